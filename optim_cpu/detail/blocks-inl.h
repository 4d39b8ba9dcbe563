// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/blocks-inl.h - decodes and encodes blocks of 8-bit moments in registers. block_fp8.hpp defines the
// bits; tests compare every instruction set with it. Compiled once per instruction set by update.cpp.
//
// A step handles the elements of two vectors: one vector has the even elements, the other the odd ones. Shifts split
// arrays of 8 and 16 bits in this way, and join them again. Joined in halves of 16 bits, a block of moments is one
// 128-bit block of lanes.
//
//   words     | e0    | e2    | e4    | e6    | e8 ...    | e1    | e3    | e5    | e7    | e9 ...
//   halves    | e0 e1 | e2 e3 | e4 e5 | e6 e7 | e8 ...
//              `------- a block of 8 --------'
#if defined(HOIST_OPTIM_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_OPTIM_BLOCKS_INL_H_
#undef HOIST_OPTIM_BLOCKS_INL_H_
#else
#define HOIST_OPTIM_BLOCKS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <hwy/highway.h>

#include <hoist/optim_cpu/block_fp8.hpp>
#include <hoist/optim_cpu/detail/update-inl.h>

HWY_BEFORE_NAMESPACE();
namespace hoist::optim::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR

using Bytes = hn::Repartition<std::uint8_t, Floats>;

// Elements of a step, and of a stretch. Each stretch is prefetched at once: two cache lines of the narrowest arrays.
inline constexpr std::size_t kStep = 2 * kLanesMax;
inline constexpr std::size_t kStretch = std::max<std::size_t>(128, 2 * kStep);
static_assert(kStep % kMomentBlock == 0 && kStretch % (2 * kStep) == 0);
inline constexpr std::size_t kStepBlocks = kStep / kMomentBlock;

template <std::size_t kBytes>
using UnsignedOf = std::conditional_t<
    kBytes == 1, std::uint8_t,
    std::conditional_t<kBytes == 2, std::uint16_t, std::conditional_t<kBytes == 4, std::uint32_t, std::uint64_t>>>;

template <Moment kMoment>
HWY_INLINE WordVector added_to_moment(WordVector word) {
  const Words words;
  const auto shifted = kMoment == Moment::first ? hn::ShiftRight<13>(word) : hn::ShiftLeft<3>(word);
  const auto mask = hn::Set(words, kMoment == Moment::first ? 0xFFu << 11 : 0xFFFFu << 3);
  const auto half = hn::Set(words, kMoment == Moment::first ? 1u << 10 : 1u << 2);
#if HWY_TARGET == HWY_AVX3
  return WordVector{_mm512_ternarylogic_epi32(shifted.raw, mask.raw, half.raw, 0xEA)};  // needs no copy of a constant
#else
  return hn::OrAnd(half, shifted, mask);
#endif
}

// --- moments of fp8: decoding ----------------------------------------------------------------------------------------
//
// Every number of the format is also a bf16 number, so 16 bits are enough to decode it: its code, shifted to the place
// of bf16's fraction, is added to the exponent of its block. That is right for codes with an implicit 1 before their
// fraction. For the others, below kLeastNormal, a table gives the code that the same value would have if exponents
// continued below the least one.

template <Moment kMoment>
inline constexpr std::uint32_t kLargestCode = kMoment == Moment::first ? 0x7F : 0xFF;
inline constexpr std::uint32_t kCodeShift = 7 - fp8::kFractionBits;  // to the place of bf16's fraction

// The code of the same value if exponents continued below the least one, whose field is 1: the code 2^e + f has the
// exponent field e - 3 and the fraction f, shifted up. The result for code 0 is not used.
constexpr std::int32_t code_without_limit(std::uint32_t code) {
  if (code == 0 || code >= fp8::kLeastNormal) return static_cast<std::int32_t>(code);
  const auto exponent = static_cast<std::uint32_t>(std::bit_width(code)) - 1;
  const std::uint32_t fraction = (code << (fp8::kFractionBits - exponent)) - fp8::kLeastNormal;
  return (static_cast<std::int32_t>(exponent) - 3) * static_cast<std::int32_t>(fp8::kLeastNormal) +
         static_cast<std::int32_t>(fraction);
}

