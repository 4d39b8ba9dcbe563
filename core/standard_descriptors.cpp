// SPDX-License-Identifier: Apache-2.0
#include <cerrno>

#include <fcntl.h>
#include <unistd.h>

#include <hoist/core/standard_descriptors.hpp>

namespace hoist {

void occupy_standard_descriptors() noexcept {
  for (int descriptor = STDIN_FILENO; descriptor <= STDERR_FILENO; ++descriptor) {
    if (::fcntl(descriptor, F_GETFD) != -1 || errno != EBADF) continue;
    // open() returns the lowest free descriptor, which is this one. Using the wrong end fails as on a closed
    // descriptor.
    const int flags = descriptor == STDIN_FILENO ? O_WRONLY : descriptor == STDOUT_FILENO ? O_RDONLY : O_RDWR;
    if (::open("/dev/null", flags) < 0) return;
  }
}

int beyond_standard_descriptors(int descriptor) noexcept {
  if (descriptor < 0 || descriptor > STDERR_FILENO) return descriptor;
  const int beyond = ::fcntl(descriptor, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  const int code = errno;
  ::close(descriptor);
  errno = code;
  return beyond;
}

}  // namespace hoist
