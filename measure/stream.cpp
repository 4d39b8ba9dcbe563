// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include <hoist/measure/stream.hpp>

// clang-format off: the first include compiles the kernels for every dynamic target, the second for the baseline.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hoist/measure/stream-inl.h"
#include <hwy/foreach_target.h>

#include <hoist/measure/stream-inl.h>
// clang-format on

namespace hoist::measure {

HWY_EXPORT(any_stream);

namespace {
const volatile std::uint32_t kZero = 0;
}

unsigned stream(const StreamArrays& arrays, Prefetch prefetch) {
  return HWY_DYNAMIC_DISPATCH(any_stream)(arrays, prefetch == Prefetch::ahead, kZero);
}

}  // namespace hoist::measure
