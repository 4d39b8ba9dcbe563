// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/packed-inl.h - decodes, updates and encodes tiles with 8-bit state, a step of two vectors at a time
// (blocks-inl.h). Compiled once per instruction set by update.cpp.
#if defined(HOIST_OPTIM_PACKED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_OPTIM_PACKED_INL_H_
#undef HOIST_OPTIM_PACKED_INL_H_
#else
#define HOIST_OPTIM_PACKED_INL_H_
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <hoist/optim_cpu/block_fp8.hpp>
#include <hoist/optim_cpu/detail/blocks-inl.h>
#include <hoist/optim_cpu/detail/update-inl.h>
#include <hoist/optim_cpu/update.hpp>

HWY_BEFORE_NAMESPACE();
namespace hoist::optim::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A split tile whose remainder is remainder8.
struct Split24Tile : SplitTile {};

template <MomentType kMoments>
inline constexpr std::size_t kMomentBytes = kMoments == MomentType::fp8 ? 1 : dtype_bytes(kElementOf<kMoments>);

template <MomentType kMoments, class Tile>
inline constexpr bool kRoundsAtRandom = kMoments == MomentType::fp8 || std::is_same_v<Tile, Split24Tile>;

template <class Visit>
HWY_INLINE void visit_master(Split24Tile& tile, const Visit& visit) {
  visit(tile.weight);
  visit(tile.remainder8);
}
template <class Visit>
HWY_INLINE void visit_master(SplitTile& tile, const Visit& visit) {
  visit(tile.weight);
  visit(tile.remainder);
}
template <class Visit>
HWY_INLINE void visit_master(WholeTile& tile, const Visit& visit) {
  visit(tile.weight);
}
template <class Visit>
HWY_INLINE void visit_master(Fp16Tile& tile, const Visit& visit) {
  visit(tile.weight);
  visit(tile.master);
}

#if HWY_TARGET == HWY_SCALAR

// --- one element at a time -------------------------------------------------------------------------------------------

HWY_INLINE FloatVector load_master(const Split24Tile& tile, std::size_t i) {
  return hn::Set(Floats(), join_master24(tile.weight[i], tile.remainder8[i]));
}

// False if it may not be committed.
template <class Tile>
HWY_INLINE bool store_rounded(FloatVector master, std::uint32_t, const Tile& tile, std::size_t i) {
  store_master(master, tile, i);
  return (std::bit_cast<std::uint32_t>(hn::GetLane(master)) & 0x7FFFFFFFu) < kMasterLimitOf<Tile>;
}
HWY_INLINE bool store_rounded(FloatVector master, std::uint32_t word, const Split24Tile& tile, std::size_t i) {
  const auto exact = std::bit_cast<std::uint32_t>(hn::GetLane(master));
  const SplitMaster split = split_master(std::bit_cast<float>((exact + added_to_master24(word)) & ~0xFFu));
  tile.weight[i] = split.weight;
  tile.remainder8[i] = static_cast<std::int8_t>(split.remainder / 256);
  return (exact & 0x7FFFFFFFu) + added_to_master24(word) < kMasterLimitBits;
}

template <MomentType kMoments>
HWY_INLINE FloatVector load_moment_of(const void* moment, const std::uint8_t* scales, std::size_t i, Moment which) {
  if constexpr (kMoments == MomentType::fp8) {
    const auto code = static_cast<const std::uint8_t*>(moment)[i];
    return hn::Set(Floats(), decode_moment(code, scales[i / kMomentBlock], which));
  } else {
    return load_moment<kMoments>(moment, i);
  }
}

struct BlockOfMoments {
  float values[kMomentBlock];
  std::uint32_t added[kMomentBlock];

  template <Moment kMoment>
  void put(std::size_t k, FloatVector value, std::uint32_t added_bits) {
    values[k] = hn::GetLane(without_denormals<kMoment>(value));
    added[k] = added_bits;
  }
  bool encode(std::size_t count, Moment which, void* codes, std::size_t first, std::uint8_t* scales) const {
    return encode_block({values, count}, {added, count}, which, static_cast<std::uint8_t*>(codes) + first,
                        scales[first / kMomentBlock]);
  }
};