// Returns each block's exponent plus kAdded, in the place where bf16 has it and in every half of the block, for a step.
template <std::uint32_t kAdded>
HWY_INLINE HalfVector exponents_of(const std::uint8_t* scales) {
  const Halves halves;
  const Bytes bytes;
  UnsignedOf<kStepBlocks> all;
  std::memcpy(&all, scales, kStepBlocks);
  const auto table = hn::BitCast(bytes, hn::Set(hn::Repartition<decltype(all), Floats>(), all));
  // Puts byte k of the table into the upper bytes of 128-bit block k, and zero into the lower bytes.
  const auto block = hn::ShiftRight<3>(hn::Iota(halves, std::uint16_t{0}));
  const auto index = hn::Or(hn::ShiftLeft<8>(block), hn::Set(halves, std::uint16_t{0x80}));
  const auto scale = hn::BitCast(halves, hn::TableLookupBytesOr0(table, hn::BitCast(bytes, index)));
  // The scale is one bit above the place of bf16's exponent; the average halves it.
  return hn::AverageRound(scale,
                          hn::Set(halves, static_cast<std::uint16_t>(2 * ((fp8::kLeastExponent << 7) + kAdded))));
}

// The magnitudes of the codes of a step, one in each half, as bf16; a first moment's sign is ignored.
#if HWY_TARGET == HWY_AVX3

template <Moment kMoment>
HWY_INLINE HalfVector decoded(HalfVector codes, const std::uint8_t* scales) {
  constexpr auto kLargest = static_cast<std::uint16_t>(kLargestCode<kMoment>);
  // The distance of a code from the largest code. The index is 31 less the code's last five bits. For code 0 the
  // distance is so large that the subtraction below saturates at zero.
  struct Table {
    constexpr Table() {
      for (std::uint32_t code = 1; code < fp8::kLeastNormal; ++code)
        below[31 - code] = static_cast<std::uint16_t>((kLargest - code_without_limit(code)) << kCodeShift);
      below[31] = 0xFFFF;
    }
    HWY_ALIGN std::uint16_t below[32] = {};
  };
  static constexpr Table kTable;
  const Halves halves;
  const auto rest = hn::AndNot(codes, hn::Set(halves, kLargest));
  const __mmask32 is_small =
      _mm512_cmpgt_epu16_mask(rest.raw, hn::Set(halves, static_cast<std::uint16_t>(kLargest - fp8::kLeastNormal)).raw);
  const auto below = _mm512_mask_permutexvar_epi16(hn::ShiftLeft<kCodeShift>(rest).raw, is_small, rest.raw,
                                                   hn::Load(halves, kTable.below).raw);
  // The largest number of a block has the block's exponent and only ones in its fraction.
  const auto largest = exponents_of<((1u << fp8::kFractionBits) - 1) << kCodeShift>(scales);
  return hn::SaturatedSub(largest, HalfVector{below});
}

#else

