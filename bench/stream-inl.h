// SPDX-License-Identifier: Apache-2.0
// bench/stream-inl.h - stream kernels. Compiled once per instruction set by stream.cpp.
#if defined(HOIST_BENCH_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_BENCH_STREAM_INL_H_
#undef HOIST_BENCH_STREAM_INL_H_
#else
#define HOIST_BENCH_STREAM_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <hoist/optim_cpu/update.hpp>

HWY_BEFORE_NAMESPACE();
namespace hoist::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Words = hn::ScalableTag<std::uint32_t>;
using WordVector = hn::Vec<Words>;

inline constexpr std::size_t kBlock = 32;  // parameters: one line of each 16-bit array, two of each 32-bit one
inline constexpr std::size_t kAhead = 512;

// Loads and stores `kBytes`. The compiler cannot know that `nothing` is zero and so cannot drop the store.
template <std::size_t kBytes>
HWY_INLINE void rewrite(void* bytes, WordVector nothing) {
  auto* words = static_cast<std::uint32_t*>(bytes);
  for (std::size_t i = 0; i < kBytes / 4; i += hn::Lanes(Words())) {
    hn::StoreU(hn::Xor(hn::LoadU(Words(), words + i), nothing), Words(), words + i);
  }
}

template <std::size_t kBytes>
HWY_INLINE WordVector read(const void* bytes, WordVector sum) {
  const auto* words = static_cast<const std::uint32_t*>(bytes);
  for (std::size_t i = 0; i < kBytes / 4; i += hn::Lanes(Words())) {
    sum = hn::Xor(sum, hn::LoadU(Words(), words + i));
  }
  return sum;
}

template <std::size_t kBytes>
HWY_INLINE void fetch(const void* bytes) {
  for (std::size_t i = 0; i < kBytes; i += 64) hwy::Prefetch(static_cast<const std::byte*>(bytes) + i);
}

template <bool kPrefetch>
unsigned stream_split(const optim::SplitTile& tile, std::uint32_t zero) {
  const optim::SplitTile t = tile;
  const WordVector nothing = hn::Set(Words(), zero);
  WordVector sum = nothing;
  const auto* gradient = static_cast<const std::uint16_t*>(t.gradient);
  for (std::size_t i = 0; i < t.count; i += kBlock) {
    if constexpr (kPrefetch) {
      fetch<64>(t.weight + i + kAhead);
      fetch<64>(t.remainder + i + kAhead);
      fetch<128>(t.moment1 + i + kAhead);
      fetch<128>(t.moment2 + i + kAhead);
      fetch<64>(gradient + i + kAhead);
    }
    rewrite<64>(t.weight + i, nothing);
    rewrite<64>(t.remainder + i, nothing);
    rewrite<128>(t.moment1 + i, nothing);
    rewrite<128>(t.moment2 + i, nothing);
    sum = read<64>(gradient + i, sum);
  }
  return hn::GetLane(sum);
}

template <bool kPrefetch>
unsigned stream_whole(const optim::WholeTile& tile, std::uint32_t zero) {
  const optim::WholeTile t = tile;
  const WordVector nothing = hn::Set(Words(), zero);
  WordVector sum = nothing;
  const auto* gradient = static_cast<const float*>(t.gradient);
  for (std::size_t i = 0; i < t.count; i += kBlock) {
    if constexpr (kPrefetch) {
      fetch<128>(t.weight + i + kAhead);
      fetch<128>(t.moment1 + i + kAhead);
      fetch<128>(t.moment2 + i + kAhead);
      fetch<128>(gradient + i + kAhead);
    }
    rewrite<128>(t.weight + i, nothing);
    rewrite<128>(t.moment1 + i, nothing);
    rewrite<128>(t.moment2 + i, nothing);
    sum = read<128>(gradient + i, sum);
  }
  return hn::GetLane(sum);
}

inline unsigned split_stream(const optim::SplitTile& tile, bool prefetch, std::uint32_t zero) {
  return prefetch ? stream_split<true>(tile, zero) : stream_split<false>(tile, zero);
}
inline unsigned whole_stream(const optim::WholeTile& tile, bool prefetch, std::uint32_t zero) {
  return prefetch ? stream_whole<true>(tile, zero) : stream_whole<false>(tile, zero);
}

}  // namespace hoist::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_BENCH_STREAM_INL_H_
