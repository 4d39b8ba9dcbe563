// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include <hoist/core/first_difference.hpp>

namespace hoist {

std::string first_difference(std::string_view one, std::string_view other, std::string_view name_of_one,
                             std::string_view name_of_other) {
  for (std::size_t line = 1;; ++line) {
    const std::string_view a = one.substr(0, one.find('\n'));
    const std::string_view b = other.substr(0, other.find('\n'));
    if (a != b || one.empty() || other.empty()) {
      const auto shown = [](std::string_view rest, std::string_view text) {
        return rest.empty() ? std::string("(nothing more)") : fmt::format("'{}'", text);
      };
      return fmt::format("line {}: {}: {} / {}: {}", line, name_of_one, shown(one, a), name_of_other, shown(other, b));
    }
    one.remove_prefix(std::min(one.size(), a.size() + 1));
    other.remove_prefix(std::min(other.size(), b.size() + 1));
  }
}

}  // namespace hoist