template <Moment kMoment>
HWY_INLINE HalfVector decoded(HalfVector codes, const std::uint8_t* scales) {
  const Halves halves;
  const Bytes bytes;
  // The difference between a code and code_without_limit() of it: 0 from kLeastNormal on.
  struct Table {
    constexpr Table() {
      for (std::uint32_t code = 1; code < fp8::kLeastNormal; ++code)
        added[code] = static_cast<std::uint8_t>(static_cast<std::int32_t>(code) - code_without_limit(code));
    }
    HWY_ALIGN std::uint8_t added[16] = {};
  };
  static constexpr Table kTable;
  const auto code = kMoment == Moment::first ? hn::And(codes, hn::Set(halves, std::uint16_t{0x7F})) : codes;
  // Bit 7 of the index is set for codes from kLeastNormal on and in every upper byte, so that the lookup returns 0
  // there. x86 ignores bits 4 to 6 of the index.
#if HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128
  const auto index = hn::SaturatedAdd(hn::BitCast(bytes, code),
                                      hn::BitCast(bytes, hn::Set(halves, static_cast<std::uint16_t>(0x8070))));
#else
  const auto is_small = hn::Lt(code, hn::Set(halves, static_cast<std::uint16_t>(fp8::kLeastNormal)));
  const auto no_index = hn::Set(halves, static_cast<std::uint16_t>(0x8080));
  const auto index = hn::BitCast(
      bytes, hn::IfThenElse(is_small, hn::Or(code, hn::Set(halves, static_cast<std::uint16_t>(0x8000))), no_index));
#endif
  const auto added = hn::TableLookupBytesOr0(hn::LoadDup128(bytes, kTable.added), index);
  const auto without_limit = hn::Sub(code, hn::BitCast(halves, added));
  const auto zero = exponents_of<0u - (fp8::top(kMoment) << 7)>(scales);
  const auto magnitude = hn::Add(zero, hn::ShiftLeft<kCodeShift>(without_limit));
#if HWY_TARGET == HWY_AVX2
  return HalfVector{_mm256_sign_epi16(magnitude.raw, code.raw)};  // 0 where the code is 0
#elif HWY_TARGET == HWY_SSE4
  return HalfVector{_mm_sign_epi16(magnitude.raw, code.raw)};
#else
  return hn::IfThenZeroElse(hn::Eq(code, hn::Zero(halves)), magnitude);
#endif
}

#endif

template <Moment kMoment>
HWY_INLINE void load_blocks(const void* codes, const std::uint8_t* scales, std::size_t i, FloatVector& even,
                            FloatVector& odd) {
  const Words words;
  const Halves halves;
  scales += i / kMomentBlock;
  HalfVector numbers;
  if constexpr (kMoment == Moment::first) {
    const hn::Rebind<std::int8_t, Halves> some;
    const auto* from = static_cast<const std::int8_t*>(codes) + i;
    const auto extended = hn::BitCast(halves, hn::PromoteTo(SignedHalves(), hn::LoadU(some, from)));
    numbers = hn::OrAnd(decoded<kMoment>(extended, scales), extended, hn::Set(halves, std::uint16_t{0x8000}));
  } else {
    const hn::Rebind<std::uint8_t, Halves> some;
    const auto* from = static_cast<const std::uint8_t*>(codes) + i;
    numbers = decoded<kMoment>(hn::PromoteTo(halves, hn::LoadU(some, from)), scales);
  }
  even = hn::BitCast(Floats(), hn::ShiftLeft<16>(hn::BitCast(words, numbers)));
  odd = hn::BitCast(Floats(), high_half(hn::BitCast(words, numbers)));
}

// --- moments of fp8: encoding ----------------------------------------------------------------------------------------

// Truncates to integers; the result is unspecified for values that do not fit. Highway's own conversion handles those,
// too, which costs several instructions.
HWY_INLINE WordVector cut_to_integer(FloatVector value) {
#if HWY_TARGET == HWY_AVX3
  return WordVector{_mm512_cvttps_epi32(value.raw)};
#elif HWY_TARGET == HWY_AVX2
  return WordVector{_mm256_cvttps_epi32(value.raw)};
#elif HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128
  return WordVector{_mm_cvttps_epi32(value.raw)};
#else
  return hn::BitCast(Words(), hn::ConvertTo(SignedWords(), value));
#endif
}

// Returns encode_block's code of every first moment of a vector, shifted up by kDroppedBits; the caller ignores the
// bits below. `rounded` is `magnitude` plus `added`. For a number from the least exponent on, this is the distance of
// its bits to those of `zero_exponent`. A smaller number is counted in units that have as many bits.
HWY_INLINE WordVector encoded(WordVector magnitude, WordVector rounded, WordVector added, WordVector zero_exponent) {
  const Words words;
  const SignedWords signed_words;
  // One unit is 2^-23 of the least exponent's power of two.
  const auto per_unit = hn::BitCast(Floats(), hn::Sub(hn::Set(words, (127u + 127 + 23 - 1) << 23), zero_exponent));
  const auto units = cut_to_integer(hn::Mul(hn::BitCast(Floats(), magnitude), per_unit));
  const auto least = hn::Set(signed_words, 1 << 23);
#if HWY_TARGET == HWY_AVX3
  const auto normal = hn::Sub(rounded, zero_exponent);
  const auto is_below = hn::RebindMask(words, hn::Lt(hn::BitCast(signed_words, normal), least));
  return hn::IfThenElse(is_below, hn::Add(units, added), normal);
#else
  // The larger of the two is right: below the least exponent the units exceed the distance; from it on, the distance
  // is at least `least`, the limit of the units.
  (void)rounded;
  const auto distance = hn::BitCast(signed_words, hn::Sub(magnitude, zero_exponent));
  const auto limited = hn::Min(hn::BitCast(signed_words, units), least);
  return hn::Add(hn::BitCast(words, hn::Max(distance, limited)), added);
#endif
}

