// SPDX-License-Identifier: Apache-2.0
// tests/support/forked.hpp - runs something in a forked process, which must not hang.
#pragma once

#include <chrono>
#include <csignal>
#include <exception>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

namespace hoist::test {

// The child's exit code, which is what `body` returns; 99 for an exception, -1 if it ended by a signal or has not ended
// after `seconds`.
template <typename Body>
int exit_code_of_fork(Body body, int seconds = 20) {
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 99;
    try {
      code = body();
    } catch (const std::exception&) {
    }
    ::_exit(code);
  }
  for (int tick = 0; tick < 50 * seconds; ++tick) {
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  return -1;
}

}  // namespace hoist::test
