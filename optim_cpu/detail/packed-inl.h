// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/packed-inl.h - decodes, updates and encodes 8-bit state in registers, in one pass. Compiled
// once per instruction set by update.cpp.
//
// A step of the loop takes the elements of two vectors, the even ones in one and the odd ones in the other: arrays of 8
// and 16 bits are taken apart and put together by shifts, and beside each other again, in 16 bits each, a block of
// moments is one 128-bit block of lanes.
//
//   words     | e0    | e2    | e4    | e6    | e8 ...    | e1    | e3    | e5    | e7    | e9 ...
//   halves    | e0 e1 | e2 e3 | e4 e5 | e6 e7 | e8 ...
//              `------- a block of 8 --------'
//
// block_fp8.hpp defines the bits; tests compare every instruction set with it.
#if defined(HOIST_OPTIM_PACKED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_OPTIM_PACKED_INL_H_
#undef HOIST_OPTIM_PACKED_INL_H_
#else
#define HOIST_OPTIM_PACKED_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <hoist/optim_cpu/block_fp8.hpp>
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

  void put(std::size_t k, FloatVector value, std::uint32_t added_bits) {
    values[k] = hn::GetLane(without_denormals(value));
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
  WordVector refused = hn::Zero(Words());
  bool sound = true;
  for (std::size_t k = 0; k < count; ++k) {
    const std::size_t i = first + k;
    const std::uint32_t word = rounding_word(tile.rounding.key, static_cast<std::uint32_t>(tile.rounding.first + i));
    Numbers n;
    n.master = load_master(tile, i);
    n.gradient = load_gradient(tile.gradient, tile.gradient_dtype, i);
    if constexpr (has_moment1(kFormula))
      n.moment1 = load_moment_of<kMoments>(tile.moment1, tile.scale1, i, Moment::first);
    if constexpr (has_moment2(kFormula))
      n.moment2 = load_moment_of<kMoments>(tile.moment2, tile.scale2, i, Moment::second);
    apply<kFormula>(c, n);
    sound &= store_rounded(n.master, word, tile, i);
    if constexpr (kMoments == MomentType::fp8) {
      if constexpr (has_moment1(kFormula)) moment1.put(k, n.moment1, added_to_moment1(word));
      if constexpr (has_moment2(kFormula)) moment2.put(k, n.moment2, added_to_moment2(word));
    } else {
      if constexpr (has_moment1(kFormula)) {
        store_moment1<kMoments>(n.moment1, tile.moment1, i);
        refused = hn::Or(refused, reaches(n.moment1, kMomentLimitBits<kMoments>));
      }
      if constexpr (has_moment2(kFormula)) {
        store_moment2<kMoments>(n.moment2, tile.rounding, tile.moment2, i);
        refused = hn::Or(refused, reaches(n.moment2, kMomentLimitBits<kMoments>));
      }
    }
  }
  if constexpr (kMoments == MomentType::fp8) {
    if constexpr (has_moment1(kFormula))
      sound &= moment1.encode(count, Moment::first, tile.moment1, first, tile.scale1);
    if constexpr (has_moment2(kFormula))
      sound &= moment2.encode(count, Moment::second, tile.moment2, first, tile.scale2);
  }
  return sound && (hn::GetLane(refused) & 0x80000000u) == 0;
}

template <Formula kFormula, MomentType kMoments, class Tile>
bool update_packed(const UpdateCoefficients& c, const Tile& tile) {
  bool sound = true;
  for (std::size_t i = 0; i < tile.count; i += kMomentBlock)
    sound &= update_block<kFormula, kMoments>(c, tile, i, std::min<std::size_t>(kMomentBlock, tile.count - i));
  return sound;
}

#else

using Halves = hn::Repartition<std::uint16_t, Floats>;
using SignedHalves = hn::Repartition<std::int16_t, Floats>;
using Bytes = hn::Repartition<std::uint8_t, Floats>;
using HalfVector = hn::Vec<Halves>;
using HalvesOfWords = hn::Rebind<std::uint16_t, Floats>;  // one for each word

// Elements of a step, and of what is prefetched at a time: 64 bytes of the narrowest arrays.
inline constexpr std::size_t kStep = 2 * kLanesMax;
inline constexpr std::size_t kLine = std::max<std::size_t>(64, kStep);
static_assert(kStep % kMomentBlock == 0);

struct WordPair {
  WordVector even, odd;
};

