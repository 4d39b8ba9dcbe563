// SPDX-License-Identifier: Apache-2.0
// measure/stream-inl.h - stream kernels. Compiled once per instruction set by stream.cpp.
#if defined(HOIST_MEASURE_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_MEASURE_STREAM_INL_H_
#undef HOIST_MEASURE_STREAM_INL_H_
#else
#define HOIST_MEASURE_STREAM_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <hoist/measure/stream.hpp>

HWY_BEFORE_NAMESPACE();
namespace hoist::measure::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Words = hn::ScalableTag<std::uint32_t>;
using WordVector = hn::Vec<Words>;

inline constexpr std::size_t kAhead = 512;  // parameters

// Loads and stores `kBytes`. The compiler cannot know that `nothing` is zero and so cannot drop the store.
template <std::size_t kBytes>
HWY_INLINE void rewrite(void* bytes, WordVector nothing) {
  auto* words = static_cast<std::uint32_t*>(bytes);
  for (std::size_t i = 0; i < kBytes / 4; i += hn::Lanes(Words())) {
    hn::StoreU(hn::Xor(hn::LoadU(Words(), words + i), nothing), Words(), words + i);
  }
}

template <std::size_t kBytes>
HWY_INLINE void overwrite(void* bytes, WordVector nothing) {
  auto* words = static_cast<std::uint32_t*>(bytes);
  for (std::size_t i = 0; i < kBytes / 4; i += hn::Lanes(Words())) hn::StoreU(nothing, Words(), words + i);
}

template <std::size_t kBytes>
HWY_INLINE WordVector read(const void* bytes, WordVector sum) {
  const auto* words = static_cast<const std::uint32_t*>(bytes);
  for (std::size_t i = 0; i < kBytes / 4; i += hn::Lanes(Words())) {
    sum = hn::Xor(sum, hn::LoadU(Words(), words + i));
  }
  return sum;
}

template <std::size_t kBytes, bool kPrefetch>
HWY_INLINE std::byte* fetched(void* array, std::size_t i) {
  auto* at = static_cast<std::byte*>(array) + i * (kBytes / kStreamBlock);
  if constexpr (kPrefetch) {
    for (std::size_t b = 0; b < kBytes; b += 64) hwy::Prefetch(at + kAhead * (kBytes / kStreamBlock) + b);
  }
  return at;
}

// Scales of a block.
HWY_INLINE void rewrite_scales(std::uint8_t* scales, std::size_t i, WordVector nothing) {
  static_assert(kStreamBlock / kMomentBlock == sizeof(std::uint64_t));
  std::uint64_t bytes;
  std::memcpy(&bytes, scales + i / kMomentBlock, sizeof bytes);
  bytes ^= hn::GetLane(nothing);
  std::memcpy(scales + i / kMomentBlock, &bytes, sizeof bytes);
}

enum class Master { split, split24, whole, beside_weight };

// Bytes a parameter: kMoment of each moment, kGradient of the gradient.
template <bool kPrefetch, Master kMaster, unsigned kMoments, std::size_t kMoment, std::size_t kGradient>
unsigned stream_arrays(const StreamArrays& all, std::uint32_t zero) {
  const StreamArrays a = all;
  const WordVector nothing = hn::Set(Words(), zero);
  WordVector sum = nothing;
  constexpr std::size_t n = kStreamBlock;
  for (std::size_t i = 0; i < a.count; i += n) {
    constexpr std::size_t kWidth = kMaster == Master::split || kMaster == Master::split24 ? 2 : 4;
    rewrite<n * kWidth>(fetched<n * kWidth, kPrefetch>(a.master[0], i), nothing);
    if constexpr (kMaster == Master::split) rewrite<n * 2>(fetched<n * 2, kPrefetch>(a.master[1], i), nothing);
    if constexpr (kMaster == Master::split24) rewrite<n>(fetched<n, kPrefetch>(a.master[1], i), nothing);
    if constexpr (kMaster == Master::beside_weight) overwrite<n * 2>(fetched<n * 2, kPrefetch>(a.weight, i), nothing);
    if constexpr (kMoments > 0) rewrite<n * kMoment>(fetched<n * kMoment, kPrefetch>(a.moments[0], i), nothing);
    if constexpr (kMoments > 1) rewrite<n * kMoment>(fetched<n * kMoment, kPrefetch>(a.moments[1], i), nothing);
    if constexpr (kMoments > 0 && kMoment == 1) rewrite_scales(a.scales[0], i, nothing);
    if constexpr (kMoments > 1 && kMoment == 1) rewrite_scales(a.scales[1], i, nothing);
    sum = read<n * kGradient>(fetched<n * kGradient, kPrefetch>(const_cast<void*>(a.gradient), i), sum);
  }
  return hn::GetLane(sum);
}

template <bool kPrefetch, Master kMaster, unsigned kMoments, std::size_t kMoment>
unsigned by_gradient(const StreamArrays& a, std::uint32_t zero) {
  return a.gradient_bytes == 2 ? stream_arrays<kPrefetch, kMaster, kMoments, kMoment, 2>(a, zero)
                               : stream_arrays<kPrefetch, kMaster, kMoments, kMoment, 4>(a, zero);
}

template <bool kPrefetch, Master kMaster>
unsigned by_moments(const StreamArrays& a, std::uint32_t zero) {
  if (a.moment_count == 0) return by_gradient<kPrefetch, kMaster, 0, 4>(a, zero);
  if (a.moment_bytes == 1) {
    return a.moment_count == 1 ? by_gradient<kPrefetch, kMaster, 1, 1>(a, zero)
                               : by_gradient<kPrefetch, kMaster, 2, 1>(a, zero);
  }
  if (a.moment_bytes == 2) {
    return a.moment_count == 1 ? by_gradient<kPrefetch, kMaster, 1, 2>(a, zero)
                               : by_gradient<kPrefetch, kMaster, 2, 2>(a, zero);
  }
  return a.moment_count == 1 ? by_gradient<kPrefetch, kMaster, 1, 4>(a, zero)
                             : by_gradient<kPrefetch, kMaster, 2, 4>(a, zero);
}

template <bool kPrefetch>
unsigned by_master(const StreamArrays& a, std::uint32_t zero) {
  if (a.weight != nullptr) return by_moments<kPrefetch, Master::beside_weight>(a, zero);
  if (!a.is_split()) return by_moments<kPrefetch, Master::whole>(a, zero);
  return a.remainder_bytes == 2 ? by_moments<kPrefetch, Master::split>(a, zero)
                                : by_moments<kPrefetch, Master::split24>(a, zero);
}

inline unsigned any_stream(const StreamArrays& a, bool prefetch, std::uint32_t zero) {
  return prefetch ? by_master<true>(a, zero) : by_master<false>(a, zero);
}

}  // namespace hoist::measure::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_MEASURE_STREAM_INL_H_
