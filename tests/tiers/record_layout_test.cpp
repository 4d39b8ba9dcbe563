// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/tiers/record_layout.hpp>

namespace hoist::tiers::record_layout_test {
namespace {

std::uint64_t master_bytes(DType dtype, RemainderType remainder = RemainderType::int16) {
  if (dtype == DType::bf16) return remainder == RemainderType::int8 ? 1 : 2;
  return dtype == DType::fp16 ? 4 : 0;
}
std::uint64_t moment_bytes_of_8(MomentType type) {
  return type == MomentType::fp32 ? 32 : type == MomentType::bf16 ? 16 : 9;
}

// The promises of record_layout.hpp, checked tile by tile.
void expect_partition(const std::vector<RecordSegment>& segments) {
  const RecordLayout layout(segments);
  ASSERT_EQ(layout.segments().size(), segments.size());
  std::uint64_t w_end = 0, s_end = 0;
  std::size_t next = 0;
  for (std::uint32_t segment = 0; segment < segments.size(); ++segment) {
    const RecordSegment& expected = segments[segment];
    EXPECT_EQ(layout.segment_w_offset(segment), w_end);
    std::uint64_t element = 0;
    while (next < layout.tiles().size() && layout.tiles()[next].segment == segment) {
      const Tile& tile = layout.tiles()[next++];
      EXPECT_EQ(tile.first_element, element);
      EXPECT_GT(tile.elements, 0u);
      EXPECT_LE(tile.elements, kTileElements);
      element += tile.elements;
      // Only the last tile of a segment is short.
      EXPECT_TRUE(tile.elements == kTileElements || element == expected.shard_elements);
      EXPECT_EQ(tile.w_offset, w_end);
      EXPECT_EQ(tile.s_offset, s_end);
      const std::uint64_t w_used = tile.elements * (expected.dtype == DType::fp32 ? 4 : 2);
      const std::uint64_t moments = expected.moment_count * moment_bytes_of_8(expected.moment_type);
      const std::uint64_t s_used =
          expected.trainable ? tile.elements / 8 * (8 * master_bytes(expected.dtype, expected.remainder) + moments) : 0;
      EXPECT_GE(tile.w_bytes, w_used);
      EXPECT_LT(tile.w_bytes, w_used + kBlockAlignment);
      EXPECT_GE(tile.s_bytes, s_used);
      EXPECT_LT(tile.s_bytes, s_used + kBlockAlignment);
      EXPECT_EQ(tile.w_bytes % kBlockAlignment, 0u);
      EXPECT_EQ(tile.s_bytes % kBlockAlignment, 0u);
      if (!expected.trainable) {
        EXPECT_EQ(tile.s_bytes, 0u);
      }
      w_end += tile.w_bytes;
      s_end += tile.s_bytes;
    }
    EXPECT_EQ(element, expected.shard_elements);
  }
  EXPECT_EQ(next, layout.tiles().size());
  // Every tile is in one run of equal ones.
  std::uint64_t tile = 0;
  for (const EqualTiles& run : layout.equal_tiles()) {
    EXPECT_EQ(run.first_tile, tile);
    EXPECT_GT(run.tile_count, 0u);
    for (; tile < run.end_tile(); ++tile) {
      EXPECT_EQ(layout.tiles()[tile].segment, run.segment);
      EXPECT_EQ(layout.tiles()[tile].elements, run.elements);
      EXPECT_EQ(layout.tile_bytes(Region::weights, tile, 1), run.w_bytes);
      EXPECT_EQ(layout.tile_bytes(Region::state, tile, 1), run.s_bytes);
      EXPECT_EQ(layout.tiles()[tile].s_bytes, run.s_bytes);
    }
  }
  EXPECT_EQ(tile, layout.tiles().size());
  EXPECT_LE(layout.equal_tiles().size(), 2 * segments.size());
  EXPECT_EQ(layout.tile_bytes(Region::state, 0, tile), s_end);
  EXPECT_EQ(layout.region_bytes(Region::weights), w_end);
  EXPECT_EQ(layout.region_bytes(Region::state), s_end);
  EXPECT_EQ(layout.bytes(), w_end + s_end);
}

TEST(RecordLayout, FullTilesHaveNoPadding) {
  const RecordLayout layout(std::array{RecordSegment{DType::bf16, true, 3 * kTileElements}});
  ASSERT_EQ(layout.tiles().size(), 3u);
  EXPECT_EQ(layout.region_bytes(Region::weights), 3 * kTileElements * 2);
  EXPECT_EQ(layout.region_bytes(Region::state), 3 * kTileElements * 10);
  const RecordLayout fp16(std::array{RecordSegment{DType::fp16, true, 3 * kTileElements}});
  EXPECT_EQ(fp16.region_bytes(Region::weights), 3 * kTileElements * 2);
  EXPECT_EQ(fp16.region_bytes(Region::state), 3 * kTileElements * kStateBytesMax);
  const RecordLayout small(std::array{RecordSegment{
      .shard_elements = 3 * kTileElements, .moment_type = MomentType::fp8, .remainder = RemainderType::int8}});
  EXPECT_EQ(small.region_bytes(Region::state), 3 * kTileElements * 13 / 4);
}

TEST(RecordLayout, EverySizeOfOneSegmentUpToThreeTiles) {
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    for (const bool trainable : {true, false}) {
      for (std::uint64_t elements = 0; elements <= 3 * kTileElements; elements += kShardMultiple) {
        expect_partition({{dtype, trainable, elements}});
        ASSERT_FALSE(::testing::Test::HasFailure()) << elements << " elements";
      }
    }
  }
}

TEST(RecordLayout, RandomListsOfSegments) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(seed);
    std::vector<RecordSegment> segments(rng.below(6));
    for (RecordSegment& segment : segments) {
      segment.dtype = std::array{DType::bf16, DType::fp16, DType::fp32}[rng.below(3)];
      segment.trainable = rng.below(3) != 0;
      segment.moment_count = static_cast<unsigned>(rng.below(3));
      segment.moment_type = std::array{MomentType::bf16, MomentType::fp32, MomentType::fp8}[rng.below(3)];
      segment.remainder = rng.below(2) == 0 ? RemainderType::int16 : RemainderType::int8;
      const std::uint64_t kinds[] = {0, 1, rng.below(64), kTileElements / kShardMultiple, rng.below(4096)};
      segment.shard_elements = kinds[rng.below(5)] * kShardMultiple;
    }
    expect_partition(segments);
    ASSERT_FALSE(::testing::Test::HasFailure()) << "seed " << seed;
  }
}

