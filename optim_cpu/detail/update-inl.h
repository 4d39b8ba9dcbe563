// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/update-inl.h - the update kernels for fp32 and bf16 state; packed-inl.h has those for 8-bit state.
// Compiled once per instruction set by update.cpp.
#if defined(HOIST_OPTIM_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_OPTIM_UPDATE_INL_H_
#undef HOIST_OPTIM_UPDATE_INL_H_
#else
#define HOIST_OPTIM_UPDATE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <hoist/optim_cpu/detail/gradient-inl.h>
#include <hoist/optim_cpu/update.hpp>

HWY_BEFORE_NAMESPACE();
namespace hoist::optim::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Words = hn::RebindToUnsigned<Floats>;
using SignedWords = hn::RebindToSigned<Floats>;
using FloatVector = hn::Vec<Floats>;
using WordVector = hn::Vec<Words>;
inline constexpr std::size_t kLanesMax = hn::MaxLanes(Floats());

// One cache line of the 16-bit streams, two of the fp32 ones: each line is prefetched once.
inline constexpr std::size_t kBlock = std::max<std::size_t>(32, 2 * kLanesMax);
// The prefetch distance of each stream: 2 KiB of the fp32 streams, 1 KiB of the others. A core keeps
// more lines in flight this way than its hardware prefetchers do over five to seven streams.
inline constexpr std::size_t kPrefetchAhead = 512;

HWY_INLINE FloatVector load_master(const SplitTile& tile, std::size_t i) {
  const Words words;
  const SignedWords signed_words;
  const hn::Rebind<std::uint16_t, Floats> halves;
  const hn::Rebind<std::int16_t, Floats> signed_halves;
  const auto high = hn::PromoteTo(words, hn::LoadU(halves, &tile.weight[i].bits));
  const auto low = hn::PromoteTo(signed_words, hn::LoadU(signed_halves, tile.remainder + i));
  return hn::BitCast(Floats(), hn::Add(hn::ShiftLeft<16>(high), hn::BitCast(words, low)));
}

HWY_INLINE void store_master(FloatVector master, const SplitTile& tile, std::size_t i) {
  const Words words;
  const hn::Rebind<std::uint16_t, Floats> halves;
  const hn::Rebind<std::int16_t, Floats> signed_halves;
  const auto bits = hn::BitCast(words, master);
  const auto high = hn::ShiftRight<16>(hn::Add(bits, hn::Set(words, 0x8000u)));
  hn::StoreU(hn::TruncateTo(halves, high), halves, &tile.weight[i].bits);
  hn::StoreU(hn::BitCast(signed_halves, hn::TruncateTo(halves, bits)), signed_halves, tile.remainder + i);
}

HWY_INLINE FloatVector load_master(const WholeTile& tile, std::size_t i) {
  return hn::LoadU(Floats(), tile.weight + i);
}
HWY_INLINE void store_master(FloatVector master, const WholeTile& tile, std::size_t i) {
  hn::StoreU(master, Floats(), tile.weight + i);
}

HWY_INLINE FloatVector load_master(const Fp16Tile& tile, std::size_t i) { return hn::LoadU(Floats(), tile.master + i); }
HWY_INLINE void store_master(FloatVector master, const Fp16Tile& tile, std::size_t i) {
  hn::StoreU(master, Floats(), tile.master + i);
  store_fp16(Floats(), master, tile.weight + i);
}

// Zero where the magnitude is below the smallest normal number; NaN stays.
HWY_INLINE FloatVector without_denormals(FloatVector value) {
  return hn::IfThenZeroElse(hn::Lt(hn::Abs(value), hn::Set(Floats(), 0x1.0p-126f)), value);
}

// Sets a lane's top bit where the magnitude's bits reach `limit_bits`: adding the distance carries into it.
HWY_INLINE WordVector reaches(FloatVector value, std::uint32_t limit_bits) {
  const Words words;
  const auto magnitude = hn::And(hn::BitCast(words, value), hn::Set(words, 0x7FFFFFFFu));
  return hn::Add(magnitude, hn::Set(words, 0x80000000u - limit_bits));
}

