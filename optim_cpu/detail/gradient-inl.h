// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/gradient-inl.h - gradients of any dtype as exact floats. Compiled once per instruction set.
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
