// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/measure/subprocess.hpp>

namespace hoist::measure {

namespace {

constexpr int kPollMilliseconds = 50;  // how late a stop is seen

class Pipe {
 public:
  Pipe() {
    if (::pipe2(ends_.data(), O_CLOEXEC) != 0) throw IoError({.operation = "pipe", .code = errno});
  }
  ~Pipe() {
    close_writer();
    ::close(ends_[0]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  int reader() const { return ends_[0]; }
  int writer() const { return ends_[1]; }
  void close_writer() {
    if (ends_[1] >= 0) ::close(ends_[1]);
    ends_[1] = -1;
  }

 private:
  std::array<int, 2> ends_{-1, -1};
};

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> merged_environment(const std::vector<std::string>& additions) {
  std::vector<std::string> all = additions;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view name(*entry, std::strcspn(*entry, "=") + 1);
    const bool replaced = std::any_of(additions.begin(), additions.end(),
                                      [&](const std::string& addition) { return addition.starts_with(name); });
    if (!replaced) all.emplace_back(*entry);
  }
  return all;
}

pid_t start(const Subprocess& process, const Pipe& output, const Pipe& errors) {
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, output.writer(), STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, errors.writer(), STDERR_FILENO);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t defaults;
  ::sigemptyset(&defaults);
  ::sigaddset(&defaults, SIGPIPE);  // which the programs of hoist ignore
  ::posix_spawnattr_setsigdefault(&attributes, &defaults);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
  const std::vector<std::string> environment = merged_environment(process.environment);
  pid_t pid = -1;
  const int code = ::posix_spawnp(&pid, process.command.front().c_str(), &actions, &attributes,
                                  pointers(process.command).data(), pointers(environment).data());
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  if (code != 0) throw IoError({.operation = "start", .path = process.command.front(), .code = code});
  return pid;
}

// Appends the available output; false at the end of the stream.
bool drain(int descriptor, std::string& text) {
  std::array<char, 16384> buffer;
  const ssize_t length = ::read(descriptor, buffer.data(), buffer.size());
  if (length > 0) text.append(buffer.data(), static_cast<std::size_t>(length));
  return length > 0 || (length < 0 && errno == EINTR);
}

int wait_for_exit(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

std::string find_program(const std::string& program) {
  const char* variable = std::getenv("PATH");
  std::string path = variable == nullptr ? "" : variable;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    std::string candidate = path.substr(begin, end - begin) + "/" + program;
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
    begin = end + 1;
  }
  return {};
}

SubprocessResult run_subprocess(const Subprocess& process, const StopFlag* stop) {
  Pipe output;
  Pipe errors;
  const pid_t pid = start(process, output, errors);
  output.close_writer();
  errors.close_writer();
  SubprocessResult result;
  std::array<pollfd, 2> streams{{{output.reader(), POLLIN, 0}, {errors.reader(), POLLIN, 0}}};
  bool stopped = false;
  while (streams[0].fd >= 0 || streams[1].fd >= 0) {
    if (!stopped && stop != nullptr && stop->load(std::memory_order_relaxed)) {
      stopped = true;
      ::kill(pid, SIGTERM);
    }
    if (::poll(streams.data(), streams.size(), kPollMilliseconds) <= 0) continue;
    if (streams[0].revents != 0 && !drain(output.reader(), result.output)) streams[0].fd = -1;
    if (streams[1].revents != 0 && !drain(errors.reader(), result.errors)) streams[1].fd = -1;
  }
  result.exit_code = wait_for_exit(pid);
  if (stopped) throw Interrupted();
  return result;
}

}  // namespace hoist::measure
