// SPDX-License-Identifier: Apache-2.0
// tiers/durability.hpp - the options for committing steps.
#pragma once

#include <cstdint>

namespace hoist::tiers {

enum class Durability : std::uint8_t {
  step,  // steps are committed; records alternate between extents
  none,  // records are rewritten in place; nothing is ever committed and the store cannot be reopened
};

}  // namespace hoist::tiers
