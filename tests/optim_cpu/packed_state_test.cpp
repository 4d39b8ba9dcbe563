// SPDX-License-Identifier: Apache-2.0
// State of 8 bits: the arithmetic is that of fp32, and what is stored is rounded as update.hpp and block_fp8.hpp say.
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <span>

#include <hoist/core/digest.hpp>

#include "packed_tile.hpp"

namespace hoist::optim::test::packed_state_test {
namespace {

// --- against the scalar text -----------------------------------------------------------------------------------------

// The fp32 update of what a packed tile says.
Tile updated_wide(PackedTile& packed, const UpdateCoefficients& c, Rounding rounding) {
  Tile wide(packed.count(), packed.wide.gradient_dtype);
  for (std::size_t i = 0; i < packed.count(); ++i) {
    wide.set_master(i, packed.wide.master_array[i]);
    wide.moment1[i] = packed.wide.moment1[i];
    wide.moment2[i] = packed.wide.moment2[i];
    wide.set_gradient(i, packed.wide.gradient_value(i));
  }
  if (packed.form.moments != MomentType::bf16) {
    (void)update_tile(c, wide.whole());
    return wide;
  }
  PackedTile narrow({"", DType::fp32, MomentType::bf16}, packed.count(), packed.wide.gradient_dtype);
  for (std::size_t i = 0; i < packed.count(); ++i) {
    narrow.narrow1[i] = packed.narrow1[i];
    narrow.narrow2[i] = packed.narrow2[i];
    narrow.wide.set_master(i, packed.wide.master_array[i]);
    narrow.wide.set_gradient(i, packed.wide.gradient_value(i));
  }
  (void)narrow.update(c, rounding);
  for (std::size_t i = 0; i < packed.count(); ++i) {
    wide.set_master(i, narrow.wide.master_array[i]);
    wide.moment1[i] = to_float(narrow.narrow1[i]);
    wide.moment2[i] = to_float(narrow.narrow2[i]);
  }
  return wide;
}

void expect_master(const PackedTile& tile, std::size_t i, float master, std::uint32_t word) {
  if (std::isnan(master)) return;
  auto bits = std::bit_cast<std::uint32_t>(master);
  if (tile.has_master24()) bits = (bits + added_to_master24(word)) & ~0xFFu;
  ASSERT_EQ(std::bit_cast<std::uint32_t>(tile.master(i)), bits) << "master of element " << i;
  if (tile.form.weights == DType::bf16) {
    ASSERT_EQ(tile.wide.weight[i], split_master(std::bit_cast<float>(bits)).weight) << "weight of element " << i;
  }
  if (tile.form.weights == DType::fp16) {
    ASSERT_EQ(tile.fp16_weight[i], float_to_fp16(master)) << "weight of element " << i;
  }
}

void expect_block(const Guarded<float>& values, const PackedTile& tile, std::size_t first, Rounding rounding,
                  Moment moment) {
  const std::size_t in_block = std::min<std::size_t>(kMomentBlock, tile.count() - first);
  std::array<std::uint32_t, kMomentBlock> added{};
  for (std::size_t i = 0; i < in_block; ++i) {
    if (std::isnan(values[first + i])) return;
    const std::uint32_t word = rounding_word(rounding.key, rounding.first + static_cast<std::uint32_t>(first + i));
    added[i] = moment == Moment::first ? added_to_moment1(word) : added_to_moment2(word);
  }
  std::array<std::uint8_t, kMomentBlock> codes{};
  std::uint8_t scale = 0;
  if (!encode_block({&values[first], in_block}, added, moment, codes.data(), scale)) return;
  const auto& tile_codes = moment == Moment::first ? tile.codes1 : tile.codes2;
  const auto& tile_scales = moment == Moment::first ? tile.scales1 : tile.scales2;
  ASSERT_EQ(tile_scales[first / kMomentBlock], scale) << "scale of the block at " << first;
  for (std::size_t i = 0; i < in_block; ++i)
    ASSERT_EQ(tile_codes[first + i], codes[i]) << "element " << first + i << ", " << values[first + i];
}

class PackedState : public ::testing::TestWithParam<std::tuple<NamedOptions, DType, Form>> {};
INSTANTIATE_TEST_SUITE_P(All, PackedState,
                         ::testing::Combine(::testing::ValuesIn(every_optimizer()), ::testing::ValuesIn(kDTypes),
                                            ::testing::ValuesIn(kForms)));

// Every instruction set, at every count up to past two of the widest vectors and around a stretch, unaligned.
TEST_P(PackedState, IsTheFp32StateRounded) {
  const auto& [optimizer, gradient, form] = GetParam();
  const UpdateCoefficients c(optimizer.options, 3, 0.5);
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (std::size_t count = 0; count < 1050; count += count < 70 ? 1 : count == 505 ? 15 : count > 600 ? 200 : 29) {
      SCOPED_TRACE(name + " count " + std::to_string(count));
      const Rounding rounding{.key = 0x9E3779B9u, .first = first_index(count)};
      Rng rng(count + 1);
      PackedTile tile(form, count, gradient, count % 17);
      count % 2 == 0 ? fill_ordinary(tile.wide, rng) : fill_extreme(tile.wide, rng);
      tile.adopt();
      const Tile expected = updated_wide(tile, c, rounding);
      (void)tile.update(c, rounding);
      ASSERT_TRUE(tile.intact());
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t word = rounding_word(rounding.key, rounding.first + static_cast<std::uint32_t>(i));
        ASSERT_NO_FATAL_FAILURE(expect_master(tile, i, expected.master_array[i], word));
      }
      for (std::size_t first = 0; tile.has_fp8() && first < count; first += kMomentBlock) {
        if (keeps_moment1(optimizer.options)) {
          ASSERT_NO_FATAL_FAILURE(expect_block(expected.moment1, tile, first, rounding, Moment::first));
        }
        if (keeps_moment2(optimizer.options)) {
          ASSERT_NO_FATAL_FAILURE(expect_block(expected.moment2, tile, first, rounding, Moment::second));
        }
      }
    }
  }
}

