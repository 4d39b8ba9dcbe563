// SPDX-License-Identifier: Apache-2.0
// comm/detail/scale_split.hpp - splits a reduction's scale, for a library that multiplies in the type of the data.
//
// NCCL's pre-multiplied sum takes its factor in the data's type: 1/3 as a bf16 is 0.13 % off, on every gradient alike.
// So only a factor that the type holds exactly is applied before the sum, and the rest by one fp32 multiplication after
// it.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include <hoist/core/dtype.hpp>

namespace hoist::comm::detail {

struct ScaleSplit {
  float before_sum = 1.0f;  // exact in the data's type
  float after_sum = 1.0f;   // before_sum * after_sum == scale, exactly
};

// The bits of `scale` in `dtype`, in the low bytes.
inline std::uint32_t encode_scale(DType dtype, float scale) {
  switch (dtype) {
    case DType::bf16:
      return to_bf16(scale).bits;
    case DType::fp16:
      return float_to_fp16(scale);
    case DType::fp32:
      return std::bit_cast<std::uint32_t>(scale);
  }
  return 0;
}

inline bool is_exact_scale(DType dtype, float scale) {
  const std::uint32_t bits = encode_scale(dtype, scale);
  switch (dtype) {
    case DType::bf16:
      return to_float(bf16{static_cast<std::uint16_t>(bits)}) == scale;
    case DType::fp16:
      return fp16_to_float(static_cast<std::uint16_t>(bits)) == scale;
    case DType::fp32:
      return true;
  }
  return false;
}

// If the type cannot hold the scale, its power of two is applied first, which keeps fp16 sums in range.
inline ScaleSplit split_scale(DType dtype, float scale) {
  if (is_exact_scale(dtype, scale)) return {scale, 1.0f};
  if (scale == 0.0f || !std::isfinite(scale)) return {1.0f, scale};
  int exponent = 0;
  const float mantissa = std::frexp(scale, &exponent);  // in [0.5, 1)
  const float power = std::ldexp(1.0f, exponent);
  if (!std::isfinite(power) || !is_exact_scale(dtype, power)) return {1.0f, scale};
  return {power, mantissa};
}

}  // namespace hoist::comm::detail
