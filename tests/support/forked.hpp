// SPDX-License-Identifier: Apache-2.0
// tests/support/forked.hpp - waits for a forked process, which must not hang, and runs something in one.
#pragma once

#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

namespace hoist::test {

// The status that the child ended with; nothing if it still runs after `limit`.
inline std::optional<int> status_within(pid_t child, std::chrono::seconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (true) {
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child) return status;
    if (std::chrono::steady_clock::now() >= end) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Where each thread of a process stands, as gdb says; empty without gdb.
inline std::string stacks_of(pid_t process) {
  const std::string command =
      "gdb -batch -p " + std::to_string(process) + " -ex 'thread apply all backtrace 20' 2>/dev/null";
  std::string text;
  std::FILE* const output = ::popen(command.c_str(), "r");
  if (!output) return text;
  char line[4096];
  while (std::fgets(line, sizeof(line), output)) text += line;
  ::pclose(output);
  return text;
}

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
  const auto status = status_within(child, std::chrono::seconds(seconds));
  if (status) return WIFEXITED(*status) ? WEXITSTATUS(*status) : -1;
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  return -1;
}

}  // namespace hoist::test
