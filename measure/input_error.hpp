// SPDX-License-Identifier: Apache-2.0
// measure/input_error.hpp - what a person asked for is impossible. `hoist` ends with exit code 2.
#pragma once

#include <hoist/core/error.hpp>

namespace hoist::measure {

// The message says what there is, what is needed and what to change.
class InputError : public Error {
 public:
  using Error::Error;
};

}  // namespace hoist::measure
