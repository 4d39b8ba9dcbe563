// SPDX-License-Identifier: Apache-2.0
// tests/support/full_table.hpp - a process that has no descriptor left.
#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace hoist::test {

// While it lives nothing can be opened (EMFILE); what is open stays so.
class FullTable {
 public:
  FullTable() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit none{0, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~FullTable() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FullTable(const FullTable&) = delete;
  FullTable& operator=(const FullTable&) = delete;

 private:
  rlimit before_{};
};

}  // namespace hoist::test
