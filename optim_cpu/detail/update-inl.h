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

#include <hoist/optim_cpu/block_fp8.hpp>
#include <hoist/optim_cpu/detail/gradient-inl.h>
#include <hoist/optim_cpu/detail/random-inl.h>
#include <hoist/optim_cpu/update.hpp>

HWY_BEFORE_NAMESPACE();
namespace hoist::optim::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using SignedWords = hn::RebindToSigned<Floats>;
using FloatVector = hn::Vec<Floats>;

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

HWY_INLINE WordVector magnitude_of(FloatVector value) {
  return hn::And(hn::BitCast(Words(), value), hn::Set(Words(), 0x7FFFFFFFu));
}

// Returns `bits`, or zero where the moment is denormal. Second moments have no sign.
template <Moment kMoment>
HWY_INLINE WordVector unless_denormal(FloatVector moment, WordVector bits) {
  const Words words;
#if HWY_TARGET == HWY_AVX3
  const __mmask16 is_normal = _mm512_test_epi32_mask(hn::BitCast(words, moment).raw, hn::Set(words, 0x7F800000u).raw);
  return hn::IfThenElseZero(hn::Mask<Words>{is_normal}, bits);
#else
  if constexpr (kMoment == Moment::second)
    return hn::IfThenZeroElse(hn::RebindMask(words, hn::Lt(moment, hn::Set(Floats(), 0x1.0p-126f))), bits);
  const SignedWords signed_words;
  const auto is_denormal = hn::Lt(hn::BitCast(signed_words, magnitude_of(moment)), hn::Set(signed_words, 0x800000));
  return hn::IfThenZeroElse(hn::RebindMask(words, is_denormal), bits);
#endif
}
template <Moment kMoment>
HWY_INLINE FloatVector without_denormals(FloatVector moment) {
  return hn::BitCast(Floats(), unless_denormal<kMoment>(moment, hn::BitCast(Words(), moment)));
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

constexpr bool decays_apart(Formula formula) { return formula == Formula::adamw || formula == Formula::lion; }

// (a * x) + (b * y)
HWY_INLINE FloatVector mix(float a, FloatVector x, float b, FloatVector y) {
  const Floats d;
  return hn::Add(hn::Mul(hn::Set(d, a), x), hn::Mul(hn::Set(d, b), y));
}

// x + (factor * y), and x if the factor is 0, whatever y is.
HWY_INLINE FloatVector add_scaled(FloatVector x, float factor, FloatVector y) {
  return factor == 0 ? x : hn::Add(x, hn::Mul(hn::Set(Floats(), factor), y));
}

// `magnitude`, which is positive, with the sign of `value`; zero where that is zero, and NaN where it is NaN.
HWY_INLINE FloatVector with_sign_of(FloatVector value, float magnitude) {
  const Floats d;
  const auto size = hn::Abs(value);
  return hn::IfThenElse(hn::Gt(size, hn::Zero(d)), hn::CopySignToAbs(hn::Set(d, magnitude), value), size);
}

// The formulas, in the order of update.hpp.
template <Formula kFormula>
HWY_INLINE void apply(const UpdateCoefficients& c, Numbers& n) {
  const Floats d;
  n.gradient = hn::Mul(n.gradient, hn::Set(d, c.gradient_scale));
  if constexpr (decays_apart(kFormula)) {
    n.master = hn::Mul(n.master, hn::Set(d, c.decay_factor));
  } else {
    n.gradient = add_scaled(n.gradient, c.l2, n.master);
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
    const auto direction = add_scaled(hn::Mul(hn::Set(d, c.moment_part), n.moment1), c.gradient_part, n.gradient);
    n.master = hn::Sub(n.master, hn::Mul(step_size, direction));
  } else {
    n.master = hn::Sub(n.master, hn::Mul(step_size, n.gradient));
  }
}

template <MomentType kMoments>
inline constexpr DType kElementOf = kMoments == MomentType::bf16 ? DType::bf16 : DType::fp32;

template <MomentType kMoments>
HWY_INLINE FloatVector load_moment(const void* moment, std::size_t i) {
  return load_floats<kElementOf<kMoments>>(Floats(), moment, i);
}

// `added` is added to the half of a bf16 moment that is cut off.
template <Moment kMoment, MomentType kMoments>
HWY_INLINE void store_moment(FloatVector value, WordVector added, void* moment, std::size_t i) {
  if constexpr (kMoments == MomentType::fp32) {
    hn::StoreU(without_denormals<kMoment>(value), Floats(), static_cast<float*>(moment) + i);
  } else if constexpr (kMoments == MomentType::bf16) {
    const hn::Rebind<std::uint16_t, Floats> halves;
    const auto rounded = unless_denormal<kMoment>(value, hn::Add(hn::BitCast(Words(), value), added));
    hn::StoreU(hn::TruncateTo(halves, hn::ShiftRight<16>(rounded)), halves, static_cast<std::uint16_t*>(moment) + i);
  }
}

// A bf16 moment must not round to infinity either. Its limit is a whole bf16 step below infinity, since random bits can
// round up by nearly a step; a master's limit is half a step below.
template <MomentType kMoments>
inline constexpr std::uint32_t kMomentLimitBits = kMoments == MomentType::bf16 ? kBf16MomentLimitBits : kInfinityBits;

// The largest resulting magnitudes (bits), to refuse a commit. Those of NaN are larger than any number's.
struct Largest {
  WordVector master, moment;
};
HWY_INLINE Largest none() { return {hn::Zero(Words()), hn::Zero(Words())}; }

template <Moment kMoment>
HWY_INLINE void note_moment(FloatVector value, Largest& largest) {
  const auto magnitude = kMoment == Moment::first ? magnitude_of(value) : hn::BitCast(Words(), value);
  largest.moment = hn::Max(largest.moment, magnitude);
}

template <MomentType kMoments, class Tile>
HWY_INLINE bool is_sound(const Largest& largest) {
  const Words words;
  const auto fine = hn::And(hn::Lt(largest.master, hn::Set(words, kMasterLimitOf<Tile>)),
                            hn::Lt(largest.moment, hn::Set(words, kMomentLimitBits<kMoments>)));
  return hn::AllTrue(words, fine);
}

template <Formula kFormula, MomentType kMoments>
inline constexpr bool kRoundsMoment2 = kMoments == MomentType::bf16&& uses_moment2(kFormula);

// `added` is what rounds the second moment.
template <Formula kFormula, MomentType kMoments, DType kGradient, class Tile>
HWY_INLINE void update_vector(const UpdateCoefficients& c, const Tile& tile, std::size_t i, WordVector added,
                              Largest& largest) {
  const Floats d;
  Numbers n;
  n.master = load_master(tile, i);
  n.gradient = load_floats<kGradient>(d, tile.gradient, i);
  if constexpr (uses_moment1(kFormula)) n.moment1 = load_moment<kMoments>(tile.moment1, i);
  if constexpr (uses_moment2(kFormula)) n.moment2 = load_moment<kMoments>(tile.moment2, i);
  apply<kFormula>(c, n);
  store_master(n.master, tile, i);
  largest.master = hn::Max(largest.master, magnitude_of(n.master));
  if constexpr (uses_moment1(kFormula)) {
    store_moment<Moment::first, kMoments>(n.moment1, hn::Set(Words(), 0x8000u), tile.moment1, i);
    note_moment<Moment::first>(n.moment1, largest);
  }
  if constexpr (uses_moment2(kFormula)) {
    store_moment<Moment::second, kMoments>(n.moment2, added, tile.moment2, i);
    note_moment<Moment::second>(n.moment2, largest);
  }
}

// --- arrays of 16 bits only ------------------------------------------------------------------------------------------
//
// Two neighbours are in one word, so a vector of words is split into its even elements and its odd ones by a shift and
// a mask, which cost less than to widen and narrow, and put together in the same way. Each element goes through the
// same arithmetic.

template <Formula kFormula, MomentType kMoments, DType kGradient, class Tile>
inline constexpr bool kGoesByPairs = HWY_TARGET != HWY_SCALAR&& std::is_same_v<Tile, SplitTile>&& kGradient !=
                                         DType::fp32 &&
                                     (kMoments == MomentType::bf16 ||
                                      !(uses_moment1(kFormula) || uses_moment2(kFormula)));

#if HWY_TARGET != HWY_SCALAR

using Halves = hn::Repartition<std::uint16_t, Floats>;
using SignedHalves = hn::Repartition<std::int16_t, Floats>;
using HalfVector = hn::Vec<Halves>;

inline constexpr std::uint32_t kHighHalf = 0xFFFF0000u;

HWY_INLINE WordVector load_words(const void* halves, std::size_t i) {
  return hn::LoadU(Words(), reinterpret_cast<const std::uint32_t*>(static_cast<const std::uint16_t*>(halves) + i));
}
HWY_INLINE void store_words(WordVector value, void* halves, std::size_t i) {
  hn::StoreU(value, Words(), reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(halves) + i));
}
HWY_INLINE WordVector high_half(WordVector words) { return hn::And(words, hn::Set(Words(), kHighHalf)); }

