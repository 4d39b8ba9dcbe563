// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/config/detail/key_rows.hpp>
#include <hoist/config/key_table.hpp>
#include <hoist/core/units.hpp>

namespace hoist::config {

namespace {

std::string_view value_type_name(ValueType type) {  // for sentences
  static constexpr std::array kNames{"true or false",
                                     "an integer",
                                     "a number",
                                     "a byte count",
                                     "a string",
                                     "a choice",
                                     "a choice, or {\"every\": N}",
                                     "a path",
                                     "a path or a list of paths",
                                     "a list of two numbers",
                                     "a list of strings",
                                     "an object",
                                     "an object"};
  static_assert(kNames.size() == static_cast<std::size_t>(ValueType::opaque) + 1);
  return kNames[static_cast<std::size_t>(type)];
}

}  // namespace

std::string_view key_status_name(KeyStatus status) {
  static constexpr std::array kNames{"implemented", "hint", "refused"};
  return kNames[static_cast<std::size_t>(status)];
}

const std::vector<KeyRow>& key_table() {
  static const std::vector<KeyRow> table =
      detail::joined({}, {detail::training_rows, detail::schedule_rows, detail::zero_rows, detail::hoist_rows,
                          detail::service_rows, detail::feature_rows});
  return table;
}

std::string_view last_part(std::string_view path) {
  const auto dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

std::string_view section_of(std::string_view path) {
  const auto dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view{} : path.substr(0, dot);
}

const KeyRow* find_member(std::string_view section_path, std::string_view name) {
  for (const KeyRow& row : key_table()) {
    if (section_of(row.path) != section_path) continue;
    if (last_part(row.path) == name || std::ranges::find(row.aliases, name) != row.aliases.end()) return &row;
  }
  return nullptr;
}

const KeyRow* find_key(std::string_view path) {
  if (path.empty()) return nullptr;
  const std::string_view above = section_of(path);
  if (above.empty()) return find_member("", path);
  const KeyRow* section = find_key(above);
  return section == nullptr ? nullptr : find_member(section->path, last_part(path));
}

std::vector<const KeyRow*> members_of(std::string_view section_path) {
  std::vector<const KeyRow*> members;
  for (const KeyRow& row : key_table()) {
    if (section_of(row.path) == section_path) members.push_back(&row);
  }
  return members;
}

namespace {

std::string bound_text(double bound, ValueType type) {
  if (type == ValueType::bytes) return format_bytes(static_cast<std::uint64_t>(bound));
  constexpr double kWrittenOutMax = 1e12;  // "1.04858e+06" is neither readable nor true
  if (bound == std::floor(bound) && std::abs(bound) < kWrittenOutMax) return fmt::format("{:.0f}", bound);
  return fmt::format("{:g}", bound);
}

std::string range_text(const KeyRow& row) {
  const Range& range = row.range;
  std::string text;
  if (range.max >= 9e18) {  // not a limit that a person needs to know
    text = fmt::format(" {} {}", range.min_excluded ? "greater than" : "of at least", bound_text(range.min, row.type));
  } else {
    text = fmt::format(" {}{} {}{}", range.min_excluded ? "above " : "from ", bound_text(range.min, row.type),
                       range.max_excluded ? "to below " : "to ", bound_text(range.max, row.type));
  }
  if (range.multiple_of > 1) text += fmt::format(", a multiple of {}", range.multiple_of);
  return text;
}

// Optimal string alignment: insertions, deletions, substitutions and swapped neighbours cost one each.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), row(b.size() + 1), next(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    next[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      next[j + 1] = std::min({row[j + 1] + 1, next[j] + 1, row[j] + (a[i] == b[j] ? 0u : 1u)});
      if (i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j])
        next[j + 1] = std::min(next[j + 1], before[j - 1] + 1);
    }
    before.swap(row);
    row.swap(next);
  }
  return row[b.size()];
}

}  // namespace

std::string allowed_text(const KeyRow& row) {
  switch (row.type) {
    case ValueType::choice:
      return fmt::format("one of \"{}\"", fmt::join(row.choices, "\", \""));
    case ValueType::cadence:
      return fmt::format("one of \"{}\", or {{\"every\": N}} with N{}", fmt::join(row.choices, "\", \""),
                         range_text(row));
    case ValueType::integer:
      if (row.range.min == row.range.max) return fmt::format("the integer {:g}", row.range.min);
      [[fallthrough]];
    case ValueType::number:
      return std::string(value_type_name(row.type)) + range_text(row) +
             (row.choices.empty() ? "" : fmt::format(", or \"{}\"", fmt::join(row.choices, "\", \"")));
    case ValueType::bytes:
      return "a byte count" + range_text(row) + ", as a number or like \"8GiB\"";
    case ValueType::number_pair:
      return "a list of two numbers, each" + range_text(row);
    default:
      return std::string(value_type_name(row.type));
  }
}

