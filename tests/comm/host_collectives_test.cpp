// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cfenv>

#include <gtest/gtest.h>

#include <hoist/comm/detail/scale_split.hpp>
#include <hoist/comm/host_collectives.hpp>

#include "reference.hpp"

namespace hoist::comm::host_collectives_test {

namespace {

using conformance::Source;

std::vector<std::byte> contributions(std::uint64_t seed, int ranks, DType dtype, std::uint64_t count) {
  std::vector<std::byte> received(static_cast<std::uint64_t>(ranks) * count * dtype_bytes(dtype));
  for (int r = 0; r < ranks; ++r) {
    for (std::uint64_t i = 0; i < count; ++i) {
      conformance::store_at(received.data(), dtype, static_cast<std::uint64_t>(r) * count + i,
                            conformance::encode(dtype, conformance::value_at({seed, r, 0}, i)));
    }
  }
  return received;
}

}  // namespace

TEST(SumInRankOrder, MatchesThePlainLoop) {
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      for (const std::uint64_t count : {1u, 15u, 1024u, 2500u}) {
        for (const float scale : {1.0f, 1.0f / 3.0f}) {
          const std::uint64_t seed = count + static_cast<std::uint64_t>(ranks);
          const auto received = contributions(seed, ranks, dtype, count);
          std::vector<std::byte> target(count * dtype_bytes(dtype));
          sum_in_rank_order(target.data(), received.data(), dtype, ranks, count, scale);
          for (std::uint64_t i = 0; i < count; ++i) {
            const std::uint32_t expected = conformance::reduced_at({seed, 0, 0}, ranks, dtype, i, scale);
            ASSERT_TRUE(conformance::same_bits(dtype, expected, conformance::stored_at(target.data(), dtype, i)))
                << dtype_name(dtype) << " ranks " << ranks << " element " << i << " seed " << seed;
          }
        }
      }
    }
  }
}

// Every 16-bit pattern passes one rank with scale 1 unchanged, NaNs but for their quiet bit.
TEST(SumInRankOrder, OneRankChangesNothing) {
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    std::vector<std::byte> values(65536 * 2);
    std::vector<std::byte> target(values.size());
    for (std::uint32_t bits = 0; bits < 65536; ++bits) conformance::store_at(values.data(), dtype, bits, bits);
    sum_in_rank_order(target.data(), values.data(), dtype, 1, 65536, 1.0f);
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      ASSERT_TRUE(conformance::same_bits(dtype, conformance::stored_at(target.data(), dtype, bits), bits)) << bits;
    }
  }
}

// The order matters in fp32: a 1 that is added to 2^24 first is lost; added last, it remains.
TEST(SumInRankOrder, AddsRankZeroFirst) {
  const std::array<float, 3> values{1.0f, 0x1p24f, -0x1p24f};
  float sum = 0;
  sum_in_rank_order(reinterpret_cast<std::byte*>(&sum), reinterpret_cast<const std::byte*>(values.data()), DType::fp32,
                    3, 1, 1.0f);
  EXPECT_EQ(sum, 0.0f);  // (1 + 2^24) rounds to 2^24
  const std::array<float, 3> reversed{0x1p24f, -0x1p24f, 1.0f};
  sum_in_rank_order(reinterpret_cast<std::byte*>(&sum), reinterpret_cast<const std::byte*>(reversed.data()),
                    DType::fp32, 3, 1, 1.0f);
  EXPECT_EQ(sum, 1.0f);
}

TEST(SumInRankOrder, RoundsOnceAfterTheScale) {
  // 3 x (1 + 2^-8 + 2^-9), rounded to bf16 once, differs from 3 x the sum already rounded to bf16.
  const std::array<std::uint16_t, 2> values{to_bf16(1.0f).bits, to_bf16(0x1.8p-8f).bits};
  std::uint16_t result = 0;
  sum_in_rank_order(reinterpret_cast<std::byte*>(&result), reinterpret_cast<const std::byte*>(values.data()),
                    DType::bf16, 2, 1, 3.0f);
  EXPECT_EQ(result, to_bf16(3.0f * (1.0f + 0x1.8p-8f)).bits);
  EXPECT_NE(result, to_bf16(3.0f * to_float(to_bf16(1.0f + 0x1.8p-8f))).bits);
}

