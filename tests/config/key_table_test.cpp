// SPDX-License-Identifier: Apache-2.0
// What every row of the key table promises, tried on every row.
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <hoist/config/config.hpp>
#include <hoist/config/detail/json_text.hpp>
#include <hoist/config/detail/reader.hpp>
#include <hoist/config/key_table.hpp>

namespace hoist {
namespace {

using config::KeyRow;
using config::KeyStatus;
using config::ValueType;
using ::testing::HasSubstr;

bool is_leaf(const KeyRow& row) { return row.type != ValueType::section && row.type != ValueType::opaque; }

// {"a": {"b": VALUE}} for "a.b", its last part under another name if asked.
std::string text_with(const KeyRow& row, const std::string& value, std::string_view name = {}) {
  std::string text = value;
  std::string_view path = row.path;
  bool last = true;
  while (!path.empty()) {
    const std::string_view part = last && !name.empty() ? name : config::last_part(path);
    text = "{\"" + std::string(part) + "\": " + text + "}";
    path = config::section_of(path);
    last = false;
  }
  return text;
}

// The message of the refusal, or "" when the text is accepted.
std::string refusal(const std::string& text) {
  try {
    Config::parse(text, "test.json");
  } catch (const ConfigProblems& error) {
    return error.what();
  }
  return {};
}

TEST(KeyTable, RowsAreWellFormed) {
  std::set<std::string> names;
  for (const KeyRow& row : config::key_table()) {
    SCOPED_TRACE(std::string(row.path));
    EXPECT_TRUE(names.insert(std::string(row.path)).second) << "two rows";
    for (const std::string_view alias : row.aliases) {
      const std::string_view above = config::section_of(row.path);
      const std::string full = above.empty() ? std::string(alias) : std::string(above) + "." + std::string(alias);
      EXPECT_TRUE(names.insert(full).second) << full << " is two rows";
    }
    EXPECT_TRUE(row.meaning.ends_with('.')) << "the meaning is a sentence";
    const std::string_view above = config::section_of(row.path);
    if (!above.empty()) {
      const KeyRow* section = config::find_key(above);
      ASSERT_NE(section, nullptr) << "no section above";
      EXPECT_EQ(section->type, ValueType::section);
    }
    if (row.status != KeyStatus::implemented) {
      EXPECT_FALSE(row.note.empty()) << "a reason is owed";
    }
    if (row.status == KeyStatus::implemented && is_leaf(row)) {
      EXPECT_NE(row.apply, nullptr) << "implemented by nothing";
    }
    if (row.status == KeyStatus::hint) {
      EXPECT_EQ(row.apply, nullptr) << "a hint with an effect";
    }
    EXPECT_EQ(row.type == ValueType::choice, !row.choices.empty());
    if (!row.default_value.empty()) {
      EXPECT_NO_FATAL_FAILURE(config::detail::default_of(row));
    }
  }
}

TEST(KeyTable, EveryNameLeadsToItsRow) {
  for (const KeyRow& row : config::key_table()) {
    EXPECT_EQ(config::find_key(row.path), &row);
    for (const std::string_view alias : row.aliases) {
      EXPECT_EQ(config::find_member(config::section_of(row.path), alias), &row);
    }
  }
  EXPECT_EQ(config::find_key("no.such.key"), nullptr);
  EXPECT_EQ(config::find_key(""), nullptr);
}

TEST(KeyTable, DefaultsAreAcceptedWhenWrittenOut) {
  for (const KeyRow& row : config::key_table()) {
    if (!is_leaf(row) || row.default_value.empty()) continue;
    EXPECT_EQ(refusal(text_with(row, std::string(row.default_value))), "") << row.path;
    for (const std::string_view alias : row.aliases) {
      EXPECT_EQ(refusal(text_with(row, std::string(row.default_value), alias)), "") << row.path << " as " << alias;
    }
  }
}

TEST(KeyTable, AutoIsTheDefaultOfEveryKey) {
  for (const KeyRow& row : config::key_table()) {
    if (!is_leaf(row)) continue;
    const Config config = Config::parse(text_with(row, "\"auto\""), "test.json");
    const Config plain = Config::parse("{}", "test.json");
    ASSERT_EQ(config.settings().size(), plain.settings().size()) << row.path;
    for (std::size_t i = 0; i < plain.settings().size(); ++i) {
      if (plain.settings()[i].row == &row && to_text(config.settings()[i].value) == "\"auto\"") continue;  // a choice
      EXPECT_EQ(config.settings()[i].value, plain.settings()[i].value) << row.path;
    }
  }
}

// Values of every kind of JSON; which are right for a type.
struct Probe {
  const char* text;
  bool (*fits)(ValueType);
};
const Probe kProbes[] = {
    {"\"no such thing\"", [](ValueType t) { return t == ValueType::string || t == ValueType::path; }},
    {"\"true\"", [](ValueType t) { return t == ValueType::string || t == ValueType::path; }},
    {"true", [](ValueType t) { return t == ValueType::boolean; }},
    {"-7", [](ValueType) { return false; }},
    {"-1e300", [](ValueType) { return false; }},
    {"4096.5", [](ValueType t) { return t == ValueType::number; }},
    {"18446744073709551615", [](ValueType t) { return t == ValueType::number; }},
    {"null", [](ValueType) { return false; }},
    {"[]", [](ValueType t) { return t == ValueType::string_list; }},
    {"[null]", [](ValueType) { return false; }},
    {"[[1]]", [](ValueType) { return false; }},
    {"{}", [](ValueType t) { return t == ValueType::section || t == ValueType::opaque; }},
    {"{\"x\": 1}", [](ValueType t) { return t == ValueType::opaque; }},
};

TEST(KeyTable, WrongTypesAreRefusedByNameAndPlace) {
  for (const KeyRow& row : config::key_table()) {
    for (const Probe& probe : kProbes) {
      SCOPED_TRACE(std::string(row.path) + " = " + probe.text);
      const std::string message = refusal(text_with(row, probe.text));
      if (!probe.fits(row.type)) {
        EXPECT_THAT(message, HasSubstr(std::string(row.path)));
        EXPECT_THAT(message, HasSubstr("(test.json:1:"));
      } else if (!message.empty()) {
        // Right type, wrong value (range, neutral value, missing neighbour): still by name.
        EXPECT_THAT(message, HasSubstr(std::string(row.path)));
      }
    }
  }
}

TEST(KeyTable, RefusedKeysAreRefusedWithTheirReason) {
  int tried = 0;
  for (const KeyRow& row : config::key_table()) {
    if (row.status != KeyStatus::refused) continue;
    std::string other;
    switch (row.type) {
      case ValueType::boolean:
        other = row.neutral == "true" ? "false" : "true";
        break;
      case ValueType::integer:
        other = "2";
        break;
      case ValueType::number:
        other = row.range.max == 1 ? "0.25" : "2.5";
        break;
      case ValueType::string:
        other = "\"something else\"";
        break;
      case ValueType::choice:
        other = "\"" + std::string(row.choices.back()) + "\"";
        break;
      case ValueType::opaque:
        other = row.neutral.empty() ? "{\"anything\": 1}" : "{\"" + std::string(row.neutral) + "\": true}";
        break;
      default:
        FAIL() << "no other value for " << row.path;
    }
    const std::string message = refusal(text_with(row, other));
    EXPECT_THAT(message, HasSubstr("refused")) << row.path;
    EXPECT_THAT(message, HasSubstr(std::string(row.note))) << row.path;
    ++tried;
  }
  EXPECT_GT(tried, 40);
}

TEST(KeyTable, ListedRefusalsAreGivenTheirReason) {
  for (const KeyRow& row : config::key_table()) {
    for (const config::Refusal& refused : row.refusals) {
      EXPECT_THAT(refusal(text_with(row, std::string(refused.value))), HasSubstr(std::string(refused.reason)))
          << row.path;
    }
  }
}

TEST(KeyTable, HintsAreNamedInOneWarning) {
  for (const KeyRow& row : config::key_table()) {
    if (row.status != KeyStatus::hint) continue;
    const std::string value = row.type == ValueType::opaque ? "{\"x\": [1]}"
                              : row.default_value.empty()   ? (row.type == ValueType::integer ? "8" : "\"text\"")
                                                            : std::string(row.default_value);
    const Config config = Config::parse(text_with(row, value), "test.json");
    ASSERT_EQ(config.warnings.size(), 1u) << row.path;
    EXPECT_THAT(config.warnings[0], HasSubstr(std::string(row.path)));
  }
}

TEST(KeyTable, RangesHoldAtTheirEnds) {
  for (const KeyRow& row : config::key_table()) {
    if (row.type != ValueType::integer || row.status == KeyStatus::refused || !row.refusals.empty()) continue;
    const auto min = static_cast<std::int64_t>(row.range.min);
    EXPECT_EQ(refusal(text_with(row, std::to_string(min))), "") << row.path;
    EXPECT_NE(refusal(text_with(row, std::to_string(min - 1))), "") << row.path;
    if (row.range.max < 9e18) {
      const auto max = static_cast<std::int64_t>(row.range.max);
      EXPECT_EQ(refusal(text_with(row, std::to_string(max))), "") << row.path;
      EXPECT_NE(refusal(text_with(row, std::to_string(max + 1))), "") << row.path;
    }
  }
}

TEST(Suggestion, FindsSlipsAndMisplacedKeys) {
  EXPECT_EQ(config::suggestion("zero_optimization", "stgae"), "did you mean \"stage\"?");
  EXPECT_EQ(config::suggestion("", "zero_optimisation"), "did you mean \"zero_optimization\"?");
  EXPECT_EQ(config::suggestion("aio", "thread_cuont"), "did you mean \"thread_count\"?");
  EXPECT_EQ(config::suggestion("zero_optimization", "aio"), "\"aio\" belongs at the top level");
  EXPECT_EQ(config::suggestion("", "nvme_path"), "did you mean \"nvme_path\" in \"zero_optimization.offload_param\"?");
  for (const std::string& far : {std::string("xyzzy"), std::string(), std::string(1'000'000, 'a')}) {
    EXPECT_EQ(config::suggestion("", far), "`hoist check --print-keys` lists all keys");
  }
}

}  // namespace
}  // namespace hoist