// The lower halves of the words of `even` beside the upper halves of those of `odd`: in the order of the elements.
HWY_INLINE HalfVector side_by_side(WordVector even, WordVector odd) {
  return hn::OddEven(hn::BitCast(Halves(), odd), hn::BitCast(Halves(), even));
}
HWY_INLINE HalfVector upper_halves(WordVector even, WordVector odd) {
  return side_by_side(hn::ShiftRight<16>(even), odd);
}
HWY_INLINE HalfVector lower_halves(WordVector even, WordVector odd) {
  return side_by_side(even, hn::ShiftLeft<16>(odd));
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
  const Halves halves;
  const SignedHalves signed_halves;
  const auto high = hn::BitCast(halves, load_words(tile.weight, i));
  const auto low = load_words(tile.remainder, i);
  // A weight was rounded up where the remainder is negative.
  const auto sign = hn::BitCast(halves, hn::ShiftRight<15>(hn::BitCast(signed_halves, low)));
  const auto cut = hn::BitCast(words, hn::Add(high, sign));
  even = hn::BitCast(d, lower_halves(low, cut));
  odd = hn::BitCast(d, upper_halves(low, cut));
}

HWY_INLINE void store_masters(FloatVector even, FloatVector odd, const SplitTile& tile, std::size_t i) {
  const Words words;
  const auto half = hn::Set(words, 0x8000u);
  const auto even_bits = hn::BitCast(words, even);
  const auto odd_bits = hn::BitCast(words, odd);
  const auto weights = upper_halves(hn::Add(even_bits, half), hn::Add(odd_bits, half));
  store_words(hn::BitCast(words, weights), tile.weight, i);
  store_words(hn::BitCast(words, lower_halves(even_bits, odd_bits)), tile.remainder, i);
}

