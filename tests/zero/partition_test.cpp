// SPDX-License-Identifier: Apache-2.0
// Partition arithmetic, exhaustively for small sizes.
#include <vector>

#include <gtest/gtest.h>

#include <hoist/zero/layout/unit_table.hpp>

namespace hoist::partition_test {
namespace {

TEST(Partition, EveryElementHasOneOwnerAndShardsAreEqual) {
  for (int world = 1; world <= 9; ++world) {
    for (std::uint64_t elements = 0; elements <= 700; elements += elements < 140 ? 1 : 53) {
      const std::uint64_t shard = shard_elements(elements, world);
      ASSERT_EQ(shard % tiers::kShardMultiple, 0u);
      ASSERT_GE(shard * static_cast<std::uint64_t>(world), elements);
      std::vector<int> owners(elements, 0);
      for (int rank = 0; rank < world; ++rank) {
        const OwnedRange range = owned_range(0, elements, shard, rank);
        for (std::uint64_t i = 0; i < range.shard.count; ++i) {
          ASSERT_EQ(range.offset + i, static_cast<std::uint64_t>(rank) * shard + range.shard.first + i);
          ++owners[range.offset + i];
        }
      }
      for (const int owned : owners) ASSERT_EQ(owned, 1) << "world " << world << " elements " << elements;
    }
  }
}

TEST(Partition, SubrangesAreFoundInTheirOwnersShards) {
  constexpr std::uint64_t kShard = 64;
  for (std::uint64_t first = 0; first < 200; first += 7) {
    for (std::uint64_t count = 1; first + count <= 256; count += 11) {
      std::uint64_t covered = 0;
      for (int rank = 0; rank < 4; ++rank) {
        const OwnedRange range = owned_range(first, count, kShard, rank);
        if (range.shard.count == 0) continue;
        ASSERT_EQ(range.offset, covered);
        ASSERT_EQ(static_cast<std::uint64_t>(rank) * kShard + range.shard.first, first + range.offset);
        ASSERT_LE(range.shard.first + range.shard.count, kShard);
        covered += range.shard.count;
      }
      ASSERT_EQ(covered, count);
    }
  }
}

// Segments, alignment and the layouts of a unit (gathered, host, gradients, their shards), over world sizes.
TEST(UnitTable, LayoutsHoldEverySegmentWithoutOverlap) {
  const std::vector<ParameterSpec> specs{{.name = "a", .shape = {7, 11}},
                                         {.name = "n", .shape = {13}, .dtype = DType::fp32},
                                         {.name = "frozen", .shape = {5, 5}, .trainable = false},
                                         {.name = "b", .shape = {}},
                                         {.name = "m", .shape = {3}, .dtype = DType::fp32, .group = GroupId{1}}};
  for (int world = 1; world <= 6; ++world) {
    Model model;
    model.add_group();
    const UnitId id = model.add_unit("unit", specs);
    const detail::UnitTable table(model, std::array<optim::StateForm, 2>{}, world);
    const detail::Unit& unit = table.unit(id);
    ASSERT_EQ(unit.segments.size(), 4u);  // bf16, fp32 group 0, fp32 group 1, frozen
    EXPECT_FALSE(unit.segments.back().trainable);
    EXPECT_EQ(unit.elements, 77u + 13 + 25 + 1 + 3);
    std::uint64_t gathered = 0, host = 0, gradient = 0, gradient_shards = 0;
    for (const detail::Segment& segment : unit.segments) {
      EXPECT_GE(segment.gathered_offset, gathered);
      gathered = segment.gathered_offset + segment.shard_bytes() * static_cast<std::uint64_t>(world);
      EXPECT_GE(segment.host_offset, host);
      host = segment.host_offset + segment.shard_bytes();
      EXPECT_EQ(segment.gathered_offset % kBlockAlignment, 0u);
      if (!segment.trainable) continue;
      EXPECT_GE(segment.gradient_offset, gradient);
      gradient = segment.gradient_offset + segment.shard_bytes() * static_cast<std::uint64_t>(world);
      EXPECT_GE(segment.gradient_shard_offset, gradient_shards);
      EXPECT_EQ(segment.gradient_shard_offset % kBlockAlignment, 0u);
      gradient_shards =
          segment.gradient_shard_offset + segment.shard_elements * dtype_bytes(segment.gradient_shard_dtype);
    }
    EXPECT_LE(gathered, unit.gathered_bytes);
    EXPECT_LE(host, unit.host_bytes());
    EXPECT_LE(gradient, unit.gradient_bytes);
    EXPECT_LE(gradient_shards, unit.gradient_shard_bytes);
    // Parameters keep their places whatever the world size.
    EXPECT_EQ(table.parameter(model.parameter("b")).first_element, 96u);
  }
}

TEST(UnitTable, IdentityNamesEveryParameterAndNotTheWorld) {
  const std::vector<ParameterSpec> specs{{.name = "w", .shape = {4, 8}},
                                         {.name = "b", .shape = {8}, .dtype = DType::fp32}};
  Model model;
  model.add_unit("layer", specs);
  const std::array<optim::StateForm, 1> groups{};
  const detail::UnitTable one(model, groups, 1), four(model, groups, 4);
  EXPECT_EQ(one.identity(), four.identity());
  EXPECT_NE(one.identity().find("w | bf16 | [4, 8]"), std::string::npos) << one.identity();
  EXPECT_NE(one.identity().find("b | fp32 | [8]"), std::string::npos) << one.identity();
}

}  // namespace
}  // namespace hoist::partition_test