TEST(RecordLayout, ZeroElementsHaveNoTiles) {
  const RecordLayout layout(std::array{RecordSegment{DType::bf16, true, 0}, RecordSegment{DType::fp32, true, 32},
                                       RecordSegment{DType::bf16, true, 0}});
  ASSERT_EQ(layout.tiles().size(), 1u);
  EXPECT_EQ(layout.tiles()[0].segment, 1u);
  EXPECT_EQ(layout.segment_w_offset(0), 0u);
  EXPECT_EQ(layout.segment_w_offset(2), kBlockAlignment);
  EXPECT_EQ(RecordLayout({}).bytes(), 0u);
}

TEST(RecordLayout, StateTileHoldsMasterOrRemainderThenMoments) {
  for (std::uint64_t elements : {kShardMultiple, std::uint64_t{96}, kTileElements}) {
    alignas(64) static std::byte tile[kTileElements * kStateBytesMax];
    for (const unsigned count : {0u, 1u, 2u}) {
      for (const MomentType moments : {MomentType::fp32, MomentType::bf16}) {
        for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16}) {
          const RecordSegment segment{
              .dtype = dtype, .shard_elements = elements, .moment_count = count, .moment_type = moments};
          const StateTileView view = view_state_tile(segment, elements, tile);
          const std::uint64_t first = master_bytes(dtype) * elements;
          EXPECT_EQ(reinterpret_cast<std::byte*>(view.remainder), dtype == DType::bf16 ? tile : nullptr);
          EXPECT_EQ(reinterpret_cast<std::byte*>(view.master), dtype == DType::fp16 ? tile : nullptr);
          for (unsigned i = 0; i < 2; ++i) {
            std::byte* const expected = i < count ? tile + first + i * moment_bytes(moments, elements) : nullptr;
            EXPECT_EQ(view.moments[i], expected);
            EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.moments[i]) % 64, 0u);
          }
        }
      }
    }
  }
}

TEST(RecordLayout, AStateTileOfBytesHasItsScalesBehindIt) {
  alignas(64) static std::byte tile[kTileElements * kStateBytesMax];
  for (const std::uint64_t n : {kShardMultiple, std::uint64_t{96}, kTileElements}) {
    for (const bool is_short : {false, true}) {
      const RecordSegment segment{.shard_elements = n,
                                  .moment_type = MomentType::fp8,
                                  .remainder = is_short ? RemainderType::int8 : RemainderType::int16};
      const StateTileView view = view_state_tile(segment, n, tile);
      EXPECT_EQ(reinterpret_cast<std::byte*>(view.remainder), is_short ? nullptr : tile);
      EXPECT_EQ(reinterpret_cast<std::byte*>(view.remainder8), is_short ? tile : nullptr);
      std::byte* const moments = tile + n * (is_short ? 1 : 2);
      for (unsigned i = 0; i < 2; ++i) {
        EXPECT_EQ(view.moments[i], moments + i * n);
        EXPECT_EQ(reinterpret_cast<std::byte*>(view.scales[i]), moments + 2 * n + i * n / 8);
      }
      EXPECT_EQ(moments + 2 * n + 2 * n / 8, tile + segment.state_bytes(n));
    }
  }
}

TEST(RecordLayoutDeathTest, ShardsAreMultiplesOf32) {
  EXPECT_DEATH(RecordLayout(std::array{RecordSegment{DType::bf16, true, 31}}), "31 elements");
}

}  // namespace
}  // namespace hoist::tiers::record_layout_test