inline constexpr std::uint32_t kInfinityBits = 0x7F800000u;
template <class Tile>
inline constexpr std::uint32_t kMasterLimitOf =
    std::is_same_v<Tile, Fp16Tile> ? kFp16MasterLimitBits : kMasterLimitBits;

// A parameter's numbers, a vector of each; moments that the formula does not have stay unset. The constructor is
// written out because GCC compiles an implicit one for the baseline, which cannot make ARM's vectors.
struct Numbers {
  HWY_INLINE Numbers() {}  // NOLINT(modernize-use-equals-default)
  FloatVector gradient, master, moment1, moment2;
};

constexpr bool has_moment1(Formula formula) {
  return formula == Formula::adamw || formula == Formula::adam || formula == Formula::lion ||
         formula == Formula::momentum;
}
constexpr bool has_moment2(Formula formula) {
  return formula == Formula::adamw || formula == Formula::adam || formula == Formula::adagrad;
}
constexpr bool decays_apart(Formula formula) { return formula == Formula::adamw || formula == Formula::lion; }

// (a * x) + (b * y)
HWY_INLINE FloatVector mix(float a, FloatVector x, float b, FloatVector y) {
  const Floats d;
  return hn::Add(hn::Mul(hn::Set(d, a), x), hn::Mul(hn::Set(d, b), y));
}

// `magnitude`, which is positive, with the sign of `value`; zero where that is zero.
HWY_INLINE FloatVector with_sign_of(FloatVector value, float magnitude) {
  const Floats d;
  return hn::IfThenZeroElse(hn::Eq(value, hn::Zero(d)), hn::CopySignToAbs(hn::Set(d, magnitude), value));
}

// The formulas, in the order of update.hpp.
template <Formula kFormula>
HWY_INLINE void apply(const UpdateCoefficients& c, Numbers& n) {
  const Floats d;
  n.gradient = hn::Mul(n.gradient, hn::Set(d, c.gradient_scale));
  if constexpr (decays_apart(kFormula)) {
    n.master = hn::Mul(n.master, hn::Set(d, c.decay_factor));
  } else {
    n.gradient = hn::Add(n.gradient, hn::Mul(hn::Set(d, c.l2), n.master));
  }
  const auto step_size = hn::Set(d, c.step_size);
  if constexpr (kFormula == Formula::adamw || kFormula == Formula::adam) {
    n.moment1 = mix(c.beta1, n.moment1, c.one_minus_beta1, n.gradient);
    n.moment2 = hn::Add(hn::Mul(hn::Set(d, c.beta2), n.moment2),
                        hn::Mul(hn::Mul(hn::Set(d, c.one_minus_beta2), n.gradient), n.gradient));
    const auto denominator = hn::Add(hn::Div(hn::Sqrt(n.moment2), hn::Set(d, c.root_bias2)), hn::Set(d, c.epsilon));
    n.master = hn::Sub(n.master, hn::Div(hn::Mul(step_size, n.moment1), denominator));
  } else if constexpr (kFormula == Formula::adagrad) {
    n.moment2 = hn::Add(n.moment2, hn::Mul(n.gradient, n.gradient));
    const auto denominator = hn::Add(hn::Sqrt(n.moment2), hn::Set(d, c.epsilon));
    n.master = hn::Sub(n.master, hn::Div(hn::Mul(step_size, n.gradient), denominator));
  } else if constexpr (kFormula == Formula::lion) {
    const auto direction = mix(c.beta1, n.moment1, c.one_minus_beta1, n.gradient);
    n.master = hn::Sub(n.master, with_sign_of(direction, c.step_size));
    n.moment1 = mix(c.beta2, n.moment1, c.one_minus_beta2, n.gradient);
  } else if constexpr (kFormula == Formula::momentum) {
    n.moment1 = mix(c.beta1, n.moment1, c.one_minus_beta1, n.gradient);
    n.master = hn::Sub(n.master, hn::Mul(step_size, mix(c.gradient_part, n.gradient, c.moment_part, n.moment1)));
  } else {
    n.master = hn::Sub(n.master, hn::Mul(step_size, n.gradient));
  }
}