// Elements [first, first + count), a block or the beginning of one. False if they may not be committed.
template <Formula kFormula, MomentType kMoments, class Tile>
bool update_block(const UpdateCoefficients& c, const Tile& tile, std::size_t first, std::size_t count) {
  BlockOfMoments moment1, moment2;
  Largest largest = none();
  bool sound = true;
  for (std::size_t k = 0; k < count; ++k) {
    const std::size_t i = first + k;
    const std::uint32_t word = rounding_word(tile.rounding.key, static_cast<std::uint32_t>(tile.rounding.first + i));
    Numbers n;
    n.master = load_master(tile, i);
    n.gradient = load_gradient(tile.gradient, tile.gradient_dtype, i);
    if constexpr (uses_moment1(kFormula))
      n.moment1 = load_moment_of<kMoments>(tile.moment1, tile.scale1, i, Moment::first);
    if constexpr (uses_moment2(kFormula))
      n.moment2 = load_moment_of<kMoments>(tile.moment2, tile.scale2, i, Moment::second);
    apply<kFormula>(c, n);
    sound &= store_rounded(n.master, word, tile, i);
    if constexpr (kMoments == MomentType::fp8) {
      if constexpr (uses_moment1(kFormula)) moment1.put<Moment::first>(k, n.moment1, added_to_moment1(word));
      if constexpr (uses_moment2(kFormula)) moment2.put<Moment::second>(k, n.moment2, added_to_moment2(word));
    } else {
      if constexpr (uses_moment1(kFormula)) {
        store_moment<Moment::first, kMoments>(n.moment1, hn::Set(Words(), 0x8000u), tile.moment1, i);
        note_moment<Moment::first>(n.moment1, largest);
      }
      if constexpr (uses_moment2(kFormula)) {
        const auto first_bits = static_cast<std::uint32_t>(tile.rounding.first + i);
        store_moment<Moment::second, kMoments>(n.moment2, rounding_halves(tile.rounding.key, first_bits), tile.moment2,
                                               i);
        note_moment<Moment::second>(n.moment2, largest);
      }
    }
  }
  if constexpr (kMoments == MomentType::fp8) {
    if constexpr (uses_moment1(kFormula))
      sound &= moment1.encode(count, Moment::first, tile.moment1, first, tile.scale1);
    if constexpr (uses_moment2(kFormula))
      sound &= moment2.encode(count, Moment::second, tile.moment2, first, tile.scale2);
  }
  return sound && is_sound<kMoments, Tile>(largest);
}

template <Formula kFormula, MomentType kMoments, class Tile>
bool update_packed(const UpdateCoefficients& c, const Tile& tile) {
  bool sound = true;
  for (std::size_t i = 0; i < tile.count; i += kMomentBlock)
    sound &= update_block<kFormula, kMoments>(c, tile, i, std::min<std::size_t>(kMomentBlock, tile.count - i));
  return sound;
}

#else

// --- masters, gradients and wider moments, two vectors at a time -----------------------------------------------------

HWY_INLINE void load_masters(const Split24Tile& tile, std::size_t i, FloatVector& even, FloatVector& odd) {
  const Floats d;
  const Words words;
  const SignedWords signed_words;
  const hn::Rebind<std::int16_t, Floats> signed_halves;
  const auto high = load_words(tile.weight, i);
  // The lower half of each word has two remainders. The odd element's is the upper byte, already sign-extended.
  const auto low =
      hn::PromoteTo(signed_words, hn::LoadU(signed_halves, reinterpret_cast<const std::int16_t*>(tile.remainder8 + i)));
  const auto even_low = hn::ShiftRight<16>(hn::ShiftLeft<24>(low));
  const auto odd_low = hn::And(low, hn::Set(signed_words, -256));
  even = hn::BitCast(d, hn::Add(hn::ShiftLeft<16>(high), hn::BitCast(words, even_low)));
  odd = hn::BitCast(d, hn::Add(high_half(high), hn::BitCast(words, odd_low)));
}
HWY_INLINE void load_masters(const WholeTile& tile, std::size_t i, FloatVector& even, FloatVector& odd) {
  hn::LoadInterleaved2(Floats(), tile.weight + i, even, odd);
}
HWY_INLINE void load_masters(const Fp16Tile& tile, std::size_t i, FloatVector& even, FloatVector& odd) {
  hn::LoadInterleaved2(Floats(), tile.master + i, even, odd);
}