// Tiles end between blocks.
TEST_P(PackedState, DoesNotDependOnTiles) {
  const auto& [optimizer, gradient, form] = GetParam();
  const auto make = [&g = gradient, &f = form] { return PackedTile(f, 1400, g); };
  expect_that_tiles_change_nothing(optimizer.options, make, {8, 24, 512, 520, 1392});
}

// --- the bits that stores hold ---------------------------------------------------------------------------------------

std::uint64_t digest_of(const PackedTile& tile) {
  Digest digest;
  const auto add = [&](const auto& array) { digest.update(std::as_bytes(std::span(array.data(), array.size()))); };
  add(tile.wide.weight);
  add(tile.wide.remainder);
  add(tile.wide.master_array);
  add(tile.wide.moment1);
  add(tile.wide.moment2);
  add(tile.fp16_weight);
  add(tile.remainder);
  add(tile.codes1);
  add(tile.codes2);
  add(tile.scales1);
  add(tile.scales2);
  add(tile.narrow1);
  add(tile.narrow2);
  return digest.value();
}

// Twenty steps of ordinary numbers and one of numbers of every scale, by every optimizer.
std::uint64_t digest_of_training(const Form& form) {
  Digest digest;
  const auto add = [&](const PackedTile& tile) {
    const std::uint64_t one = digest_of(tile);
    digest.update(std::as_bytes(std::span(&one, 1)));
  };
  for (const NamedOptions& optimizer : every_optimizer()) {
    for (const DType gradient : kDTypes) {
      Rng rng(12);
      PackedTile ordinary(form, 1037, gradient), extreme(form, 1037, gradient);
      fill_ordinary(ordinary.wide, rng);
      ordinary.adopt();
      for (std::uint32_t step = 1; step <= 20; ++step) {
        EXPECT_TRUE(ordinary.update(UpdateCoefficients(optimizer.options, step, 0.5), {.key = step * 0x9E3779B9u}));
        new_gradients(ordinary.wide, rng);
      }
      add(ordinary);
      fill_extreme(extreme.wide, rng);
      for (std::size_t i = 0; i < extreme.wide.count(); ++i)  // infinities make NaN, whose bits differ among processors
        if (!std::isfinite(extreme.wide.gradient_value(i))) extreme.wide.set_gradient(i, 0);
      extreme.adopt();
      (void)extreme.update(UpdateCoefficients(optimizer.options, 2, 0.5), {.key = 3});
      add(extreme);
    }
  }
  return digest.value();
}

