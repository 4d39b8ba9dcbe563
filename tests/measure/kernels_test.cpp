// SPDX-License-Identifier: Apache-2.0
// The limit that updates are measured against, and the measurement itself on arrays too small to mean anything.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/measure/division.hpp>
#include <hoist/measure/kernels.hpp>
#include <hoist/measure/stream.hpp>
#include <hoist/measure/streamed_step.hpp>
#include <hoist/platform/update_arrays.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::measure::kernels_test {
namespace {

using Bytes = std::vector<unsigned char>;

struct Shape {
  bool split;
  unsigned moments;
  std::size_t moment_bytes, gradient_bytes;
  bool weight = false;      // of fp16, beside a master that is not split
  bool remainder8 = false;  // of a split one
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const bool split : {true, false})
    for (const unsigned moments : {0u, 1u, 2u})
      for (const std::size_t moment_bytes : {1u, 2u, 4u})
        for (const std::size_t gradient_bytes : {2u, 4u}) {
          all.push_back({split, moments, moment_bytes, gradient_bytes});
          if (!split) all.push_back({split, moments, moment_bytes, gradient_bytes, true});
          if (split) all.push_back({split, moments, moment_bytes, gradient_bytes, false, true});
        }
  return all;
}

// Every array between guards, none aligned to more than its element.
struct Arrays {
  explicit Arrays(const Shape& shape, std::size_t count) : bytes(7, Bytes(kGuard + 4 * count + 8 * kAhead)) {
    for (std::size_t a = 0; a < bytes.size(); ++a)
      for (std::size_t i = 0; i < bytes[a].size(); ++i) bytes[a][i] = static_cast<unsigned char>(7 * i + a);
    view.count = count;
    view.master[0] = bytes[0].data() + kGuard;
    if (shape.split) view.master[1] = bytes[1].data() + kGuard;
    if (shape.weight) view.weight = bytes[1].data() + kGuard;
    for (unsigned i = 0; i < shape.moments; ++i) view.moments[i] = bytes[2 + i].data() + kGuard;
    if (shape.remainder8) view.remainder_bytes = 1;
    for (unsigned i = 0; shape.moment_bytes == 1 && i < shape.moments; ++i)
      view.scales[i] = bytes[5 + i].data() + kGuard;
    view.moment_count = shape.moments;
    view.moment_bytes = shape.moment_bytes;
    view.gradient = bytes[4].data() + kGuard;
    view.gradient_bytes = shape.gradient_bytes;
  }
  static constexpr std::size_t kGuard = 68, kAhead = 512;
  std::vector<Bytes> bytes;
  StreamArrays view;
};

TEST(Stream, ChangesNothingAndReadsEveryGradient) {
  constexpr std::size_t kCount = 5 * kStreamBlock;
  for (const Shape& shape : shapes()) {
    for (const Prefetch prefetch : {Prefetch::none, Prefetch::ahead}) {
      Arrays arrays(shape, kCount);
      std::vector<Bytes> before = arrays.bytes;
      if (shape.weight) std::memset(before[1].data() + Arrays::kGuard, 0, 2 * kCount);
      (void)stream(arrays.view, prefetch);
      EXPECT_EQ(arrays.bytes, before);
      // The value is one lane of a sum by exclusive or: a word of the gradient that is read reaches exactly one lane.
      unsigned changed = 0;
      const unsigned value = stream(arrays.view, prefetch);
      for (std::size_t word = 0; word < kCount * shape.gradient_bytes / 4; ++word) {
        unsigned char& byte = arrays.bytes[4][Arrays::kGuard + 4 * word];
        byte ^= 1u;
        if (stream(arrays.view, prefetch) != value) ++changed;
        byte ^= 1u;
      }
      EXPECT_GT(changed, 0u);
      EXPECT_EQ(kCount * shape.gradient_bytes / 4 % changed, 0u) << "every lane sees as many words";
    }
  }
}

TEST(Stream, TrafficIsWhatAnUpdateMoves) {
  EXPECT_EQ(Arrays({true, 2, 4, 2}, kStreamBlock).view.traffic_bytes(), 26);
  EXPECT_EQ(Arrays({false, 2, 4, 4}, kStreamBlock).view.traffic_bytes(), 28);
  EXPECT_EQ(Arrays({true, 2, 2, 2}, kStreamBlock).view.traffic_bytes(), 18);
  EXPECT_EQ(Arrays({true, 0, 4, 2}, kStreamBlock).view.traffic_bytes(), 10);
  EXPECT_EQ(Arrays({true, 2, 1, 2}, kStreamBlock).view.traffic_bytes(), 14.5);
  EXPECT_EQ(Arrays({true, 2, 1, 2, false, true}, kStreamBlock).view.traffic_bytes(), 12.5);
  EXPECT_EQ(Arrays({false, 2, 4, 2, true}, kStreamBlock).view.traffic_bytes(), 28);
}

