// SPDX-License-Identifier: Apache-2.0
// config/detail/json_text.hpp - JSON as a tree with the position of every value in the text.
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

// Deeper nesting than any configuration has; hostile input cannot exhaust the stack.
inline constexpr std::size_t kJsonDepthMax = 64;
// More values than any configuration has; a data file cannot fill memory with one tree node for each.
inline constexpr std::size_t kJsonValuesMax = 1'000'000;

// The comments and trailing commas that plain_json() accepts are no error. Neither is Infinity, which Python writes.
JsonNode parse_json_text(std::string_view text);
bool is_infinite(const JsonNode& node);

// Both counted from 1; the column in bytes.
struct TextPosition {
  std::size_t line = 1;
  std::size_t column = 1;
};
TextPosition position_of(std::string_view text, std::size_t offset);

// The value as the user wrote it, shortened if it is long; for messages.
std::string display(const JsonNode& node);

}  // namespace hoist::config::detail
