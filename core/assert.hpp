// SPDX-License-Identifier: Apache-2.0
// core/assert.hpp - broken internal invariants end the process.
//
// On in every build: memory may be under DMA when an invariant breaks, so the program never continues. If a caller of
// the public API breaks a contract, that is hoist::UsageError (core/error.hpp) instead.
#pragma once

#include <string>

#include <fmt/format.h>

namespace hoist::detail {

[[noreturn]] void assertion_failed(const char* expression, const char* file, int line, const std::string& values);

}  // namespace hoist::detail

// HOIST_ASSERT(condition) or HOIST_ASSERT(condition, "format {}", values...)
#define HOIST_ASSERT(condition, ...)                                                            \
  do {                                                                                          \
    if (!(condition)) [[unlikely]]                                                              \
      ::hoist::detail::assertion_failed(#condition, __FILE__, __LINE__,                         \
                                        ::std::string(__VA_OPT__(::fmt::format(__VA_ARGS__)))); \
  } while (false)
