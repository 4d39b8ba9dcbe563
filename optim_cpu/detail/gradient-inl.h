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

// The floats of Lanes(d) fp16 bit patterns, one in the low half of each lane. In integers rather than by the
// hardware's conversion, which some targets lack and others quiet signalling NaNs with; exact for every pattern.
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

// float_to_fp16 of every lane: bit patterns in the low halves. Not the hardware's conversion, for the same reasons.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> fp16_of_floats(D d, hn::Vec<D> value) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(du, value);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000u));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFFu));
  const auto signed_magnitude = hn::BitCast(di, magnitude);
  // Half of what falls away, less one bit where the result would be even already; exponents from 127 to 15.
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1u));
  const auto carried = hn::Add(hn::Add(magnitude, hn::Set(du, 0xFFFu - (112u << 23))), odd);
  const auto normal = hn::Min(hn::BitCast(di, hn::ShiftRight<13>(carried)), hn::Set(di, 0x7C00));
  // A float beside 0.5 has steps of 2^-24, fp16's smallest number: the addition rounds to a count of them.
  const auto beside_half = hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f));
  const auto subnormal = hn::Sub(hn::BitCast(di, beside_half), hn::Set(di, 0x3F000000));
  const auto is_subnormal = hn::Lt(signed_magnitude, hn::Set(di, 0x38800000));
  const auto is_nan = hn::Gt(signed_magnitude, hn::Set(di, 0x7F800000));
  const auto number = hn::IfThenElse(is_subnormal, subnormal, normal);
  return hn::Or(hn::BitCast(du, hn::IfThenElse(is_nan, hn::Set(di, 0x7E00), number)), sign);
}

// Elements [first, first + Lanes(d)) of an array of `kDtype`, aligned to its element.
template <DType kDtype, class D>
HWY_INLINE hn::Vec<D> load_floats(D d, const void* elements, std::size_t first) {
  if constexpr (kDtype == DType::fp32) {
    return hn::LoadU(d, static_cast<const float*>(elements) + first);
  } else {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<std::uint16_t, D> d16;
    const auto bits = hn::PromoteTo(du, hn::LoadU(d16, static_cast<const std::uint16_t*>(elements) + first));
    if constexpr (kDtype == DType::bf16) {
      return hn::BitCast(d, hn::ShiftLeft<16>(bits));
    } else {
      return floats_of_fp16(d, bits);
    }
  }
}

}  // namespace hoist::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_OPTIM_GRADIENT_INL_H_
