// SPDX-License-Identifier: Apache-2.0
// tests/core/split_rule.hpp - what must hold of the split of one master; used sampled and exhaustively.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include <hoist/core/dtype.hpp>

namespace hoist::test {

// The value of a bf16 as a double, an infinity as the next power of two: the grid that rounding is measured on.
inline double grid_value(std::uint16_t magnitude_bits) {
  return magnitude_bits == 0x7F80 ? 0x1.0p128 : static_cast<double>(to_float(bf16{magnitude_bits}));
}

// Null when everything holds, else what does not.
inline const char* broken_split_rule(std::uint32_t bits) {
  const float master = std::bit_cast<float>(bits);
  const SplitMaster parts = split_master(master);
  if (std::bit_cast<std::uint32_t>(join_master(parts.weight, parts.remainder)) != bits) return "join(split(x)) != x";

  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  const bool finite = magnitude < 0x7F800000u;
  const std::uint16_t weight_magnitude = parts.weight.bits & 0x7FFFu;
  if (master_is_committable(master) != (finite && weight_magnitude < 0x7F80u)) {
    return "committable is not the same as: finite, and so is the weight";
  }
  if (!finite) return nullptr;

  // Nearest bf16 of the same sign, halves away from zero. Measured in doubles, which hold every value and difference.
  if ((parts.weight.bits >> 15) != (bits >> 31)) return "the weight has another sign";
  const double exact = std::fabs(static_cast<double>(master));
  const double weight = grid_value(weight_magnitude);
  const double error = std::fabs(exact - weight);
  if (weight_magnitude > 0) {
    const double below = std::fabs(exact - grid_value(static_cast<std::uint16_t>(weight_magnitude - 1)));
    if (below < error) return "the next bf16 towards zero is nearer";
  }
  if (weight_magnitude < 0x7F80u) {
    const double above = std::fabs(exact - grid_value(static_cast<std::uint16_t>(weight_magnitude + 1)));
    if (above < error) return "the next bf16 away from zero is nearer";
    if (above == error) return "a half was rounded towards zero";
  }
  return nullptr;
}

}  // namespace hoist::test
