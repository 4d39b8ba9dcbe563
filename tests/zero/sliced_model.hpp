// SPDX-License-Identifier: Apache-2.0
// tests/zero/sliced_model.hpp - a model of which every sharding group has a slice, as in a tensor-parallel job, and one
// parameter that all slices share.
#pragma once

#include <string>

#include <hoist/zero/engine.hpp>

namespace hoist::test {

struct Slice {
  int index = 0;
  bool poisoned = false;   // a gradient that is not finite
  std::string recorded{};  // directory for metrics and traces; empty: none
};

// One step of a slice on the ranks of `groups.sharding`. Clipping is at 0.5.
StepReport step_of_slice(const Runtime::Groups& groups, const Slice& slice);
// The norm over so many slices, the shared parameter counted once.
double norm_of_slices(int count);

}  // namespace hoist::test