template <Moment kMoment>
HWY_INLINE void store_moments(FloatVector even, FloatVector odd, const WordPair& added, void* moment, std::size_t i) {
  const Words words;
  const auto even_bits = unless_denormal<kMoment>(even, hn::Add(hn::BitCast(words, even), added.even));
  const auto odd_bits = unless_denormal<kMoment>(odd, hn::Add(hn::BitCast(words, odd), added.odd));
  store_words(hn::BitCast(words, upper_halves(even_bits, odd_bits)), moment, i);
}

HWY_INLINE void note_masters(FloatVector even, FloatVector odd, Largest& largest) {
  largest.master = hn::Max(largest.master, hn::Max(magnitude_of(even), magnitude_of(odd)));
}

// Elements [i, i + twice the lanes).
template <Formula kFormula, DType kGradient>
HWY_INLINE void update_pairs(const UpdateCoefficients& c, const SplitTile& tile, std::size_t i, RoundingHalves& random,
                             Largest& largest) {
  Numbers even, odd;
  load_masters(tile, i, even.master, odd.master);
  load_pairs<kGradient>(tile.gradient, i, even.gradient, odd.gradient);
  if constexpr (uses_moment1(kFormula)) load_pairs<DType::bf16>(tile.moment1, i, even.moment1, odd.moment1);
  if constexpr (uses_moment2(kFormula)) load_pairs<DType::bf16>(tile.moment2, i, even.moment2, odd.moment2);
  apply<kFormula>(c, even);
  apply<kFormula>(c, odd);
  store_masters(even.master, odd.master, tile, i);
  note_masters(even.master, odd.master, largest);
  if constexpr (uses_moment1(kFormula)) {
    const auto half = hn::Set(Words(), 0x8000u);
    store_moments<Moment::first>(even.moment1, odd.moment1, {half, half}, tile.moment1, i);
    note_moment<Moment::first>(even.moment1, largest);
    note_moment<Moment::first>(odd.moment1, largest);
  }
  if constexpr (uses_moment2(kFormula)) {
    store_moments<Moment::second>(even.moment2, odd.moment2, random.at(i), tile.moment2, i);
    note_moment<Moment::second>(even.moment2, largest);
    note_moment<Moment::second>(odd.moment2, largest);
  }
}

#endif  // HWY_TARGET != HWY_SCALAR

