// SPDX-License-Identifier: Apache-2.0
#include <system_error>

#include <fmt/format.h>
#include <pthread.h>

#include <hoist/core/error.hpp>
#include <hoist/core/thread.hpp>

namespace hoist {

namespace {

template <class Thread, class Body>
Thread start(const std::string& name, Body body) {
  try {
    Thread thread(std::move(body));
    ::pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
    return thread;
  } catch (const std::system_error& error) {
    throw Error(fmt::format(
        "the thread '{}' could not be started: {}; raise the limit of processes and threads (ulimit -u, LimitNPROC=, a "
        "container's pids limit) or that of address space (ulimit -v)",
        name, error.code().message()));
  }
}

}  // namespace

std::thread start_thread(const std::string& name, std::function<void()> body) {
  return start<std::thread>(name, std::move(body));
}

std::jthread start_joining_thread(const std::string& name, std::function<void(const std::stop_token&)> body) {
  return start<std::jthread>(name, std::move(body));
}

}  // namespace hoist
