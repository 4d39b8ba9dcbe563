// SPDX-License-Identifier: Apache-2.0
// examples/gpt/card/team.hpp - a block of threads that work together, as the kernels' text sees it.
//
// The text (rows.hpp, attention.hpp) is written against a Team, in steps that all threads take together: each(work)
// does work(thread) for every thread; values that a thread keeps from one step to the next are Private. On a card a
// Team is the block that the text runs in, each() is a call, Private a register. In tests it is a loop over all
// threads, in any order, and the four things that threads do with each other's registers follow their definition in the
// PTX manual (tests/gpt/emulated_team.hpp): so that everything but these few wrappers is tested where there is no card.
//
// Pre:   steps are taken by all threads of a block: what a loop over steps depends on is the same for all of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include <hoist/platform/elements.hpp>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#define HOIST_ON_CARD __device__ __forceinline__
#define HOIST_UNROLL _Pragma("unroll")
#else
#define HOIST_ON_CARD inline
#define HOIST_UNROLL
#endif

namespace hoist::gpt::card {

inline constexpr unsigned kWarpThreads = 32;

// --- arithmetic that need not have the same bits on both sides -------------------------------------------------------

HOIST_ON_CARD float exp2(float x) {
#ifdef __CUDA_ARCH__
  return ::exp2f(x);
#else
  return std::exp2(x);
#endif
}
HOIST_ON_CARD float divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#else
  return a / b;
#endif
}
inline constexpr float kLog2OfE = 1.44269504f;
inline constexpr float kLnOf2 = 0.693147181f;

// --- two 16-bit values in a register, the first in the lower half ----------------------------------------------------

// Rounded to nearest even, as the hardware does.
template <typename As>
HOIST_ON_CARD std::uint32_t pack_pair(float low, float high);

#ifdef __CUDACC__
template <>
__device__ __forceinline__ std::uint32_t pack_pair<platform::AsBf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ std::uint32_t pack_pair<platform::AsFp16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
#else
template <>
inline std::uint32_t pack_pair<platform::AsBf16>(float low, float high) {
  const auto nearest_even = [](float value) -> std::uint32_t {
    const std::uint32_t bits = exact::bits_of(value);
    return value != value ? (bits >> 16) | 0x40u : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  };
  return nearest_even(low) | nearest_even(high) << 16;
}
template <>
inline std::uint32_t pack_pair<platform::AsFp16>(float low, float high) {
  return float_to_fp16(low) | static_cast<std::uint32_t>(float_to_fp16(high)) << 16;
}
#endif

// --- a block of a card -----------------------------------------------------------------------------------------------

#ifdef __CUDACC__
class CardTeam {
 public:
  template <typename T>
  class Private {
   public:
    __device__ __forceinline__ T& operator[](unsigned) { return value_; }

   private:
    T value_;
  };

  template <typename Work>
  __device__ __forceinline__ void each(const Work& work) const {
    work(threadIdx.x);
  }
  __device__ __forceinline__ void barrier() const { __syncthreads(); }

  // take(thread, what the thread whose number differs in the bits of `mask` gives), within a warp.
  template <typename Give, typename Take>
  __device__ __forceinline__ void exchange(unsigned mask, const Give& give, const Take& take) const {
    take(threadIdx.x, __shfl_xor_sync(0xFFFFFFFFu, give(threadIdx.x), mask));
  }

  // ldmatrix.x4: lane 8 * i + r of a warp names row r of the i-th 8 x 8 matrix of 16-bit values in shared memory, 16
  // bytes. out(thread)[i] becomes the pair at row lane / 4, columns 2 * (lane % 4) and the next of matrix i;
  // transposed: of the matrix's columns and rows.
  template <bool kTransposed, typename Address, typename Out>
  __device__ __forceinline__ void load_matrices(const Address& address, const Out& out) const {
    const auto row = static_cast<std::uint32_t>(__cvta_generic_to_shared(address(threadIdx.x)));
    std::uint32_t* const r = out(threadIdx.x);
    if constexpr (kTransposed) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(row)
                   : "memory");
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(row)
                   : "memory");
    }
  }

  // mma.m16n8k16: sum(thread)[0..3] += A B, of each warp. A is 16 x 16, B is 16 x 8; where each element lies in the
  // threads' registers: PTX manual, "Matrix Fragments for mma.m16n8k16 with floating point type".
  template <typename As, typename Sum, typename A, typename B>
  __device__ __forceinline__ void multiply(const Sum& sum, const A& of_a, const B& of_b) const {
    float* const d = sum(threadIdx.x);
    const std::uint32_t* const a = of_a(threadIdx.x);
    const std::uint32_t* const b = of_b(threadIdx.x);
    if constexpr (std::is_same_v<As, platform::AsBf16>) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
};
#endif

}  // namespace hoist::gpt::card
