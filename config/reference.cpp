// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/config/key_table.hpp>
#include <hoist/config/reference.hpp>

namespace hoist::config {

namespace {

constexpr std::string_view kIntroduction =
    R"(# Configuration reference

A configuration is the JSON file that DeepSpeed users have. hoist's own settings go under the key `"hoist"`. `hoist
check --print-keys` prints this page from the table that the parser uses; do not edit it by hand. `hoist check
--print-schema` prints the schema for editors from the same table (`docs/hoist.schema.json`, installed as
`share/hoist/hoist.schema.json`; a file may name it under `"$schema"`).

- An unknown key in a section is an error, unless it begins with `_` or `//` or is `comment` or `comments`. So is one at
  the top level that is at most two letters from a key, or is the name of a key that belongs in a section. DeepSpeed
  ignores others there and in sections about the program (`flops_profiler`), and so does hoist, with a warning. A key
  given twice is an error, and so is a file that has keys, but none of DeepSpeed's or hoist's.
- Comments (`#` or `//` to the end of the line, `/* */`) and a comma after the last member are accepted, as in
  DeepSpeed, and so is `Infinity` as the value of a hint.
- A key that changes results is **implemented** or **refused** with the reason. A refused key is still accepted at its
  neutral value. A **hint** could only change speed or logging; it is accepted without effect. One warning names the
  hints of a file; hints that a person may count on have a warning of their own, which says what hoist does instead.
- `"auto"` means hoist's default, which may differ from another tool's choice. `hoist check` shows it. hoist's Trainer
  takes the value of its arguments instead, where it has one.
- Integers may be written as integral floats (`5e8`), byte counts also as `"8GiB"` or `"8G"` (powers of two) or `"8GB"`
  (a power of ten). Booleans are never strings. `null` is allowed only where DeepSpeed's own default is none (marked
  below); it means the same as leaving the key out.
- All problems of a file are reported at once, each with line and column.
- The program declares every parameter as bf16, fp16 or fp32. bf16 parameters train with an exact fp32 master, whether
  or not the file has a `bf16` section. `"bf16": {"enabled": false}` is for fp32 models: a file cannot turn bf16
  parameters into fp32 ones, so the engine then refuses them.
- The store is the subdirectory `hoist` of `nvme_path`. With nothing on NVMe, `hoist.checkpoint_path` names a directory
  that `Engine::save` commits to; steps are then not committed.
- `train_batch_size` is micro-batch times accumulation times world size; two of them imply the third.
- A `scheduler` gives step n the rate that DeepSpeed would: the first step has the rate that its schedule starts with,
  and skipped steps do not count.
)";

std::string cell(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '|') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::string code(std::string_view text) { return text.empty() ? std::string{} : fmt::format("`{}`", cell(text)); }

std::string default_cell(const KeyRow& row) {
  if (row.deepspeed_default.empty()) return code(row.default_value);
  return fmt::format("{} (DeepSpeed: {})", code(row.default_value), code(row.deepspeed_default));
}

std::string sentence(std::string_view text) {
  if (text.empty()) return {};
  std::string result(text);
  // A sentence may begin with the name of a key, whose case stays as it is.
  const bool begins_with_key = text.substr(0, text.find(' ')).find_first_of("._") != std::string_view::npos;
  if (result[0] >= 'a' && result[0] <= 'z' && !begins_with_key) result[0] = static_cast<char>(result[0] - 'a' + 'A');
  if (!result.ends_with('.')) result += '.';
  return result;
}

std::string status_cell(const KeyRow& row) {
  if (row.status != KeyStatus::refused) return std::string(key_status_name(row.status));
  if (row.neutral.empty()) return "refused";
  if (row.switches_in_parts) return fmt::format("refused unless every `{}` in it is false", row.neutral);
  if (row.type == ValueType::opaque)
    return fmt::format("refused unless `{}` is {}", row.neutral, fmt::join(row.off_values, " or "));
  return fmt::format("refused unless {}", code(row.neutral));
}

std::string meaning_cell(const KeyRow& row) {
  std::string text(row.meaning);
  if (!row.note.empty()) text += " " + sentence(row.note);
  for (const Refusal& refusal : row.refusals) {
    // Rows that share a reason (the optimizers) say it once.
    if (text.find(sentence(refusal.reason)) != std::string::npos) continue;
    std::vector<std::string> values;
    for (const Refusal& other : row.refusals) {
      if (other.reason == refusal.reason) values.push_back(code(other.value == "{}" ? "{\"every\": N}" : other.value));
    }
    text += fmt::format(" Refused: {}. {}", fmt::join(values, ", "), sentence(refusal.reason));
  }
  return cell(text);
}

std::string name_cell(const KeyRow& row) {
  std::string text = code(last_part(row.path));
  for (const std::string_view alias : row.aliases) text += fmt::format(", {}", code(alias));
  return text;
}

void add_table(std::string& text, std::string_view section_path) {
  text += "\n| key | value | default | status | meaning |\n|---|---|---|---|---|\n";
  for (const KeyRow* row : members_of(section_path)) {
    if (row->type == ValueType::section) continue;
    const std::string allowed = allowed_text(*row) + (row->nullable ? ", or null" : "");
    text += fmt::format("| {} | {} | {} | {} | {} |\n", name_cell(*row), cell(allowed), default_cell(*row),
                        status_cell(*row), meaning_cell(*row));
  }
}

}  // namespace

std::string reference_markdown() {
  std::string text(kIntroduction);
  text += "\n## Top level\n";
  add_table(text, "");
  for (const KeyRow& row : key_table()) {
    if (row.type != ValueType::section) continue;
    std::string names = fmt::format("`{}`", row.path);
    for (const std::string_view alias : row.aliases) names += fmt::format(", `{}`", alias);
    text += fmt::format("\n## {}\n\n{}\n", names, row.meaning);
    add_table(text, row.path);
  }
  return text;
}

}  // namespace hoist::config
