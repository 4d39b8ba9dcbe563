// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include <hoist/config/key_table.hpp>
#include <hoist/config/reference.hpp>

namespace hoist::config {

namespace {

using Json = nlohmann::ordered_json;

// 4096, not 4096.0: bounds of integers are written as such.
Json number(double value) {
  return value == std::floor(value) && std::abs(value) < 9e15 ? Json(static_cast<std::int64_t>(value)) : Json(value);
}

// The limit of integers, and of numbers without one of their own: Range's default, in values that JSON can write.
constexpr std::int64_t kCountMax = std::numeric_limits<std::int64_t>::max();

void add_range(Json& schema, const Range& range) {
  schema[range.min_excluded ? "exclusiveMinimum" : "minimum"] = number(range.min);
  const Json most = range.max == Range{}.max ? Json(kCountMax) : number(range.max);
  schema[range.max_excluded ? "exclusiveMaximum" : "maximum"] = most;
  if (range.multiple_of > 1) schema["multipleOf"] = range.multiple_of;
}

Json ranged(const char* type, const Range& range) {
  Json schema{{"type", type}};
  add_range(schema, range);
  return schema;
}

// The parser accepts choices in any case; editors offer the usual spelling.
Json spellings(const std::vector<std::string_view>& choices) {
  std::string pattern;
  for (const std::string_view choice : choices) {
    pattern += pattern.empty() ? "^(" : "|";
    for (const char c : choice) {
      const char lower = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
      if (lower >= 'a' && lower <= 'z')
        pattern += {'[', lower, static_cast<char>(lower - 'a' + 'A'), ']'};
      else
        pattern += {c};
    }
  }
  return {{"type", "string"}, {"anyOf", {Json{{"enum", choices}}, Json{{"pattern", pattern + ")$"}}}}};
}

// As is_path() in values.cpp.
Json path_schema() { return {{"type", "string"}, {"pattern", "^(?!~(/|$))[^$]+$"}}; }

Json any_value_of(const KeyRow& row) {
  switch (row.type) {
    case ValueType::boolean:
      return {{"type", "boolean"}};
    case ValueType::integer:
      return ranged("integer", row.range);
    case ValueType::number:
      if (!row.choices.empty()) return {{"anyOf", {ranged("number", row.range), spellings(row.choices)}}};
      return ranged("number", row.range);
    case ValueType::bytes:
      return {{"anyOf",
               {ranged("integer", row.range),
                Json{{"type", "string"},
                     {"pattern", R"(^\s*[0-9.]+([eE][+-]?[0-9]+)?\s*([kKmMgGtTpP]([iI]?[bB])?|[bB])?\s*$)"}}}}};
    case ValueType::string:
      return {{"type", "string"}};
    case ValueType::choice:
      return spellings(row.choices);
    case ValueType::cadence:
      return {{"anyOf",
               {spellings(row.choices), Json{{"type", "object"},
                                             {"properties", {{"every", ranged("integer", row.range)}}},
                                             {"required", {"every"}},
                                             {"additionalProperties", false}}}}};
    case ValueType::path:
      return path_schema();
    case ValueType::path_list:
      return {{"anyOf", {path_schema(), Json{{"type", "array"}, {"items", path_schema()}, {"minItems", 1}}}}};
    case ValueType::number_pair:
      return {{"type", "array"}, {"items", ranged("number", row.range)}, {"minItems", 2}, {"maxItems", 2}};
    case ValueType::string_list:
      return {{"type", "array"}, {"items", {{"type", "string"}}}};
    case ValueType::section:
    case ValueType::opaque:
      return {{"type", "object"}};
  }
  return {};
}

// The values that are accepted; null: none.
Json honoured_value_of(const KeyRow& row) {
  if (row.status == KeyStatus::refused) {
    if (row.type == ValueType::opaque) {
      if (row.neutral.empty()) return {{"type", "object"}, {"maxProperties", 0}};
      if (row.switches_in_parts) return {{"type", "object"}};
      Json off = Json::array();
      for (const std::string_view value : row.off_values) off.push_back(Json::parse(value));
      off.push_back("auto");
      return {{"type", "object"}, {"properties", {{std::string(row.neutral), {{"enum", std::move(off)}}}}}};
    }
    if (row.neutral.empty()) return nullptr;
    const Json neutral = Json::parse(row.neutral);
    return neutral.is_string() ? spellings({neutral.get_ref<const std::string&>()}) : Json{{"const", neutral}};
  }
  Json schema = any_value_of(row);
  if (row.type != ValueType::choice && !row.refusals.empty()) {
    Json values = Json::array();
    for (const Refusal& refusal : row.refusals) values.push_back(Json::parse(refusal.value));
    schema["not"] = {{"enum", std::move(values)}};
  }
  return schema;
}

std::string description_of(const KeyRow& row) {
  std::string text(row.meaning);
  if (row.status == KeyStatus::hint) text += " Accepted without effect:";
  if (row.status == KeyStatus::refused) text += " Refused except at its neutral value:";
  if (!row.note.empty()) text += " " + std::string(row.note);
  if (row.status != KeyStatus::implemented) text += ".";
  return text;
}

Json leaf_schema(const KeyRow& row) {
  Json choices = Json::array();
  if (Json honoured = honoured_value_of(row); !honoured.is_null()) choices.push_back(std::move(honoured));
  const bool own_auto = std::ranges::find(row.choices, "auto") != row.choices.end();
  if (row.type != ValueType::opaque && !own_auto) choices.push_back({{"const", "auto"}});
  if (row.nullable) choices.push_back({{"type", "null"}});
  Json schema{{"description", description_of(row)}};
  if (!row.default_value.empty()) schema["default"] = Json::parse(row.default_value);
  if (choices.size() == 1) {
    schema.update(choices.front());
  } else {
    schema["anyOf"] = std::move(choices);
  }
  return schema;
}

Json properties_of(std::string_view section_path);

Json section_schema(const KeyRow& row) {
  Json types = Json::array({"object"});
  if (row.nullable) types.push_back("null");
  if (row.path == "zero_optimization") types.push_back("boolean");  // the stages 0 and 1, as in DeepSpeed
  Json schema{{"description", row.meaning},
              {"type", types.size() == 1 ? types.front() : types},
              {"additionalProperties", has_only_hints(row.path)},
              {"patternProperties", {{"^(_|//)|^comments?$", true}}},
              {"properties", properties_of(row.path)}};
  return schema;
}

Json properties_of(std::string_view section_path) {
  Json properties = Json::object();
  for (const KeyRow* row : members_of(section_path)) {
    const Json schema = row->type == ValueType::section ? section_schema(*row) : leaf_schema(*row);
    properties[std::string(last_part(row->path))] = schema;
    for (const std::string_view alias : row->aliases) properties[std::string(alias)] = schema;
  }
  return properties;
}

// JSON with one space of indentation a level; what fits into a line of 120 columns has one line.
void print(const Json& value, std::size_t indent, std::size_t column, std::string& text) {
  constexpr std::size_t kColumns = 120;
  const std::string line = value.dump();
  if (!value.is_structured() || column + line.size() <= kColumns) {
    text += line;
    return;
  }
  char before = line.front();
  for (const auto& [name, member] : value.items()) {
    text += std::exchange(before, ',');
    text += "\n" + std::string(indent + 1, ' ');
    const std::string label = value.is_object() ? Json(name).dump() + ": " : "";
    text += label;
    print(member, indent + 1, indent + 1 + label.size(), text);
  }
  text += "\n" + std::string(indent, ' ') + line.back();
}

}  // namespace

std::string schema_json() {
  const Json schema{
      {"$schema", "https://json-schema.org/draft/2020-12/schema"},
      {"title", "hoist configuration"},
      {"description",
       "A DeepSpeed configuration with hoist's own settings under \"hoist\". Printed by `hoist check --print-schema` "
       "from the table the parser uses. Only `hoist check` knows the rules between keys. A key at the top that is not "
       "known is an error here, and a warning of a run."},
      {"type", "object"},
      {"additionalProperties", false},
      {"patternProperties", {{"^(_|//)|^comments?$", true}}},
      {"properties", properties_of("")}};
  std::string text;
  print(schema, 0, 0, text);
  return text + "\n";
}

}  // namespace hoist::config
