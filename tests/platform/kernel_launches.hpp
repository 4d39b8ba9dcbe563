// SPDX-License-Identifier: Apache-2.0
// tests/platform/kernel_launches.hpp - values for kernels, and launches of many threads carried out one after the
// other.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <hoist/core/dtype.hpp>
#include <hoist/core/float_environment.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/detail/kernel_bodies.hpp>
#include <hoist/tests/support/guarded.hpp>

#include "device_fixture.hpp"

namespace hoist::platform {

using detail::ThreadPlace;

inline constexpr std::array kDTypes{DType::bf16, DType::fp16, DType::fp32};

// --- values ----------------------------------------------------------------------------------------------------------

// ordinary: numbers of [-0.1, 0.1]. any_bits: any pattern, and a quarter of them edges: zeros, denormals, ties of
// rounding, infinities and NaN.
enum class Values : std::uint8_t { ordinary, any_bits };

inline std::uint32_t draw_bits(Rng& rng, Values values) {
  constexpr std::array kEdges{0x00000000u, 0x80000000u, 0x00000001u, 0x807FFFFFu, 0x00800000u, 0x3F808000u,
                              0x3F807FFFu, 0x3F818000u, 0xBF808000u, 0x7F7F7FFFu, 0x7F7F8000u, 0x7F7FFFFFu,
                              0x7F800000u, 0xFF800000u, 0x7FC00000u, 0x7F800001u, 0x38800000u, 0x387FE000u,
                              0x33000000u, 0x33000001u, 0x477FEFFFu, 0x477FF000u, 0x00008000u, 0x00007FFFu};
  if (values == Values::ordinary) return std::bit_cast<std::uint32_t>(static_cast<float>(0.2 * (rng.uniform() - 0.5)));
  if (rng.below(4) == 0) return kEdges[rng.below(kEdges.size())];
  return static_cast<std::uint32_t>(rng.bits());
}

inline void put(DType dtype, std::byte* at, std::uint32_t fp32_bits) {
  const auto value = std::bit_cast<float>(fp32_bits);
  std::uint32_t bits = fp32_bits;
  if (dtype == DType::bf16) bits = to_bf16(value).bits;
  if (dtype == DType::fp16) bits = float_to_fp16(value);
  std::memcpy(at, &bits, dtype_bytes(dtype));
}

inline std::uint32_t stored_bits(DType dtype, const std::byte* at) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, at, dtype_bytes(dtype));
  return bits;
}

inline float value_of(DType dtype, const std::byte* at) {
  const std::uint32_t bits = stored_bits(dtype, at);
  if (dtype == DType::bf16) return to_float(bf16{static_cast<std::uint16_t>(bits)});
  if (dtype == DType::fp16) return fp16_to_float(static_cast<std::uint16_t>(bits));
  return std::bit_cast<float>(bits);
}

using GuardedBytes = test::Guarded<std::byte>;

inline void fill(GuardedBytes& array, DType dtype, Rng& rng, Values values) {
  for (std::size_t i = 0; i < array.size(); i += dtype_bytes(dtype))
    put(dtype, array.data() + i, draw_bits(rng, values));
}

// --- launches --------------------------------------------------------------------------------------------------------

// How many threads a launch has, and whether the last one goes first.
struct Launch {
  std::uint64_t threads;
  bool backwards;
};
inline constexpr std::array kLaunches{Launch{1, false}, Launch{3, true}, Launch{256, false}, Launch{4096, true}};

template <typename Body>
void emulate(const Launch& launch, const Body& body) {
  const FloatEnvironment environment;
  for (std::uint64_t t = 0; t < launch.threads; ++t)
    body(ThreadPlace{launch.backwards ? launch.threads - 1 - t : t, launch.threads});
}

}  // namespace hoist::platform
