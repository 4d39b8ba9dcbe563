// SPDX-License-Identifier: Apache-2.0
// config/detail/key_rows.hpp - the parts of the key table, in the order of the reference.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <vector>

#include <hoist/config/detail/draft.hpp>
#include <hoist/config/key_table.hpp>

namespace hoist::config::detail {

std::vector<KeyRow> training_rows();  // batch, optimizer, number formats
std::vector<KeyRow> schedule_rows();  // scheduler
std::vector<KeyRow> zero_rows();      // zero_optimization, aio
std::vector<KeyRow> hoist_rows();     // hoist's own settings
std::vector<KeyRow> service_rows();   // logging, profiling, checkpoints, activations
std::vector<KeyRow> feature_rows();   // features of DeepSpeed that hoist does not have

using RowMaker = std::vector<KeyRow> (*)();
// `rows`, and after them those of all parts.
inline std::vector<KeyRow> joined(std::vector<KeyRow> rows, std::initializer_list<RowMaker> parts) {
  for (const RowMaker part : parts) std::ranges::move(part(), std::back_inserter(rows));
  return rows;
}

inline bool as_bool(const Value& value) { return std::get<bool>(value); }
inline std::uint64_t as_count(const Value& value) { return static_cast<std::uint64_t>(std::get<std::int64_t>(value)); }
inline unsigned as_unsigned(const Value& value) { return static_cast<unsigned>(std::get<std::int64_t>(value)); }
inline double as_number(const Value& value) { return std::get<double>(value); }
inline const std::string& as_text(const Value& value) { return std::get<std::string>(value); }
inline const std::vector<std::string>& as_texts(const Value& value) {
  return std::get<std::vector<std::string>>(value);
}

// Shorter spellings of the common rows.
inline KeyRow section_row(std::string_view path, std::string_view meaning) {
  return {.path = path, .type = ValueType::section, .meaning = meaning};
}

inline KeyRow hint(std::string_view path, ValueType type, std::string_view default_value, std::string_view meaning,
                   std::string_view note) {
  return {.path = path,
          .type = type,
          .status = KeyStatus::hint,
          .default_value = default_value,
          .meaning = meaning,
          .note = note};
}

// A hint without a default; DeepSpeed's own files may write null for it.
inline KeyRow optional_hint(std::string_view path, ValueType type, std::string_view meaning, std::string_view note) {
  return {.path = path, .type = type, .status = KeyStatus::hint, .nullable = true, .meaning = meaning, .note = note};
}

// Accepted at `neutral` only, which is also its default.
inline KeyRow refused(std::string_view path, ValueType type, std::string_view neutral, std::string_view meaning,
                      std::string_view note) {
  return {.path = path,
          .type = type,
          .status = KeyStatus::refused,
          .default_value = neutral,
          .neutral = neutral,
          .meaning = meaning,
          .note = note};
}

// A section that is accepted while its member `switch_name` is false or absent.
inline KeyRow refused_section(std::string_view path, std::string_view switch_name, std::string_view meaning,
                              std::string_view note) {
  return {.path = path,
          .type = ValueType::opaque,
          .status = KeyStatus::refused,
          .neutral = switch_name,
          .meaning = meaning,
          .note = note};
}

// A hint with a warning of its own, where it has another value than its default.
inline KeyRow explained(KeyRow row) {
  row.is_explained = true;
  return row;
}

// A section that DeepSpeed's engine has no use for, or that only changes speed. It asks for something if its member
// `switch_name` is on; without such a name, if it has any member.
inline KeyRow hint_section(std::string_view path, std::string_view switch_name, std::string_view meaning,
                           std::string_view note) {
  return {.path = path,
          .type = ValueType::opaque,
          .status = KeyStatus::hint,
          .neutral = switch_name,
          .is_explained = true,
          .nullable = true,
          .meaning = meaning,
          .note = note};
}

}  // namespace hoist::config::detail
