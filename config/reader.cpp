// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/config/detail/reader.hpp>
#include <hoist/config/detail/values.hpp>

namespace hoist::config::detail {

namespace {

using nlohmann::json;
using Kind = JsonNode::Kind;

// A key for messages; quoted only if it needs to be.
std::string shown_key(const std::string& name) {
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
      const std::string shown = shown_path.empty() ? shown_key(member.key) : shown_path + "." + shown_key(member.key);
      if (!names.insert(member.key).second) {
        problem(shown, "given twice in one object", member.key_offset);
        continue;
      }
      if (const KeyRow* row = find_member(section_path, member.key)) {
        knows_a_key_ = true;
        read_member(*row, member, shown);
      } else {
        unknown_key(section_path, member, shown);
      }
    }
  }

  // DeepSpeed reads its keys by name and ignores others at the top level, such as those of the project that wrote the
  // file, and in sections about the program. A file without any key of DeepSpeed's is something else.
  void note_unknown_keys() {
    if (unknown_keys_.empty()) return;
    if (!knows_a_key_) {
      problem("", "no key of DeepSpeed is in this file: is it the right one?", unknown_keys_.front().offset);
      return;
    }
    std::vector<std::string> names;
    constexpr std::size_t kNamesMax = 20;
    for (const UnknownKey& unknown : std::span(unknown_keys_).first(std::min(kNamesMax, unknown_keys_.size()))) {
      const std::string advice = suggestion(unknown.section_path, unknown.key);
      names.push_back(advice == kNoSuggestion ? unknown.shown : fmt::format("{} ({})", unknown.shown, advice));
    }
    result_.warnings.push_back(fmt::format("not used, since neither hoist nor DeepSpeed 0.19 knows such keys: {}{}",
                                           fmt::join(names, ", "),
                                           unknown_keys_.size() > kNamesMax ? ", and others" : ""));
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
    if (is_full()) return;
    const TextPosition at = position_of(text_, offset);
    result_.problems.push_back({std::move(key), std::move(sentence), at.line, at.column});
  }

 private:
  // A key that neither hoist nor DeepSpeed reads, where DeepSpeed ignores such keys.
  struct UnknownKey {
    std::string shown;
    std::string_view section_path;
    std::string_view key;
    std::size_t offset = 0;
  };

  // Counts a problem beyond the limit instead of storing it: line and column of each cost a walk over the text.
  bool is_full() {
    if (result_.problems.size() < kProblemsMax) return false;
    ++result_.unlisted;
    return true;
  }

  void unknown_key(std::string_view section_path, const JsonMember& member, const std::string& shown) {
    if (is_comment(member.key)) return note_comment(member, shown);
    const bool is_ignored = section_path.empty()
                                ? unknown_keys_.size() >= kProblemsMax || !is_slip_at_top_level(member.key)
                                : has_only_hints(section_path);
    if (is_ignored) {
      refuse_duplicates(member.value, shown);
      unknown_keys_.push_back({shown, section_path, member.key, member.key_offset});
    } else if (!is_full()) {
      problem(shown, std::string(kUnknownKey) + suggestion(section_path, member.key), member.key_offset);
    }
  }

  // People write comments under such keys.
  static bool is_comment(std::string_view key) {
    return key.starts_with('_') || key.starts_with("//") || key == "comment" || key == "comments";
  }

  void note_comment(const JsonMember& member, const std::string& shown) {
    refuse_duplicates(member.value, shown);
    result_.hints.push_back(shown);
  }

