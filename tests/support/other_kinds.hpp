// SPDX-License-Identifier: Apache-2.0
// tests/support/other_kinds.hpp - pipes, devices and the like in place of a file, and a deadline for tests with them.
#pragma once

#include <array>
#include <string>

#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

namespace hoist::test {

struct OtherKind {
  const char* name;
  mode_t type;

  // False where this user may make none.
  bool make(const std::string& path) const {
    if (type == S_IFDIR) return ::mkdir(path.c_str(), 0700) == 0;
    return ::mknod(path.c_str(), type | 0600, type == S_IFCHR ? ::makedev(1, 5) : 0) == 0;  // 1, 5: /dev/zero
  }
};

inline constexpr std::array kOtherKinds{OtherKind{"pipe", S_IFIFO}, OtherKind{"socket", S_IFSOCK},
                                        OtherKind{"directory", S_IFDIR}, OtherKind{"device", S_IFCHR}};

// Ends the process by a signal when something in its scope hangs. A test under it takes less than a hundredth of the
// deadline.
class TestDeadline {
 public:
  TestDeadline() { ::alarm(120); }
  ~TestDeadline() { ::alarm(0); }
  TestDeadline(const TestDeadline&) = delete;
  TestDeadline& operator=(const TestDeadline&) = delete;
};

}  // namespace hoist::test
