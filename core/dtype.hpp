// SPDX-License-Identifier: Apache-2.0
// core/dtype.hpp - number types, and the lossless split of an fp32 master into a bf16 weight and a 16-bit remainder.
//
// The split uses only integer arithmetic, and every bf16 weight in every placement is made by it. The hardware's
// conversion rounds to nearest even, which cannot be split this way. Derivation: docs/format.md.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>

namespace hoist {

enum class DType : std::uint8_t { bf16 = 0, fp16 = 1, fp32 = 2 };

constexpr std::uint64_t dtype_bytes(DType dtype) { return dtype == DType::fp32 ? 4 : 2; }
std::string_view dtype_name(DType dtype);
std::optional<DType> parse_dtype(std::string_view name);

// A bfloat16 as stored: the upper half of an fp32. Arithmetic happens in float.
struct bf16 {
  std::uint16_t bits;
  friend constexpr bool operator==(bf16, bf16) = default;
};

constexpr float to_float(bf16 value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }

// fp16 (IEEE binary16) <-> fp32; rounds to nearest even in every rounding mode of the thread; overflows to infinity.
float fp16_to_float(std::uint16_t bits);
std::uint16_t float_to_fp16(float value);

// A master value split without loss. weight is the master rounded to bf16, halves away from zero.
struct SplitMaster {
  bf16 weight;
  std::int16_t remainder;
};

constexpr SplitMaster split_master(float master) {
  const auto b = std::bit_cast<std::uint32_t>(master);
  return {bf16{static_cast<std::uint16_t>((b + 0x8000u) >> 16)},
          static_cast<std::int16_t>(static_cast<std::uint16_t>(b))};
}

constexpr float join_master(bf16 weight, std::int16_t remainder) {
  const auto high = static_cast<std::uint32_t>(weight.bits) << 16;
  return std::bit_cast<float>(high + static_cast<std::uint32_t>(static_cast<std::int32_t>(remainder)));
}

// A master of 24 bits: the weight and the upper 8 bits of the remainder; the master's last 8 bits are zero.
constexpr float join_master24(bf16 weight, std::int8_t remainder) {
  return join_master(weight, static_cast<std::int16_t>(remainder * 256));
}
// The type of an optimizer's stored moments. fp8: 8 bits each, in blocks of kMomentBlock that share an exponent of 8
// bits (docs/optimizers.md).
enum class MomentType : std::uint8_t { fp32 = 0, bf16 = 1, fp8 = 2 };
std::string_view moment_type_name(MomentType type);
inline constexpr std::uint64_t kMomentBlock = 8;
// Bytes of one moment of `elements` parameters, a multiple of kMomentBlock.
constexpr std::uint64_t moment_bytes(MomentType type, std::uint64_t elements) {
  if (type == MomentType::fp8) return elements + elements / kMomentBlock;
  return elements * (type == MomentType::fp32 ? 4 : 2);
}

// The remainder of the fp32 master beside a bf16 weight: complete, or 8 bits shorter.
enum class RemainderType : std::uint8_t { int16 = 0, int8 = 1 };
constexpr std::uint64_t remainder_bytes(RemainderType type) { return type == RemainderType::int16 ? 2 : 1; }

// The same rounding without a remainder, for gradients and activations. NaN stays NaN (a payload only in the low half
// would round to infinity or beyond).
constexpr bf16 to_bf16(float value) {
  if (value != value) return bf16{static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(value) >> 16) | 0x0040u)};
  return split_master(value).weight;
}

// Masters at or beyond this magnitude (bits) round to a bf16 infinity or are not finite; they are never committed.
inline constexpr std::uint32_t kMasterLimitBits = 0x7F7F8000u;
// The same for masters beside fp16 weights: from 65520 on they round to infinity.
inline constexpr std::uint32_t kFp16MasterLimitBits = 0x477FF000u;
constexpr bool master_is_committable(float master, DType weights = DType::bf16) {
  const std::uint32_t limit_bits = weights == DType::fp16 ? kFp16MasterLimitBits : kMasterLimitBits;
  return (std::bit_cast<std::uint32_t>(master) & 0x7FFFFFFFu) < limit_bits;
}

// To the nearest master of 24 bits, halves away from zero; down at the end of the range that may be committed.
constexpr float to_master24(float master) {
  const auto b = std::bit_cast<std::uint32_t>(master);
  const std::uint32_t nearest = (b + 0x80u) & ~0xFFu;
  return std::bit_cast<float>((nearest & 0x7FFFFFFFu) < kMasterLimitBits ? nearest : b & ~0xFFu);
}

}  // namespace hoist
