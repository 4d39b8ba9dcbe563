// SPDX-License-Identifier: Apache-2.0
// config/detail/values.hpp - one JSON value checked against its row of the key table.
//
// Threading  Pure functions of their arguments.
// Errors     Returned, as the rest of a sentence that begins with the key.
#pragma once

#include <optional>
#include <string>
#include <variant>

#include <hoist/config/detail/json_text.hpp>
#include <hoist/config/key_table.hpp>

namespace hoist::config::detail {

struct Wrong {
  std::string sentence;
  std::optional<Value> refused{};  // set when the value is of the right kind, but not honoured
};
using Checked = std::variant<Value, Wrong>;

// Pre: the row is not a section.
Checked check_value(const KeyRow& row, const JsonNode& node);

// The value of a table default. Pre: the row has one.
Value default_of(const KeyRow& row);

bool is_string(const JsonNode& node);
bool is_null(const JsonNode& node);

}  // namespace hoist::config::detail
