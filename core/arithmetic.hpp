// SPDX-License-Identifier: Apache-2.0
// core/arithmetic.hpp - arithmetic that gives the same bits on CPU and GPU: one source for the C++ compiler and nvcc,
// so that kernels can be tested without a GPU.
//
// Every operation rounds once, to nearest even, keeps denormals and is never fused with another. Under nvcc these are
// the `_rn` intrinsics, which are never contracted; -ftz=false keeps the denormals. In C++ they are the plain
// operators: the translation unit is compiled with -ffp-contract=off, and the thread is in a FloatEnvironment.
// The bits of a NaN are unspecified, because processors make different ones.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

// Marks a function that runs on both sides.
#ifdef __CUDACC__
#define HOIST_HOST_DEVICE __host__ __device__
#else
#define HOIST_HOST_DEVICE
#endif

namespace hoist::exact {

// The operation on a GPU, and the same in C++.
#ifdef __CUDA_ARCH__
#define HOIST_EXACT(on_gpu, in_cpp) on_gpu
#else
#define HOIST_EXACT(on_gpu, in_cpp) in_cpp
#endif

HOIST_HOST_DEVICE inline float add(float a, float b) { return HOIST_EXACT(__fadd_rn(a, b), a + b); }
HOIST_HOST_DEVICE inline float sub(float a, float b) { return HOIST_EXACT(__fsub_rn(a, b), a - b); }
HOIST_HOST_DEVICE inline float mul(float a, float b) { return HOIST_EXACT(__fmul_rn(a, b), a * b); }
HOIST_HOST_DEVICE inline float div(float a, float b) { return HOIST_EXACT(__fdiv_rn(a, b), a / b); }
HOIST_HOST_DEVICE inline float sqrt(float a) { return HOIST_EXACT(__fsqrt_rn(a), std::sqrt(a)); }
HOIST_HOST_DEVICE inline double add(double a, double b) { return HOIST_EXACT(__dadd_rn(a, b), a + b); }
HOIST_HOST_DEVICE inline double mul(double a, double b) { return HOIST_EXACT(__dmul_rn(a, b), a * b); }
HOIST_HOST_DEVICE inline std::uint32_t bits_of(float value) {
  return HOIST_EXACT(__float_as_uint(value), std::bit_cast<std::uint32_t>(value));
}
HOIST_HOST_DEVICE inline float float_of(std::uint32_t bits) {
  return HOIST_EXACT(__uint_as_float(bits), std::bit_cast<float>(bits));
}

#undef HOIST_EXACT

// (a * x) + (b * y)
HOIST_HOST_DEVICE inline float mix(float a, float x, float b, float y) { return add(mul(a, x), mul(b, y)); }

// x + (factor * y), and x if the factor is 0, whatever y is.
HOIST_HOST_DEVICE inline float add_scaled(float x, float factor, float y) {
  return factor == 0.0f ? x : add(x, mul(factor, y));
}

// Zero where the magnitude is below the smallest normal number; NaN stays.
HOIST_HOST_DEVICE inline float without_denormals(float value) {
  return (bits_of(value) & 0x7FFFFFFFu) < 0x00800000u ? 0.0f : value;
}

}  // namespace hoist::exact
