// SPDX-License-Identifier: Apache-2.0
// Which stores of several sharding groups belong together: zero/checkpoint/store_survey.hpp.
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/zero/checkpoint/store_survey.hpp>

namespace hoist::test::store_survey_test {
namespace {

using Orders = std::vector<std::uint64_t>;

const detail::StoreDirectory kFirst;
const detail::StoreDirectory k2r2 = detail::new_store_directory(2, 2), k3r2 = detail::new_store_directory(3, 2),
                             k3r4 = detail::new_store_directory(3, 4);

TEST(AlignedStores, TheNthIsOfOneAttemptInAllGroups) {
  const struct {
    std::vector<detail::StoreDirectory> own;
    std::vector<Orders> job;  // the orders that each rank's group has
    std::vector<std::string> names;
  } kCases[] = {
      {{}, {{}, {}}, {}},
      {{k3r4, k2r2, kFirst}, {{3, 2, 0}, {3, 2, 0}}, {k3r4.name, k2r2.name, ""}},
      // Groups of 8 ranks, of which one has stores that the other lacks. World sizes do not matter.
      {{k3r4, k2r2}, {{3, 2}, {3, 3}}, {k3r4.name, "reshard-0003-ranks-0", k2r2.name}},
      {{k3r4, k3r2}, {{3, 2}, {3, 3}}, {k3r4.name, k3r2.name, "reshard-0002-ranks-8"}},
      {{}, {{}, {}, {3, 3, 0}, {3, 3, 0}}, {"reshard-0003-ranks-8", "reshard-0003-ranks-0", ""}},
      {{kFirst}, {{0}, {5}}, {"reshard-0005-ranks-8", ""}},
  };
  for (const auto& group : kCases) {
    std::vector<std::string> names;
    for (const detail::StoreDirectory& store : detail::aligned(group.own, group.job, 8)) names.push_back(store.name);
    EXPECT_EQ(names, group.names);
  }
}

}  // namespace
}  // namespace hoist::test::store_survey_test