// Does the same for second moments below the least exponent, whose units fp32 cannot hold. The last bit of `unit` is
// 2^-16 of a step of the code, so adding `unit` rounds the number to a multiple of that. Where the addition has rounded
// up, one is subtracted, so that the result is truncated.
HWY_INLINE WordVector encoded_below(WordVector magnitude, FloatVector unit, WordVector added) {
  const Floats d;
  const Words words;
  const auto number = hn::BitCast(d, magnitude);
  const auto sum = hn::Add(number, unit);
  const auto is_more = hn::RebindMask(words, hn::Gt(hn::Sub(sum, unit), number));
  const auto nearest = hn::Sub(hn::BitCast(words, sum), hn::BitCast(words, unit));
  const auto fixed = hn::IfThenElse(is_more, hn::Sub(nearest, hn::Set(words, 1u)), nearest);
  return hn::Add(hn::ShiftLeft<fp8::kDroppedBits - 16>(fixed), added);
}

// A step's moments before they are cut off.
template <Moment kMoment>
struct RoundedMoments {
  HWY_INLINE RoundedMoments(FloatVector even_value, FloatVector odd_value, const WordPair& random)
      // Second moments have no sign, unless they are NaN; then the master is NaN, too.
      : even_magnitude(kMoment == Moment::first ? magnitude_of(even_value) : hn::BitCast(Words(), even_value)),
        odd_magnitude(kMoment == Moment::first ? magnitude_of(odd_value) : hn::BitCast(Words(), odd_value)),
        even_added(added_to_moment<kMoment>(random.even)),
        odd_added(added_to_moment<kMoment>(random.odd)),
        even(hn::Add(even_magnitude, even_added)),
        odd(hn::Add(odd_magnitude, odd_added)) {}
  WordVector even_magnitude, odd_magnitude, even_added, odd_added, even, odd;
};

// Returns the exponents of the blocks' scales, in the place where fp32 has them, from the blocks' largest magnitudes.
// Also raises `largest` to these: the moments are finite while it is below kInfinityBits.
HWY_INLINE WordVector noted_exponents(WordVector most, WordVector& largest) {
  const Words words;
  largest = hn::Max(largest, most);
  return hn::And(hn::Max(most, hn::Set(words, fp8::kLeastExponent << 23)), hn::Set(words, 0xFF800000u));
}

// Returns the scales as bytes, from exponents in the place where fp32 has them. Byte kStepBlocks * w + k comes from
// lane w of the k-th 128-bit block of lanes.
template <std::size_t kOfEach>
HWY_INLINE UnsignedOf<kOfEach * kStepBlocks> scale_bytes(WordVector exponents) {
  const Words words;
  const auto scale = hn::Sub(hn::ShiftRight<23>(exponents), hn::Set(words, fp8::kLeastExponent));
  struct Order {
    constexpr Order() {
      for (std::uint32_t i = 0; i < kOfEach * kStepBlocks; ++i) lane[i] = i % kStepBlocks * 4 + i / kStepBlocks;
    }
    HWY_ALIGN std::uint32_t lane[kLanesMax] = {};
  };
  static constexpr Order kOrder;
  const auto in_order = kStepBlocks == 1 ? scale : hn::TableLookupLanes(scale, hn::SetTableIndices(words, kOrder.lane));
  UnsignedOf<kOfEach * kStepBlocks> bytes;
#if HWY_TARGET == HWY_AVX3
  const auto narrow = _mm512_cvtepi32_epi8(in_order.raw);
  std::memcpy(&bytes, &narrow, sizeof bytes);
#else
  const hn::Rebind<std::uint8_t, Words> narrow;
  HWY_ALIGN std::uint8_t all[kLanesMax];
  hn::Store(hn::TruncateTo(narrow, in_order), narrow, all);
  std::memcpy(&bytes, all, sizeof bytes);
#endif
  return bytes;
}

