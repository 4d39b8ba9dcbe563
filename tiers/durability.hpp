// SPDX-License-Identifier: Apache-2.0
// tiers/durability.hpp - the options for committing steps.
#pragma once

#include <cstdint>

namespace hoist::tiers {

// The numbers are those in a superblock.
enum class Durability : std::uint8_t {
  step = 0,  // steps are committed; records alternate between extents
  none = 1,  // records are rewritten in place; nothing is ever committed and the store cannot be reopened
};

}  // namespace hoist::tiers
