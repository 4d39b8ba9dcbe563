// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <string>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/core/open_file.hpp>
#include <hoist/core/standard_descriptors.hpp>

namespace hoist::standard_descriptors_test {
namespace {

// Runs `work` in a process without standard descriptors; its result is the exit code.
template <typename Work>
int without_standard_descriptors(Work work) {
  const pid_t child = ::fork();
  if (child == 0) {
    for (const int descriptor : {0, 1, 2}) ::close(descriptor);
    ::_exit(work());
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(StandardDescriptors, OccupiedOnesAreNobodysFiles) {
  const int code = without_standard_descriptors([] {
    occupy_standard_descriptors();
    if (::open("/dev/zero", O_RDWR) <= STDERR_FILENO) return 1;
    char byte = 'x';
    if (::read(STDIN_FILENO, &byte, 1) != -1 || errno != EBADF) return 2;
    if (::write(STDOUT_FILENO, &byte, 1) != -1 || errno != EBADF) return 3;
    return ::write(STDERR_FILENO, &byte, 1) == 1 ? 0 : 4;
  });
  EXPECT_EQ(code, 0);
}

TEST(StandardDescriptors, AreNotThoseOfFilesThatAreOpened) {
  const std::string path = "/proc/self/exe";
  const int code = without_standard_descriptors([&] {
    if (open_regular_file(path, O_RDONLY) <= STDERR_FILENO) return 1;
    return open_input_file(path) <= STDERR_FILENO ? 2 : 0;
  });
  EXPECT_EQ(code, 0);
}

TEST(StandardDescriptors, OpenOnesStay) {
  const int before = ::dup(STDOUT_FILENO);
  occupy_standard_descriptors();
  const int after = ::dup(STDOUT_FILENO);
  EXPECT_EQ(after, before + 1) << "nothing was opened";
  ::close(before);
  ::close(after);
}

TEST(StandardDescriptors, FilesAreMovedBeyondThem) {
  const int code = without_standard_descriptors([] {
    const int file = beyond_standard_descriptors(::open("/dev/zero", O_RDWR | O_CLOEXEC));
    if (file <= STDERR_FILENO) return 1;
    if ((::fcntl(file, F_GETFD) & FD_CLOEXEC) == 0) return 2;
    if (::fcntl(STDIN_FILENO, F_GETFD) != -1) return 3;  // where it was before
    errno = ENOENT;
    return beyond_standard_descriptors(-1) == -1 && errno == ENOENT ? 0 : 4;
  });
  EXPECT_EQ(code, 0);
}

}  // namespace
}  // namespace hoist::standard_descriptors_test
