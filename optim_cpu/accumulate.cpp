// SPDX-License-Identifier: Apache-2.0
#include <hoist/core/float_environment.hpp>
#include <hoist/optim_cpu/accumulate.hpp>

// clang-format off: the first include compiles the kernels for every dynamic target, the second for the baseline.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hoist/optim_cpu/detail/accumulate-inl.h"
#include <hwy/foreach_target.h>

#include <hoist/optim_cpu/detail/accumulate-inl.h>
// clang-format on

namespace hoist::optim {

HWY_EXPORT(accumulate_gradient_of);

void accumulate_gradient(float* sums, const void* gradient, DType dtype, std::size_t count, Accumulate how) {
  const FloatEnvironment environment;
  HWY_DYNAMIC_DISPATCH(accumulate_gradient_of)(sums, gradient, dtype, count, how);
}

}  // namespace hoist::optim
