// SPDX-License-Identifier: Apache-2.0
// Denormals, the host program's float mode, and what may be committed.
#include <cfenv>
#include <cmath>
#include <limits>

#include <hoist/optim_cpu/norm.hpp>
#include <hoist/optim_cpu/reference.hpp>

#include "tiles.hpp"

namespace hoist::optim::test::update_edges_test {
namespace {

constexpr float kSmallestNormal = std::numeric_limits<float>::min();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(Denormals, MomentsOfIdleParametersEndAtZeroAndNeverBelowNormal) {
  OptimizerOptions options;
  options.weight_decay = 0;
  options.beta2 = 0.9;
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    Tile tile(67, DType::bf16);
    for (std::size_t i = 0; i < tile.count(); ++i) {
      tile.set_master(i, 0.5f);
      tile.moment1[i] = (i % 2 == 0 ? 1e-30f : -1e-30f);
      tile.moment2[i] = 1e-30f;
    }
    for (std::uint64_t step = 1; step <= 300; ++step) {
      ASSERT_TRUE(update_tile(UpdateCoefficients(options, step, 1.0), tile.split()));
      for (std::size_t i = 0; i < tile.count(); ++i) {
        for (const float moment : {tile.moment1[i], tile.moment2[i]}) {
          ASSERT_TRUE(moment == 0 || std::fabs(moment) >= kSmallestNormal)
              << name << " step " << step << ": " << moment;
        }
      }
    }
    for (std::size_t i = 0; i < tile.count(); ++i) {
      ASSERT_EQ(tile.moment1[i], 0.0f) << name << " element " << i;
      ASSERT_EQ(tile.moment2[i], 0.0f) << name << " element " << i;
    }
  }
}

TEST(Denormals, MastersKeepThem) {
  for (const auto& [optimizer, standard] : every_optimizer()) {
    OptimizerOptions options = standard;
    options.weight_decay = 0;
    for (const auto& name : supported_instruction_sets()) {
      const Forced forced(name);
      Tile tile(33, DType::fp32);
      for (std::size_t i = 0; i < tile.count(); ++i) tile.set_master(i, std::bit_cast<float>(0x00012345u));
      ASSERT_TRUE(update_tile(UpdateCoefficients(options, 1, 1.0), tile.split())) << optimizer;
      for (std::size_t i = 0; i < tile.count(); ++i) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(tile.split_value(i)), 0x00012345u) << optimizer << ", " << name;
      }
    }
  }
}

// As in torch.optim: a product with a factor of zero is left out, so that an infinite number stays, and no NaN is lost.
TEST(NotFinite, WeightsAreInfiniteOrNaN) {
  for (const auto& [optimizer, standard] : every_optimizer()) {
    OptimizerOptions options = standard;
    options.weight_decay = 0;
    const UpdateCoefficients coefficients(options, 1, 1.0);
    const auto expect = [&](float master, float gradient, int kind) {
      ReferenceState state{.master = static_cast<double>(master)};
      reference_update(options, 1, static_cast<double>(gradient), state);
      EXPECT_EQ(std::fpclassify(state.master), kind) << optimizer << ", reference";
      for (const auto& name : supported_instruction_sets()) {
        const Forced forced(name);
        Tile tile(67, DType::fp32);
        for (std::size_t i = 0; i < tile.count(); ++i) tile.set_master(i, master);
        for (std::size_t i = 0; i < tile.count(); ++i) tile.set_gradient(i, gradient);
        EXPECT_FALSE(update_tile(coefficients, tile.whole()));
        for (std::size_t i = 0; i < tile.count(); ++i)
          ASSERT_EQ(std::fpclassify(tile.master_array[i]), kind) << optimizer << ", " << name;
      }
    };
    expect(-kInfinity, 0, FP_INFINITE);
    expect(1, kNaN, FP_NAN);
    if (options.kind == OptimizerKind::sgd) expect(1, kInfinity, FP_INFINITE);
  }
}

#if defined(__x86_64__)

