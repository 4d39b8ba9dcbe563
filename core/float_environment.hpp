// SPDX-License-Identifier: Apache-2.0
// core/float_environment.hpp - the floating-point mode that arithmetic with promised bits is defined in.
#pragma once

#include <cstdint>

namespace hoist {

// While alive, this thread rounds to nearest even, keeps denormals and traps nothing; then the caller's mode, sticky
// flags included, is back. Host programs built with -ffast-math or calling into BLAS often run with flush-to-zero.
// Both members are out of line on purpose: the compiler knows nothing of the mode and would move arithmetic past it.
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