HWY_INLINE WordVector over_block(WordVector largest) {
  largest = hn::Max(largest, hn::Shuffle1032(largest));
  return hn::Max(largest, hn::Shuffle2301(largest));
}

// Joins the bits above the dropped ones, with the sign, of the even and the odd elements.
HWY_INLINE HalfVector coded(WordVector even, WordVector odd) {
  const Words words;
  const SignedWords signed_words;
  const auto lower = hn::ShiftRight<fp8::kDroppedBits>(hn::BitCast(signed_words, even));
  const auto upper = hn::ShiftRight<fp8::kDroppedBits - 16>(hn::BitCast(signed_words, odd));
  return side_by_side(hn::BitCast(words, lower), hn::BitCast(words, upper));
}

// encode_block of a step's blocks, whose least exponent is one above `zero_exponent`: a code in each half. A moment
// below 2^-126 counts as +0.
HWY_INLINE HalfVector coded(const RoundedMoments<Moment::first>& rounded, FloatVector even, FloatVector odd,
                            WordVector zero_exponent) {
  const Floats d;
  const Words words;
  const auto even_code = encoded(rounded.even_magnitude, rounded.even, rounded.even_added, zero_exponent);
  const auto odd_code = encoded(rounded.odd_magnitude, rounded.odd, rounded.odd_added, zero_exponent);
  const auto greatest_negative = hn::Set(d, -0x1.0p-126f);
  const auto even_sign = hn::Le(even, greatest_negative), odd_sign = hn::Le(odd, greatest_negative);
#if HWY_TARGET == HWY_AVX3
  const auto sign = hn::Set(words, 0x80u << fp8::kDroppedBits);
  return coded(hn::IfThenElse(hn::RebindMask(words, even_sign), hn::Or(even_code, sign), even_code),
               hn::IfThenElse(hn::RebindMask(words, odd_sign), hn::Or(odd_code, sign), odd_code));
#else
  const Halves halves;
  const auto signs =
      side_by_side(hn::BitCast(words, hn::VecFromMask(d, even_sign)), hn::BitCast(words, hn::VecFromMask(d, odd_sign)));
  return hn::OrAnd(coded(even_code, odd_code), signs, hn::Set(halves, std::uint16_t{0x80}));
#endif
}

HWY_INLINE HalfVector coded(const RoundedMoments<Moment::second>& rounded, FloatVector even, FloatVector odd,
                            WordVector zero_exponent) {
  const Words words;
  const Halves halves;
  const SignedHalves signed_halves;
  const auto code = coded(hn::Sub(rounded.even, zero_exponent), hn::Sub(rounded.odd, zero_exponent));
  const auto is_in_range = hn::Gt(hn::BitCast(signed_halves, code),
                                  hn::Set(signed_halves, static_cast<std::int16_t>(fp8::kLeastNormal - 1)));
  // Few blocks have second moments 2^14 times smaller than their largest.
  if (HWY_LIKELY(hn::AllTrue(signed_halves, is_in_range))) return code;
  const auto unit = hn::BitCast(Floats(), hn::Add(zero_exponent, hn::Set(words, 4u << 23)));
  const auto below = coded(encoded_below(rounded.even_magnitude, unit, rounded.even_added),
                           encoded_below(rounded.odd_magnitude, unit, rounded.odd_added));
  const auto not_zero = hn::Max(below, hn::Set(halves, std::uint16_t{1}));
  const auto all = hn::IfThenElse(hn::RebindMask(halves, is_in_range), code, not_zero);
  const auto tops = upper_halves(hn::BitCast(words, even), hn::BitCast(words, odd));
  const auto has_no_exponent = hn::Eq(hn::And(tops, hn::Set(halves, std::uint16_t{0x7F80})), hn::Zero(halves));
  return hn::IfThenZeroElse(has_no_exponent, all);
}