// The lower halves of the words of `even` beside the upper halves of those of `odd`: in the order of the elements.
HWY_INLINE HalfVector side_by_side(WordVector even, WordVector odd) {
  return hn::OddEven(hn::BitCast(Halves(), odd), hn::BitCast(Halves(), even));
}
HWY_INLINE HalfVector upper_halves(WordVector even, WordVector odd) {
  return side_by_side(hn::ShiftRight<16>(even), odd);
}

HWY_INLINE WordVector magnitude_of(FloatVector value) {
  return hn::And(hn::BitCast(Words(), value), hn::Set(Words(), 0x7FFFFFFFu));
}

// --- random bits -----------------------------------------------------------------------------------------------------

HWY_INLINE WordVector rounding_word_of(std::uint32_t key, WordVector index) {
  const Words words;
  auto x = hn::Xor(index, hn::Set(words, key + 0x9E3779B9u));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(words, 0x7FEB352Du));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(words, 0x846CA68Bu));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

// rounding_word of the elements of a step from element i of a tile on.
HWY_INLINE WordPair rounding_words(const Rounding& rounding, std::size_t i) {
  const Words words;
  const auto first = hn::Set(words, static_cast<std::uint32_t>(rounding.first + i));
  const auto even = hn::Add(first, hn::ShiftLeft<1>(hn::Iota(words, 0u)));
  const auto odd = hn::Add(even, hn::Set(words, 1u));
  return {rounding_word_of(rounding.key, even), rounding_word_of(rounding.key, odd)};
}

// random_halves of the same.
HWY_INLINE WordPair random_halves_of_pairs(const Rounding& rounding, std::size_t i) {
  const Words words;
  const auto low_half = hn::Set(words, 0xFFFFu);
  const auto first = hn::Set(words, static_cast<std::uint32_t>(rounding.first + i));
  const auto even = hn::Add(first, hn::ShiftLeft<1>(hn::Iota(words, 0u)));
  const auto random = mixed_pairs(rounding, hn::ShiftRight<1>(even));
  if (rounding.first % 2 == 0) return {hn::And(random, low_half), hn::ShiftRight<16>(random)};
  const auto next = mixed_pairs(rounding, hn::ShiftRight<1>(hn::Add(even, hn::Set(words, 1u))));
  return {hn::ShiftRight<16>(random), hn::And(next, low_half)};
}

template <Moment kMoment>
HWY_INLINE WordVector added_to_moment(WordVector word) {
  const Words words;
  if constexpr (kMoment == Moment::first) {
    return hn::OrAnd(hn::Set(words, 1u << 10), hn::ShiftRight<13>(word), hn::Set(words, 0xFFu << 11));
  } else {
    return hn::OrAnd(hn::Set(words, 1u << 2), hn::ShiftLeft<3>(word), hn::Set(words, 0xFFFFu << 3));
  }
}

// --- moments of fp8: decoding ----------------------------------------------------------------------------------------

// Two to the exponent of each block of a step, in every word of its block.
HWY_INLINE FloatVector powers_of(const std::uint8_t* scales) {
  const Words words;
  const Bytes bytes;
  auto table = hn::Zero(bytes);
  if constexpr (kLanesMax <= 16) {
    std::uint32_t all = 0;
    std::memcpy(&all, scales, kLanesMax / 4);
    table = hn::BitCast(bytes, hn::Set(words, all));
  } else {
    HWY_ALIGN std::uint8_t all[16] = {};
    std::memcpy(all, scales, hn::Lanes(words) / 4);
    table = hn::LoadDup128(bytes, all);
  }
  // Byte k of the table to the top of the words of 128-bit block k, nothing elsewhere.
  const auto block = hn::ShiftRight<2>(hn::Iota(words, 0u));
  const auto index = hn::Or(hn::ShiftLeft<24>(block), hn::Set(words, 0x00808080u));
  const auto scale = hn::BitCast(words, hn::TableLookupBytesOr0(table, hn::BitCast(bytes, index)));
  return hn::BitCast(Floats(), hn::Add(hn::ShiftRight<1>(scale), hn::Set(words, fp8::kLeastExponent << 23)));
}

