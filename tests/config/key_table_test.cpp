// SPDX-License-Identifier: Apache-2.0
// Tries the promises of the key table on every row.
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/config/config.hpp>
#include <hoist/config/detail/json_text.hpp>
#include <hoist/config/detail/values.hpp>
#include <hoist/config/key_table.hpp>
#include <hoist/config/setting.hpp>

namespace hoist::key_table_test {
namespace {

using config::KeyRow;
using config::KeyStatus;
using config::ValueType;
using ::testing::HasSubstr;

bool is_leaf(const KeyRow& row) { return row.type != ValueType::section && row.type != ValueType::opaque; }

// Which schedule has a parameter, with what else it needs.
std::string schedule_with(std::string_view parameter, const std::string& setting) {
  const auto is = [&](std::string_view prefix) { return parameter.starts_with(prefix); };
  std::string type = "WarmupLR";
  std::vector<std::string> needs;
  if (is("total_num_steps")) {
    type = "WarmupDecayLR";
  } else if (is("warmup_min_ratio") || is("cos_min_ratio")) {
    type = "WarmupCosineLR";
    needs = {R"("total_num_steps": 5000)"};
  } else if (is("cycle_") || is("decay_")) {
    type = "OneCycle";
    if (parameter != "cycle_min_lr") needs.push_back(R"("cycle_min_lr": 0.1)");
    if (parameter != "cycle_max_lr") needs.push_back(R"("cycle_max_lr": 0.2)");
  } else if (is("lr_range_test_")) {
    type = "LRRangeTest";
  }
  std::string params = setting;
  for (const std::string& need : needs) params += ", " + need;
  return R"({"scheduler": {"type": ")" + type + R"(", "params": {)" + params + "}}}";
}

// Which optimizer has a parameter.
std::string optimizer_with(std::string_view parameter, const std::string& setting) {
  std::string type = "AdamW";
  if (parameter == "lr_decay" || parameter == "initial_accumulator_value") type = "Adagrad";
  std::string params = setting;
  if (parameter == "momentum" || parameter == "dampening" || parameter == "nesterov") type = "SGD";
  if (parameter == "nesterov") params += R"(, "momentum": 0.9)";
  return R"({"optimizer": {"type": ")" + type + R"(", "params": {)" + params + "}}}";
}

// {"a": {"b": VALUE}} for "a.b", its last part under another name if asked.
std::string text_with(const KeyRow& row, const std::string& value, std::string_view name = {}) {
  const std::string_view last_name = name.empty() ? config::last_part(row.path) : name;
  std::string text = "\"" + std::string(last_name) + "\": " + value;
  if (config::section_of(row.path) == "scheduler.params") return schedule_with(last_name, text);
  if (config::section_of(row.path) == "optimizer.params") return optimizer_with(last_name, text);
  for (std::string_view path = config::section_of(row.path); !path.empty(); path = config::section_of(path)) {
    text = "\"" + std::string(config::last_part(path)) + "\": {" + text + "}";
  }
  return "{" + text + "}";
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
    if (row.type == ValueType::choice || row.type == ValueType::cadence) {
      EXPECT_FALSE(row.choices.empty());
    } else {
      EXPECT_TRUE(row.choices.empty() || row.type == ValueType::number);
    }
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

const ConfigSetting* find_setting(const Config& config, const KeyRow& row) {
  for (const ConfigSetting& setting : config.settings()) {
    if (setting.row == &row) return &setting;
  }
  return nullptr;
}

TEST(KeyTable, AutoIsTheDefaultOfEveryKey) {
  for (const KeyRow& row : config::key_table()) {
    if (!is_leaf(row)) continue;
    const std::string text = text_with(row, "\"auto\"");
    if (refusal(text).find("only a trainer") != std::string::npos) continue;  // has no default: see schedule_test
    if (config::section_of(row.path) == "scheduler.params" && row.default_value.empty() && !row.nullable) continue;
    const Config config = Config::parse(text, "test.json");
    const ConfigSetting* setting = find_setting(config, row);
    if (row.path == "scheduler.params.last_batch_iteration") continue;  // no schedule counts it
    ASSERT_EQ(setting == nullptr, row.default_value.empty()) << row.path;
    if (setting == nullptr || to_text(setting->value) == "\"auto\"") continue;  // a choice
    EXPECT_EQ(setting->value, config::detail::default_of(row)) << row.path;
  }
}

TEST(KeyTable, NullIsTheSameAsNothingWhereDeepSpeedSaysNone) {
  int tried = 0;
  for (const KeyRow& row : config::key_table()) {
    if (!row.nullable) continue;
    const std::string text = text_with(row, "null");
    if (config::section_of(row.path) == "scheduler.params") continue;  // names its schedule beside it
    const Config config = Config::parse(text, "test.json");
    EXPECT_TRUE(config.warnings.empty()) << row.path;
    const Config plain = Config::parse("{}", "test.json");
    ASSERT_EQ(config.settings().size(), plain.settings().size()) << row.path;
    for (std::size_t i = 0; i < plain.settings().size(); ++i) {
      EXPECT_EQ(config.settings()[i].value, plain.settings()[i].value) << row.path;
      EXPECT_EQ(config.settings()[i].source, ConfigSetting::Source::standard) << row.path;
    }
    ++tried;
  }
  EXPECT_GT(tried, 15);
}

bool is_path(ValueType type) { return type == ValueType::path || type == ValueType::path_list; }

// Values of every kind of JSON; which are right for a type.
struct Probe {
  const char* text;
  bool (*fits)(ValueType);
};
const Probe kProbes[] = {
    {"\"no such thing\"", [](ValueType t) { return t == ValueType::string || is_path(t); }},
    {"\"true\"", [](ValueType t) { return t == ValueType::string || is_path(t); }},
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
    // In a section about the program, it is ignored, as DeepSpeed does.
    {"{\"x\": 1}", [](ValueType t) { return t == ValueType::opaque || t == ValueType::section; }},
};

TEST(KeyTable, WrongTypesAreRefusedByNameAndPlace) {
  for (const KeyRow& row : config::key_table()) {
    for (const Probe& probe : kProbes) {
      SCOPED_TRACE(std::string(row.path) + " = " + probe.text);
      if (row.path == "zero_optimization" && std::string_view(probe.text) == "true") continue;  // the old form
      const std::string message = refusal(text_with(row, probe.text));
      if (row.nullable && std::string_view(probe.text) == "null") {
        EXPECT_EQ(message, "");
      } else if (!probe.fits(row.type)) {
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
      case ValueType::string_list:
        other = "[\"something\"]";
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
  EXPECT_GE(tried, 37);
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
    if (row.status != KeyStatus::hint || (row.is_explained && row.type != ValueType::opaque)) continue;
    const std::string on = row.neutral.empty() ? "x" : std::string(row.neutral);
    const std::string value = row.type == ValueType::opaque ? "{\"" + on + "\": [1]}"
                              : row.default_value.empty()   ? (row.type == ValueType::integer   ? "8"
                                                               : row.type == ValueType::boolean ? "true"
                                                                                                : "\"text\"")
                                                            : std::string(row.default_value);
    const Config config = Config::parse(text_with(row, value), "test.json");
    ASSERT_EQ(config.warnings.size(), 1u) << row.path;
    EXPECT_THAT(config.warnings[0], HasSubstr(std::string(row.path)));
  }
}

// A hint that a person may count on has a warning of its own with the meaning.
TEST(KeyTable, ExplainedHintsSayWhyWhereTheyAskForSomething) {
  int tried = 0;
  for (const KeyRow& row : config::key_table()) {
    if (!row.is_explained) continue;
    const std::string on = row.neutral.empty() ? "x" : std::string(row.neutral);
    const std::string value = row.type == ValueType::opaque    ? "{\"" + on + "\": true}"
                              : row.type == ValueType::boolean ? (row.default_value == "true" ? "false" : "true")
                                                               : "8";
    const std::string expected = fmt::format("{} has no effect: {}", row.path, row.note);
    EXPECT_THAT(Config::parse(text_with(row, value), "test.json").warnings, ::testing::Contains(expected)) << value;
    const std::string off = row.type != ValueType::opaque ? std::string(row.default_value)
                            : row.neutral.empty()         ? "{}"
                                                          : "{\"" + on + "\": false}";
    EXPECT_THAT(Config::parse(text_with(row, off), "test.json").warnings,
                ::testing::Not(::testing::Contains(HasSubstr("has no effect"))))
        << row.path;
    ++tried;
  }
  EXPECT_GE(tried, 14);
}

// DeepSpeed's sections for compression have a switch in each part.
TEST(KeyTable, SectionsWhosePartsAreOffAreAccepted) {
  const auto verdict = [](const std::string& section) {
    return refusal("{\"compression_training\": " + section + "}");
  };
  EXPECT_EQ(verdict(R"({"weight_quantization": {"shared_parameters": {"enabled": false, "quantize_groups": 1}},
                        "layer_reduction": {"enabled": false}})"),
            "");
  EXPECT_THAT(verdict(R"({"weight_quantization": {"shared_parameters": {"enabled": true}},
                          "layer_reduction": {"enabled": false}})"),
              HasSubstr("refused"));
  EXPECT_THAT(verdict(R"({"weight_quantization": {"different_groups": {}}})"), HasSubstr("refused"));
  for (const char* size : {"0", "1"}) {
    EXPECT_EQ(refusal(fmt::format(R"({{"tensor_parallel": {{"autotp_size": {}}}}})", size)), "");
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
      // Within the range; what else the value needs is another rule's business.
      EXPECT_THAT(refusal(text_with(row, std::to_string(max))), ::testing::Not(HasSubstr("is not"))) << row.path;
      EXPECT_NE(refusal(text_with(row, std::to_string(max + 1))), "") << row.path;
    }
  }
}

TEST(Suggestion, FindsSlipsAndMisplacedKeys) {
  EXPECT_EQ(config::suggestion("zero_optimization", "stgae"), "did you mean \"stage\"?");
  EXPECT_EQ(config::suggestion("", "zero_optimisation"), "did you mean \"zero_optimization\"?");
  EXPECT_EQ(config::suggestion("aio", "thread_cuont"), "did you mean \"thread_count\"?");
  EXPECT_EQ(config::suggestion("zero_optimization", "aio"), "\"aio\" belongs at the top level");
  EXPECT_EQ(config::suggestion("", "loss_scale"), "did you mean \"loss_scale\" in \"fp16\"?") << "no hint of bf16's";
  EXPECT_EQ(config::suggestion("", "nvme_path"),
            "did you mean \"nvme_path\" in \"zero_optimization.offload_param\" or "
            "\"zero_optimization.offload_optimizer\"?");
  EXPECT_EQ(config::suggestion("zero_optimization", "device"),
            "did you mean \"device\" in \"zero_optimization.offload_param\" or "
            "\"zero_optimization.offload_optimizer\"?");
  EXPECT_EQ(config::suggestion("zero_optimization", "super_offload"),
            "did you mean \"super_offload\" in \"zero_optimization.offload_optimizer\"?")
      << "and not cpu_offload, which is similar";
  EXPECT_EQ(config::suggestion("zero_optimization.offload_optimizer", "pipeline"),
            "did you mean \"pipeline_read\" or \"pipeline_write\"?");
  EXPECT_EQ(config::suggestion("fp16", "fp16"), config::kNoSuggestion) << "it is in that section already";
  EXPECT_EQ(config::suggestion("fp16", "type"), config::kNoSuggestion) << "of two sections elsewhere, neither is meant";
  for (const std::string& far : {std::string("xyzzy"), std::string(), std::string(1'000'000, 'a')}) {
    EXPECT_EQ(config::suggestion("", far), "`hoist check --print-keys` lists all keys");
  }
}

}  // namespace
}  // namespace hoist::key_table_test
