// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <csignal>
#include <exception>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <pthread.h>

#include <hoist/core/blocked_signals.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/core/units.hpp>

namespace hoist {

namespace {

// Kernels and the libraries that they call (oneTBB, OpenBLAS) run with half of it.
constexpr std::size_t kStackBytesMin = 256 * kKiB;

// A thread's stack is as large as the limit of the process's when the program began.
void require_stack(const std::string& name) {
  pthread_attr_t attributes;
  if (::pthread_getattr_default_np(&attributes) != 0) return;
  std::size_t bytes = kStackBytesMin;
  ::pthread_attr_getstacksize(&attributes, &bytes);
  ::pthread_attr_destroy(&attributes);
  if (bytes >= kStackBytesMin) return;
  throw Error(
      fmt::format("the thread '{}' would get a stack of {}, and {} are needed; raise the limit of stacks (ulimit -s)",
                  name, format_bytes(bytes), format_bytes(kStackBytesMin)));
}

template <class Thread, class Body>
Thread start(const std::string& name, Body body) {
  require_stack(name);
  try {
    const OtherSignalsBlocked blocked;
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

OtherSignalsBlocked::OtherSignalsBlocked() {
  sigset_t others;
  ::sigfillset(&others);
  for (const int mine : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPROF})
    ::sigdelset(&others, mine);
  ::pthread_sigmask(SIG_BLOCK, &others, &before_);
}
OtherSignalsBlocked::~OtherSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

std::thread start_thread(const std::string& name, std::function<void()> body) {
  return start<std::thread>(name, std::move(body));
}

std::jthread start_joining_thread(const std::string& name, std::function<void(const std::stop_token&)> body) {
  return start<std::jthread>(name, std::move(body));
}

void run_on_threads(const std::string& name, std::size_t count, const std::function<void(std::size_t)>& body,
                    const std::function<void()>& meanwhile) {
  std::vector<std::exception_ptr> errors(count);
  std::atomic<std::size_t> running{count};
  std::vector<std::jthread> threads;  // joined also if one cannot be started
  for (std::size_t i = 0; i < count; ++i) {
    threads.push_back(start_joining_thread(name, [&, i](const std::stop_token&) {
      try {
        body(i);
      } catch (...) {
        errors[i] = std::current_exception();
      }
      running.fetch_sub(1);
    }));
  }
  while (meanwhile && running.load() > 0) meanwhile();
  threads.clear();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace hoist