// decode_moment of codes whose lowest bit is the lowest of kFractionBits in fp32; other bits are not looked at.
template <Moment kMoment>
HWY_INLINE FloatVector decoded(WordVector codes, FloatVector power) {
  const Floats d;
  const Words words;
  constexpr std::uint32_t kMask = (kMoment == Moment::first ? 0x7Fu : 0xFFu) << fp8::kDroppedBits;
  constexpr std::uint32_t kZeroExponent = (127 - fp8::top(kMoment)) << 23;
  static_assert((kMask & kZeroExponent) == 0);
  const auto value = hn::BitCast(d, hn::OrAnd(hn::Set(words, kZeroExponent), codes, hn::Set(words, kMask)));
  // With the smallest exponent a number has no 1 before its fraction, which counts twice: 2 x - 2. Others are less
  // than that, and all of it is exact.
  const auto two = hn::BitCast(d, hn::Set(words, kZeroExponent + (1u << 23)));
  const auto below = hn::MulSub(value, hn::Set(d, 2.0f), two);
  return hn::Mul(hn::Min(value, below), power);
}

HWY_INLINE FloatVector with_sign_bit(FloatVector value, WordVector sign) {
  const Words words;
  return hn::BitCast(Floats(), hn::OrAnd(hn::BitCast(words, value), sign, hn::Set(words, 0x80000000u)));
}

template <Moment kMoment>
HWY_INLINE void load_blocks(const void* codes, const std::uint8_t* scales, std::size_t i, FloatVector& even,
                            FloatVector& odd) {
  const Words words;
  const HalvesOfWords halves;
  const auto* pairs = reinterpret_cast<const std::uint16_t*>(static_cast<const std::uint8_t*>(codes) + i);
  const auto pair = hn::PromoteTo(words, hn::LoadU(halves, pairs));  // an even code below an odd one
  const auto power = powers_of(scales + i / kMomentBlock);
  even = decoded<kMoment>(hn::ShiftLeft<fp8::kDroppedBits>(pair), power);
  odd = decoded<kMoment>(hn::ShiftLeft<fp8::kDroppedBits - 8>(pair), power);
  if constexpr (kMoment == Moment::first) {
    even = with_sign_bit(even, hn::ShiftLeft<24>(pair));
    odd = with_sign_bit(odd, hn::ShiftLeft<16>(pair));
  }
}

// --- moments of fp8: encoding ----------------------------------------------------------------------------------------

// The byte of each block's scale from the bits of its power of two, which are in every word of the block.
HWY_INLINE void store_scales(WordVector power, std::uint8_t* scales) {
  const Words words;
  const auto scale = hn::Sub(hn::ShiftRight<23>(power), hn::Set(words, fp8::kLeastExponent));
  const auto fourth =
      hn::And(hn::ShiftLeft<2>(hn::Iota(words, 0u)), hn::Set(words, static_cast<std::uint32_t>(hn::Lanes(words) - 1)));
  const auto first_words = hn::TableLookupLanes(scale, hn::IndicesFromVec(words, fourth));
  const auto blocks = hn::LowerHalf(hn::LowerHalf(first_words));
  const hn::Rebind<std::uint8_t, hn::DFromV<decltype(blocks)>> bytes;
  hn::StoreU(hn::TruncateTo(bytes, blocks), bytes, scales);
}

// The code, in its upper half, of a number below the least exponent of its block: what encode_block's `fixed` is,
// rounded. `unit` has its last bit at 2^-16 of a step, so that adding it cuts the rest off; to the nearest, which is
// then taken back where it is more than the number.
HWY_INLINE WordVector code_below(WordVector magnitude, FloatVector unit, WordVector added) {
  const Floats d;
  const Words words;
  const auto number = hn::BitCast(d, magnitude);
  const auto sum = hn::Add(number, unit);
  const auto is_more = hn::RebindMask(words, hn::Gt(hn::Sub(sum, unit), number));
  const auto nearest = hn::Sub(hn::BitCast(words, sum), hn::BitCast(words, unit));
  const auto fixed = hn::IfThenElse(is_more, hn::Sub(nearest, hn::Set(words, 1u)), nearest);
  return hn::Add(fixed, hn::ShiftRight<fp8::kDroppedBits - 16>(added));
}

