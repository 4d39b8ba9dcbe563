// SPDX-License-Identifier: Apache-2.0
// measure/stream.hpp - the limit that updates are measured against: the same loads and stores and no arithmetic.
//
// Threading  Pure function; one caller per range.
#pragma once

#include <array>
#include <cstddef>

namespace hoist::measure {

enum class Prefetch : bool { none, ahead };

// The arrays that an update of `count` parameters goes through.
struct StreamArrays {
  std::array<void*, 2> master{};  // of 2 bytes a parameter both (split), or the first alone of 4
  void* weight = nullptr;         // of 2 bytes a parameter, written and never read: beside a master of 4
  std::array<void*, 2> moments{};
  unsigned moment_count = 0;
  std::size_t moment_bytes = 4;  // a parameter: 4 or 2
  const void* gradient = nullptr;
  std::size_t gradient_bytes = 4;  // 4 or 2
  std::size_t count = 0;           // a multiple of kStreamBlock

  bool is_split() const { return master[1] != nullptr; }
  std::size_t traffic_bytes() const {  // a parameter
    return 2 * (4 + moment_count * moment_bytes) + (weight != nullptr ? 2 : 0) + gradient_bytes;
  }
};
inline constexpr std::size_t kStreamBlock = 32;

// Reads every array and writes back, unchanged, those that an update writes; of weights, zeros. Returns a value that
// depends on every gradient.
unsigned stream(const StreamArrays& arrays, Prefetch prefetch);

}  // namespace hoist::measure