HWY_INLINE void store_masters(FloatVector even, FloatVector odd, const WholeTile& tile, std::size_t i) {
  hn::StoreInterleaved2(even, odd, Floats(), tile.weight + i);
}
HWY_INLINE void store_masters(FloatVector even, FloatVector odd, const Fp16Tile& tile, std::size_t i) {
  const Floats d;
  hn::StoreInterleaved2(even, odd, d, tile.master + i);
  store_words(hn::Or(fp16_of_floats(d, even), hn::ShiftLeft<16>(fp16_of_floats(d, odd))), tile.weight, i);
}

// Whether a pair of lanes has a NaN.
HWY_INLINE hn::Mask<Floats> either_is_nan(FloatVector a, FloatVector b) {
#if HWY_TARGET == HWY_AVX3
  return hn::Mask<Floats>{_mm512_cmp_ps_mask(a.raw, b.raw, _CMP_UNORD_Q)};
#elif HWY_TARGET == HWY_AVX2
  return hn::Mask<Floats>{_mm256_cmp_ps(a.raw, b.raw, _CMP_UNORD_Q)};
#else
  return hn::Or(hn::IsNaN(a), hn::IsNaN(b));
#endif
}

// Collects the reasons to refuse a commit: the largest magnitudes (update-inl.h), and for masters that are rounded the
// largest weight and whether a master was NaN, since the addition that rounds can turn a NaN into a number.
struct Refusals {
  HWY_INLINE Refusals() : largest(none()), weight(hn::Zero(Halves())), is_nan(hn::FirstN(Floats(), 0)) {}
  Largest largest;
  HalfVector weight;
  hn::Mask<Floats> is_nan;
};

template <MomentType kMoments, class Tile>
HWY_INLINE bool is_sound(const Refusals& refusals) {
  const auto fine = hn::Lt(hn::BitCast(SignedHalves(), refusals.weight), hn::Set(SignedHalves(), std::int16_t{0x7F80}));
  static_assert(kMasterLimitBits + 0x8000 == 0x7F80u << 16);
  return is_sound<kMoments, Tile>(refusals.largest) && hn::AllTrue(SignedHalves(), fine) &&
         hn::AllFalse(Floats(), refusals.is_nan);
}

// added_to_master24 of every word: its third byte.
HWY_INLINE WordVector added_to_masters(WordVector word) {
  HWY_ALIGN static constexpr std::uint32_t kThirdBytes[4] = {0x80808002u, 0x80808006u, 0x8080800Au, 0x8080800Eu};
  const Bytes bytes;
  const auto index = hn::BitCast(bytes, hn::LoadDup128(Words(), kThirdBytes));
  return hn::BitCast(Words(), hn::TableLookupBytesOr0(hn::BitCast(bytes, word), index));
}

template <class Tile>
HWY_INLINE void put_masters(FloatVector even, FloatVector odd, const WordPair&, const Tile& tile, std::size_t i,
                            std::uint16_t*, Refusals& refusals) {
  store_masters(even, odd, tile, i);
  note_masters(even, odd, refusals.largest);
}
HWY_INLINE void put_masters(FloatVector even, FloatVector odd, const WordPair& random, const Split24Tile& tile,
                            std::size_t i, std::uint16_t* codes, Refusals& refusals) {
  const Words words;
  const Halves halves;
  const auto even_added = added_to_masters(random.even), odd_added = added_to_masters(random.odd);
  // The last 8 bits of the sums are ignored.
  const auto even_sum = hn::Add(hn::BitCast(words, even), even_added);
  const auto odd_sum = hn::Add(hn::BitCast(words, odd), odd_added);
  const auto half = hn::Set(words, 0x8000u);
  const auto weights = upper_halves(hn::Add(even_sum, half), hn::Add(odd_sum, half));
  store_words(hn::BitCast(words, weights), tile.weight, i);
  hn::Store(hn::ShiftRight<8>(lower_halves(even_sum, odd_sum)), halves, codes);
  refusals.weight = hn::Max(refusals.weight, hn::And(weights, hn::Set(halves, std::uint16_t{0x7FFF})));
  refusals.is_nan = hn::Or(refusals.is_nan, either_is_nan(even, odd));
}