// The results are those of earlier versions, on every instruction set: a store continues with the same bits.
TEST(PackedStateBits, AreTheOnesThatStoresHold) {
  constexpr std::uint64_t kDigests[] = {3062153288914825578u,  3625503176258881468u,  6697722558043674533u,
                                        13171384808829344007u, 15020319478081685320u, 17510074270675895518u};
  for (std::size_t i = 0; i < std::size(kForms); ++i) {
    for (const auto& name : supported_instruction_sets()) {
      const Forced forced(name);
      EXPECT_EQ(digest_of_training(kForms[i]), kDigests[i]) << kForms[i] << ", " << name;
    }
  }
}

// Lion with beta2 = 0 stores the gradient as its moment, so a test can place any values around the rounding thresholds.
TEST(PackedStateBits, EveryThresholdOfRoundingIsTheScalarTexts) {
  const UpdateCoefficients c({.kind = OptimizerKind::lion, .learning_rate = 1e-4, .beta2 = 0, .weight_decay = 0}, 1, 1);
  constexpr std::size_t kCount = 4096;
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (std::uint32_t round = 0; round < 40; ++round) {
      SCOPED_TRACE(name + " round " + std::to_string(round));
      Rng rng(round);
      PackedTile tile({"", DType::fp32, MomentType::fp8}, kCount, DType::fp32);
      Guarded<float> values(kCount);
      for (std::size_t i = 0; i < kCount; ++i) {
        // One element of each block sets its exponent. The others are multiples of 2^-20 of the least exponent, where
        // the random bits begin to count, or the floats next to these.
        const int exponent = static_cast<int>(i / kMomentBlock % 190) - 80;
        const int bits = static_cast<int>(rng.below(25));
        const auto multiple = static_cast<double>(rng.below(std::uint64_t{1} << bits));
        auto value = static_cast<float>(std::ldexp(multiple, exponent - 6 - 20));
        if (i % kMomentBlock == 3) value = static_cast<float>(std::ldexp(1 + rng.uniform(), exponent));
        const auto beside = static_cast<std::uint32_t>(rng.below(3));
        if (value > 0) value = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) + beside - 1);
        values[i] = rng.below(2) == 0 ? value : -value;
        tile.wide.set_gradient(i, values[i]);
        if (std::abs(values[i]) < 0x1.0p-126f) values[i] = 0;
      }
      tile.adopt();
      const Rounding rounding{.key = round * 0x85EBCA6Bu, .first = round};
      EXPECT_TRUE(tile.update(c, rounding));
      for (std::size_t first = 0; first < kCount; first += kMomentBlock)
        ASSERT_NO_FATAL_FAILURE(expect_block(values, tile, first, rounding, Moment::first));
    }
  }
}

#if defined(__x86_64__)

TEST(PackedStateBits, AHostsFloatModeChangesNothing) {
  const auto updated = [](const Form& form, OptimizerOptions options, unsigned mode) {
    Rng rng(31);
    PackedTile tile(form, 1000, DType::fp32);
    fill_extreme(tile.wide, rng);
    tile.adopt();
    options.weight_decay = 1e-40;  // a denormal coefficient
    const HostMode host(mode);
    (void)tile.update(UpdateCoefficients(options, 2, 0.7), {.key = 9});
    EXPECT_EQ(_mm_getcsr(), mode) << "the caller's mode was not put back";
    return tile;
  };
  for (const Form& form : kForms) {
    for (const auto& [optimizer, options] : every_optimizer()) {
      for (const auto& name : supported_instruction_sets()) {
        const Forced forced(name);
        const PackedTile expected = updated(form, options, kDefaultMode);
        for (const unsigned mode : kHostModes) {
          EXPECT_TRUE(updated(form, options, mode).same_state(expected))
              << optimizer << ", " << form << ", " << name << ", MXCSR " << mode;
        }
      }
    }
  }
}

#endif

// --- limits ----------------------------------------------------------------------------------------------------------

