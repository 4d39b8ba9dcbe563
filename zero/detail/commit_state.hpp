// SPDX-License-Identifier: Apache-2.0
// zero/detail/commit_state.hpp - what a commit's caller state begins with.
#pragma once

#include <cstdint>

namespace hoist {

// Every commit carries its name (empty for a step's) before the program's own bytes.
inline constexpr std::uint64_t kCommitNameBytes = 256;

}  // namespace hoist