// rounding_bits' mixer on pairs of indices: 16 bits for either of a pair.
HWY_INLINE WordVector mixed_pairs(const Rounding& rounding, WordVector pair_index) {
  const Words words;
  auto x = hn::Xor(pair_index, hn::Set(words, rounding.key));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(words, 0x7FEB352Du));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(words, 0x846CA68Bu));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

// The random bits for element i of a tile and those after it. The sequence starts at a constant: GCC 12 makes one
// that starts anywhere else lane by lane, through memory, which takes longer than the rest of the update.
HWY_INLINE WordVector random_halves(const Rounding& rounding, std::size_t i) {
  const Words words;
  const auto index = hn::Add(hn::Iota(words, 0), hn::Set(words, static_cast<std::uint32_t>(rounding.first + i)));
  const auto x = mixed_pairs(rounding, hn::ShiftRight<1>(index));
  const auto is_odd = hn::TestBit(index, hn::Set(words, 1u));
  return hn::IfThenElse(is_odd, hn::ShiftRight<16>(x), hn::And(x, hn::Set(words, 0xFFFFu)));
}

template <MomentType kMoments>
inline constexpr DType kElementOf = kMoments == MomentType::bf16 ? DType::bf16 : DType::fp32;

template <MomentType kMoments>
HWY_INLINE FloatVector load_moment(const void* moment, std::size_t i) {
  return load_floats<kElementOf<kMoments>>(Floats(), moment, i);
}

// `added` is added to the half that is cut off.
HWY_INLINE void store_bf16(FloatVector value, WordVector added, void* moment, std::size_t i) {
  const Words words;
  const hn::Rebind<std::uint16_t, Floats> halves;
  const auto high = hn::ShiftRight<16>(hn::Add(hn::BitCast(words, value), added));
  hn::StoreU(hn::TruncateTo(halves, high), halves, static_cast<std::uint16_t*>(moment) + i);
}

template <MomentType kMoments>
HWY_INLINE void store_moment1(FloatVector value, void* moment, std::size_t i) {
  value = without_denormals(value);
  if constexpr (kMoments == MomentType::fp32) return hn::StoreU(value, Floats(), static_cast<float*>(moment) + i);
  if constexpr (kMoments == MomentType::bf16) store_bf16(value, hn::Set(Words(), 0x8000u), moment, i);
}

template <MomentType kMoments>
HWY_INLINE void store_moment2(FloatVector value, const Rounding& rounding, void* moment, std::size_t i) {
  value = without_denormals(value);
  if constexpr (kMoments == MomentType::fp32) return hn::StoreU(value, Floats(), static_cast<float*>(moment) + i);
  if constexpr (kMoments == MomentType::bf16) store_bf16(value, random_halves(rounding, i), moment, i);
}

// A moment of bf16 must not round to infinity either; a master's limit keeps half a step away from it, this a whole
// one.
template <MomentType kMoments>
inline constexpr std::uint32_t kMomentLimitBits = kMoments == MomentType::bf16 ? 0x7F7F0000u : kInfinityBits;

// `refused` collects lanes that may not be committed in its top bits.
template <Formula kFormula, MomentType kMoments, DType kGradient, class Tile>
HWY_INLINE void update_vector(const UpdateCoefficients& c, const Tile& tile, std::size_t i, WordVector& refused) {
  const Floats d;
  Numbers n;
  n.master = load_master(tile, i);
  n.gradient = load_floats<kGradient>(d, tile.gradient, i);
  if constexpr (has_moment1(kFormula)) n.moment1 = load_moment<kMoments>(tile.moment1, i);
  if constexpr (has_moment2(kFormula)) n.moment2 = load_moment<kMoments>(tile.moment2, i);
  apply<kFormula>(c, n);
  store_master(n.master, tile, i);
  refused = hn::Or(refused, reaches(n.master, kMasterLimitOf<Tile>));
  if constexpr (has_moment1(kFormula)) {
    store_moment1<kMoments>(n.moment1, tile.moment1, i);
    refused = hn::Or(refused, reaches(n.moment1, kMomentLimitBits<kMoments>));
  }
  if constexpr (has_moment2(kFormula)) {
    store_moment2<kMoments>(n.moment2, tile.rounding, tile.moment2, i);
    refused = hn::Or(refused, reaches(n.moment2, kMomentLimitBits<kMoments>));
  }
}

