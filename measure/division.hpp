// SPDX-License-Identifier: Apache-2.0
// measure/division.hpp - the cost of an update's exact divisions and square roots alone; processors have one unit for
// them, the slowest.
//
// Threading  Pure functions.
#pragma once

#include <cstddef>

#include <hoist/core/update_formula.hpp>

namespace hoist::measure {

struct DivisionWork {  // of one parameter
  unsigned divisions = 0;
  unsigned roots = 0;
};

// The divisions and roots of a formula (optim_cpu/update.hpp).
constexpr DivisionWork division_work(UpdateFormula formula) {
  if (formula == UpdateFormula::adamw || formula == UpdateFormula::adam) return {.divisions = 2, .roots = 1};
  if (formula == UpdateFormula::adagrad) return {.divisions = 1, .roots = 1};
  return {};
}

// Divides and takes roots as an update of `count` parameters does, in the instruction set that updates use, on numbers
// that stay in registers. Returns a number that depends on all of them.
float divide(const DivisionWork& work, std::size_t count);

}  // namespace hoist::measure
