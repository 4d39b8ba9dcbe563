// SPDX-License-Identifier: Apache-2.0
// measure/division-inl.h - divisions and square roots. Compiled once per instruction set by division.cpp.
#if defined(HOIST_MEASURE_DIVISION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_MEASURE_DIVISION_INL_H_
#undef HOIST_MEASURE_DIVISION_INL_H_
#else
#define HOIST_MEASURE_DIVISION_INL_H_
#endif

#include <cstddef>

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace hoist::measure::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;
using FloatVector = hn::Vec<Floats>;

// The numbers approach the square of c / d and stay normal numbers.
template <unsigned kDivisions>
HWY_INLINE FloatVector divided(FloatVector x, FloatVector c, FloatVector d) {
  x = hn::Sqrt(x);
  if constexpr (kDivisions == 2) x = hn::Div(d, x);
  return hn::Div(c, x);
}

// Eight numbers a lane, so that none waits for itself.
template <unsigned kDivisions>
float divide_all(std::size_t count) {
  const Floats f;
  const auto c = hn::Set(f, 1.7f), d = hn::Set(f, 1.3f);
  auto x0 = hn::Set(f, 1.1f), x1 = hn::Set(f, 1.2f), x2 = hn::Set(f, 1.4f), x3 = hn::Set(f, 1.5f);
  auto x4 = hn::Set(f, 1.6f), x5 = hn::Set(f, 1.8f), x6 = hn::Set(f, 1.9f), x7 = hn::Set(f, 2.1f);
  for (std::size_t i = 0; i < count; i += 8 * hn::Lanes(f)) {
    x0 = divided<kDivisions>(x0, c, d);
    x1 = divided<kDivisions>(x1, c, d);
    x2 = divided<kDivisions>(x2, c, d);
    x3 = divided<kDivisions>(x3, c, d);
    x4 = divided<kDivisions>(x4, c, d);
    x5 = divided<kDivisions>(x5, c, d);
    x6 = divided<kDivisions>(x6, c, d);
    x7 = divided<kDivisions>(x7, c, d);
  }
  const auto sum = hn::Add(hn::Add(hn::Add(x0, x1), hn::Add(x2, x3)), hn::Add(hn::Add(x4, x5), hn::Add(x6, x7)));
  return hn::GetLane(sum);
}

inline float divide_any(unsigned divisions, std::size_t count) {
  if (divisions == 2) return divide_all<2>(count);
  if (divisions == 1) return divide_all<1>(count);
  return 0;
}

}  // namespace hoist::measure::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_MEASURE_DIVISION_INL_H_