// --- arrays of 16 bits only
// --------------------------------------------------------------------------------------------- Two neighbours are in
// one word, so a vector of words is split into its even elements and its odd ones by a shift and a mask, which cost
// less than to widen and narrow, and put together in the same way. Each element goes through the same arithmetic.

template <Formula kFormula, MomentType kMoments, DType kGradient, class Tile>
inline constexpr bool kGoesByPairs = HWY_TARGET != HWY_SCALAR&& std::is_same_v<Tile, SplitTile>&& kGradient !=
                                         DType::fp32 &&
                                     (kMoments == MomentType::bf16 ||
                                      !(has_moment1(kFormula) || has_moment2(kFormula)));

inline constexpr std::uint32_t kHighHalf = 0xFFFF0000u;

HWY_INLINE WordVector load_words(const void* halves, std::size_t i) {
  return hn::LoadU(Words(), reinterpret_cast<const std::uint32_t*>(static_cast<const std::uint16_t*>(halves) + i));
}
HWY_INLINE void store_words(WordVector value, void* halves, std::size_t i) {
  hn::StoreU(value, Words(), reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(halves) + i));
}
HWY_INLINE WordVector high_half(WordVector words) { return hn::And(words, hn::Set(Words(), kHighHalf)); }
// The high half of `even` beside the high half of `odd`.
HWY_INLINE WordVector joined(WordVector even, WordVector odd) {
  return hn::Or(hn::ShiftRight<16>(even), high_half(odd));
}

template <DType kDtype>
HWY_INLINE void load_pairs(const void* elements, std::size_t i, FloatVector& even, FloatVector& odd) {
  const Floats d;
  const auto words = load_words(elements, i);
  if constexpr (kDtype == DType::bf16) {
    even = hn::BitCast(d, hn::ShiftLeft<16>(words));
    odd = hn::BitCast(d, high_half(words));
  } else {
    even = floats_of_fp16(d, hn::And(words, hn::Set(Words(), 0xFFFFu)));
    odd = floats_of_fp16(d, hn::ShiftRight<16>(words));
  }
}

HWY_INLINE void load_masters(const SplitTile& tile, std::size_t i, FloatVector& even, FloatVector& odd) {
  const Floats d;
  const Words words;
  const SignedWords signed_words;
  const auto high = load_words(tile.weight, i);
  const auto low = load_words(tile.remainder, i);
  const auto low_even = hn::ShiftRight<16>(hn::BitCast(signed_words, hn::ShiftLeft<16>(low)));
  const auto low_odd = hn::ShiftRight<16>(hn::BitCast(signed_words, low));
  even = hn::BitCast(d, hn::Add(hn::ShiftLeft<16>(high), hn::BitCast(words, low_even)));
  odd = hn::BitCast(d, hn::Add(high_half(high), hn::BitCast(words, low_odd)));
}

HWY_INLINE void store_masters(FloatVector even, FloatVector odd, const SplitTile& tile, std::size_t i) {
  const Words words;
  const auto half = hn::Set(words, 0x8000u);
  const auto even_bits = hn::BitCast(words, even);
  const auto odd_bits = hn::BitCast(words, odd);
  store_words(joined(hn::Add(even_bits, half), hn::Add(odd_bits, half)), tile.weight, i);
  store_words(hn::Or(hn::And(even_bits, hn::Set(words, 0xFFFFu)), hn::ShiftLeft<16>(odd_bits)), tile.remainder, i);
}

HWY_INLINE void store_moments(FloatVector even, FloatVector odd, WordVector added_even, WordVector added_odd,
                              void* moment, std::size_t i) {
  const Words words;
  const auto even_bits = hn::Add(hn::BitCast(words, without_denormals(even)), added_even);
  const auto odd_bits = hn::Add(hn::BitCast(words, without_denormals(odd)), added_odd);
  store_words(joined(even_bits, odd_bits), moment, i);
}

