// SPDX-License-Identifier: Apache-2.0
// tests/optim_cpu/packed_tile.hpp - tiles with some 8-bit state, together with the exact fp32 values of that state.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <ostream>
#include <span>

#include <hoist/optim_cpu/block_fp8.hpp>

#include "tiles.hpp"

namespace hoist::optim::test {

// The parts of a tile's state that have 8 bits.
struct Form {
  const char* name;
  DType weights;
  MomentType moments;
  RemainderType remainder = RemainderType::int16;
};
inline std::ostream& operator<<(std::ostream& out, const Form& form) { return out << form.name; }
inline constexpr Form kForms[] = {
    {"all", DType::bf16, MomentType::fp8, RemainderType::int8},
    {"moments", DType::bf16, MomentType::fp8},
    {"moments_of_fp16", DType::fp16, MomentType::fp8},
    {"moments_of_fp32", DType::fp32, MomentType::fp8},
    {"remainder", DType::bf16, MomentType::fp32, RemainderType::int8},
    {"remainder_beside_bf16", DType::bf16, MomentType::bf16, RemainderType::int8},
};

constexpr std::size_t block_count(std::size_t elements) { return (elements + kMomentBlock - 1) / kMomentBlock; }

// A tile of which some state has 8 bits. `wide` holds the gradient and, exactly, what the state says.
struct PackedTile {
  PackedTile(const Form& form_in, std::size_t count, DType gradient_dtype, std::size_t offset = 0)
      : form(form_in),
        wide(count, gradient_dtype, offset),
        fp16_weight(count, offset),
        remainder(count, offset),
        codes1(count, offset),
        codes2(count, offset),
        scales1(block_count(count), offset),
        scales2(block_count(count), offset),
        narrow1(count, offset),
        narrow2(count, offset) {}

  std::size_t count() const { return wide.count(); }
  bool has_fp8() const { return form.moments == MomentType::fp8; }
  bool has_master24() const { return form.remainder == RemainderType::int8; }

  // Rounds the wide state to what this form can hold, and takes it.
  void adopt() {
    for (std::size_t i = 0; i < count(); ++i) {
      wide.set_master(i, has_master24() ? to_master24(wide.master_array[i]) : wide.master_array[i]);
      remainder[i] = static_cast<std::int8_t>(wide.remainder[i] / 256);
      if (form.moments == MomentType::bf16) {
        narrow1[i] = to_bf16(wide.moment1[i]);
        narrow2[i] = to_bf16(wide.moment2[i]);
        wide.moment1[i] = to_float(narrow1[i]);
        wide.moment2[i] = to_float(narrow2[i]);
      }
    }
    if (!has_fp8()) return;
    for (std::size_t first = 0; first < count(); first += kMomentBlock) {
      const std::size_t in_block = std::min<std::size_t>(kMomentBlock, count() - first);
      const std::size_t block = first / kMomentBlock;
      ASSERT_TRUE(
          encode_block({&wide.moment1[first], in_block}, kAllNearest, Moment::first, &codes1[first], scales1[block]));
      ASSERT_TRUE(
          encode_block({&wide.moment2[first], in_block}, kAllNearest, Moment::second, &codes2[first], scales2[block]));
      for (std::size_t i = first; i < first + in_block; ++i) {
        wide.moment1[i] = moment1(i);
        wide.moment2[i] = moment2(i);
      }
    }
  }
  float moment1(std::size_t i) const { return decode_moment(codes1[i], scales1[i / kMomentBlock], Moment::first); }
  float moment2(std::size_t i) const { return decode_moment(codes2[i], scales2[i / kMomentBlock], Moment::second); }
  float master(std::size_t i) const {
    if (form.weights != DType::bf16) return wide.master_array[i];
    return has_master24() ? join_master24(wide.weight[i], remainder[i]) : wide.split_value(i);
  }

