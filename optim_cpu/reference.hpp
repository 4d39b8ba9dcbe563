// SPDX-License-Identifier: Apache-2.0
// optim_cpu/reference.hpp - every optimizer as in its paper and PyTorch: scalar, double precision, readable.
//
// For tests, and for readers of the kernels.
#pragma once

#include <cstdint>

#include <hoist/optim_cpu/optimizer.hpp>

namespace hoist::optim {

struct ReferenceState {
  double master = 0;
  double moment1 = 0;
  double moment2 = 0;  // adagrad: begins with the initial accumulator
};

// One parameter, one step (counted from 1). `gradient` is already unscaled and clipped.
void reference_update(const OptimizerOptions& options, std::uint64_t step, double gradient, ReferenceState& state);

}  // namespace hoist::optim
