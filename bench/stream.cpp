// SPDX-License-Identifier: Apache-2.0
#include "stream.hpp"

// clang-format off: the first include compiles the kernels for every dynamic target, the second for the baseline.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hoist/bench/stream-inl.h"
#include <hwy/foreach_target.h>

#include <hoist/bench/stream-inl.h>
// clang-format on

namespace hoist::bench {

HWY_EXPORT(split_stream);
HWY_EXPORT(whole_stream);

namespace {
const volatile std::uint32_t kZero = 0;
}

unsigned stream_tile(const optim::SplitTile& tile, Prefetch prefetch) {
  return HWY_DYNAMIC_DISPATCH(split_stream)(tile, prefetch == Prefetch::ahead, kZero);
}

unsigned stream_tile(const optim::WholeTile& tile, Prefetch prefetch) {
  return HWY_DYNAMIC_DISPATCH(whole_stream)(tile, prefetch == Prefetch::ahead, kZero);
}

}  // namespace hoist::bench