Tile one_update(OptimizerOptions options, unsigned host_mode, double& norm) {
  Rng rng(31);
  Tile tile(1000, DType::fp32);
  fill_extreme(tile, rng);
  options.weight_decay = 1e-40;  // a denormal coefficient
  const HostMode mode(host_mode);
  const UpdateCoefficients coefficients(options, 2, 0.7);
  (void)update_tile(coefficients, tile.split());
  norm = sum_of_squares_chunk(tile.gradient.data(), DType::fp32, tile.count());
  EXPECT_EQ(_mm_getcsr(), host_mode) << "the caller's mode was not put back";
  return tile;
}

TEST(HostFloatMode, ChangesNothingAndIsPutBack) {
  for (const auto& [optimizer, options] : every_optimizer()) {
    for (const auto& name : supported_instruction_sets()) {
      const Forced forced(name);
      double norm = 0;
      const Tile expected = one_update(options, kDefaultMode, norm);
      for (const unsigned mode : kHostModes) {
        double other_norm = 0;
        EXPECT_TRUE(one_update(options, mode, other_norm).same_state(expected))
            << optimizer << ", " << name << ", MXCSR " << mode;
        EXPECT_EQ(norm, other_norm) << name << ", MXCSR " << mode;
      }
    }
  }
}

#endif

// A tile that is fine except for one element, at every position in turn.
template <typename Spoil>
void expect_refused(OptimizerOptions options, const Spoil& spoil, const char* what) {
  options.weight_decay = 0;
  const UpdateCoefficients coefficients(options, 1, 1.0);
  constexpr std::size_t kCount = 83;
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (std::size_t bad = 0; bad < kCount; ++bad) {
      Rng rng(bad);
      Tile tile(kCount, DType::fp32);
      fill_ordinary(tile, rng);
      ASSERT_TRUE(update_tile(coefficients, tile.split()));
      ASSERT_TRUE(update_tile(coefficients, tile.whole()));
      spoil(tile, bad);
      EXPECT_FALSE(update_tile(coefficients, tile.split())) << name << ": " << what << " at " << bad << " was accepted";
    }
    for (std::size_t bad = 0; bad < kCount; ++bad) {
      Rng rng(bad);
      Tile tile(kCount, DType::fp32);
      fill_ordinary(tile, rng);
      spoil(tile, bad);
      EXPECT_FALSE(update_tile(coefficients, tile.whole())) << name << ": " << what << " at " << bad << " was accepted";
    }
  }
}

TEST(Committable, NonFiniteGradientsAreNoticed) {
  for (const auto& [name, options] : every_optimizer()) {
    SCOPED_TRACE(name);
    expect_refused(
        options, [](Tile& tile, std::size_t i) { tile.set_gradient(i, kNaN); }, "NaN gradient");
    expect_refused(
        options, [](Tile& tile, std::size_t i) { tile.set_gradient(i, kInfinity); }, "infinite gradient");
    expect_refused(
        options, [](Tile& tile, std::size_t i) { tile.set_gradient(i, -kInfinity); }, "infinite gradient");
  }
}

TEST(Committable, NonFiniteStateIsNoticed) {
  for (const auto& [name, options] : every_optimizer()) {
    SCOPED_TRACE(name);
    expect_refused(
        options, [](Tile& tile, std::size_t i) { tile.set_master(i, kNaN); }, "NaN master");
    expect_refused(
        options, [](Tile& tile, std::size_t i) { tile.set_master(i, -kInfinity); }, "infinite master");
    if (keeps_moment1(options))
      expect_refused(
          options, [](Tile& tile, std::size_t i) { tile.moment1[i] = kNaN; }, "NaN moment1");
    if (!keeps_moment2(options)) continue;
    expect_refused(
        options, [](Tile& tile, std::size_t i) { tile.moment2[i] = kInfinity; }, "infinite moment2");
    // The square overflows though the gradient is finite; the update itself is then tiny.
    expect_refused(
        options, [](Tile& tile, std::size_t i) { tile.set_gradient(i, 1e30f); }, "overflow of moment2");
  }
}

