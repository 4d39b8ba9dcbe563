// SPDX-License-Identifier: Apache-2.0
// config/detail/json_text.hpp - JSON as a tree that remembers where everything stands in the text.
//
// Values are read by nlohmann-json; positions are kept because every message to the user names line and column.
// Members keep their order and their duplicates, so that a duplicate key can be reported.
//
// Threading  Pure function of its argument.
// Errors     JsonSyntaxError with the offset of the offending byte.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace hoist::config::detail {

struct JsonMember;

struct JsonNode {
  enum class Kind { scalar, list, object };
  Kind kind = Kind::scalar;
  nlohmann::json scalar;            // null, boolean, number or string
  std::vector<JsonNode> items;      // of a list
  std::vector<JsonMember> members;  // of an object, in the order of the text
  std::size_t offset = 0;           // of the first byte of the value
};

struct JsonMember {
  std::string key;
  std::size_t key_offset = 0;
  JsonNode value;
};

class JsonSyntaxError : public std::runtime_error {
 public:
  JsonSyntaxError(std::size_t at, const std::string& what_is_wrong) : std::runtime_error(what_is_wrong), offset(at) {}
  std::size_t offset;
};

// Nesting deeper than any configuration; keeps hostile input from exhausting the stack.
inline constexpr std::size_t kJsonDepthMax = 64;
// More values than any configuration; keeps a data file from filling memory, one node of the tree for each.
inline constexpr std::size_t kJsonValuesMax = 1'000'000;

// Comments and commas too many, as plain_json() knows them, are no error.
JsonNode parse_json_text(std::string_view text);

// Both counted from 1; the column in bytes.
struct TextPosition {
  std::size_t line = 1;
  std::size_t column = 1;
};
TextPosition position_of(std::string_view text, std::size_t offset);

// The value as the user would recognise it, shortened when long; for messages.
std::string display(const JsonNode& node);

}  // namespace hoist::config::detail