// encode_block of all blocks of a step; a moment below 2^-126 counts as +0. `largest` takes note of what the scales are
// chosen by: below kInfinityBits they are sound.
template <Moment kMoment>
HWY_INLINE void store_blocks(FloatVector even, FloatVector odd, const WordPair& random, void* codes,
                             std::uint8_t* scales, std::size_t i, WordVector& largest) {
  const Floats d;
  const Words words;
  const SignedWords signed_words;
  const Halves halves;
  const SignedHalves signed_halves;
  const auto even_bits = hn::BitCast(words, even), odd_bits = hn::BitCast(words, odd);
  // Second moments have no sign, unless they are NaN; then the master is NaN, too.
  const auto even_magnitude = kMoment == Moment::first ? magnitude_of(even) : even_bits;
  const auto odd_magnitude = kMoment == Moment::first ? magnitude_of(odd) : odd_bits;
  const auto even_added = added_to_moment<kMoment>(random.even), odd_added = added_to_moment<kMoment>(random.odd);
  const auto even_rounded = hn::Add(even_magnitude, even_added), odd_rounded = hn::Add(odd_magnitude, odd_added);

  auto most = hn::Max(even_rounded, odd_rounded);
  most = hn::Max(most, hn::Shuffle1032(most));
  most = hn::Max(most, hn::Shuffle2301(most));
  largest = hn::Max(largest, most);
  const auto power = hn::And(hn::Max(most, hn::Set(words, fp8::kLeastExponent << 23)), hn::Set(words, 0xFF800000u));
  store_scales(power, scales + i / kMomentBlock);

  // Codes of numbers within the exponents of the block; less than kLeastNormal says that they are not.
  const auto zero_exponent = hn::Sub(power, hn::Set(words, fp8::top(kMoment) << 23));
  const auto shifted_even =
      hn::ShiftRight<fp8::kDroppedBits>(hn::BitCast(signed_words, hn::Sub(even_rounded, zero_exponent)));
  const auto shifted_odd =
      hn::ShiftRight<fp8::kDroppedBits - 16>(hn::BitCast(signed_words, hn::Sub(odd_rounded, zero_exponent)));
  auto code = side_by_side(hn::BitCast(words, shifted_even), hn::BitCast(words, shifted_odd));
  const auto is_normal =
      hn::RebindMask(halves, hn::Gt(hn::BitCast(signed_halves, code),
                                    hn::Set(signed_halves, static_cast<std::int16_t>(fp8::kLeastNormal - 1))));
  // Few blocks have second moments 2^14 times smaller than their largest.
  if (kMoment == Moment::first || HWY_UNLIKELY(!hn::AllTrue(halves, is_normal))) {
    const auto unit = hn::BitCast(d, hn::Add(zero_exponent, hn::Set(words, 4u << 23)));
    auto below = upper_halves(code_below(even_magnitude, unit, even_added), code_below(odd_magnitude, unit, odd_added));
    if constexpr (kMoment == Moment::second) {
      const auto one = hn::Set(signed_halves, std::int16_t{1});
      below = hn::BitCast(halves, hn::Max(hn::BitCast(signed_halves, below), one));
    }
    code = hn::IfThenElse(is_normal, code, below);
    const auto tops = upper_halves(even_bits, odd_bits);
    if constexpr (kMoment == Moment::first)
      code = hn::OrAnd(code, hn::ShiftRight<8>(tops), hn::Set(halves, std::uint16_t{0x80}));
    const auto exponents = hn::And(tops, hn::Set(halves, std::uint16_t{0x7F80}));
    code = hn::IfThenZeroElse(hn::Eq(exponents, hn::Zero(halves)), code);
  }
  const hn::Rebind<std::uint8_t, Halves> bytes;
  hn::StoreU(hn::TruncateTo(bytes, code), bytes, static_cast<std::uint8_t*>(codes) + i);
}

// --- masters, gradients and wider moments, two vectors at a time -----------------------------------------------------