HWY_INLINE WordVector either_reaches(FloatVector a, FloatVector b, std::uint32_t limit_bits) {
  return hn::Or(reaches(a, limit_bits), reaches(b, limit_bits));
}

// Elements [i, i + twice the lanes). Pre: the tile's first index is even where its rounding counts.
template <Formula kFormula, DType kGradient>
HWY_INLINE void update_pairs(const UpdateCoefficients& c, const SplitTile& tile, std::size_t i, WordVector& refused) {
  const Words words;
  Numbers even, odd;
  load_masters(tile, i, even.master, odd.master);
  load_pairs<kGradient>(tile.gradient, i, even.gradient, odd.gradient);
  if constexpr (has_moment1(kFormula)) load_pairs<DType::bf16>(tile.moment1, i, even.moment1, odd.moment1);
  if constexpr (has_moment2(kFormula)) load_pairs<DType::bf16>(tile.moment2, i, even.moment2, odd.moment2);
  apply<kFormula>(c, even);
  apply<kFormula>(c, odd);
  store_masters(even.master, odd.master, tile, i);
  refused = hn::Or(refused, either_reaches(even.master, odd.master, kMasterLimitBits));
  if constexpr (has_moment1(kFormula)) {
    const auto half = hn::Set(words, 0x8000u);
    store_moments(even.moment1, odd.moment1, half, half, tile.moment1, i);
    refused = hn::Or(refused, either_reaches(even.moment1, odd.moment1, kMomentLimitBits<MomentType::bf16>));
  }
  if constexpr (has_moment2(kFormula)) {
    // first + i may wrap only from one pair to the next, as both are even.
    const auto first_pair = hn::Set(words, static_cast<std::uint32_t>(tile.rounding.first + i));
    const auto index = hn::Add(first_pair, hn::ShiftLeft<1>(hn::Iota(words, 0u)));
    const auto random = mixed_pairs(tile.rounding, hn::ShiftRight<1>(index));
    store_moments(even.moment2, odd.moment2, hn::And(random, hn::Set(words, 0xFFFFu)), hn::ShiftRight<16>(random),
                  tile.moment2, i);
    refused = hn::Or(refused, either_reaches(even.moment2, odd.moment2, kMomentLimitBits<MomentType::bf16>));
  }
}

HWY_INLINE void prefetch_master(const SplitTile& tile, std::size_t i) {
  hwy::Prefetch(tile.weight + i);
  hwy::Prefetch(tile.remainder + i);
}
HWY_INLINE void prefetch_master(const WholeTile& tile, std::size_t i) {
  hwy::Prefetch(tile.weight + i);
  hwy::Prefetch(tile.weight + i + 16);
}
// The weights' line, too: it is written whole, but a store still waits for it.
HWY_INLINE void prefetch_master(const Fp16Tile& tile, std::size_t i) {
  hwy::Prefetch(tile.weight + i);
  hwy::Prefetch(tile.master + i);
  hwy::Prefetch(tile.master + i + 16);
}

// The lines of one block. Beyond the end of a tile this fetches its neighbour, usually the next one to be updated.
template <DType kDtype>
HWY_INLINE void prefetch_array(const void* elements, std::size_t i) {
  const auto* at = static_cast<const std::byte*>(elements) + i * dtype_bytes(kDtype);
  hwy::Prefetch(at);
  if constexpr (kDtype == DType::fp32) hwy::Prefetch(at + 64);
}

template <Formula kFormula, MomentType kMoments, DType kGradient, class Tile>
HWY_INLINE void prefetch_block(const Tile& tile, std::size_t i) {
  prefetch_master(tile, i);
  if constexpr (has_moment1(kFormula)) prefetch_array<kElementOf<kMoments>>(tile.moment1, i);
  if constexpr (has_moment2(kFormula)) prefetch_array<kElementOf<kMoments>>(tile.moment2, i);
  prefetch_array<kGradient>(tile.gradient, i);
}

