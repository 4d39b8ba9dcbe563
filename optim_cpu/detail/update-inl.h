// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/update-inl.h - the update kernels. Compiled once per instruction set by update.cpp.
#if defined(HOIST_OPTIM_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_OPTIM_UPDATE_INL_H_
#undef HOIST_OPTIM_UPDATE_INL_H_
#else
#define HOIST_OPTIM_UPDATE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

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
inline constexpr std::size_t kBlock = std::max<std::size_t>(32, kLanesMax);
// How far ahead of the arithmetic each stream is fetched: 2 KiB of the fp32 streams, 1 KiB of the others. A core keeps
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

// A parameter's numbers, a vector of each; moments that the formula has not stay unset.
struct Numbers {
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

// `refused` collects lanes that may not be committed in its top bits.
template <Formula kFormula, DType kGradient, class Tile>
HWY_INLINE void update_vector(const UpdateCoefficients& c, const Tile& tile, std::size_t i, WordVector& refused) {
  const Floats d;
  Numbers n;
  n.master = load_master(tile, i);
  n.gradient = load_floats<kGradient>(d, tile.gradient, i);
  if constexpr (has_moment1(kFormula)) n.moment1 = hn::LoadU(d, tile.moment1 + i);
  if constexpr (has_moment2(kFormula)) n.moment2 = hn::LoadU(d, tile.moment2 + i);
  apply<kFormula>(c, n);
  store_master(n.master, tile, i);
  refused = hn::Or(refused, reaches(n.master, kMasterLimitBits));
  if constexpr (has_moment1(kFormula)) {
    hn::StoreU(without_denormals(n.moment1), d, tile.moment1 + i);
    refused = hn::Or(refused, reaches(n.moment1, kInfinityBits));
  }
  if constexpr (has_moment2(kFormula)) {
    hn::StoreU(without_denormals(n.moment2), d, tile.moment2 + i);
    refused = hn::Or(refused, reaches(n.moment2, kInfinityBits));
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

// The lines of one block. Beyond the end of a tile this fetches its neighbour, usually the next one to be updated.
template <Formula kFormula, DType kGradient, class Tile>
HWY_INLINE void prefetch_block(const Tile& tile, std::size_t i) {
  prefetch_master(tile, i);
  if constexpr (has_moment1(kFormula)) {
    hwy::Prefetch(tile.moment1 + i);
    hwy::Prefetch(tile.moment1 + i + 16);
  }
  if constexpr (has_moment2(kFormula)) {
    hwy::Prefetch(tile.moment2 + i);
    hwy::Prefetch(tile.moment2 + i + 16);
  }
  const auto* gradient = static_cast<const std::byte*>(tile.gradient) + i * dtype_bytes(kGradient);
  hwy::Prefetch(gradient);
  if constexpr (kGradient == DType::fp32) hwy::Prefetch(gradient + 64);
}

// One vector's worth of a tile, so that the elements after the last full vector go through the same arithmetic.
struct TailBuffer {
  HWY_ALIGN float moment1[kLanesMax];
  HWY_ALIGN float moment2[kLanesMax];
  HWY_ALIGN float master[kLanesMax];
  HWY_ALIGN bf16 weight[kLanesMax];
  HWY_ALIGN std::int16_t remainder[kLanesMax];
  HWY_ALIGN std::byte gradient[4 * kLanesMax];
};

inline void point_master_at(TailBuffer& buffer, SplitTile& tail) {
  tail.weight = buffer.weight;
  tail.remainder = buffer.remainder;
}
inline void point_master_at(TailBuffer& buffer, WholeTile& tail) { tail.weight = buffer.master; }

inline void copy_master(const SplitTile& from, std::size_t i, const SplitTile& to, std::size_t j) {
  to.weight[j] = from.weight[i];
  to.remainder[j] = from.remainder[i];
}
inline void copy_master(const WholeTile& from, std::size_t i, const WholeTile& to, std::size_t j) {
  to.weight[j] = from.weight[i];
}

// Elements [first, tile.count), fewer than a vector. Spare lanes repeat the last element: its result is discarded, and
// it refuses only what that element refuses anyway.
template <Formula kFormula, DType kGradient, class Tile>
HWY_INLINE void update_tail(const UpdateCoefficients& c, const Tile& tile, std::size_t first, WordVector& refused) {
  TailBuffer buffer;
  Tile tail;
  point_master_at(buffer, tail);
  tail.moment1 = buffer.moment1;
  tail.moment2 = buffer.moment2;
  tail.gradient = buffer.gradient;
  constexpr std::size_t kGradientBytes = dtype_bytes(kGradient);
  const std::size_t lanes = hn::Lanes(Floats());
  for (std::size_t j = 0; j < lanes; ++j) {
    const std::size_t i = std::min(first + j, tile.count - 1);
    copy_master(tile, i, tail, j);
    if constexpr (has_moment1(kFormula)) tail.moment1[j] = tile.moment1[i];
    if constexpr (has_moment2(kFormula)) tail.moment2[j] = tile.moment2[i];
    std::copy_n(static_cast<const std::byte*>(tile.gradient) + i * kGradientBytes, kGradientBytes,
                buffer.gradient + j * kGradientBytes);
  }
  update_vector<kFormula, kGradient>(c, tail, 0, refused);
  for (std::size_t j = 0; first + j < tile.count; ++j) {
    copy_master(tail, j, tile, first + j);
    if constexpr (has_moment1(kFormula)) tile.moment1[first + j] = tail.moment1[j];
    if constexpr (has_moment2(kFormula)) tile.moment2[first + j] = tail.moment2[j];
  }
}

template <Formula kFormula, DType kGradient, class Tile>
bool update_whole_or_split(const UpdateCoefficients& coefficients, const Tile& whole_tile) {
  // Copies whose address is never given away, or every store could be a store into them.
  const UpdateCoefficients c = coefficients;
  const Tile tile = whole_tile;
  const std::size_t lanes = hn::Lanes(Floats());
  WordVector refused = hn::Zero(Words());
  std::size_t i = 0;
  for (; i + kBlock <= tile.count; i += kBlock) {
    prefetch_block<kFormula, kGradient>(tile, i + kPrefetchAhead);
    for (std::size_t j = 0; j < kBlock; j += lanes) update_vector<kFormula, kGradient>(c, tile, i + j, refused);
  }
  for (; i + lanes <= tile.count; i += lanes) update_vector<kFormula, kGradient>(c, tile, i, refused);
  if (i < tile.count) update_tail<kFormula, kGradient>(c, tile, i, refused);
  const SignedWords signed_words;
  return hn::AllFalse(signed_words, hn::Lt(hn::BitCast(signed_words, refused), hn::Zero(signed_words)));
}

template <Formula kFormula, class Tile>
bool update_by_dtype(const UpdateCoefficients& c, const Tile& tile) {
  switch (tile.gradient_dtype) {
    case DType::bf16:
      return update_whole_or_split<kFormula, DType::bf16>(c, tile);
    case DType::fp16:
      return update_whole_or_split<kFormula, DType::fp16>(c, tile);
    case DType::fp32:
      return update_whole_or_split<kFormula, DType::fp32>(c, tile);
  }
  return false;
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

inline bool update_split(const UpdateCoefficients& c, const SplitTile& tile) { return update_by_formula(c, tile); }
inline bool update_whole(const UpdateCoefficients& c, const WholeTile& tile) { return update_by_formula(c, tile); }

inline const char* instruction_set() { return hwy::TargetName(HWY_TARGET); }

}  // namespace hoist::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_OPTIM_UPDATE_INL_H_
