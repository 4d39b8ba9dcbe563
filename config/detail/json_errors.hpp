// SPDX-License-Identifier: Apache-2.0
// config/detail/json_errors.hpp - what is wrong with a text that is no JSON, said to a person.
//
// A parser says what it expected; a person wants to know what they did: a comment, a trailing comma, Python's True,
// single quotes. These look at the text around the place and say that; the parser's words remain for the rest.
//
// Threading  Pure functions of their arguments.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include <hoist/config/detail/json_text.hpp>

namespace hoist::config::detail {

// Where the parser gave up.
struct SyntaxFailure {
  std::size_t token_begin = 0;  // first byte of the token it was reading
  std::size_t offset = 0;       // the byte it could not accept
  std::string parser_says;
};

JsonSyntaxError explain(std::string_view text, const SyntaxFailure& failure);

// A text no parser need look at: empty, or not UTF-8 at all.
std::optional<JsonSyntaxError> refuse_at_sight(std::string_view text);

}  // namespace hoist::config::detail