TEST(Committable, TheLimitIsExact) {
  OptimizerOptions options;
  options.weight_decay = 0;
  const UpdateCoefficients coefficients(options, 1, 1.0);
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      Tile tile(37, DType::bf16);  // zero gradients and moments leave masters as they are
      tile.set_master(20, std::bit_cast<float>(sign | (kMasterLimitBits - 1)));
      EXPECT_TRUE(update_tile(coefficients, tile.split())) << name;
      EXPECT_TRUE(update_tile(coefficients, tile.whole())) << name;
      tile.set_master(20, std::bit_cast<float>(sign | kMasterLimitBits));
      EXPECT_FALSE(update_tile(coefficients, tile.split())) << name;
      EXPECT_FALSE(update_tile(coefficients, tile.whole())) << name;
    }
  }
}

// Spare lanes of a tail must not spoil the answer, whatever zeros would do there.
TEST(Committable, EpsilonZeroWithATailIsAccepted) {
  for (const auto& [optimizer, standard] : every_optimizer()) {
    OptimizerOptions options = standard;
    options.epsilon = 0;
    for (const auto& name : supported_instruction_sets()) {
      const Forced forced(name);
      Rng rng(5);
      for (std::size_t count = 1; count < 40; ++count) {
        Tile tile(count, DType::bf16);
        fill_ordinary(tile, rng);
        for (std::size_t i = 0; i < count; ++i) tile.set_gradient(i, 0.001f);
        EXPECT_TRUE(update_tile(UpdateCoefficients(options, 1, 1.0), tile.split()))
            << optimizer << ", " << name << " count " << count;
      }
    }
  }
}

// State that a formula does not keep is neither read nor written: the pointers may be null.
TEST(Moments, ThatAreNotKeptAreNotTouched) {
  for (const auto& [optimizer, options] : every_optimizer()) {
    for (const auto& name : supported_instruction_sets()) {
      const Forced forced(name);
      Rng rng(6);
      Tile tile(101, DType::bf16);
      fill_ordinary(tile, rng);
      SplitTile split = tile.split();
      WholeTile whole = tile.whole();
      if (!keeps_moment1(options)) split.moment1 = whole.moment1 = nullptr;
      if (!keeps_moment2(options)) split.moment2 = whole.moment2 = nullptr;
      EXPECT_TRUE(update_tile(UpdateCoefficients(options, 1, 1.0), split)) << optimizer << ", " << name;
      EXPECT_TRUE(update_tile(UpdateCoefficients(options, 2, 1.0), whole)) << optimizer << ", " << name;
    }
  }
}

TEST(Committable, AnEmptyTileIs) {
  Tile tile(0, DType::bf16);
  EXPECT_TRUE(update_tile(UpdateCoefficients(OptimizerOptions{}, 1, 1.0), tile.split()));
  EXPECT_TRUE(update_tile(UpdateCoefficients(OptimizerOptions{}, 1, 1.0), tile.whole()));
}

// All 65536 patterns of each 16-bit gradient type arrive exactly: beta1 = 0 makes moment1 the gradient.
TEST(Gradients, EveryPatternArrivesExactly) {
  OptimizerOptions options;
  options.beta1 = 0;
  const UpdateCoefficients coefficients(options, 1, 1.0);
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    for (const auto& name : supported_instruction_sets()) {
      const Forced forced(name);
      Tile tile(65536, dtype);
      for (std::size_t i = 0; i < 65536; ++i) {
        const auto bits = static_cast<std::uint16_t>(i);
        std::memcpy(tile.gradient.data() + 2 * i, &bits, 2);
      }
      EXPECT_FALSE(update_tile(coefficients, tile.whole()));
      for (std::size_t i = 0; i < 65536; ++i) {
        const float right = tile.gradient_value(i);
        if (std::isnan(right)) {
          ASSERT_TRUE(std::isnan(tile.moment1[i])) << name << " pattern " << i;
        } else if (std::fabs(right) < kSmallestNormal) {
          ASSERT_EQ(tile.moment1[i], 0.0f) << name << " pattern " << i;
        } else {
          ASSERT_EQ(tile.moment1[i], right) << name << " pattern " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace hoist::optim::test::update_edges_test
