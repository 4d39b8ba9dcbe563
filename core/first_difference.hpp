// SPDX-License-Identifier: Apache-2.0
// core/first_difference.hpp - the first line in which two texts differ, for an error.
//
// Threading  A pure function.
#pragma once

#include <string>
#include <string_view>

namespace hoist {

// "line 2: stored: 'b' / yours: 'x'", with the names that are given. Pre: the texts differ.
std::string first_difference(std::string_view one, std::string_view other, std::string_view name_of_one,
                             std::string_view name_of_other);

}  // namespace hoist
