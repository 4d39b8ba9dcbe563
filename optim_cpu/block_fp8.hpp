// SPDX-License-Identifier: Apache-2.0
// optim_cpu/block_fp8.hpp - 8-bit moments: blocks of small floating-point numbers that share an exponent.
//
// A block is kMomentBlock = 8 neighbours. Its scale is a byte: the fp32 exponent field of its largest magnitude, less
// 32. A first moment has a sign, 3 exponent bits and 4 fraction bits. A second moment, which is never negative, has 4
// exponent bits and 4 fraction bits. The largest exponent stands for the block's own exponent. The smallest one covers
// the range down to zero in equal steps, like fp32's denormals. So elements from 2^-6 of the block's power of two up
// (second moments: from 2^-14) have steps of 1/16 of their own power of two. Below that, the step is 2^-10 (2^-18) of
// the block's power of two.
//
// Four properties that the update relies on:
// - An unchanged number is not rounded again: the representable numbers do not depend on the scale, except near zero.
// - Encoding a decoded block gives the same bytes, however it was rounded before (encode_block chooses the scale by the
//   rounded values); a block of zeros is bytes of zero.
// - A second moment above zero is never stored as zero, but at least as the smallest number that the block can hold. If
//   it became zero beside a first moment that is not, the update would move the parameter without bound.
// - Integer arithmetic on the bits of fp32 only: the same bytes on every machine.
//
// Threading  Pure functions.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <span>

#include <hoist/core/dtype.hpp>

namespace hoist::optim {

enum class Moment : std::uint8_t { first, second };

namespace fp8 {

inline constexpr std::uint32_t kFractionBits = 4;
inline constexpr std::uint32_t kDroppedBits = 23 - kFractionBits;    // of fp32's fraction
inline constexpr std::uint32_t kLeastNormal = 1u << kFractionBits;   // the first code of the smallest exponent
inline constexpr std::uint32_t kLeastExponent = 32;                  // of a block; smaller ones in it stay above 0
inline constexpr std::uint32_t kNearest = 1u << (kDroppedBits - 1);  // the addend that rounds to nearest
inline constexpr std::uint32_t kInfiniteExponent = 255;

// The exponent field of the code of a number that has the block's own exponent.
constexpr std::uint32_t top(Moment moment) { return moment == Moment::first ? 7 : 15; }

}  // namespace fp8

constexpr float decode_moment(std::uint8_t code, std::uint8_t scale, Moment moment) {
  const std::uint32_t magnitude = moment == Moment::first ? code & 0x7Fu : code;
  const std::uint32_t sign = moment == Moment::first ? (code & 0x80u) << 24 : 0;
  const std::uint32_t zero_exponent = (scale + fp8::kLeastExponent - fp8::top(moment)) << 23;
  if (magnitude >= fp8::kLeastNormal)
    return std::bit_cast<float>(sign | ((magnitude << fp8::kDroppedBits) + zero_exponent));
  // A smaller code has no implicit 1 before its fraction: decode it with that 1, then subtract the 1.
  const auto with_one = std::bit_cast<float>(((magnitude + fp8::kLeastNormal) << fp8::kDroppedBits) + zero_exponent);
  const auto one = std::bit_cast<float>((fp8::kLeastNormal << fp8::kDroppedBits) + zero_exponent);
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(with_one - one));
}

// Encodes up to kMomentBlock values; magnitudes below 2^-126 count as zero. added[i], below 2^19, selects the rounding
// of value i: fp8::kNearest, or random bits. Returns false if the result is not finite; the block must then not be
// decoded. Pre: no NaN; second moments are not negative.
constexpr bool encode_block(std::span<const float> values, std::span<const std::uint32_t> added, Moment moment,
                            std::uint8_t* codes, std::uint8_t& scale) {
  const auto magnitude_of = [&](std::size_t i) {
    const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(values[i]) & 0x7FFFFFFFu;
    return magnitude < 0x00800000u ? 0 : magnitude;
  };
  std::uint32_t largest = 0;  // exponent and kept fraction, rounded
  for (std::size_t i = 0; i < values.size(); ++i)
    largest = std::max(largest, (magnitude_of(i) + added[i]) >> fp8::kDroppedBits);
  const std::uint32_t exponent = std::max(largest >> fp8::kFractionBits, fp8::kLeastExponent);
  const std::uint32_t zero_exponent = exponent - fp8::top(moment);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint32_t magnitude = magnitude_of(i);
    const std::uint32_t rounded = (magnitude + added[i]) >> fp8::kDroppedBits;
    std::uint32_t code = 0;
    if (magnitude != 0 && rounded >= ((zero_exponent + 1) << fp8::kFractionBits)) {
      code = rounded - (zero_exponent << fp8::kFractionBits);
    } else if (magnitude != 0) {
      // The code counts steps of 2^(zero_exponent + 1 - 127 - 4). `fixed` counts them with 16 binary places.
      const std::uint32_t shift = zero_exponent + 4 - (magnitude >> 23);
      const std::uint32_t fixed = shift < 32 ? ((magnitude & 0x7FFFFFu) | 0x800000u) >> shift : 0;
      code = (fixed + (added[i] >> (fp8::kDroppedBits - 16))) >> 16;
      if (moment == Moment::second) code = std::max(code, 1u);
    }
    const std::uint32_t sign = moment == Moment::first ? std::bit_cast<std::uint32_t>(values[i]) >> 24 & 0x80u : 0;
    codes[i] = static_cast<std::uint8_t>(code | sign);
  }
  scale = static_cast<std::uint8_t>(exponent - fp8::kLeastExponent);
  return exponent < fp8::kInfiniteExponent;
}
inline constexpr std::array<std::uint32_t, kMomentBlock> kAllNearest{fp8::kNearest, fp8::kNearest, fp8::kNearest,
                                                                     fp8::kNearest, fp8::kNearest, fp8::kNearest,
                                                                     fp8::kNearest, fp8::kNearest};

}  // namespace hoist::optim
