// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <hoist/config/detail/values.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/units.hpp>

namespace hoist::config::detail {

namespace {

using nlohmann::json;
using Kind = JsonNode::Kind;

bool same_text(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  return std::ranges::equal(a, b, {}, lower, lower);
}

bool is_number(const JsonNode& node) { return node.kind == Kind::scalar && node.scalar.is_number(); }

bool reads_as_number(const std::string& text) {
  const auto number = parse_number<double>(text);
  return number && std::isfinite(*number);
}

// The boolean meant by another spelling: 1, "yes", Python's "True".
std::optional<bool> meant_as_bool(const JsonNode& node) {
  if (is_number(node)) {
    const double value = node.scalar.get<double>();
    return value == 0 || value == 1 ? std::optional(value == 1) : std::nullopt;
  }
  if (!is_string(node)) return std::nullopt;
  const auto& text = node.scalar.get_ref<const std::string&>();
  for (const std::string_view yes : {"true", "yes", "on", "1"})
    if (same_text(text, yes)) return true;
  for (const std::string_view no : {"false", "no", "off", "0"})
    if (same_text(text, no)) return false;
  return std::nullopt;
}

// An integer, or a float that is one.
std::optional<std::int64_t> integral(const json& number) {
  if (number.is_number_unsigned()) {
    const auto value = number.get<std::uint64_t>();
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
    return static_cast<std::int64_t>(value);
  }
  if (number.is_number_integer()) return number.get<std::int64_t>();
  const double value = number.get<double>();
  if (std::abs(value) >= 0x1p63 || value != std::floor(value)) return std::nullopt;
  return static_cast<std::int64_t>(value);
}

// "is not an integer of at least 0" would not explain the problem.
bool is_beyond_counting(const KeyRow& row, const JsonNode& node) {
  if (row.type != ValueType::integer && row.type != ValueType::bytes) return false;
  return is_number(node) && node.scalar.get<double>() >= 0x1p63 && !integral(node.scalar);
}

// "~/state" and "$SCRATCH/state" would be directories of these names.
bool is_for_a_shell(std::string_view path) {
  return path == "~" || path.starts_with("~/") || path.find('$') != std::string_view::npos;
}

Wrong not_allowed(const KeyRow& row, const JsonNode& node) {
  std::string sentence = fmt::format("{} is not {}", display(node), allowed_text(row));
  if (is_null(node)) sentence += "; leave the key out for its default";
  if (is_beyond_counting(row, node)) sentence += "; it is larger than 2^63 - 1, the largest count";
  if (row.type == ValueType::number && row.range.max == Range{}.max && is_number(node) &&
      node.scalar.get<double>() > row.range.max)
    sentence += "; it is larger than 2^63, the largest number";
  if (row.type == ValueType::boolean && !is_string(node)) {
    if (const auto meant = meant_as_bool(node)) sentence += fmt::format("; write {}", *meant);
  }
  if (is_string(node)) {
    const auto& text = node.scalar.get_ref<const std::string&>();
    if (row.type == ValueType::boolean && text != "true" && text != "false") {
      if (const auto meant = meant_as_bool(node)) sentence += fmt::format("; write {} without quotes", *meant);
    }
    if (is_for_a_shell(text) && (row.type == ValueType::path || row.type == ValueType::path_list))
      sentence += ": nothing replaces ~ or variables in a configuration; write the directory in full";
    const bool quoted_bool = row.type == ValueType::boolean && (text == "true" || text == "false");
    const bool quoted_number =
        (row.type == ValueType::integer || row.type == ValueType::number) && reads_as_number(text);
    if (quoted_bool || quoted_number) sentence += fmt::format("; write {} without quotes", text);
    const std::string_view near = nearest_name(row.choices, text);
    if (!near.empty()) sentence += fmt::format("; did you mean \"{}\"?", near);
  }
  return {sentence};
}

bool in_range(const Range& range, double value) {
  if (value < range.min || value > range.max) return false;
  return !(range.min_excluded && value == range.min) && !(range.max_excluded && value == range.max);
}

Checked check_integer(const KeyRow& row, const JsonNode& node) {
  if (!is_number(node)) return not_allowed(row, node);
  const auto value = integral(node.scalar);
  if (!value || !in_range(row.range, static_cast<double>(*value))) return not_allowed(row, node);
  return Value(*value);
}

Checked check_bytes(const KeyRow& row, const JsonNode& node) {
  std::optional<std::int64_t> value;
  if (is_number(node)) value = integral(node.scalar);
  if (is_string(node)) {
    if (const auto bytes = parse_bytes(node.scalar.get_ref<const std::string&>())) {
      value = static_cast<std::int64_t>(*bytes);
    }
  }
  if (!value || !in_range(row.range, static_cast<double>(*value))) return not_allowed(row, node);
  if (static_cast<std::uint64_t>(*value) % row.range.multiple_of != 0) return not_allowed(row, node);
  return Value(*value);
}

Checked check_choice(const KeyRow& row, const JsonNode& node) {
  if (!is_string(node)) return not_allowed(row, node);
  const auto& text = node.scalar.get_ref<const std::string&>();
  for (const std::string_view choice : row.choices) {
    if (same_text(choice, text)) return Value(std::string(choice));
  }
  return not_allowed(row, node);
}

Checked check_number(const KeyRow& row, const JsonNode& node) {
  if (is_string(node) && !row.choices.empty()) return check_choice(row, node);
  if (!is_number(node) || !in_range(row.range, node.scalar.get<double>())) return not_allowed(row, node);
  return Value(node.scalar.get<double>());
}

Checked check_cadence(const KeyRow& row, const JsonNode& node) {
  if (node.kind != Kind::object) return check_choice(row, node);
  if (node.members.size() != 1 || node.members.front().key != "every") return not_allowed(row, node);
  const Checked every = check_integer(row, node.members.front().value);
  return std::holds_alternative<Wrong>(every) ? not_allowed(row, node) : every;
}

bool is_path(const JsonNode& node) {
  if (!is_string(node)) return false;
  const auto& text = node.scalar.get_ref<const std::string&>();
  return !text.empty() && text.find('\0') == std::string::npos && !is_for_a_shell(text);
}

Checked check_path(const KeyRow& row, const JsonNode& node) {
  if (!is_path(node)) return not_allowed(row, node);
  return Value(node.scalar.get<std::string>());
}

Checked check_path_list(const KeyRow& row, const JsonNode& node) {
  if (is_path(node)) return Value(std::vector{node.scalar.get<std::string>()});
  if (node.kind != Kind::list || node.items.empty()) return not_allowed(row, node);
  std::vector<std::string> paths;
  for (const JsonNode& item : node.items) {
    if (!is_path(item)) return not_allowed(row, is_string(item) ? item : node);
    paths.push_back(item.scalar.get<std::string>());
  }
  return Value(std::move(paths));
}

Checked check_list(const KeyRow& row, const JsonNode& node) {
  if (node.kind != Kind::list) return not_allowed(row, node);
  if (row.type == ValueType::string_list) {
    std::vector<std::string> texts;
    for (const JsonNode& item : node.items) {
      if (!is_string(item)) return not_allowed(row, node);
      texts.push_back(item.scalar.get<std::string>());
    }
    return Value(std::move(texts));
  }
  std::vector<double> numbers;
  for (const JsonNode& item : node.items) {
    if (!is_number(item) || !in_range(row.range, item.scalar.get<double>())) return not_allowed(row, node);
    numbers.push_back(item.scalar.get<double>());
  }
  if (numbers.size() != 2) return not_allowed(row, node);
  return Value(std::move(numbers));
}

Checked check_type(const KeyRow& row, const JsonNode& node) {
  switch (row.type) {
    case ValueType::boolean:
      if (node.kind != Kind::scalar || !node.scalar.is_boolean()) return not_allowed(row, node);
      return Value(node.scalar.get<bool>());
    case ValueType::integer:
      return check_integer(row, node);
    case ValueType::number:
      return check_number(row, node);
    case ValueType::bytes:
      return check_bytes(row, node);
    case ValueType::string:
      if (!is_string(node)) return not_allowed(row, node);
      return Value(node.scalar.get<std::string>());
    case ValueType::choice:
      return check_choice(row, node);
    case ValueType::cadence:
      return check_cadence(row, node);
    case ValueType::path:
      return check_path(row, node);
    case ValueType::path_list:
      return check_path_list(row, node);
    case ValueType::number_pair:
    case ValueType::string_list:
      return check_list(row, node);
    case ValueType::section:
    case ValueType::opaque:
      break;
  }
  HOIST_ASSERT(false, "section {} has no value", row.path);
}

const Refusal* find_refusal(const KeyRow& row, const JsonNode& node) {
  for (const Refusal& refusal : row.refusals) {
    if (refusal.value == "{}" && node.kind == Kind::object) return &refusal;
    if (node.kind != Kind::scalar) continue;
    const json refused_value = json::parse(refusal.value);
    if (refused_value == node.scalar) return &refusal;
    if (refused_value.is_string() && node.scalar.is_string() &&
        same_text(refused_value.get<std::string>(), node.scalar.get<std::string>())) {
      return &refusal;
    }
  }
  return nullptr;
}

Wrong refusal_of(const JsonNode& node, std::string_view reason, std::optional<Value> value) {
  return {fmt::format("{} is refused: {}", display(node), reason), std::move(value)};
}

}  // namespace

bool is_string(const JsonNode& node) { return node.kind == Kind::scalar && node.scalar.is_string(); }
bool is_null(const JsonNode& node) { return node.kind == Kind::scalar && node.scalar.is_null(); }

Checked check_value(const KeyRow& row, const JsonNode& node) {
  if (is_infinite(node) && row.status != KeyStatus::hint) return not_allowed(row, node);
  Checked checked = check_type(row, node);
  const auto* value = std::get_if<Value>(&checked);
  if (const Refusal* refusal = find_refusal(row, node)) {
    return refusal_of(node, refusal->reason, value == nullptr ? std::nullopt : std::optional(*value));
  }
  if (row.status != KeyStatus::refused || value == nullptr) return checked;
  if (row.neutral.empty()) return refusal_of(node, row.note, *value);
  const Checked neutral = check_type(row, parse_json_text(row.neutral));
  if (*value != std::get<Value>(neutral)) return refusal_of(node, row.note, *value);
  return checked;
}

Value default_of(const KeyRow& row) {
  const Checked checked = check_type(row, parse_json_text(row.default_value));
  const Wrong* wrong = std::get_if<Wrong>(&checked);
  HOIST_ASSERT(wrong == nullptr, "default of {}: {}", row.path, wrong == nullptr ? "" : wrong->sentence);
  return std::get<Value>(checked);
}

}  // namespace hoist::config::detail
