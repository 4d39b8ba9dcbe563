// SPDX-License-Identifier: Apache-2.0
// optim_cpu/reference.hpp - Adam and AdamW as the papers and PyTorch write them: scalar, double precision, readable.
//
// For tests, and for whoever wants to know what the kernels compute.
#pragma once

#include <cstdint>

#include <hoist/optim_cpu/adam.hpp>

namespace hoist::optim {

struct ReferenceState {
  double master = 0;
  double moment1 = 0;
  double moment2 = 0;
};

// One parameter, one step (counted from 1). `gradient` is already unscaled and clipped.
void reference_adam(const AdamOptions& options, std::uint64_t step, double gradient, ReferenceState& state);

}  // namespace hoist::optim
