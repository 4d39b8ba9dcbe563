// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/accumulate-inl.h - sums over micro-batches. Compiled once per instruction set by accumulate.cpp.
#if defined(HOIST_OPTIM_ACCUMULATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_OPTIM_ACCUMULATE_INL_H_
#undef HOIST_OPTIM_ACCUMULATE_INL_H_
#else
#define HOIST_OPTIM_ACCUMULATE_INL_H_
#endif

#include <cstddef>

#include <hwy/highway.h>

#include <hoist/optim_cpu/accumulate.hpp>
#include <hoist/optim_cpu/detail/gradient-inl.h>

HWY_BEFORE_NAMESPACE();
namespace hoist::optim::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <DType kDtype, Accumulate kHow, class D>
HWY_INLINE void accumulate_vector(D d, float* HWY_RESTRICT sums, const void* gradient, std::size_t first) {
  auto value = load_floats<kDtype>(d, gradient, first);
  if constexpr (kHow == Accumulate::add) value = hn::Add(hn::LoadU(d, sums + first), value);
  hn::StoreU(value, d, sums + first);
}

template <DType kDtype, Accumulate kHow>
void accumulate(float* HWY_RESTRICT sums, const void* gradient, std::size_t count) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) accumulate_vector<kDtype, kHow>(d, sums, gradient, i);
  const hn::CappedTag<float, 1> one;
  for (; i < count; ++i) accumulate_vector<kDtype, kHow>(one, sums, gradient, i);
}

template <DType kDtype>
void accumulate_as(float* sums, const void* gradient, std::size_t count, Accumulate how) {
  if (how == Accumulate::add) return accumulate<kDtype, Accumulate::add>(sums, gradient, count);
  accumulate<kDtype, Accumulate::overwrite>(sums, gradient, count);
}

inline void accumulate_gradient_of(float* sums, const void* gradient, DType dtype, std::size_t count, Accumulate how) {
  switch (dtype) {
    case DType::bf16:
      return accumulate_as<DType::bf16>(sums, gradient, count, how);
    case DType::fp16:
      return accumulate_as<DType::fp16>(sums, gradient, count, how);
    case DType::fp32:
      return accumulate_as<DType::fp32>(sums, gradient, count, how);
  }
}

}  // namespace hoist::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_OPTIM_ACCUMULATE_INL_H_