TEST(SumInRankOrder, IgnoresTheCallersFloatEnvironment) {
  const auto received = contributions(5, 3, DType::fp32, 1000);
  std::vector<std::byte> expected(4000);
  std::vector<std::byte> found(4000);
  sum_in_rank_order(expected.data(), received.data(), DType::fp32, 3, 1000, 1.0f / 3.0f);
  std::fesetround(FE_UPWARD);
  sum_in_rank_order(found.data(), received.data(), DType::fp32, 3, 1000, 1.0f / 3.0f);
  const int mode = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(expected, found);
  EXPECT_EQ(mode, FE_UPWARD);
}

// Every element exactly once, in order, inside scratch and without overlap within a round.
TEST(ReduceRounds, CoverEveryElementOnceWithinScratch) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(seed);
    const int ranks = 1 + static_cast<int>(rng.below(9));
    const std::uint64_t scratch = reduce_scratch_bytes_min(ranks) + rng.below(5000);
    std::vector<ReducePiece> pieces(rng.below(8));
    for (ReducePiece& piece : pieces) {
      piece.dtype = static_cast<DType>(rng.below(3));
      piece.shard_elements = rng.below(4) == 0 ? 0 : rng.below(3000);
    }
    ReduceRounds rounds(pieces, ranks, scratch);
    std::vector<ReduceChunk> round;
    std::vector<std::uint64_t> covered(pieces.size(), 0);
    while (rounds.next(round)) {
      std::uint64_t end_bytes = 0;
      for (const ReduceChunk& chunk : round) {
        ASSERT_EQ(chunk.first_element, covered[chunk.piece]) << "seed " << seed;
        ASSERT_GT(chunk.element_count, 0u) << "seed " << seed;
        ASSERT_GE(chunk.scratch_offset_bytes, end_bytes) << "seed " << seed;
        covered[chunk.piece] += chunk.element_count;
        end_bytes = chunk.scratch_offset_bytes +
                    chunk.element_count * static_cast<std::uint64_t>(ranks) * dtype_bytes(pieces[chunk.piece].dtype);
        ASSERT_LE(end_bytes, scratch) << "seed " << seed;
      }
    }
    for (std::size_t p = 0; p < pieces.size(); ++p) ASSERT_EQ(covered[p], pieces[p].shard_elements) << "seed " << seed;
  }
}

TEST(ReduceRounds, SmallPiecesShareARound) {
  const std::vector<ReducePiece> pieces(100, ReducePiece{nullptr, DType::fp32, 64, 1.0f});
  ReduceRounds rounds(pieces, 4, 1 << 20);
  std::vector<ReduceChunk> round;
  ASSERT_TRUE(rounds.next(round));
  EXPECT_EQ(round.size(), 100u);
  EXPECT_FALSE(rounds.next(round));
}

TEST(ScaleSplit, PartsAreExactAndMultiplyToTheScale) {
  Rng rng(9);
  std::vector<float> scales{1.0f,  0.5f, 1.0f / 3,  1.0f / 65536, 1e-7f, 1e-30f,
                            3e38f, 0.0f, -1.0f / 7, 65504.0f,     1e-42f};
  for (int i = 0; i < 10000; ++i) scales.push_back(static_cast<float>(std::exp(40 * rng.uniform() - 20)));
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    for (const float scale : scales) {
      const detail::ScaleSplit split = detail::split_scale(dtype, scale);
      EXPECT_EQ(conformance::decode(dtype, conformance::encode(dtype, split.before_sum)), split.before_sum) << scale;
      EXPECT_EQ(split.before_sum * split.after_sum, scale) << dtype_name(dtype);
    }
  }
  EXPECT_EQ(detail::split_scale(DType::bf16, 0.25f).after_sum, 1.0f);  // the usual scales cost no second pass
  EXPECT_NE(detail::split_scale(DType::bf16, 1.0f / 3).after_sum, 1.0f);
}

}  // namespace hoist::comm::host_collectives_test