TEST(PackedStateLimits, WhatCannotBeCommittedIsRefusedWhereverItIs) {
  const OptimizerOptions adamw{.weight_decay = 0};
  // Its first moment becomes the gradient.
  const OptimizerOptions lion{.kind = OptimizerKind::lion, .learning_rate = 1e-4, .beta2 = 0, .weight_decay = 0};
  struct Case {
    const char* name;
    OptimizerOptions options;
    float gradient;
    bool sound;
  };
  const Case cases[] = {{"fine", adamw, 1.0f, true},
                        {"a gradient that is no number", adamw, std::numeric_limits<float>::quiet_NaN(), false},
                        {"an infinite second moment", adamw, 3e38f, false},
                        {"a large first moment", lion, 0x1.Ep127f, true},
                        {"a first moment that rounds to infinity", lion, std::numeric_limits<float>::max(), false}};
  constexpr std::size_t kCount = 45;
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (const Case& one : cases) {
      for (std::size_t bad = 0; bad < kCount; ++bad) {
        PackedTile tile(kForms[0], kCount, DType::fp32);
        Rng rng(bad);
        fill_ordinary(tile.wide, rng);
        tile.wide.set_gradient(bad, one.gradient);
        tile.adopt();
        EXPECT_EQ(tile.update(UpdateCoefficients(one.options, 1, 1.0), {}), one.sound)
            << one.name << " at " << bad << ", " << name;
      }
    }
  }
}

// NaN of every payload, those too that a sum of integers would carry over: whatever is in a gradient's memory.
TEST(PackedStateLimits, NoNaNIsOverlooked) {
  constexpr std::size_t kCount = 71;
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (const Form& form : kForms) {
      for (const auto& [optimizer, options] : every_optimizer()) {
        for (const std::uint32_t bits : {0xFFFFFFFFu, 0x7FFFFFFFu, 0x7FFFFF80u, 0x7F800001u, 0xFFC00000u}) {
          for (const std::size_t bad : {0u, 1u, 40u, 64u, 69u, 70u}) {
            PackedTile tile(form, kCount, DType::fp32);
            Rng rng(bad);
            fill_ordinary(tile.wide, rng);
            tile.adopt();
            std::memcpy(tile.wide.gradient.data() + 4 * bad, &bits, 4);
            EXPECT_FALSE(tile.update(UpdateCoefficients(options, 1, 1.0), {.key = 1}))
                << optimizer << ", " << form << ", " << name << ", element " << bad << " " << std::hex << bits;
          }
        }
      }
    }
  }
}

// Lanes behind a tile's end are zeros; without an epsilon that would be zero divided by zero.
TEST(PackedStateLimits, WhatIsBehindTheEndIsNotRefused) {
  const UpdateCoefficients c({.epsilon = 0, .weight_decay = 0}, 1, 1.0);
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (const Form& form : kForms) {
      for (std::size_t count = 1; count < 70; ++count) {
        PackedTile tile(form, count, DType::fp32);
        Rng rng(count);
        fill_ordinary(tile.wide, rng);
        for (std::size_t i = 0; i < count; ++i) tile.wide.set_gradient(i, 1e-3f);
        tile.adopt();
        EXPECT_TRUE(tile.update(c, {.key = 1})) << form << ", " << name << ", " << count;
        ASSERT_TRUE(tile.intact());
      }
    }
  }
}

// A master that the random bits round to the limit.
TEST(PackedStateLimits, AMasterRoundedToTheLimitIsRefused) {
  OptimizerOptions options{.kind = OptimizerKind::sgd, .learning_rate = 1, .weight_decay = 0};
  unsigned refused = 0;
  for (std::uint32_t key = 0; key < 64; ++key) {
    PackedTile tile(kForms[0], 8, DType::fp32);
    tile.wide.set_master(3, std::bit_cast<float>(kMasterLimitBits - 0x100));
    tile.adopt();
    // To half a step of 24 bits below the limit.
    const float goal = std::bit_cast<float>(kMasterLimitBits - 0x80);
    tile.wide.set_gradient(3, tile.wide.master_array[3] - goal);
    const bool sound = tile.update(UpdateCoefficients(options, 1, 1.0), {.key = key});
    EXPECT_EQ(sound, (added_to_master24(rounding_word(key, 3)) < 0x80));
    refused += sound ? 0 : 1;
  }
  EXPECT_GT(refused, 0u);
  EXPECT_LT(refused, 64u);
}

}  // namespace
}  // namespace hoist::optim::test::packed_state_test
