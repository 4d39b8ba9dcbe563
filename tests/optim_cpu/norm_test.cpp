// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include <hoist/core/units.hpp>
#include <hoist/optim_cpu/norm.hpp>

#include "tiles.hpp"

namespace hoist::optim::test::norm_test {
namespace {

// norm.hpp's order in plain C++.
double right_chunk(const std::byte* elements, DType dtype, std::size_t count) {
  double lanes[16] = {};
  for (std::size_t i = 0; i < count; ++i) {
    const auto x = static_cast<double>(get_gradient(elements, dtype, i));
    lanes[i % 16] += x * x;
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  return lanes[0];
}

std::uint64_t bits(double value) { return std::bit_cast<std::uint64_t>(value); }

TEST(Norm, EveryInstructionSetAndCountFollowsTheOrderToTheBit) {
  for (const DType dtype : kDTypes) {
    for (const auto& name : supported_instruction_sets()) {
      const Forced forced(name);
      for (const std::size_t count :
           {0u, 1u, 2u, 3u, 7u, 8u, 15u, 16u, 17u, 31u, 33u, 100u, 1000u, 4095u, 65535u, 65536u}) {
        for (const std::size_t offset : {0u, 1u, 5u}) {
          Rng rng(count + 1);
          Guarded<std::byte> elements(count * dtype_bytes(dtype), offset * dtype_bytes(dtype));
          for (std::size_t i = 0; i < count; ++i) put_gradient(elements.data(), dtype, i, any_scale(rng, -149, 30));
          const double sum = sum_of_squares_chunk(elements.data(), dtype, count);
          EXPECT_EQ(bits(sum), bits(right_chunk(elements.data(), dtype, count)))
              << name << " " << dtype_name(dtype) << " count " << count << " seed " << count + 1;
        }
      }
    }
  }
}

TEST(Norm, ChunksAreCountedFromTheShard) {
  const std::size_t count = 3 * kNormChunkElements + 777;
  std::vector<std::byte> elements(count * 2);
  Rng rng(3);
  for (std::size_t i = 0; i < count; ++i)
    put_gradient(elements.data(), DType::bf16, i, static_cast<float>(rng.uniform()));
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    std::vector<double> partial(divide_up(count, kNormChunkElements), -1.0);
    sums_of_squares(elements.data(), DType::bf16, count, partial);
    ASSERT_EQ(partial.size(), 4u);
    for (std::size_t chunk = 0; chunk < partial.size(); ++chunk) {
      const std::size_t first = chunk * kNormChunkElements;
      EXPECT_EQ(bits(partial[chunk]), bits(right_chunk(elements.data() + 2 * first, DType::bf16,
                                                       std::min(kNormChunkElements, count - first))))
          << name << " chunk " << chunk;
    }
  }
}

TEST(Norm, NonFiniteElementsShow) {
  for (const DType dtype : kDTypes) {
    for (const auto& name : supported_instruction_sets()) {
      const Forced forced(name);
      for (std::size_t bad = 0; bad < 40; ++bad) {
        std::vector<std::byte> elements(40 * dtype_bytes(dtype));
        put_gradient(elements.data(), dtype, bad, -std::numeric_limits<float>::infinity());
        EXPECT_EQ(sum_of_squares_chunk(elements.data(), dtype, 40), std::numeric_limits<double>::infinity()) << name;
        put_gradient(elements.data(), dtype, bad, std::numeric_limits<float>::quiet_NaN());
        EXPECT_TRUE(std::isnan(sum_of_squares_chunk(elements.data(), dtype, 40))) << name;
      }
    }
  }
}

TEST(Norm, LargestFloatsDoNotOverflow) {
  std::vector<float> elements(kNormChunkElements, std::numeric_limits<float>::max());
  const double sum = sum_of_squares_chunk(elements.data(), DType::fp32, elements.size());
  const auto largest = static_cast<double>(std::numeric_limits<float>::max());
  EXPECT_NEAR(sum / (static_cast<double>(elements.size()) * largest * largest), 1.0, 1e-12);
}

TEST(NormDeathTest, TooLongAChunkOrTooFewSumsAreBugs) {
  std::vector<float> elements(kNormChunkElements + 1);
  EXPECT_DEATH((void)sum_of_squares_chunk(elements.data(), DType::fp32, elements.size()), "in one chunk");
  std::vector<double> partial(1);
  EXPECT_DEATH(sums_of_squares(elements.data(), DType::fp32, elements.size(), partial), "sums for");
}

}  // namespace
}  // namespace hoist::optim::test::norm_test