  // Elements [first, first + some) as a tile of their own. Pre: `first` is that of a block, if there are blocks.
  bool update(const UpdateCoefficients& c, Rounding rounding, std::size_t first, std::size_t some) {
    const TileState state{
        .moment1 = has_fp8()                          ? static_cast<void*>(codes1.data() + first)
                   : form.moments == MomentType::bf16 ? static_cast<void*>(narrow1.data() + first)
                                                      : static_cast<void*>(wide.moment1.data() + first),
        .moment2 = has_fp8()                          ? static_cast<void*>(codes2.data() + first)
                   : form.moments == MomentType::bf16 ? static_cast<void*>(narrow2.data() + first)
                                                      : static_cast<void*>(wide.moment2.data() + first),
        .gradient = wide.gradient.data() + first * dtype_bytes(wide.gradient_dtype),
        .gradient_dtype = wide.gradient_dtype,
        .count = some,
        .moment_type = form.moments,
        .rounding = {.key = rounding.key, .first = static_cast<std::uint32_t>(rounding.first + first)},
        .scale1 = scales1.data() + first / kMomentBlock,
        .scale2 = scales2.data() + first / kMomentBlock};
    float* const master = wide.master_array.data() + first;
    if (form.weights == DType::fp32) return update_tile(c, WholeTile{state, master});
    if (form.weights == DType::fp16) return update_tile(c, Fp16Tile{state, fp16_weight.data() + first, master});
    SplitTile tile{state, wide.weight.data() + first};
    if (has_master24()) tile.remainder8 = remainder.data() + first;
    if (!has_master24()) tile.remainder = wide.remainder.data() + first;
    return update_tile(c, tile);
  }
  bool update(const UpdateCoefficients& c, Rounding rounding) { return update(c, rounding, 0, count()); }

  bool intact() const {
    return wide.intact() && fp16_weight.intact() && remainder.intact() && codes1.intact() && codes2.intact() &&
           scales1.intact() && scales2.intact() && narrow1.intact() && narrow2.intact();
  }
  bool same_state(const PackedTile& other) const {
    return wide.same_state(other.wide) && fp16_weight.same_bytes(other.fp16_weight) &&
           remainder.same_bytes(other.remainder) && codes1.same_bytes(other.codes1) &&
           codes2.same_bytes(other.codes2) && scales1.same_bytes(other.scales1) && scales2.same_bytes(other.scales2) &&
           narrow1.same_bytes(other.narrow1) && narrow2.same_bytes(other.narrow2);
  }

  Form form;
  Tile wide;
  Guarded<std::uint16_t> fp16_weight;
  Guarded<std::int8_t> remainder;
  Guarded<std::uint8_t> codes1, codes2, scales1, scales2;
  Guarded<bf16> narrow1, narrow2;
};

// However a range is cut into tiles, and wherever the cuts are, it ends in the same bits. `make` returns the range.
template <typename Make>
void expect_that_tiles_change_nothing(const OptimizerOptions& optimizer, const Make& make,
                                      std::initializer_list<std::size_t> tile_counts) {
  const UpdateCoefficients c(optimizer, 3, 0.5);
  const auto updated = [&](std::size_t tile_count) {
    Rng rng(8);
    PackedTile tile = make();
    fill_ordinary(tile.wide, rng);
    tile.adopt();
    for (std::size_t first = 0; first < tile.count(); first += tile_count)
      EXPECT_TRUE(tile.update(c, {.key = 77}, first, std::min(tile_count, tile.count() - first)));
    return tile;
  };
  const PackedTile expected = updated(make().count());
  for (const std::size_t tile_count : tile_counts) EXPECT_TRUE(updated(tile_count).same_state(expected)) << tile_count;
}

// Numbers from -0.5 to 0.5, as `number` gives them for 0, 1, ..., are even and uncorrelated enough for rounding.
template <typename Number>
void expect_even(const Number& number) {
  constexpr std::uint32_t kCount = 1u << 18;
  double sum = 0, product = 0, before = 0;
  for (std::uint32_t i = 0; i < kCount; ++i) {
    const double x = number(i);
    sum += x;
    product += x * before;
    before = x;
  }
  EXPECT_LT(std::fabs(sum), 5 * std::sqrt(kCount / 12.0));
  EXPECT_LT(std::fabs(product), 5 * std::sqrt(static_cast<double>(kCount)) / 12);
}

}  // namespace hoist::optim::test
