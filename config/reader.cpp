// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <variant>

#include <fmt/format.h>

#include <hoist/config/detail/reader.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/units.hpp>

namespace hoist::config::detail {

namespace {

using nlohmann::json;
using Kind = JsonNode::Kind;

// What is wrong with a value, as the rest of a sentence that began with the key.
struct Wrong {
  std::string sentence;
};
using Checked = std::variant<Value, Wrong>;

bool same_text(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  return std::ranges::equal(a, b, {}, lower, lower);
}

bool is_string(const JsonNode& node) { return node.kind == Kind::scalar && node.scalar.is_string(); }
bool is_number(const JsonNode& node) { return node.kind == Kind::scalar && node.scalar.is_number(); }

bool reads_as_number(const std::string& text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc{} && end == text.data() + text.size() && std::isfinite(number);
}

Wrong not_allowed(const KeyRow& row, const JsonNode& node) {
  std::string sentence = fmt::format("{} is not {}", display(node), allowed_text(row));
  if (node.kind == Kind::scalar && node.scalar.is_null()) sentence += "; leave the key out for its default";
  if (is_string(node)) {
    const auto& text = node.scalar.get_ref<const std::string&>();
    const bool quoted_bool = row.type == ValueType::boolean && (text == "true" || text == "false");
    const bool quoted_number =
        (row.type == ValueType::integer || row.type == ValueType::number) && reads_as_number(text);
    if (quoted_bool || quoted_number) sentence += fmt::format("; write {} without quotes", text);
  }
  return {sentence};
}

bool in_range(const Range& range, double value) {
  if (value < range.min || value > range.max) return false;
  return !(range.min_excluded && value == range.min) && !(range.max_excluded && value == range.max);
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
  if (std::abs(value) >= 9.2e18 || value != std::floor(value)) return std::nullopt;
  return static_cast<std::int64_t>(value);
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

Checked check_number(const KeyRow& row, const JsonNode& node) {
  if (!is_number(node) || !in_range(row.range, node.scalar.get<double>())) return not_allowed(row, node);
  return Value(node.scalar.get<double>());
}

Checked check_choice(const KeyRow& row, const JsonNode& node) {
  if (!is_string(node)) return not_allowed(row, node);
  const auto& text = node.scalar.get_ref<const std::string&>();
  for (const std::string_view choice : row.choices) {
    if (same_text(choice, text)) return Value(std::string(choice));
  }
  return not_allowed(row, node);
}

Checked check_path(const KeyRow& row, const JsonNode& node) {
  const JsonNode* one = &node;
  if (node.kind == Kind::list) {
    if (node.items.size() > 1) {
      return Wrong{fmt::format("{} names {} paths; several drives come later, use one path or a RAID-0 of the drives",
                               display(node), node.items.size())};
    }
    if (node.items.empty()) return not_allowed(row, node);
    one = &node.items.front();
  }
  if (!is_string(*one)) return not_allowed(row, node);
  const auto& text = one->scalar.get_ref<const std::string&>();
  if (text.empty() || text.find('\0') != std::string::npos) return not_allowed(row, node);
  return Value(text);
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
    case ValueType::path:
      return check_path(row, node);
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

Wrong refusal_of(const JsonNode& node, std::string_view reason) {
  return {fmt::format("{} is refused: {}", display(node), reason)};
}

Checked check_value(const KeyRow& row, const JsonNode& node) {
  if (const Refusal* refusal = find_refusal(row, node)) return refusal_of(node, refusal->reason);
  Checked checked = check_type(row, node);
  if (row.status != KeyStatus::refused || std::holds_alternative<Wrong>(checked)) return checked;
  if (row.neutral.empty()) return refusal_of(node, row.note);
  const Checked neutral = check_type(row, parse_json_text(row.neutral));
  if (std::get<Value>(checked) != std::get<Value>(neutral)) return refusal_of(node, row.note);
  return checked;
}

// A key as it can be printed: plain when it is plain.
std::string printable(const std::string& name) {
  const auto plain = [](char c) { return c > ' ' && c < '\x7f' && c != '"' && c != '\\'; };
  if (!name.empty() && name.size() <= 80 && std::ranges::all_of(name, plain)) return name;
  JsonNode node;
  node.scalar = name;
  return display(node);
}

class Reader {
 public:
  Reader(std::string_view text, ReadResult& result) : text_(text), result_(result) {}

  void read_object(const JsonNode& object, std::string_view section_path, const std::string& shown_path) {
    std::set<std::string_view> names;
    for (const JsonMember& member : object.members) {
      const std::string shown = shown_path.empty() ? printable(member.key) : shown_path + "." + printable(member.key);
      if (!names.insert(member.key).second) {
        problem(shown, "given twice in one object", member.key_offset);
        continue;
      }
      if (const KeyRow* row = find_member(section_path, member.key)) {
        read_member(*row, member, shown);
      } else {
        problem(shown, "unknown key; " + suggestion(section_path, member.key), member.key_offset);
      }
    }
  }

  // One setting for each row that ends with a value.
  void collect_settings() {
    for (const KeyRow& row : key_table()) {
      if (row.type == ValueType::section || row.type == ValueType::opaque) continue;
      ConfigSetting setting{.row = &row};
      if (const auto found = given_.find(&row); found != given_.end()) {
        setting = found->second;
      }
      if (std::holds_alternative<std::monostate>(setting.value)) {
        if (row.default_value.empty()) continue;
        setting.value = default_of(row);
      }
      result_.settings.push_back(std::move(setting));
    }
  }

  void problem(std::string key, std::string sentence, std::size_t offset) {
    const TextPosition at = position_of(text_, offset);
    result_.problems.push_back({std::move(key), std::move(sentence), at.line, at.column});
  }

 private:
  void read_member(const KeyRow& row, const JsonMember& member, const std::string& shown) {
    if (row.type == ValueType::section || row.type == ValueType::opaque) {
      read_section(row, member, shown);
      return;
    }
    const TextPosition at = position_of(text_, member.value.offset);
    ConfigSetting setting{.row = &row, .line = at.line, .column = at.column};
    if (is_automatic(row, member.value)) {
      setting.source = ConfigSetting::Source::automatic;
      result_.automatic.push_back(shown);
    } else {
      Checked checked = check_value(row, member.value);
      if (const Wrong* wrong = std::get_if<Wrong>(&checked)) {
        problem(shown, wrong->sentence, member.value.offset);
        return;
      }
      setting.value = std::get<Value>(std::move(checked));
      setting.source = ConfigSetting::Source::file;
    }
    keep(row, std::move(setting), member, shown);
  }

  void keep(const KeyRow& row, ConfigSetting setting, const JsonMember& member, const std::string& shown) {
    const auto [place, is_new] = given_.try_emplace(&row, setting);
    if (is_new) {
      if (row.status == KeyStatus::hint) result_.hints.push_back(shown);
      return;
    }
    if (place->second.value != setting.value) {
      problem(shown,
              fmt::format("{} contradicts {} at line {}: both are names of one setting", display(member.value),
                          to_text(place->second.value).empty() ? "\"auto\"" : to_text(place->second.value),
                          place->second.line),
              member.value.offset);
    }
  }

  void read_section(const KeyRow& row, const JsonMember& member, const std::string& shown) {
    const JsonNode& node = member.value;
    if (node.kind != Kind::object) {
      std::string sentence = fmt::format("{} is not an object", display(node));
      if (node.kind == Kind::scalar && node.scalar.is_null()) sentence += "; leave the section out";
      if (row.path == "zero_optimization" && node.scalar.is_boolean()) {
        sentence += "; the short form of old DeepSpeed is refused, write {\"stage\": 3}";
      }
      problem(shown, sentence, node.offset);
      return;
    }
    if (row.type == ValueType::section) {
      read_object(node, row.path, shown);
      return;
    }
    refuse_duplicates(node, shown);
    if (row.status == KeyStatus::hint) {
      result_.hints.push_back(shown);
    } else if (asks_for_something(row, node)) {
      problem(shown, "refused: " + std::string(row.note), member.key_offset);
    }
  }

  static bool asks_for_something(const KeyRow& row, const JsonNode& section) {
    if (row.neutral.empty()) return !section.members.empty();
    for (const JsonMember& member : section.members) {
      if (member.key == row.neutral) return member.value.kind != Kind::scalar || member.value.scalar != json(false);
    }
    return false;
  }

  void refuse_duplicates(const JsonNode& node, const std::string& shown) {
    std::set<std::string_view> names;
    for (const JsonMember& member : node.members) {
      const std::string path = shown + "." + printable(member.key);
      if (!names.insert(member.key).second) problem(path, "given twice in one object", member.key_offset);
      refuse_duplicates(member.value, path);
    }
    for (const JsonNode& item : node.items) refuse_duplicates(item, shown);
  }

  static bool is_automatic(const KeyRow& row, const JsonNode& node) {
    return is_string(node) && node.scalar.get_ref<const std::string&>() == "auto" &&
           std::ranges::find(row.choices, "auto") == row.choices.end();
  }

  std::string_view text_;
  ReadResult& result_;
  std::map<const KeyRow*, ConfigSetting> given_;
};

}  // namespace

Value default_of(const KeyRow& row) {
  const Checked checked = check_type(row, parse_json_text(row.default_value));
  const Wrong* wrong = std::get_if<Wrong>(&checked);
  HOIST_ASSERT(wrong == nullptr, "default of {}: {}", row.path, wrong == nullptr ? "" : wrong->sentence);
  return std::get<Value>(checked);
}

ReadResult read_settings(const JsonNode& root, std::string_view text) {
  ReadResult result;
  Reader reader(text, result);
  if (root.kind == Kind::object) {
    reader.read_object(root, "", "");
  } else {
    reader.problem("", fmt::format("the configuration is not an object but {}", display(root)), root.offset);
  }
  reader.collect_settings();
  return result;
}

}  // namespace hoist::config::detail