HWY_INLINE void load_masters(const Split24Tile& tile, std::size_t i, FloatVector& even, FloatVector& odd) {
  const Floats d;
  const Words words;
  const SignedWords signed_words;
  const hn::Rebind<std::int16_t, Floats> signed_halves;
  const auto high = load_words(tile.weight, i);
  // Two remainders in the lower half of each word; the odd one is the upper of them, sign and all.
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

// The largest resulting magnitudes (bits), to refuse a commit.
struct Largest {
  WordVector even_master, odd_master, moment;
};
HWY_INLINE Largest none() { return {hn::Zero(Words()), hn::Zero(Words()), hn::Zero(Words())}; }

template <class Tile>
HWY_INLINE void put_masters(FloatVector even, FloatVector odd, const WordPair&, const Tile& tile, std::size_t i,
                            Largest& largest) {
  store_masters(even, odd, tile, i);
  largest.even_master = hn::Max(largest.even_master, magnitude_of(even));
  largest.odd_master = hn::Max(largest.odd_master, magnitude_of(odd));
}
HWY_INLINE void put_masters(FloatVector even, FloatVector odd, const WordPair& random, const Split24Tile& tile,
                            std::size_t i, Largest& largest) {
  const Words words;
  const HalvesOfWords halves;
  const auto last_byte = hn::Set(words, 0xFFu);
  const auto even_added = hn::And(hn::ShiftRight<16>(random.even), last_byte);
  const auto odd_added = hn::And(hn::ShiftRight<16>(random.odd), last_byte);
  // The last 8 bits of the sums are ignored.
  const auto even_sum = hn::Add(hn::BitCast(words, even), even_added);
  const auto odd_sum = hn::Add(hn::BitCast(words, odd), odd_added);
  const auto half = hn::Set(words, 0x8000u);
  store_words(hn::BitCast(words, upper_halves(hn::Add(even_sum, half), hn::Add(odd_sum, half))), tile.weight, i);
  const auto remainders = hn::IfVecThenElse(last_byte, hn::ShiftRight<8>(even_sum), odd_sum);
  hn::StoreU(hn::TruncateTo(halves, remainders), halves, reinterpret_cast<std::uint16_t*>(tile.remainder8 + i));
  // A sum could leave a NaN behind; that of the magnitude cannot.
  largest.even_master = hn::Max(largest.even_master, hn::Add(magnitude_of(even), even_added));
  largest.odd_master = hn::Max(largest.odd_master, hn::Add(magnitude_of(odd), odd_added));
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

template <MomentType kMoments, Moment kMoment>
HWY_INLINE void put_moments(FloatVector even, FloatVector odd, const Rounding& rounding, const WordPair& random,
                            void* moment, std::uint8_t* scales, std::size_t i, Largest& largest) {
  if constexpr (kMoments == MomentType::fp8) {
    store_blocks<kMoment>(even, odd, random, moment, scales, i, largest.moment);
  } else {
    largest.moment = hn::Max(largest.moment, hn::Max(magnitude_of(even), magnitude_of(odd)));
    if constexpr (kMoments == MomentType::fp32) {
      hn::StoreInterleaved2(without_denormals(even), without_denormals(odd), Floats(), static_cast<float*>(moment) + i);
    } else if constexpr (kMoment == Moment::first) {
      const auto half = hn::Set(Words(), 0x8000u);
      store_moments(even, odd, half, half, moment, i);
    } else {
      const WordPair added = random_halves_of_pairs(rounding, i);
      store_moments(even, odd, added.even, added.odd, moment, i);
    }
  }
}

// --- a step, and a tile ----------------------------------------------------------------------------------------------

template <Formula kFormula, MomentType kMoments, class Tile>
HWY_INLINE void update_step(const UpdateCoefficients& c, const Tile& tile, std::size_t i, Largest& largest) {
  Numbers even, odd;
  load_masters(tile, i, even.master, odd.master);
  load_gradients(tile.gradient, tile.gradient_dtype, i, even.gradient, odd.gradient);
  if constexpr (has_moment1(kFormula))
    load_moments<kMoments, Moment::first>(tile.moment1, tile.scale1, i, even.moment1, odd.moment1);
  if constexpr (has_moment2(kFormula))
    load_moments<kMoments, Moment::second>(tile.moment2, tile.scale2, i, even.moment2, odd.moment2);
  apply<kFormula>(c, even);
  apply<kFormula>(c, odd);
  WordPair random{hn::Zero(Words()), hn::Zero(Words())};
  if constexpr (kRoundsAtRandom<kMoments, Tile>) random = rounding_words(tile.rounding, i);
  put_masters(even.master, odd.master, random, tile, i, largest);
  if constexpr (has_moment1(kFormula)) {
    put_moments<kMoments, Moment::first>(even.moment1, odd.moment1, tile.rounding, random, tile.moment1, tile.scale1, i,
                                         largest);
  }
  if constexpr (has_moment2(kFormula)) {
    put_moments<kMoments, Moment::second>(even.moment2, odd.moment2, tile.rounding, random, tile.moment2, tile.scale2,
                                          i, largest);
  }
}

// kLine elements from element i on; of an array of b bytes an element these are b lines, where kLine is 64.
template <std::size_t kBytes>
HWY_INLINE void prefetch_elements(const void* array, std::size_t i) {
  const auto* at = static_cast<const std::byte*>(array) + i * kBytes;
  for (std::size_t b = 0; b < kLine * kBytes; b += 64) hwy::Prefetch(at + b);
}
HWY_INLINE void prefetch_scales(const std::uint8_t* scales, std::size_t i) {
  if (i / kMomentBlock % 64 < kLine / kMomentBlock) hwy::Prefetch(scales + i / kMomentBlock + 64);
}

template <Formula kFormula, MomentType kMoments, class Tile>
HWY_INLINE void prefetch_step(Tile tile, std::size_t i) {
  const std::size_t ahead = i + kPrefetchAhead;
  visit_master(tile, [&](auto* array) HWY_ATTR { prefetch_elements<sizeof(*array)>(array, ahead); });
  if constexpr (has_moment1(kFormula)) prefetch_elements<kMomentBytes<kMoments>>(tile.moment1, ahead);
  if constexpr (has_moment2(kFormula)) prefetch_elements<kMomentBytes<kMoments>>(tile.moment2, ahead);
  if constexpr (kMoments == MomentType::fp8 && has_moment1(kFormula)) prefetch_scales(tile.scale1, i);
  if constexpr (kMoments == MomentType::fp8 && has_moment2(kFormula)) prefetch_scales(tile.scale2, i);
  tile.gradient_dtype == DType::fp32 ? prefetch_elements<4>(tile.gradient, ahead)
                                     : prefetch_elements<2>(tile.gradient, ahead);
}

// The last elements of a tile, fewer than kLine, in memory of their own that zeros fill up: they leave moments of zero
// behind, which change no scale. The return value is that of the real ones.
template <Formula kFormula, MomentType kMoments, class Tile>
HWY_NOINLINE Largest update_last(const UpdateCoefficients& c, const Tile& tile, std::size_t first) {
  struct Copy {
    std::byte* original;
    const std::byte* copy;
    std::size_t bytes;
  };
  constexpr std::size_t kArrays = 7, kArrayBytes = 4 * kLine;
  HWY_ALIGN std::byte memory[kArrays * kArrayBytes] = {};
  std::array<Copy, kArrays> copies{};
  std::size_t taken = 0;
  const std::size_t count = tile.count - first;
  // Points `array`, whose first `begin` bytes belong to others, at a copy of the next ones.
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
  if constexpr (has_moment1(kFormula)) take_moment(last.moment1, last.scale1);
  if constexpr (has_moment2(kFormula)) take_moment(last.moment2, last.scale2);
  last.rounding.first += static_cast<std::uint32_t>(first);

  const Words words;
  const std::size_t step = 2 * hn::Lanes(words);
  Largest all = none();
  for (std::size_t j = 0; j < count; j += step) {
    Largest largest = none();
    update_step<kFormula, kMoments>(c, last, j, largest);
    // Without an epsilon a master beside moments of zero becomes NaN.
    const std::size_t real = std::min(step, count - j);
    const auto even = hn::IfThenElseZero(hn::FirstN(words, (real + 1) / 2), largest.even_master);
    const auto odd = hn::IfThenElseZero(hn::FirstN(words, real / 2), largest.odd_master);
    all = {hn::Max(all.even_master, even), hn::Max(all.odd_master, odd), hn::Max(all.moment, largest.moment)};
  }
  for (std::size_t k = 1; k < taken; ++k) std::memcpy(copies[k].original, copies[k].copy, copies[k].bytes);
  return all;
}

template <MomentType kMoments, class Tile>
HWY_INLINE bool is_sound(const Largest& largest) {
  const Words words;
  const auto master = hn::Max(largest.even_master, largest.odd_master);
  const auto fine = hn::And(hn::Lt(master, hn::Set(words, kMasterLimitOf<Tile>)),
                            hn::Lt(largest.moment, hn::Set(words, kMomentLimitBits<kMoments>)));
  return hn::AllTrue(words, fine);
}

template <Formula kFormula, MomentType kMoments, class Tile>
bool update_packed(const UpdateCoefficients& coefficients, const Tile& packed) {
  // Copies whose address is never given away, or every store could be a store into them.
  const UpdateCoefficients c = coefficients;
  const Tile tile = packed;
  const std::size_t step = 2 * hn::Lanes(Floats());
  Largest largest = none();
  std::size_t i = 0;
  for (; i + kLine <= tile.count; i += kLine) {
    prefetch_step<kFormula, kMoments>(tile, i);
    for (std::size_t j = 0; j < kLine; j += step) update_step<kFormula, kMoments>(c, tile, i + j, largest);
  }
  bool sound = is_sound<kMoments, Tile>(largest);
  if (i < tile.count) sound &= is_sound<kMoments, Tile>(update_last<kFormula, kMoments>(coefficients, packed, i));
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