template <DType kDtype>
HWY_INLINE void load_two(const void* elements, std::size_t i, FloatVector& even, FloatVector& odd) {
  if constexpr (kDtype == DType::fp32) {
    hn::LoadInterleaved2(Floats(), static_cast<const float*>(elements) + i, even, odd);
  } else {
    load_pairs<kDtype>(elements, i, even, odd);
  }
}

// A branch instead of a kernel for each dtype: the processor predicts it well.
HWY_INLINE void load_gradients(const void* gradient, DType dtype, std::size_t i, FloatVector& even, FloatVector& odd) {
  if (dtype == DType::bf16) return load_two<DType::bf16>(gradient, i, even, odd);
  if (dtype == DType::fp16) return load_two<DType::fp16>(gradient, i, even, odd);
  load_two<DType::fp32>(gradient, i, even, odd);
}

template <MomentType kMoments, Moment kMoment>
HWY_INLINE void load_moments(const void* moment, const std::uint8_t* scales, std::size_t i, FloatVector& even,
                             FloatVector& odd) {
  if constexpr (kMoments == MomentType::fp8) {
    load_blocks<kMoment>(moment, scales, i, even, odd);
  } else {
    load_two<kElementOf<kMoments>>(moment, i, even, odd);
  }
}

// The random bits that round a tile's numbers.
struct Random {
  HWY_INLINE explicit Random(const Rounding& rounding) : words(rounding), halves(rounding) {}
  RoundingWords words;
  RoundingHalves halves;  // of moments of bf16
};

template <MomentType kMoments, Moment kMoment>
HWY_INLINE void put_wide_moments(FloatVector even, FloatVector odd, Random& source, void* moment, std::size_t i,
                                 Largest& largest) {
  note_moment<kMoment>(even, largest);
  note_moment<kMoment>(odd, largest);
  if constexpr (kMoments == MomentType::fp32) {
    hn::StoreInterleaved2(without_denormals<kMoment>(even), without_denormals<kMoment>(odd), Floats(),
                          static_cast<float*>(moment) + i);
  } else if constexpr (kMoment == Moment::first) {
    const auto half = hn::Set(Words(), 0x8000u);
    store_moments<kMoment>(even, odd, {half, half}, moment, i);
  } else {
    store_moments<kMoment>(even, odd, source.halves.at(i), moment, i);
  }
}

// --- a step, and a tile ----------------------------------------------------------------------------------------------
//
// The kernel first computes a whole stretch and keeps its numbers in memory; then it rounds and encodes the moments. In
// a single pass the divisions of the next step would be more than two hundred instructions away, so a core would not
// see them before the divisions of this step have ended. While a core divides, it has time for all the work that is
// independent of moments.

struct StepNumbers {
  HWY_ALIGN float even_moment1[kLanesMax], odd_moment1[kLanesMax];
  HWY_ALIGN float even_moment2[kLanesMax], odd_moment2[kLanesMax];
  HWY_ALIGN std::uint32_t even_random[kLanesMax], odd_random[kLanesMax];
  HWY_ALIGN std::uint16_t remainder[kStep];  // in codes
};