// One vector's worth of a tile, so that the elements after the last full vector go through the same arithmetic.
struct TailBuffer {
  HWY_ALIGN std::byte moment1[4 * kLanesMax];
  HWY_ALIGN std::byte moment2[4 * kLanesMax];
  HWY_ALIGN float master[kLanesMax];
  HWY_ALIGN bf16 weight[kLanesMax];
  HWY_ALIGN std::int16_t remainder[kLanesMax];
  HWY_ALIGN std::uint16_t fp16_weight[kLanesMax];
  HWY_ALIGN std::byte gradient[4 * kLanesMax];
};

inline void point_master_at(TailBuffer& buffer, SplitTile& tail) {
  tail.weight = buffer.weight;
  tail.remainder = buffer.remainder;
}
inline void point_master_at(TailBuffer& buffer, WholeTile& tail) { tail.weight = buffer.master; }
inline void point_master_at(TailBuffer& buffer, Fp16Tile& tail) {
  tail.weight = buffer.fp16_weight;
  tail.master = buffer.master;
}

inline void copy_master(const SplitTile& from, std::size_t i, const SplitTile& to, std::size_t j) {
  to.weight[j] = from.weight[i];
  to.remainder[j] = from.remainder[i];
}
inline void copy_master(const WholeTile& from, std::size_t i, const WholeTile& to, std::size_t j) {
  to.weight[j] = from.weight[i];
}
inline void copy_master(const Fp16Tile& from, std::size_t i, const Fp16Tile& to, std::size_t j) {
  to.weight[j] = from.weight[i];
  to.master[j] = from.master[i];
}

// Copies element i of `from` to element j of `to`.
template <DType kDtype>
HWY_INLINE void copy_element(const void* from, std::size_t i, void* to, std::size_t j) {
  constexpr std::size_t kBytes = dtype_bytes(kDtype);
  std::copy_n(static_cast<const std::byte*>(from) + i * kBytes, kBytes, static_cast<std::byte*>(to) + j * kBytes);
}

HWY_INLINE FloatVector load_gradient(const void* gradient, DType dtype, std::size_t i) {
  if (dtype == DType::bf16) return load_floats<DType::bf16>(Floats(), gradient, i);
  if (dtype == DType::fp16) return load_floats<DType::fp16>(Floats(), gradient, i);
  return load_floats<DType::fp32>(Floats(), gradient, i);
}

// Updates elements [first, tile.count), fewer than a block, a vector at a time in buffers; false when one of them may
// not be committed. Spare lanes of the last vector repeat the last element: their results are discarded, and they
// refuse only what that element refuses anyway. Not inlined, and one function for all gradient dtypes: it is a large
// part of what there is to compile, and a small part of what runs.
template <Formula kFormula, MomentType kMoments, class Tile>
HWY_NOINLINE bool update_rest(const UpdateCoefficients& c, const Tile& tile, std::size_t first) {
  const Floats d;
  const SignedWords signed_words;
  TailBuffer buffer;
  Tile tail;
  point_master_at(buffer, tail);
  tail.moment1 = buffer.moment1;
  tail.moment2 = buffer.moment2;
  tail.gradient = buffer.gradient;
  const std::size_t lanes = hn::Lanes(d);
  WordVector refused = hn::Zero(Words());
  for (; first < tile.count; first += lanes) {
    tail.rounding = {.key = tile.rounding.key, .first = static_cast<std::uint32_t>(tile.rounding.first + first)};
    for (std::size_t j = 0; j < lanes; ++j) {
      const std::size_t i = std::min(first + j, tile.count - 1);
      copy_master(tile, i, tail, j);
      if constexpr (has_moment1(kFormula)) copy_element<kElementOf<kMoments>>(tile.moment1, i, tail.moment1, j);
      if constexpr (has_moment2(kFormula)) copy_element<kElementOf<kMoments>>(tile.moment2, i, tail.moment2, j);
      if (tile.gradient_dtype == DType::fp32) {
        copy_element<DType::fp32>(tile.gradient, i, buffer.gradient, j);
      } else {
        copy_element<DType::bf16>(tile.gradient, i, buffer.gradient, j);  // fp16 has as many bytes
      }
    }
    const auto gradient = load_gradient(buffer.gradient, tile.gradient_dtype, 0);
    hn::StoreU(gradient, d, reinterpret_cast<float*>(buffer.gradient));
    update_vector<kFormula, kMoments, DType::fp32>(c, tail, 0, refused);
    for (std::size_t j = 0; j < lanes && first + j < tile.count; ++j) {
      copy_master(tail, j, tile, first + j);
      if constexpr (has_moment1(kFormula)) copy_element<kElementOf<kMoments>>(tail.moment1, j, tile.moment1, first + j);
      if constexpr (has_moment2(kFormula)) copy_element<kElementOf<kMoments>>(tail.moment2, j, tile.moment2, first + j);
    }
  }
  return hn::AllFalse(signed_words, hn::Lt(hn::BitCast(signed_words, refused), hn::Zero(signed_words)));
}

