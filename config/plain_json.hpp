// SPDX-License-Identifier: Apache-2.0
// config/plain_json.hpp - turns the extensions that DeepSpeed's reader accepts into JSON: comments from # or // to the
// end of the line, comments between /* and */, a comma after the last member or item, and Infinity.
//
// Threading  Pure function of its argument.
#pragma once

#include <string>
#include <string_view>

namespace hoist::config {

// No JSON number is infinite. This one, of as many characters, stands for Infinity.
inline constexpr std::string_view kInfinityNumber = "1.79e308";
inline constexpr double kInfinityValue = 1.79e308;

// Returns `text` with spaces or kInfinityNumber in their place, so that every other byte keeps its position. Leaves
// strings alone, and comments that do not end.
std::string plain_json(std::string_view text);

}  // namespace hoist::config
