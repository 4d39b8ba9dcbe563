// SPDX-License-Identifier: Apache-2.0
// optim_cpu/norm.hpp - the sum of squares of a gradient shard, in an order that nothing but the shard decides.
//
// fp64, 16 lanes by element index modulo 16 inside chunks of kNormChunkElements counted from the start of the shard;
// lanes are added in a fixed tree (i with i + 8, then + 4, + 2, + 1), chunks in order by the caller. Thread count,
// block size and instruction set therefore never change a bit.
#pragma once

#include <cstddef>
#include <span>

#include <hoist/core/dtype.hpp>

namespace hoist::optim {

inline constexpr std::size_t kNormChunkElements = 65536;

// Sum of squares of one chunk (count <= kNormChunkElements); NaN or infinity when an element is.
double sum_of_squares_chunk(const void* gradient, DType dtype, std::size_t count);

// One entry per chunk of the shard, so `partial.size()` is divide_up(count, kNormChunkElements).
void sums_of_squares(const void* gradient, DType dtype, std::size_t count, std::span<double> partial);

}  // namespace hoist::optim
