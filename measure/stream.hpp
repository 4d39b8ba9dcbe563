// SPDX-License-Identifier: Apache-2.0
// measure/stream.hpp - the limit for updates: the same loads and stores without arithmetic.
//
// Threading  Pure function; one caller per range.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <hoist/core/dtype.hpp>

namespace hoist::measure {

enum class Prefetch : bool { none, ahead };

// The arrays of an update of `count` parameters.
struct StreamArrays {
  std::array<void*, 2> master{};    // of 2 bytes a parameter and remainder_bytes (split), or the first alone of 4
  std::size_t remainder_bytes = 2;  // 2 or 1
  void* weight = nullptr;           // of 2 bytes a parameter, written and never read: beside a master of 4
  std::array<void*, 2> moments{};
  unsigned moment_count = 0;
  std::size_t moment_bytes = 4;           // a parameter: 4, 2 or 1
  std::array<std::uint8_t*, 2> scales{};  // where that is 1: a byte for each kMomentBlock parameters
  const void* gradient = nullptr;
  std::size_t gradient_bytes = 4;  // 4 or 2
  std::size_t count = 0;           // a multiple of kStreamBlock

  bool is_split() const { return master[1] != nullptr; }
  double traffic_bytes() const {  // a parameter
    const std::size_t state = (is_split() ? 2 + remainder_bytes : 4) + moment_count * moment_bytes;
    const double scales_bytes = moment_bytes == 1 ? moment_count / static_cast<double>(kMomentBlock) : 0;
    return 2 * (static_cast<double>(state) + scales_bytes) +
           static_cast<double>((weight != nullptr ? 2 : 0) + gradient_bytes);
  }
};
inline constexpr std::size_t kStreamBlock = 64;

// Reads every array and writes back, unchanged, those that an update writes; of weights, zeros. Returns a value that
// depends on every gradient.
unsigned stream(const StreamArrays& arrays, Prefetch prefetch);

}  // namespace hoist::measure
