// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/core/assert.hpp>
#include <hoist/core/float_environment.hpp>
#include <hoist/core/units.hpp>
#include <hoist/optim_cpu/norm.hpp>

// clang-format off: the first include compiles the kernels for every dynamic target, the second for the baseline.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hoist/optim_cpu/detail/norm-inl.h"
#include <hwy/foreach_target.h>

#include <hoist/optim_cpu/detail/norm-inl.h>
// clang-format on

namespace hoist::optim {

HWY_EXPORT(sum_of_squares_of);

double sum_of_squares_chunk(const void* gradient, DType dtype, std::size_t count) {
  HOIST_ASSERT(count <= kNormChunkElements, "{} elements in one chunk", count);
  const FloatEnvironment environment;
  return HWY_DYNAMIC_DISPATCH(sum_of_squares_of)(gradient, dtype, count);
}

void sums_of_squares(const void* gradient, DType dtype, std::size_t count, std::span<double> partial) {
  HOIST_ASSERT(partial.size() == divide_up(count, kNormChunkElements), "{} sums for {} elements", partial.size(),
               count);
  const auto* bytes = static_cast<const std::byte*>(gradient);
  for (std::size_t chunk = 0; chunk < partial.size(); ++chunk) {
    const std::size_t first = chunk * kNormChunkElements;
    partial[chunk] =
        sum_of_squares_chunk(bytes + first * dtype_bytes(dtype), dtype, std::min(kNormChunkElements, count - first));
  }
}

}  // namespace hoist::optim