template <Formula kFormula, MomentType kMoments, DType kGradient, class Tile>
bool update_whole_or_split(const UpdateCoefficients& coefficients, const Tile& whole_tile) {
  // Copies whose address is never given away, or every store could be a store into them.
  const UpdateCoefficients c = coefficients;
  const Tile tile = whole_tile;
  const std::size_t lanes = hn::Lanes(Floats());
  WordVector refused = hn::Zero(Words());
  [[maybe_unused]] const bool by_pairs = tile.rounding.first % 2 == 0;  // neighbours share their random bits
  std::size_t i = 0;
  for (; i + kBlock <= tile.count; i += kBlock) {
    prefetch_block<kFormula, kMoments, kGradient>(tile, i + kPrefetchAhead);
    if constexpr (kGoesByPairs<kFormula, kMoments, kGradient, Tile>) {
      if (by_pairs) {
        for (std::size_t j = 0; j < kBlock; j += 2 * lanes) update_pairs<kFormula, kGradient>(c, tile, i + j, refused);
        continue;
      }
    }
    for (std::size_t j = 0; j < kBlock; j += lanes)
      update_vector<kFormula, kMoments, kGradient>(c, tile, i + j, refused);
  }
  const SignedWords signed_words;
  const bool sound = hn::AllFalse(signed_words, hn::Lt(hn::BitCast(signed_words, refused), hn::Zero(signed_words)));
  return i == tile.count ? sound : update_rest<kFormula, kMoments>(coefficients, whole_tile, i) && sound;
}

template <Formula kFormula, MomentType kMoments, class Tile>
bool update_by_gradient(const UpdateCoefficients& c, const Tile& tile) {
  switch (tile.gradient_dtype) {
    case DType::bf16:
      return update_whole_or_split<kFormula, kMoments, DType::bf16>(c, tile);
    case DType::fp16:
      return update_whole_or_split<kFormula, kMoments, DType::fp16>(c, tile);
    case DType::fp32:
      return update_whole_or_split<kFormula, kMoments, DType::fp32>(c, tile);
  }
  return false;
}

template <Formula kFormula, class Tile>
bool update_by_dtype(const UpdateCoefficients& c, const Tile& tile) {
  if constexpr (has_moment1(kFormula) || has_moment2(kFormula)) {
    if (tile.moment_type == MomentType::bf16) return update_by_gradient<kFormula, MomentType::bf16>(c, tile);
  }
  return update_by_gradient<kFormula, MomentType::fp32>(c, tile);
}

template <class Tile>
bool update_by_formula(const UpdateCoefficients& c, const Tile& tile) {
  switch (c.formula) {
    case Formula::adamw:
      return update_by_dtype<Formula::adamw>(c, tile);
    case Formula::adam:
      return update_by_dtype<Formula::adam>(c, tile);
    case Formula::adagrad:
      return update_by_dtype<Formula::adagrad>(c, tile);
    case Formula::lion:
      return update_by_dtype<Formula::lion>(c, tile);
    case Formula::momentum:
      return update_by_dtype<Formula::momentum>(c, tile);
    case Formula::sgd:
      return update_by_dtype<Formula::sgd>(c, tile);
  }
  return false;
}

inline const char* instruction_set() { return hwy::TargetName(HWY_TARGET); }

}  // namespace hoist::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_OPTIM_UPDATE_INL_H_
