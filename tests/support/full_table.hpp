// SPDX-License-Identifier: Apache-2.0
// tests/support/full_table.hpp - a process that has no descriptor left, or few.
#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

namespace hoist::test {

// While it lives nothing can be opened (EMFILE), or hardly more than `left`; what is open stays so.
class FullTable {
 public:
  explicit FullTable(unsigned left = 0) {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const int next = ::dup(0);
    ::close(next);
    const rlimit few{left == 0 ? 0 : static_cast<rlim_t>(next) + left, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  ~FullTable() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FullTable(const FullTable&) = delete;
  FullTable& operator=(const FullTable&) = delete;

 private:
  rlimit before_{};
};

}  // namespace hoist::test
