// SPDX-License-Identifier: Apache-2.0
// platform/elements.hpp - the number types of device memory: one element, and eight of them in accesses of 16
// bytes. Read by the C++ compiler and by nvcc.
#pragma once

#include <cstdint>
#include <cstring>

#include <hoist/core/arithmetic.hpp>
#include <hoist/core/dtype.hpp>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#else
#include <hoist/core/assert.hpp>
#endif

namespace hoist::platform {

struct AsBf16 {
  using Stored = std::uint16_t;
  HOIST_HOST_DEVICE static float load(Stored value) { return exact::float_of(static_cast<std::uint32_t>(value) << 16); }
  // hoist::to_bf16 without its branch, so that loops vectorise: halves away from zero, by integer arithmetic; the
  // hardware's conversion rounds halves to even.
  HOIST_HOST_DEVICE static Stored store(float value) {
    const std::uint32_t bits = exact::bits_of(value);
    const std::uint32_t quiet = (bits >> 16) | 0x0040u;
    const std::uint32_t rounded = (bits + 0x8000u) >> 16;
    return static_cast<Stored>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
  }
};

// On a GPU by its own conversions, which round to nearest even and handle subnormals, as ours do.
struct AsFp16 {
  using Stored = std::uint16_t;
  HOIST_HOST_DEVICE static float load(Stored value) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(value));
#else
    return fp16_to_float(value);
#endif
  }
  HOIST_HOST_DEVICE static Stored store(float value) {
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rn(value));
#else
    return float_to_fp16(value);
#endif
  }
};

struct AsFp32 {
  using Stored = float;
  HOIST_HOST_DEVICE static float load(Stored value) { return value; }
  HOIST_HOST_DEVICE static Stored store(float value) { return value; }
};

// Elements that a thread works on at a time: 16 bytes of the 16-bit types, twice as many of fp32.
inline constexpr std::uint64_t kPackElements = 8;

struct alignas(16) Block16 {
  std::uint32_t word[4];
};

HOIST_HOST_DEVICE inline Block16 load_block(const void* at) {
#ifdef __CUDA_ARCH__
  return *static_cast<const Block16*>(at);
#else
#ifndef __CUDACC__
  HOIST_ASSERT(reinterpret_cast<std::uintptr_t>(at) % 16 == 0, "a GPU faults on {}", at);
#endif
  Block16 block;
  std::memcpy(&block, at, sizeof block);
  return block;
#endif
}

HOIST_HOST_DEVICE inline void store_block(void* at, const Block16& block) {
#ifdef __CUDA_ARCH__
  *static_cast<Block16*>(at) = block;
#else
#ifndef __CUDACC__
  HOIST_ASSERT(reinterpret_cast<std::uintptr_t>(at) % 16 == 0, "a GPU faults on {}", at);
#endif
  std::memcpy(at, &block, sizeof block);
#endif
}

// Elements [first, first + kCount) as they are stored. kCount is 1, or kPackElements that begin at 16 bytes.
template <std::uint64_t kCount, typename Stored>
HOIST_HOST_DEVICE void load_stored(const void* elements, std::uint64_t first, Stored (&out)[kCount]) {
  static_assert(sizeof(Stored) == 2 || sizeof(Stored) == 4);
  const char* at = static_cast<const char*>(elements) + first * sizeof(Stored);
  if constexpr (kCount == 1) {
#ifdef __CUDA_ARCH__
    out[0] = *reinterpret_cast<const Stored*>(at);
#else
    std::memcpy(out, at, sizeof(Stored));
#endif
  } else {
    static_assert(kCount == kPackElements);
    constexpr std::uint64_t kPerBlock = 16 / sizeof(Stored);
    for (std::uint64_t block = 0; block < kCount / kPerBlock; ++block) {
      const Block16 words = load_block(at + 16 * block);
      for (std::uint64_t j = 0; j < kPerBlock; ++j) {
        if constexpr (sizeof(Stored) == 2) {
          out[j] = static_cast<Stored>(words.word[j / 2] >> (16 * (j % 2)));
        } else {
          out[block * kPerBlock + j] = exact::float_of(words.word[j]);
        }
      }
    }
  }
}

template <std::uint64_t kCount, typename Stored>
HOIST_HOST_DEVICE void store_stored(void* elements, std::uint64_t first, const Stored (&in)[kCount]) {
  char* at = static_cast<char*>(elements) + first * sizeof(Stored);
  if constexpr (kCount == 1) {
#ifdef __CUDA_ARCH__
    *reinterpret_cast<Stored*>(at) = in[0];
#else
    std::memcpy(at, in, sizeof(Stored));
#endif
  } else {
    constexpr std::uint64_t kPerBlock = 16 / sizeof(Stored);
    for (std::uint64_t block = 0; block < kCount / kPerBlock; ++block) {
      Block16 words;
      for (std::uint64_t k = 0; k < 4; ++k) {
        if constexpr (sizeof(Stored) == 2) {
          words.word[k] = static_cast<std::uint32_t>(in[2 * k]) | static_cast<std::uint32_t>(in[2 * k + 1]) << 16;
        } else {
          words.word[k] = exact::bits_of(in[block * kPerBlock + k]);
        }
      }
      store_block(at + 16 * block, words);
    }
  }
}

template <typename As, std::uint64_t kCount>
HOIST_HOST_DEVICE void load_floats(const void* elements, std::uint64_t first, float (&out)[kCount]) {
  typename As::Stored stored[kCount];
  load_stored<kCount>(elements, first, stored);
  for (std::uint64_t j = 0; j < kCount; ++j) out[j] = As::load(stored[j]);
}

template <typename As, std::uint64_t kCount>
HOIST_HOST_DEVICE void store_floats(void* elements, std::uint64_t first, const float (&in)[kCount]) {
  typename As::Stored stored[kCount];
  for (std::uint64_t j = 0; j < kCount; ++j) stored[j] = As::store(in[j]);
  store_stored<kCount>(elements, first, stored);
}

// The part of an array in packs: elements [head, head + packs * kPackElements); the rest one by one.
struct PackSpan {
  std::uint64_t head = 0;
  std::uint64_t packs = 0;
};

// The elements outside the packs: those before them, then those after.
HOIST_HOST_DEVICE inline std::uint64_t rest_of(const PackSpan& span, std::uint64_t count) {
  return count - span.packs * kPackElements;
}
HOIST_HOST_DEVICE inline std::uint64_t rest_element(const PackSpan& span, std::uint64_t k) {
  return k < span.head ? k : k + span.packs * kPackElements;
}

}  // namespace hoist::platform
