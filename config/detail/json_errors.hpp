// SPDX-License-Identifier: Apache-2.0
// config/detail/json_errors.hpp - explains to a person why a text is not JSON.
//
// A parser reports what it expected, but a person needs to know the mistake: a trailing comma, Python's True, single
// quotes. These functions look at the text around the position and name the mistake. If they find none, the parser's
// message remains.
//
// Threading  Pure functions of their arguments.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include <hoist/config/detail/json_text.hpp>

namespace hoist::config::detail {

// The position at which the parser gave up.
struct SyntaxFailure {
  std::size_t token_begin = 0;  // first byte of the token it was reading
  std::size_t offset = 0;       // the byte it could not accept
  std::string parser_says;
};

JsonSyntaxError explain(std::string_view text, const SyntaxFailure& failure);

// The problem of a text that no parser needs to read: empty, or not UTF-8.
std::optional<JsonSyntaxError> refuse_by_content(std::string_view text);

}  // namespace hoist::config::detail