// Masters from element `end` on become zero: the tile ends before them.
template <Formula kFormula, MomentType kMoments, class Tile>
HWY_INLINE void compute_step(const UpdateCoefficients& c, const Tile& tile, std::size_t i, Random& source,
                             Refusals& refusals, StepNumbers& to, std::size_t end = kStep) {
  const Floats d;
  const Words words;
  Numbers even, odd;
  load_masters(tile, i, even.master, odd.master);
  load_gradients(tile.gradient, tile.gradient_dtype, i, even.gradient, odd.gradient);
  if constexpr (uses_moment1(kFormula))
    load_moments<kMoments, Moment::first>(tile.moment1, tile.scale1, i, even.moment1, odd.moment1);
  if constexpr (uses_moment2(kFormula))
    load_moments<kMoments, Moment::second>(tile.moment2, tile.scale2, i, even.moment2, odd.moment2);
  apply<kFormula>(c, even);
  apply<kFormula>(c, odd);
  if (end < kStep) {
    even.master = hn::IfThenElseZero(hn::FirstN(d, (end + 1) / 2), even.master);
    odd.master = hn::IfThenElseZero(hn::FirstN(d, end / 2), odd.master);
  }
  WordPair random{hn::Zero(words), hn::Zero(words)};
  if constexpr (kRoundsAtRandom<kMoments, Tile>) random = source.words.at(i);
  put_masters(even.master, odd.master, random, tile, i, to.remainder, refusals);
  if constexpr (kMoments == MomentType::fp8) {
    hn::Store(random.even, words, to.even_random);
    hn::Store(random.odd, words, to.odd_random);
    if constexpr (uses_moment1(kFormula)) {
      hn::Store(even.moment1, d, to.even_moment1);
      hn::Store(odd.moment1, d, to.odd_moment1);
    }
    if constexpr (uses_moment2(kFormula)) {
      hn::Store(even.moment2, d, to.even_moment2);
      hn::Store(odd.moment2, d, to.odd_moment2);
    }
  } else {
    Largest& largest = refusals.largest;
    if constexpr (uses_moment1(kFormula))
      put_wide_moments<kMoments, Moment::first>(even.moment1, odd.moment1, source, tile.moment1, i, largest);
    if constexpr (uses_moment2(kFormula))
      put_wide_moments<kMoments, Moment::second>(even.moment2, odd.moment2, source, tile.moment2, i, largest);
  }
}

template <Formula kFormula, class Tile>
HWY_INLINE Codes put_moments(const StepNumbers& from, const Tile& tile, std::size_t i, WordVector& largest) {
  const Floats d;
  const Words words;
  Codes codes;
  const WordPair random{hn::Load(words, from.even_random), hn::Load(words, from.odd_random)};
  Numbers even, odd;
  if constexpr (uses_moment1(kFormula)) {
    even.moment1 = hn::Load(d, from.even_moment1);
    odd.moment1 = hn::Load(d, from.odd_moment1);
  }
  if constexpr (uses_moment2(kFormula)) {
    even.moment2 = hn::Load(d, from.even_moment2);
    odd.moment2 = hn::Load(d, from.odd_moment2);
  }
  if constexpr (uses_moment1(kFormula) && uses_moment2(kFormula)) {
    put_both_blocks(even.moment1, odd.moment1, even.moment2, odd.moment2, random, tile.scale1, tile.scale2, i, largest,
                    codes);
  } else if constexpr (uses_moment1(kFormula)) {
    codes.moment1 = put_blocks<Moment::first>(even.moment1, odd.moment1, random, tile.scale1, i, largest);
  } else if constexpr (uses_moment2(kFormula)) {
    codes.moment2 = put_blocks<Moment::second>(even.moment2, odd.moment2, random, tile.scale2, i, largest);
  }
  return codes;
}

// Encodes and stores what compute_step has left in `from` for two steps.
template <Formula kFormula, MomentType kMoments, class Tile>
HWY_INLINE void put_two_steps(const StepNumbers* from, const Tile& tile, std::size_t i, Largest& largest) {
  const Halves halves;
  if constexpr (std::is_same_v<Tile, Split24Tile>)
    store_bytes(hn::Load(halves, from[0].remainder), hn::Load(halves, from[1].remainder), tile.remainder8, i);
  if constexpr (kMoments == MomentType::fp8) {
    const Codes first = put_moments<kFormula>(from[0], tile, i, largest.moment);
    const Codes second = put_moments<kFormula>(from[1], tile, i + kStep, largest.moment);
    if constexpr (uses_moment1(kFormula)) store_bytes(first.moment1, second.moment1, tile.moment1, i);
    if constexpr (uses_moment2(kFormula)) store_bytes(first.moment2, second.moment2, tile.moment2, i);
  }
}

