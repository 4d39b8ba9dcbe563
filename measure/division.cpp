// SPDX-License-Identifier: Apache-2.0
#include <hoist/measure/division.hpp>

// clang-format off: the first include compiles the kernels for every dynamic target, the second for the baseline.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hoist/measure/division-inl.h"
#include <hwy/foreach_target.h>

#include <hoist/measure/division-inl.h>
// clang-format on

namespace hoist::measure {

HWY_EXPORT(divide_any);

float divide(unsigned divisions, std::size_t count) { return HWY_DYNAMIC_DISPATCH(divide_any)(divisions, count); }

}  // namespace hoist::measure