TEST(Kernels, EveryOptimizerIsMeasured) {
  using optim::OptimizerKind;
  for (const OptimizerKind kind :
       {OptimizerKind::adamw, OptimizerKind::adam, OptimizerKind::adagrad, OptimizerKind::lion, OptimizerKind::sgd}) {
    for (const DType master : {DType::bf16, DType::fp16, DType::fp32}) {
      for (const DType gradient : {DType::bf16, DType::fp16, DType::fp32}) {
        const KernelResult result = compare_kernel(
            {.optimizer = optim::default_options(kind), .master = master, .gradient = gradient, .checksum = true},
            {.state_bytes = 2'000'000, .pairs = 2, .threads = 2});
        EXPECT_EQ(result.ratios.size(), 2u);
        EXPECT_EQ(result.control_ratios.size(), 2u);
        EXPECT_GT(result.in_cache_ratio, 0);
        const bool divides = kind != OptimizerKind::lion && kind != OptimizerKind::sgd;
        EXPECT_EQ(result.division_ratio > 0, divides);
        EXPECT_GT(result.gigabytes_per_second(), 0);
      }
    }
  }
}

TEST(Kernels, StateOfEightBitsIsMeasured) {
  for (const DType master : {DType::bf16, DType::fp16, DType::fp32}) {
    for (const MomentType moments : {MomentType::bf16, MomentType::fp8}) {
      const KernelResult result =
          compare_kernel({.optimizer = {.moments = moments, .remainder = RemainderType::int8}, .master = master},
                         {.state_bytes = 2'000'000, .pairs = 2, .threads = 2});
      EXPECT_GT(result.gigabytes_per_second(), 0);
    }
  }
}

TEST(Kernels, TheLimitIsNamed) {
  KernelResult result;
  const auto limit = [&](double ratio, double in_cache, double division) {
    result.ratios = {ratio};
    result.in_cache_ratio = in_cache;
    result.division_ratio = division;
    return std::string(result.limit());
  };
  EXPECT_EQ(limit(1.01, 0.9, 0.9), "memory");
  EXPECT_EQ(limit(0.9, 1.3, 1.4), "memory");
  EXPECT_EQ(limit(0.6, 0.7, 0.75), "division");
  EXPECT_EQ(limit(0.6, 0.7, 2.0), "instructions");
  EXPECT_EQ(limit(0.6, 0.7, 0), "instructions");
}

// Twice as many numbers are twice the work: nothing is left out by the compiler.
TEST(Division, IsDone) {
  constexpr std::size_t kCount = 1 << 16;
  for (const UpdateFormula formula : {UpdateFormula::adamw, UpdateFormula::adagrad}) {
    const unsigned divisions = divisions_of(formula);
    // Towards the square of 1.7 / 1.3, or the cube root of the square of 1.7, from eight numbers.
    const double towards = divisions == 2 ? 1.7 / 1.3 * 1.7 / 1.3 : std::cbrt(1.7 * 1.7);
    EXPECT_NEAR(static_cast<double>(divide(divisions, kCount)), 8 * towards, 1e-4);
    EXPECT_GT(std::abs(static_cast<double>(divide(divisions, 1)) - 8 * towards), 1e-2);
  }
  EXPECT_EQ(divide(divisions_of(UpdateFormula::lion), kCount), 0.0f);
}

TEST(StreamedStep, MovesWhatTheFormulaSaysAndLeavesNothing) {
  const test::TempDirectory directory;
  const StreamedStepResult result = compare_streamed_step(
      {.directory = directory.path(), .parameters = 1 << 20, .pinned_bytes = 64 * kMiB, .pairs = 2});
  EXPECT_EQ(result.ratios.size(), 2u);
  EXPECT_NEAR(result.bytes_read_per_parameter(), 12, 0.01);  // the last tile of a unit is padded
  EXPECT_NEAR(result.bytes_written_per_parameter(), 12, 0.01);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST(StreamedStep, IsComparedWithTransfersOfAnotherSetting) {
  const test::TempDirectory directory;
  const StreamedStepResult result = compare_streamed_step({.directory = directory.path(),
                                                           .parameters = 1 << 20,
                                                           .pinned_bytes = 64 * kMiB,
                                                           .mixed_block_bytes = 64 * kKiB,
                                                           .mixed_queue_depth = 3,
                                                           .pairs = 1});
  EXPECT_EQ(result.mixed_block_bytes, 64 * kKiB);
  EXPECT_EQ(result.mixed_queue_depth, 3u);
  EXPECT_NEAR(result.bytes_read_per_parameter(), 12, 0.01);
}

}  // namespace
}  // namespace hoist::measure::kernels_test