// Prefetches kStretch elements from element i on: 2 * kBytes cache lines where kStretch is 128.
template <std::size_t kBytes>
HWY_INLINE void prefetch_elements(const void* array, std::size_t i) {
  const auto* at = static_cast<const std::byte*>(array) + i * kBytes;
  for (std::size_t b = 0; b < kStretch * kBytes; b += 64) hwy::Prefetch(at + b);
}
HWY_INLINE void prefetch_scales(const std::uint8_t* scales, std::size_t i) {
  if (i / kMomentBlock % 64 < kStretch / kMomentBlock) hwy::Prefetch(scales + i / kMomentBlock + 64);
}

template <Formula kFormula, MomentType kMoments, class Tile>
HWY_INLINE void prefetch_stretch(Tile tile, std::size_t i) {
  const std::size_t ahead = i + kPrefetchAhead;
  visit_master(tile, [&](auto* array) HWY_ATTR { prefetch_elements<sizeof(*array)>(array, ahead); });
  if constexpr (uses_moment1(kFormula)) prefetch_elements<kMomentBytes<kMoments>>(tile.moment1, ahead);
  if constexpr (uses_moment2(kFormula)) prefetch_elements<kMomentBytes<kMoments>>(tile.moment2, ahead);
  if constexpr (kMoments == MomentType::fp8 && uses_moment1(kFormula)) prefetch_scales(tile.scale1, i);
  if constexpr (kMoments == MomentType::fp8 && uses_moment2(kFormula)) prefetch_scales(tile.scale2, i);
  tile.gradient_dtype == DType::fp32 ? prefetch_elements<4>(tile.gradient, ahead)
                                     : prefetch_elements<2>(tile.gradient, ahead);
}

// Updates the last elements of a tile, fewer than kStretch, in a copy that is padded with zeros. The padding keeps
// moments of zero, which change no scale.
template <Formula kFormula, MomentType kMoments, class Tile>
HWY_NOINLINE bool update_last(const UpdateCoefficients& c, const Tile& tile, std::size_t first) {
  struct Copy {
    std::byte* original;
    const std::byte* copy;
    std::size_t bytes;
  };
  constexpr std::size_t kArrays = 7, kArrayBytes = 4 * kStretch;
  HWY_ALIGN std::byte memory[kArrays * kArrayBytes] = {};
  std::array<Copy, kArrays> copies{};
  std::size_t taken = 0;
  const std::size_t count = tile.count - first;
  // Copies `bytes` bytes from byte `begin` of `array` on, and points `array` at the copy.
  const auto take = [&](auto*& array, std::size_t begin, std::size_t bytes) {
    using Element = std::remove_reference_t<decltype(array)>;
    auto* const original = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(array))) + begin;
    std::byte* const copy = memory + taken * kArrayBytes;
    std::memcpy(copy, original, bytes);
    copies[taken++] = {original, copy, bytes};
    array = static_cast<Element>(static_cast<void*>(copy));
  };
  Tile last = tile;
  take(last.gradient, first * dtype_bytes(tile.gradient_dtype), count * dtype_bytes(tile.gradient_dtype));
  visit_master(last, [&](auto*& array) { take(array, first * sizeof(*array), count * sizeof(*array)); });
  const auto take_moment = [&](void*& moment, std::uint8_t*& scales) {
    take(moment, first * kMomentBytes<kMoments>, count * kMomentBytes<kMoments>);
    if (kMoments == MomentType::fp8) take(scales, first / kMomentBlock, (count + kMomentBlock - 1) / kMomentBlock);
  };
  if constexpr (uses_moment1(kFormula)) take_moment(last.moment1, last.scale1);
  if constexpr (uses_moment2(kFormula)) take_moment(last.moment2, last.scale2);
  last.rounding.first += static_cast<std::uint32_t>(first);

  Random random(last.rounding);
  Refusals refusals;
  StepNumbers numbers[2];
  for (std::size_t j = 0; j < count; j += 2 * kStep) {
    for (std::size_t k = 0; k < 2; ++k) {
      // Masters from `end` on are set to zero: without an epsilon, moments of zero would make them NaN.
      const std::size_t end = count - std::min(count, j + k * kStep);
      compute_step<kFormula, kMoments>(c, last, j + k * kStep, random, refusals, numbers[k], end);
    }
    put_two_steps<kFormula, kMoments>(numbers, last, j, refusals.largest);
  }
  for (std::size_t k = 1; k < taken; ++k) std::memcpy(copies[k].original, copies[k].copy, copies[k].bytes);
  return is_sound<kMoments, Tile>(refusals);
}