// The codes of a step's moments, one in each half.
struct Codes {
  HWY_INLINE Codes() : moment1(hn::Zero(Halves())), moment2(moment1) {}
  HalfVector moment1, moment2;
};

// Stores the bytes of two steps.
HWY_INLINE void store_bytes(HalfVector first, HalfVector second, void* array, std::size_t i) {
  auto* const to = static_cast<std::uint8_t*>(array) + i;
  [[maybe_unused]] const Bytes bytes;
#if HWY_TARGET == HWY_AVX3
  const auto packed = _mm512_packus_epi16(first.raw, second.raw);
  const auto order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  hn::StoreU(hn::Vec<Bytes>{_mm512_permutexvar_epi64(order, packed)}, bytes, to);
#elif HWY_TARGET == HWY_AVX2
  hn::StoreU(hn::Vec<Bytes>{_mm256_permute4x64_epi64(_mm256_packus_epi16(first.raw, second.raw), 0xD8)}, bytes, to);
#elif HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128
  hn::StoreU(hn::Vec<Bytes>{_mm_packus_epi16(first.raw, second.raw)}, bytes, to);
#else
  const hn::Rebind<std::uint8_t, Halves> some;
  hn::StoreU(hn::TruncateTo(some, first), some, to);
  hn::StoreU(hn::TruncateTo(some, second), some, to + kStep);
#endif
}

template <class Scale>
HWY_INLINE void store_scales(Scale bytes, std::uint8_t* scales, std::size_t i) {
  std::memcpy(scales + i / kMomentBlock, &bytes, kStepBlocks);
}

template <Moment kMoment>
HWY_INLINE HalfVector put_blocks(FloatVector even, FloatVector odd, const WordPair& random, std::uint8_t* scales,
                                 std::size_t i, WordVector& largest) {
  const RoundedMoments<kMoment> rounded(even, odd, random);
  const auto exponents = noted_exponents(over_block(hn::Max(rounded.even, rounded.odd)), largest);
  store_scales(scale_bytes<1>(exponents), scales, i);
  return coded(rounded, even, odd, hn::Sub(exponents, hn::Set(Words(), fp8::top(kMoment) << 23)));
}

// Encodes the blocks of both moments. One search finds the largest magnitudes of both, in alternate lanes.
HWY_INLINE void put_both_blocks(FloatVector even1, FloatVector odd1, FloatVector even2, FloatVector odd2,
                                const WordPair& random, std::uint8_t* scales1, std::uint8_t* scales2, std::size_t i,
                                WordVector& largest, Codes& codes) {
  const Words words;
  const RoundedMoments<Moment::first> rounded1(even1, odd1, random);
  const RoundedMoments<Moment::second> rounded2(even2, odd2, random);
  const auto most1 = hn::Max(rounded1.even, rounded1.odd), most2 = hn::Max(rounded2.even, rounded2.odd);
  auto most = hn::Max(hn::InterleaveLower(words, most1, most2), hn::InterleaveUpper(words, most1, most2));
  most = hn::Max(most, hn::Shuffle1032(most));
  const auto exponents = noted_exponents(most, largest);
  const auto bytes = scale_bytes<2>(exponents);
  store_scales(bytes, scales1, i);
  store_scales(static_cast<UnsignedOf<kStepBlocks>>(bytes >> (8 * kStepBlocks)), scales2, i);
  constexpr std::uint32_t kTop1 = fp8::top(Moment::first) << 23, kTop2 = fp8::top(Moment::second) << 23;
  HWY_ALIGN static constexpr std::uint32_t kTops[4] = {kTop1, kTop2, kTop1, kTop2};
  const auto zero_exponents = hn::Sub(exponents, hn::LoadDup128(words, kTops));
  codes.moment1 = coded(rounded1, even1, odd1, hn::DupEven(zero_exponents));
  codes.moment2 = coded(rounded2, even2, odd2, hn::DupOdd(zero_exponents));
}

#endif  // HWY_TARGET != HWY_SCALAR

}  // namespace hoist::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_OPTIM_BLOCKS_INL_H_
