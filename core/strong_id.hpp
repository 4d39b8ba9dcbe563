// SPDX-License-Identifier: Apache-2.0
// core/strong_id.hpp - indices of different types that cannot be mixed up.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>

namespace hoist {

template <typename Tag>
struct StrongId {
  std::uint32_t index = 0;
  friend constexpr auto operator<=>(StrongId, StrongId) = default;
};

}  // namespace hoist

template <typename Tag>
struct std::hash<hoist::StrongId<Tag>> {
  std::size_t operator()(hoist::StrongId<Tag> id) const noexcept { return id.index; }
};