  void read_member(const KeyRow& row, const JsonMember& member, const std::string& shown) {
    if (row.type == ValueType::section || row.type == ValueType::opaque) {
      read_section(row, member, shown);
      return;
    }
    if (row.nullable && is_null(member.value)) return;
    const TextPosition at = position_of(text_, member.value.offset);
    ConfigSetting setting{.row = &row, .line = at.line, .column = at.column};
    if (is_automatic(row, member.value)) {
      setting.source = ConfigSetting::Source::automatic;
      result_.automatic.push_back(shown);
    } else {
      Checked checked = check_value(row, member.value);
      if (const Wrong* wrong = std::get_if<Wrong>(&checked)) {
        problem(shown, wrong->sentence, member.value.offset);
        if (wrong->refused) {
          setting.value = *wrong->refused;
          result_.refused.push_back(std::move(setting));
        }
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
      if (row.status != KeyStatus::hint) return;
      const bool is_default = place->second.source == ConfigSetting::Source::automatic ||
                              (!row.default_value.empty() && place->second.value == default_of(row));
      if (!row.is_explained || !is_default) note_hint(row, shown, !is_default);
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

  void note_hint(const KeyRow& row, const std::string& shown, bool asks) {
    if (row.is_explained && asks) {
      result_.warnings.push_back(fmt::format("{} has no effect: {}", shown, row.note));
    } else {
      result_.hints.push_back(shown);
    }
  }

  void read_section(const KeyRow& row, const JsonMember& member, const std::string& shown) {
    const JsonNode& node = member.value;
    if (row.nullable && is_null(node)) return;
    if (row.path == "zero_optimization" && node.kind == Kind::scalar && node.scalar.is_boolean()) {
      read_old_switch(node);
      return;
    }
    if (node.kind != Kind::object) {
      problem(shown, not_a_section(row, node), node.offset);
      return;
    }
    if (row.type == ValueType::section) {
      read_object(node, row.path, shown);
      return;
    }
    refuse_duplicates(node, shown);
    if (row.status == KeyStatus::hint) {
      if (const bool asks = asks_for_something(row, node); asks || row.neutral != "enabled")
        note_hint(row, shown, asks);
    } else if (asks_for_something(row, node)) {
      problem(shown, "refused: " + std::string(row.note), member.key_offset);
    } else if (row.neutral != "enabled" && !node.members.empty()) {
      result_.hints.push_back(shown);  // members that mean something to another program
    }
  }

  // DeepSpeed still reads "zero_optimization": true, from before there were stages.
  void read_old_switch(const JsonNode& node) {
    const TextPosition at = position_of(text_, node.offset);
    const std::int64_t stage = node.scalar.get<bool>() ? 1 : 0;
    const KeyRow* const row = find_key("zero_optimization.stage");
    given_.try_emplace(
        row,
        ConfigSetting{
            .row = row, .value = stage, .source = ConfigSetting::Source::file, .line = at.line, .column = at.column});
    result_.warnings.push_back(fmt::format(
        "zero_optimization: {} is read as stage {}, as DeepSpeed reads this old form", display(node), stage));
  }

  // {"enabled": true} for true where the section has such a switch, {"type": "AdamW"} for "AdamW".
  static std::string as_section(const KeyRow& row, const JsonNode& node) {
    if (node.kind != Kind::scalar) return {};
    const bool is_switch = node.scalar.is_boolean() || (is_string(node) && node.scalar == "auto");
    const std::string_view member = is_switch ? "enabled" : is_string(node) ? "type" : "";
    if (member.empty() || find_member(row.path, member) == nullptr) return {};
    return fmt::format("; write {{\"{}\": {}}}", member, display(node));
  }

  static std::string not_a_section(const KeyRow& row, const JsonNode& node) {
    std::string sentence = fmt::format("{} is not an object", display(node)) + as_section(row, node);
    if (is_null(node)) sentence += "; leave the section out";
    if (row.path.starts_with("zero_optimization.offload_")) sentence += "; write {\"device\": \"cpu\"} or \"nvme\"";
    return sentence;
  }

  static bool asks_for_something(const KeyRow& row, const JsonNode& section) {
    if (row.neutral.empty()) return !section.members.empty();
    std::vector<const JsonNode*> switches;
    find_switches(row, section, switches);
    const auto is_on = [&row](const JsonNode* node) {
      if (is_string(*node) && node->scalar == "auto") return false;
      return node->kind != Kind::scalar || std::ranges::none_of(row.off_values, [node](std::string_view off) {
               return node->scalar == json::parse(off);
             });
    };
    const bool lacks_switches = row.switches_in_parts && switches.empty() && !section.members.empty();
    return lacks_switches || std::ranges::any_of(switches, is_on);
  }

  static void find_switches(const KeyRow& row, const JsonNode& section, std::vector<const JsonNode*>& found) {
    for (const JsonMember& member : section.members) {
      if (member.key == row.neutral) found.push_back(&member.value);
      if (row.switches_in_parts) find_switches(row, member.value, found);
    }
  }

  void refuse_duplicates(const JsonNode& node, const std::string& shown) {
    std::set<std::string_view> names;
    for (const JsonMember& member : node.members) {
      const std::string path = shown + "." + shown_key(member.key);
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
  std::vector<UnknownKey> unknown_keys_;
  bool knows_a_key_ = false;
};

}  // namespace

const ConfigSetting* ReadResult::setting(std::string_view path) const {
  const auto found = std::ranges::find(settings, path, [](const ConfigSetting& each) { return each.row->path; });
  return found == settings.end() ? nullptr : &*found;
}

bool ReadResult::in_file(std::string_view path) const {
  const ConfigSetting* const found = setting(path);
  return found != nullptr && found->source == ConfigSetting::Source::file;
}

void ReadResult::refuse(std::string_view path, std::string sentence) {
  const ConfigSetting* const found = setting(path);
  problems.push_back({std::string(path), std::move(sentence), found == nullptr ? 0 : found->line,
                      found == nullptr ? 0 : found->column});
}

ReadResult read_settings(const JsonNode& root, std::string_view text) {
  ReadResult result;
  Reader reader(text, result);
  if (root.kind == Kind::object) {
    reader.read_object(root, "", "");
    reader.note_unknown_keys();
  } else {
    reader.problem("", fmt::format("the configuration is not an object but {}", display(root)), root.offset);
  }
  reader.collect_settings();
  return result;
}

}  // namespace hoist::config::detail