template <Formula kFormula, MomentType kMoments, class Tile>
bool update_packed(const UpdateCoefficients& coefficients, const Tile& packed) {
  // Copies whose address is never taken: the compiler would otherwise assume that any store may change them.
  const UpdateCoefficients c = coefficients;
  const Tile tile = packed;
  Random random(tile.rounding);
  Refusals refusals;
  constexpr std::size_t kComputed = kMoments == MomentType::fp8 ? kStretch : 2 * kStep;
  StepNumbers numbers[kComputed / kStep];
  std::size_t i = 0;
  for (; i + kStretch <= tile.count; i += kStretch) {
    prefetch_stretch<kFormula, kMoments>(tile, i);
    for (std::size_t first = i; first < i + kStretch; first += kComputed) {
      std::size_t at = first;
      for (StepNumbers& one : numbers) {
        compute_step<kFormula, kMoments>(c, tile, at, random, refusals, one);
        at += kStep;
      }
      at = first;
      for (StepNumbers* two = numbers; two != std::end(numbers); two += 2) {
        put_two_steps<kFormula, kMoments>(two, tile, at, refusals.largest);
        at += 2 * kStep;
      }
    }
  }
  bool sound = is_sound<kMoments, Tile>(refusals);
  if (i < tile.count) sound &= update_last<kFormula, kMoments>(coefficients, packed, i);
  return sound;
}

#endif  // HWY_TARGET == HWY_SCALAR

// --- which kernel ----------------------------------------------------------------------------------------------------

template <MomentType kMoments, class Tile>
bool packed_by_formula(const UpdateCoefficients& c, const Tile& tile) {
  switch (c.formula) {
    case Formula::adamw:
      return update_packed<Formula::adamw, kMoments>(c, tile);
    case Formula::adam:
      return update_packed<Formula::adam, kMoments>(c, tile);
    case Formula::adagrad:
      return update_packed<Formula::adagrad, kMoments>(c, tile);
    case Formula::lion:
      return update_packed<Formula::lion, kMoments>(c, tile);
    case Formula::momentum:
      return update_packed<Formula::momentum, kMoments>(c, tile);
    case Formula::sgd:
      return update_packed<Formula::sgd, MomentType::fp32>(c, tile);
  }
  return false;
}

// Tiles whose master is not packed.
template <class Tile>
bool update_any(const UpdateCoefficients& c, const Tile& tile) {
  if (tile.moment_type == MomentType::fp8) return packed_by_formula<MomentType::fp8>(c, tile);
  return update_by_formula(c, tile);
}

inline bool update_split24(const UpdateCoefficients& c, const Split24Tile& tile) {
  switch (tile.moment_type) {
    case MomentType::fp32:
      return packed_by_formula<MomentType::fp32>(c, tile);
    case MomentType::bf16:
      return packed_by_formula<MomentType::bf16>(c, tile);
    case MomentType::fp8:
      return packed_by_formula<MomentType::fp8>(c, tile);
  }
  return false;
}

inline bool update_split(const UpdateCoefficients& c, const SplitTile& tile) {
  return tile.remainder8 != nullptr ? update_split24(c, Split24Tile{tile}) : update_any(c, tile);
}
inline bool update_whole(const UpdateCoefficients& c, const WholeTile& tile) { return update_any(c, tile); }
inline bool update_fp16(const UpdateCoefficients& c, const Fp16Tile& tile) { return update_any(c, tile); }

}  // namespace hoist::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_OPTIM_PACKED_INL_H_
