// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <string_view>

#include <gtest/gtest.h>

#include <hoist/core/first_difference.hpp>

namespace hoist::first_difference_test {
namespace {

TEST(FirstDifference, ShowsBothLines) {
  const auto difference = [](std::string_view one, std::string_view other) {
    return first_difference(one, other, "stored", "yours");
  };
  EXPECT_EQ(difference("a\nb\nc\n", "a\nx\nc\n"), "line 2: stored: 'b' / yours: 'x'");
  EXPECT_EQ(difference("a\n", "a\nb\n"), "line 2: stored: (nothing more) / yours: 'b'");
  EXPECT_EQ(difference("a\nb", "a\n"), "line 2: stored: 'b' / yours: (nothing more)");
  EXPECT_EQ(difference("", "a"), "line 1: stored: (nothing more) / yours: 'a'");
}

}  // namespace
}  // namespace hoist::first_difference_test
