// SPDX-License-Identifier: Apache-2.0
// measure/division.hpp - the cost of an update's exact divisions and square roots alone; processors have one unit for
// them, the slowest.
//
// Threading  Pure functions.
#pragma once

#include <cstddef>

#include <hoist/core/update_formula.hpp>

namespace hoist::measure {

// The divisions of a formula for one parameter (optim_cpu/update.hpp). A formula that divides also takes one root.
constexpr unsigned divisions_of(UpdateFormula formula) {
  if (formula == UpdateFormula::adamw || formula == UpdateFormula::adam) return 2;
  return formula == UpdateFormula::adagrad ? 1 : 0;
}

// Divides and takes roots as an update of `count` parameters does, in the instruction set that updates use, on numbers
// that stay in registers. Returns a number that depends on all of them.
float divide(unsigned divisions, std::size_t count);

}  // namespace hoist::measure
