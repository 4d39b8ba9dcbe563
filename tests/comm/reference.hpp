// SPDX-License-Identifier: Apache-2.0
// tests/comm/reference.hpp - seeded contributions and the plain-loop results every backend must match bit for bit.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include <hoist/core/dtype.hpp>
#include <hoist/core/rng.hpp>

namespace hoist::comm::conformance {

// Names one buffer of one rank; every rank can make every other's.
struct Source {
  std::uint64_t seed = 0;
  int rank = 0;
  std::size_t piece = 0;

  std::uint64_t key() const { return random_bits(random_bits(seed, static_cast<std::uint64_t>(rank)), piece); }
};

inline std::byte byte_at(const Source& source, std::uint64_t index) {
  return static_cast<std::byte>(random_bits(source.key(), index) & 0xFF);
}

// Mostly ordinary gradients; sometimes zeros of both signs, denormals and values whose sum overflows.
inline float value_at(const Source& source, std::uint64_t index) {
  const std::uint64_t key = source.key();
  switch (random_bits(key ^ 0x5EED, index) % 64) {
    case 0:
      return 0.0f;
    case 1:
      return -0.0f;
    case 2:
      return 1e-40f;
    case 3:
      return -3e-39f;
    case 4:
      return 3.0e38f;
    case 5:
      return 5.9e-8f;
    default:
      return static_cast<float>(random_normal(key, index));
  }
}

inline std::uint32_t encode(DType dtype, float value) {
  switch (dtype) {
    case DType::bf16:
      return to_bf16(value).bits;
    case DType::fp16:
      return float_to_fp16(value);
    case DType::fp32:
      return std::bit_cast<std::uint32_t>(value);
  }
  return 0;
}

inline float decode(DType dtype, std::uint32_t bits) {
  switch (dtype) {
    case DType::bf16:
      return to_float(bf16{static_cast<std::uint16_t>(bits)});
    case DType::fp16:
      return fp16_to_float(static_cast<std::uint16_t>(bits));
    case DType::fp32:
      return std::bit_cast<float>(bits);
  }
  return 0;
}

inline std::uint32_t stored_at(const std::byte* data, DType dtype, std::uint64_t index) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, data + index * dtype_bytes(dtype), dtype_bytes(dtype));
  return bits;
}

inline void store_at(std::byte* data, DType dtype, std::uint64_t index, std::uint32_t bits) {
  std::memcpy(data + index * dtype_bytes(dtype), &bits, dtype_bytes(dtype));
}

// Element `index` of the reduction over `ranks`, as bits.
inline std::uint32_t reduced_at(Source source, int ranks, DType dtype, std::uint64_t index, float scale) {
  float sum = 0;
  for (int r = 0; r < ranks; ++r) {
    source.rank = r;
    const float value = decode(dtype, encode(dtype, value_at(source, index)));
    sum = r == 0 ? value : sum + value;
  }
  return encode(dtype, scale == 1.0f ? sum : scale * sum);
}

// Which NaN an overflowing sum ends in is the processor's choice.
inline bool same_bits(DType dtype, std::uint32_t a, std::uint32_t b) {
  return a == b || (std::isnan(decode(dtype, a)) && std::isnan(decode(dtype, b)));
}

}  // namespace hoist::comm::conformance
