// SPDX-License-Identifier: Apache-2.0
// tests/zero/toy_kernels.hpp - the toy model's arithmetic, on memory of its own.
//
// A kernel of the toy model copies what it shares with other threads, whole, and computes on the copies. So the thread
// sanitizer sees every byte that is shared, and need not follow each element, which took most of its time: this file is
// built without it.
//
// Threading  Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <hoist/core/dtype.hpp>

namespace hoist::test {

// Depends on every element.
double weighted_sum(std::span<const std::byte> values, DType dtype);

// Element i becomes element first + i of a normal distribution of the seed.
void fill_normal(std::uint64_t seed, std::uint64_t first, std::span<float> out);

// gradient[i] += scale * (a share of weight i and noise of the seed).
void add_gradient(std::span<const std::byte> weights, DType weights_dtype, std::span<std::byte> gradient,
                  DType gradient_dtype, std::uint64_t seed, float scale);

}  // namespace hoist::test
