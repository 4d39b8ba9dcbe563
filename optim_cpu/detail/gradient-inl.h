// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/gradient-inl.h - gradients of any dtype as exact floats, and floats as fp16. Compiled once per
// instruction set.
#if defined(HOIST_OPTIM_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_OPTIM_GRADIENT_INL_H_
#undef HOIST_OPTIM_GRADIENT_INL_H_
#else
#define HOIST_OPTIM_GRADIENT_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include <hwy/highway.h>

#include <hoist/core/dtype.hpp>

HWY_BEFORE_NAMESPACE();
namespace hoist::optim::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// x86 processors with AVX2 convert fp16 in one instruction, with the bits of the integers below for all but NaN: it
// rounds to nearest even and keeps denormals, whatever the thread's mode.
#undef HOIST_CONVERTS_FP16
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
#define HOIST_CONVERTS_FP16 1
#else
#define HOIST_CONVERTS_FP16 0
#endif

#if HOIST_CONVERTS_FP16

template <class D>
using Fp16Of = hn::Rebind<hwy::float16_t, D>;
template <class D>
using BitsOfFp16Of = hn::Rebind<std::uint16_t, D>;

template <class D>
HWY_INLINE hn::Vec<D> load_fp16(D d, const std::uint16_t* elements) {
  return hn::PromoteTo(d, hn::BitCast(Fp16Of<D>(), hn::LoadU(BitsOfFp16Of<D>(), elements)));
}
template <class D>
HWY_INLINE void store_fp16(D d, hn::Vec<D> value, std::uint16_t* elements) {
  (void)d;
  hn::StoreU(hn::BitCast(BitsOfFp16Of<D>(), hn::DemoteTo(Fp16Of<D>(), value)), BitsOfFp16Of<D>(), elements);
}
// The floats of Lanes(d) bit patterns, one in the low half of each lane, whose upper half is zero.
template <class D, class U32 = hn::Vec<hn::RebindToUnsigned<D>>>
HWY_INLINE hn::Vec<D> floats_of_fp16(D d, U32 bits) {
  return hn::PromoteTo(d, hn::BitCast(Fp16Of<D>(), hn::TruncateTo(BitsOfFp16Of<D>(), bits)));
}
// The fp16 bit patterns of the floats of `value`, one in the low half of each lane.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> fp16_of_floats(D, hn::Vec<D> value) {
  return hn::PromoteTo(hn::RebindToUnsigned<D>(), hn::BitCast(BitsOfFp16Of<D>(), hn::DemoteTo(Fp16Of<D>(), value)));
}

#else

// The floats of Lanes(d) fp16 bit patterns, one in the low half of each lane. Uses integers instead of the
// hardware's conversion, which some targets lack. Exact for every pattern.
template <class D, class U32 = hn::Vec<hn::RebindToUnsigned<D>>>
HWY_INLINE hn::Vec<D> floats_of_fp16(D d, U32 bits) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000u)));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFu));
  const auto rebias = hn::Set(du, 112u << 23);  // 127 - 15
  const auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
  const auto special = hn::Add(normal, rebias);  // exponent 31 becomes 255
  const auto subnormal = hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)), hn::Set(d, 0x1.0p-24f));
  const auto signed_magnitude = hn::BitCast(di, magnitude);
  const auto is_special = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, 0x7BFF)));
  const auto is_subnormal = hn::RebindMask(du, hn::Lt(signed_magnitude, hn::Set(di, 0x0400)));
  const auto finite = hn::IfThenElse(is_subnormal, hn::BitCast(du, subnormal), normal);
  return hn::BitCast(d, hn::Or(hn::IfThenElse(is_special, special, finite), sign));
}

// float_to_fp16 of every lane: bit patterns in the low halves.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> fp16_of_floats(D d, hn::Vec<D> value) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(du, value);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000u));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFFu));
  const auto signed_magnitude = hn::BitCast(di, magnitude);
  // Rounds to nearest even: adds half of the last bit that stays, less one unless that bit is 1. The same addition
  // changes the exponent's bias from 127 to 15.
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto carried = hn::Add(hn::Add(magnitude, hn::Set(du, 0xFFFu - (112u << 23))), odd);
  const auto normal = hn::Min(hn::BitCast(di, hn::ShiftRight<13>(carried)), hn::Set(di, 0x7C00));
  // Floats from 0.5 to 1 are multiples of 2^-24, fp16's smallest number, so the addition rounds to a count of these.
  const auto beside_half = hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f));
  const auto subnormal = hn::Sub(hn::BitCast(di, beside_half), hn::Set(di, 0x3F000000));
  const auto is_subnormal = hn::Lt(signed_magnitude, hn::Set(di, 0x38800000));
  const auto is_nan = hn::Gt(signed_magnitude, hn::Set(di, 0x7F800000));
  const auto number = hn::IfThenElse(is_subnormal, subnormal, normal);
  return hn::Or(hn::BitCast(du, hn::IfThenElse(is_nan, hn::Set(di, 0x7E00), number)), sign);
}

template <class D>
HWY_INLINE hn::Vec<D> load_fp16(D d, const std::uint16_t* elements) {
  return floats_of_fp16(d,
                        hn::PromoteTo(hn::RebindToUnsigned<D>(), hn::LoadU(hn::Rebind<std::uint16_t, D>(), elements)));
}
template <class D>
HWY_INLINE void store_fp16(D d, hn::Vec<D> value, std::uint16_t* elements) {
  const hn::Rebind<std::uint16_t, D> d16;
  hn::StoreU(hn::TruncateTo(d16, fp16_of_floats(d, value)), d16, elements);
}

#endif  // HOIST_CONVERTS_FP16

// Elements [first, first + Lanes(d)) of an array of `kDtype`, aligned to its element.
template <DType kDtype, class D>
HWY_INLINE hn::Vec<D> load_floats(D d, const void* elements, std::size_t first) {
  if constexpr (kDtype == DType::fp32) {
    return hn::LoadU(d, static_cast<const float*>(elements) + first);
  } else if constexpr (kDtype == DType::fp16) {
    return load_fp16(d, static_cast<const std::uint16_t*>(elements) + first);
  } else {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<std::uint16_t, D> d16;
    const auto bits = hn::PromoteTo(du, hn::LoadU(d16, static_cast<const std::uint16_t*>(elements) + first));
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  }
}

}  // namespace hoist::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_OPTIM_GRADIENT_INL_H_
