// SPDX-License-Identifier: Apache-2.0
// optim_cpu/norm.hpp - the sum of squares of a gradient shard, in an order that depends only on the shard.
//
// core/norm_order.hpp defines the order. Thread count, block size and instruction set never change a bit.
#pragma once

#include <cstddef>
#include <span>

#include <hoist/core/dtype.hpp>
#include <hoist/core/norm_order.hpp>

namespace hoist::optim {

// Sum of squares of one chunk (count <= kNormChunkElements); NaN or infinity if an element is.
double sum_of_squares_chunk(const void* gradient, DType dtype, std::size_t count);

// One entry per chunk of the shard, so `partial.size()` is divide_up(count, kNormChunkElements).
void sums_of_squares(const void* gradient, DType dtype, std::size_t count, std::span<double> partial);

}  // namespace hoist::optim
