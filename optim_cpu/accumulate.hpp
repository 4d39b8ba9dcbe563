// SPDX-License-Identifier: Apache-2.0
// optim_cpu/accumulate.hpp - fp32 sums of gradients over the micro-batches of a step.
//
// Threading  Pure functions; one caller per range of `sums`.
#pragma once

#include <cstddef>
#include <cstdint>

#include <hoist/core/dtype.hpp>

namespace hoist::optim {

// The first micro-batch overwrites the sums of the step before.
enum class Accumulate : std::uint8_t { overwrite, add };

// sums[i] = gradient[i], or sums[i] + gradient[i] rounded to fp32; the same bits on every instruction set. A bf16 or
// fp16 gradient is exact in fp32.
// Pre: both aligned to their element; they do not overlap.
void accumulate_gradient(float* sums, const void* gradient, DType dtype, std::size_t count, Accumulate how);

}  // namespace hoist::optim