namespace {

// The most similar name, if at most `wrong_letters_max` letters of it are wrong; else empty.
std::string_view nearest_within(const std::vector<std::string_view>& names, std::string_view name,
                                std::size_t wrong_letters_max) {
  std::string_view best;
  std::size_t best_distance = wrong_letters_max + 1;
  for (const std::string_view candidate : names) {
    // Names of very different lengths cannot be near; skip the computation.
    const std::size_t apart =
        candidate.size() > name.size() ? candidate.size() - name.size() : name.size() - candidate.size();
    if (apart >= best_distance) continue;
    if (const std::size_t distance = edit_distance(name, candidate); distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::vector<std::string_view> names_of_members(std::string_view section_path) {
  std::vector<std::string_view> names;
  for (const KeyRow* row : members_of(section_path)) {
    names.push_back(last_part(row->path));
    names.insert(names.end(), row->aliases.begin(), row->aliases.end());
  }
  return names;
}

// "pipeline" of "pipeline_read".
bool is_start_of(std::string_view name, std::string_view longer) {
  return !name.empty() && longer.size() > name.size() && longer.starts_with(name) && longer[name.size()] == '_';
}

bool is_below(std::string_view path, std::string_view section_path) {
  if (section_path.empty()) return true;
  return path.size() > section_path.size() && path.starts_with(section_path) && path[section_path.size()] == '.';
}

// The sections that a key of this name in `section_path` may have been meant for: those below, or else the only one
// elsewhere. A key that is only a hint counts only if no other key has the name.
std::vector<std::string_view> sections_with(std::string_view section_path, std::string_view name) {
  std::vector<const KeyRow*> rows;
  for (const KeyRow& row : key_table()) {
    const bool has_name = name == last_part(row.path) || std::ranges::find(row.aliases, name) != row.aliases.end();
    if (has_name && row.path != section_path && !is_below(section_path, row.path)) rows.push_back(&row);
  }
  const auto keep_if_any = [&rows](auto preferred) {
    if (std::ranges::any_of(rows, preferred)) std::erase_if(rows, [&](const KeyRow* row) { return !preferred(row); });
  };
  keep_if_any([](const KeyRow* row) { return row->status != KeyStatus::hint; });
  const auto below = [&](const KeyRow* row) { return is_below(section_of(row->path), section_path); };
  keep_if_any(below);
  if (rows.size() > 1 && !std::ranges::all_of(rows, below)) return {};
  std::vector<std::string_view> sections;
  for (const KeyRow* row : rows) sections.push_back(section_of(row->path));
  return sections;
}

// A third of the letters may be wrong.
std::size_t wrong_letters_max(std::string_view name) { return std::max<std::size_t>(1, name.size() / 3); }

}  // namespace

std::string_view nearest_name(const std::vector<std::string_view>& names, std::string_view name) {
  return nearest_within(names, name, wrong_letters_max(name));
}

bool has_only_hints(std::string_view section_path) {
  return !section_path.empty() && std::ranges::all_of(members_of(section_path),
                                                      [](const KeyRow* row) { return row->status == KeyStatus::hint; });
}

bool is_slip_at_top_level(std::string_view name) {
  if (!nearest_within(names_of_members({}), name, std::min<std::size_t>(2, wrong_letters_max(name))).empty())
    return true;
  // Other programs have keys such as "lr" and "warmup_num_steps", too.
  return std::ranges::any_of(sections_with({}, name), [](std::string_view section) {
    return !section.starts_with("optimizer") && !section.starts_with("scheduler") && !has_only_hints(section);
  });
}

std::string suggestion(std::string_view section_path, std::string_view name) {
  const std::vector<std::string_view> sections = sections_with(section_path, name);
  const auto in_sections = [&] {
    return fmt::format("did you mean \"{}\" in \"{}\"?", name, fmt::join(sections, "\" or \""));
  };
  if (!sections.empty() && is_below(sections.front(), section_path)) return in_sections();  // before similar names
  std::vector<std::string_view> names = names_of_members(section_path);
  if (const std::string_view near = nearest_name(names, name); !near.empty()) {
    return fmt::format("did you mean \"{}\"?", near);
  }
  if (!section_path.empty()) {  // at the top level, other programs' keys may be such words
    std::erase_if(names, [&](std::string_view longer) {
      return !is_start_of(name, longer) || find_member(section_path, longer)->status == KeyStatus::refused;
    });
    if (!names.empty()) return fmt::format("did you mean \"{}\"?", fmt::join(names, "\" or \""));
  }
  if (sections.empty()) return std::string(kNoSuggestion);
  if (sections.front().empty()) return fmt::format("\"{}\" belongs at the top level", name);
  return in_sections();
}

}  // namespace hoist::config
