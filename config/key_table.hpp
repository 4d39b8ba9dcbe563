// SPDX-License-Identifier: Apache-2.0
// config/key_table.hpp - every key of a configuration: its type, range, default and status.
//
// One table, as data. The reader checks files against it, fills the options structs through it, and prints the
// reference (docs/config.md) from it, so that they cannot drift apart.
//
// Threading  The table is built on first use and constant afterwards.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace hoist::config {

namespace detail {
struct Draft;
}

enum class ValueType : std::uint8_t {
  boolean,
  integer,  // an integral float such as 5e8 counts
  number,   // finite; or one of KeyRow::choices, if the row has any
  bytes,    // an integer, or a string such as "8GiB"
  string,
  choice,       // one of KeyRow::choices
  cadence,      // one of KeyRow::choices, or {"every": N}
  path,         // a string
  path_list,    // a string, or a list of strings
  number_pair,  // a list of two numbers
  string_list,
  section,  // an object whose members are rows of their own
  opaque,   // an object whose members are not examined
};

enum class KeyStatus : std::uint8_t {
  implemented,
  hint,     // accepted without effect, since it cannot change results; named once in a warning
  refused,  // except at its neutral value; `note` says why, and what to write instead
};
std::string_view key_status_name(KeyStatus status);

// A checked value. bytes is an integer; choice and path are strings, path_list is a list of them; cadence is a string
// or an integer; sections have none.
using Value = std::variant<std::monostate, bool, std::int64_t, double, std::string, std::vector<double>,
                           std::vector<std::string>>;

struct Range {
  double min = 0;
  double max = 0x1p63;  // integers that are at most 2^63 - 1
  bool max_excluded = false;
  bool min_excluded = false;
  std::uint64_t multiple_of = 1;
};

// A value that this version refuses, of a key that is otherwise implemented. `value` is JSON text; "{}" stands for
// any object.
struct Refusal {
  std::string_view value;
  std::string_view reason;
};

struct KeyRow {
  std::string_view path;                    // "zero_optimization.offload_param.device"
  std::vector<std::string_view> aliases{};  // other names of the last part
  ValueType type = ValueType::boolean;
  KeyStatus status = KeyStatus::implemented;
  std::string_view default_value{};      // JSON text; empty: none
  std::string_view deepspeed_default{};  // JSON text, when it differs
  Range range{};
  std::vector<std::string_view> choices{};
  // Refused keys: JSON text of the value that changes nothing; empty: no value is accepted. Opaque sections, hints too:
  // the name of the member that switches the section on; off, or absent, it asks for nothing.
  std::string_view neutral{};
  std::vector<std::string_view> off_values{"false"};  // of that member, as JSON text
  // The section's parts have switches of that name, at any depth: they must be there, and all of them off.
  bool switches_in_parts = false;
  bool is_explained = false;  // hints: has a warning of its own, with the note, where the file asks for something
  std::vector<Refusal> refusals{};
  bool nullable = false;       // null is the same as leaving the key out, as where DeepSpeed's own default is None
  std::string_view meaning{};  // one sentence
  std::string_view note{};     // hint: why it has no effect; refused: why, and the alternative; else a remark
  void (*apply)(detail::Draft&, const Value&) = nullptr;  // implemented keys: puts the value where it takes effect
};

// All rows, sections before their members.
const std::vector<KeyRow>& key_table();

// The row of a path whose parts may be aliases; null when there is none.
const KeyRow* find_key(std::string_view path);
const KeyRow* find_member(std::string_view section_path, std::string_view name);
// Rows directly below a section ("" is the top level).
std::vector<const KeyRow*> members_of(std::string_view section_path);

std::string_view last_part(std::string_view path);
std::string_view section_of(std::string_view path);  // "" at the top level

// The allowed values of a row, for messages and the reference: "an integer from 1 to 4096".
std::string allowed_text(const KeyRow& row);

// The most similar of some names, if it is similar enough for a typing error; else empty.
std::string_view nearest_name(const std::vector<std::string_view>& names, std::string_view name);

// Whether an unknown key at the top level is meant for DeepSpeed: misspelled by a letter or two, or the name of a key
// that belongs in a section. Other unknown keys there are those of the program that wrote the file, which may be
// similar.
bool is_slip_at_top_level(std::string_view name);

// Whether every member of a section is a hint.
bool has_only_hints(std::string_view section_path);

// For an unknown member: "did you mean ...?", or the section that has a key of that name, or kNoSuggestion.
inline constexpr std::string_view kNoSuggestion = "`hoist check --print-keys` lists all keys";
std::string suggestion(std::string_view section_path, std::string_view name);

}  // namespace hoist::config
