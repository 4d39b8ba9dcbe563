// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/norm-inl.h - sums of squares. Compiled once per instruction set by norm.cpp.
#if defined(HOIST_OPTIM_NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_OPTIM_NORM_INL_H_
#undef HOIST_OPTIM_NORM_INL_H_
#else
#define HOIST_OPTIM_NORM_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <hwy/highway.h>

#include <hoist/core/norm_order.hpp>
#include <hoist/optim_cpu/detail/gradient-inl.h>

HWY_BEFORE_NAMESPACE();
namespace hoist::optim::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_HAVE_SCALABLE || HWY_TARGET == HWY_SCALAR

// Vectors of unknown length cannot be kept in an array; the compiler vectorises these sixteen sums as it likes.
template <DType kDtype>
void add_squares(const void* gradient, std::size_t groups, double* HWY_RESTRICT lanes) {
  const hn::CappedTag<float, 1> one;
  for (std::size_t group = 0; group < groups; ++group) {
    for (std::size_t k = 0; k < kNormLanes; ++k) {
      const double x = static_cast<double>(hn::GetLane(load_floats<kDtype>(one, gradient, group * kNormLanes + k)));
      lanes[k] += x * x;
    }
  }
}

#else

// Adds the squares of `groups` groups of 16 elements to the sixteen sums. A square of a float is exact in double, so
// each addition is the only rounding.
template <DType kDtype>
void add_squares(const void* gradient, std::size_t groups, double* HWY_RESTRICT lanes) {
  const hn::CappedTag<double, kNormLanes> d;
  const hn::Rebind<float, decltype(d)> floats;
  constexpr std::size_t kVectors = kNormLanes / hn::MaxLanes(d);
  hn::Vec<decltype(d)> sums[kVectors];
  for (std::size_t k = 0; k < kVectors; ++k) sums[k] = hn::LoadU(d, lanes + k * hn::MaxLanes(d));
  for (std::size_t group = 0; group < groups; ++group) {
    HWY_UNROLL(8)
    for (std::size_t k = 0; k < kVectors; ++k) {
      const std::size_t first = group * kNormLanes + k * hn::MaxLanes(d);
      const auto x = hn::PromoteTo(d, load_floats<kDtype>(floats, gradient, first));
      sums[k] = hn::Add(sums[k], hn::Mul(x, x));
    }
  }
  for (std::size_t k = 0; k < kVectors; ++k) hn::StoreU(sums[k], d, lanes + k * hn::MaxLanes(d));
}

#endif

template <DType kDtype>
double sum_of_squares(const void* gradient, std::size_t count) {
  HWY_ALIGN double lanes[kNormLanes] = {};
  const std::size_t groups = count / kNormLanes;
  add_squares<kDtype>(gradient, groups, lanes);
  if (const std::size_t rest = count % kNormLanes; rest != 0) {
    // Zeros fill the last group: adding +0 to a sum of squares changes nothing.
    constexpr std::size_t kElementBytes = dtype_bytes(kDtype);
    HWY_ALIGN std::byte last[kNormLanes * kElementBytes] = {};
    std::copy_n(static_cast<const std::byte*>(gradient) + groups * kNormLanes * kElementBytes, rest * kElementBytes,
                last);
    add_squares<kDtype>(last, 1, lanes);
  }
  return sum_of_lanes(lanes);
}

inline double sum_of_squares_of(const void* gradient, DType dtype, std::size_t count) {
  switch (dtype) {
    case DType::bf16:
      return sum_of_squares<DType::bf16>(gradient, count);
    case DType::fp16:
      return sum_of_squares<DType::fp16>(gradient, count);
    case DType::fp32:
      return sum_of_squares<DType::fp32>(gradient, count);
  }
  return 0;
}

}  // namespace hoist::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_OPTIM_NORM_INL_H_