HWY_INLINE void prefetch_master(const SplitTile& tile, std::size_t i) {
  hwy::Prefetch(tile.weight + i);
  hwy::Prefetch(tile.remainder + i);
}
HWY_INLINE void prefetch_master(const WholeTile& tile, std::size_t i) {
  hwy::Prefetch(tile.weight + i);
  hwy::Prefetch(tile.weight + i + 16);
}
// Prefetches the weights' line, too: the kernel overwrites all of it, but a store still waits for the line.
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
  if constexpr (uses_moment1(kFormula)) prefetch_array<kElementOf<kMoments>>(tile.moment1, i);
  if constexpr (uses_moment2(kFormula)) prefetch_array<kElementOf<kMoments>>(tile.moment2, i);
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
// refuse only what that element refuses anyway. Not inlined, and one function for all gradient dtypes: this
// code takes much of the compile time and little of the run time.
template <Formula kFormula, MomentType kMoments, class Tile>
HWY_NOINLINE bool update_rest(const UpdateCoefficients& c, const Tile& tile, std::size_t first) {
  const Floats d;
  TailBuffer buffer;
  Tile tail;
  point_master_at(buffer, tail);
  tail.moment1 = buffer.moment1;
  tail.moment2 = buffer.moment2;
  tail.gradient = buffer.gradient;
  const std::size_t lanes = hn::Lanes(d);
  Largest largest = none();
  for (; first < tile.count; first += lanes) {
    for (std::size_t j = 0; j < lanes; ++j) {
      const std::size_t i = std::min(first + j, tile.count - 1);
      copy_master(tile, i, tail, j);
      if constexpr (uses_moment1(kFormula)) copy_element<kElementOf<kMoments>>(tile.moment1, i, tail.moment1, j);
      if constexpr (uses_moment2(kFormula)) copy_element<kElementOf<kMoments>>(tile.moment2, i, tail.moment2, j);
      if (tile.gradient_dtype == DType::fp32) {
        copy_element<DType::fp32>(tile.gradient, i, buffer.gradient, j);
      } else {
        copy_element<DType::bf16>(tile.gradient, i, buffer.gradient, j);  // fp16 has as many bytes
      }
    }
    const auto gradient = load_gradient(buffer.gradient, tile.gradient_dtype, 0);
    hn::StoreU(gradient, d, reinterpret_cast<float*>(buffer.gradient));
    WordVector added = hn::Zero(Words());
    if constexpr (kRoundsMoment2<kFormula, kMoments>)
      added = rounding_halves(tile.rounding.key, static_cast<std::uint32_t>(tile.rounding.first + first));
    update_vector<kFormula, kMoments, DType::fp32>(c, tail, 0, added, largest);
    for (std::size_t j = 0; j < lanes && first + j < tile.count; ++j) {
      copy_master(tail, j, tile, first + j);
      if constexpr (uses_moment1(kFormula))
        copy_element<kElementOf<kMoments>>(tail.moment1, j, tile.moment1, first + j);
      if constexpr (uses_moment2(kFormula))
        copy_element<kElementOf<kMoments>>(tail.moment2, j, tile.moment2, first + j);
    }
  }
  return is_sound<kMoments, Tile>(largest);
}

template <Formula kFormula, MomentType kMoments, DType kGradient, class Tile>
bool update_whole_or_split(const UpdateCoefficients& coefficients, const Tile& whole_tile) {
  // Copies whose address is never taken: the compiler would otherwise assume that any store may change them.
  const UpdateCoefficients c = coefficients;
  const Tile tile = whole_tile;
  const std::size_t lanes = hn::Lanes(Floats());
  Largest largest = none();
  [[maybe_unused]] RoundingHalves random(tile.rounding);
  std::size_t i = 0;
  for (; i + kBlock <= tile.count; i += kBlock) {
    prefetch_block<kFormula, kMoments, kGradient>(tile, i + kPrefetchAhead);
    for (std::size_t j = 0; j < kBlock; j += 2 * lanes) {
      if constexpr (kGoesByPairs<kFormula, kMoments, kGradient, Tile>) {
        update_pairs<kFormula, kGradient>(c, tile, i + j, random, largest);
      } else {
        WordPair added{hn::Zero(Words()), hn::Zero(Words())};
        if constexpr (kRoundsMoment2<kFormula, kMoments>) added = random.in_order(i + j);
        update_vector<kFormula, kMoments, kGradient>(c, tile, i + j, added.even, largest);
        update_vector<kFormula, kMoments, kGradient>(c, tile, i + j + lanes, added.odd, largest);
      }
    }
  }
  const bool sound = is_sound<kMoments, Tile>(largest);
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
  if constexpr (uses_moment1(kFormula) || uses_moment2(kFormula)) {
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
