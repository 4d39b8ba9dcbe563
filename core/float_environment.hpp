// SPDX-License-Identifier: Apache-2.0
// core/float_environment.hpp - the floating-point mode of all arithmetic with guaranteed bits.
#pragma once

#include <cstdint>

namespace hoist {

// While alive, this thread rounds to nearest even, keeps denormals and traps nothing. The destructor restores the
// caller's mode with its sticky flags. Host programs built with -ffast-math or calling into BLAS often run with
// flush-to-zero. Both members are deliberately out of line: the compiler does not know the mode and would move
// arithmetic past it.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::uint64_t saved_;
};

}  // namespace hoist
