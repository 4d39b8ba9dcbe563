// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include <hoist/core/dtype.hpp>

namespace hoist {

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return "bf16";
    case DType::fp16:
      return "fp16";
    case DType::fp32:
      return "fp32";
  }
  return "?";
}

std::optional<DType> parse_dtype(std::string_view name) {
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    if (name == dtype_name(dtype)) return dtype;
  return std::nullopt;
}

std::string_view moment_type_name(MomentType type) {
  switch (type) {
    case MomentType::fp32:
      return "fp32";
    case MomentType::bf16:
      return "bf16";
    case MomentType::fp8:
      return "fp8";
  }
  return "?";
}

float fp16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1Fu;
  const std::uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  return sign != 0 ? -magnitude : magnitude;
}

std::uint16_t float_to_fp16(float value) {
  const auto b = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((b >> 16) & 0x8000u);
  const std::uint32_t magnitude = b & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {  // subnormal in fp16: a count of 2^-24
    const std::uint32_t exponent = magnitude >> 23;
    if (exponent < 102) return sign;  // below half of 2^-24
    const std::uint32_t significand = (magnitude & 0x7FFFFFu) | 0x800000u;
    const std::uint32_t shift = 126 - exponent;  // 14 to 24
    const std::uint32_t half_to_even = (1u << (shift - 1)) - 1 + ((significand >> shift) & 1u);
    return static_cast<std::uint16_t>(sign | ((significand + half_to_even) >> shift));
  }
  const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>((rounded >> 13) - (112u << 10)));
}

}  // namespace hoist
