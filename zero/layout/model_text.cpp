// SPDX-License-Identifier: Apache-2.0
// The model as text: what a store keeps to recognise it by, and to be read without the program that made it.
#include <algorithm>
#include <array>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/error.hpp>
#include <hoist/core/first_difference.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/layout/unit_table.hpp>

namespace hoist::detail {

namespace {

constexpr std::string_view kShortRemainder = " remainder int8";

}  // namespace

std::string UnitTable::identity() const {
  std::string text;
  for (const Unit& unit : units_) {
    for (const ParameterId id : unit.parameters) {
      const ParameterSpec& spec = this->spec(id);
      const Parameter& parameter = this->parameter(id);
      text += fmt::format("{} | {} | {} | [{}] | {} | segment {} at {}", unit.name, spec.name, dtype_name(spec.dtype),
                          fmt::join(spec.shape, ", "), spec.trainable ? "trainable" : "frozen", parameter.segment,
                          parameter.first_element);
      // Adam's two moments of fp32 and remainders of 16 bits go without saying.
      const optim::StateForm& state = unit.segments[parameter.segment].state;
      if (spec.trainable && state != optim::StateForm{})
        text += fmt::format(" | {} {}{}", optim::state_name(state.state), moment_type_name(state.moments),
                            state.remainder == RemainderType::int8 ? kShortRemainder : "");
      text += '\n';
    }
  }
  return text;
}

namespace {

constexpr std::size_t kFieldCount = 7;
constexpr std::string_view kSeparator = " | ";  // no name holds a '|'

// Everything before `separator`; `text` is left with what follows it.
std::string_view take_until(std::string_view& text, std::string_view separator) {
  const std::size_t at = text.find(separator);
  const std::string_view part = text.substr(0, at);
  text = at == std::string_view::npos ? std::string_view{} : text.substr(at + separator.size());
  return part;
}

std::optional<std::vector<std::int64_t>> read_shape(std::string_view text) {
  if (!text.starts_with('[') || !text.ends_with(']')) return std::nullopt;
  text = text.substr(1, text.size() - 2);
  std::vector<std::int64_t> shape;
  while (!text.empty()) {
    const auto extent = parse_number<std::int64_t>(take_until(text, ", "));
    if (!extent) return std::nullopt;
    shape.push_back(*extent);
  }
  return shape;
}

struct Line {
  std::string unit;
  ParameterSpec spec;  // its group is the segment
  optim::StateForm state;
};

std::optional<optim::StateForm> read_state(std::string_view text) {
  if (text.empty()) return optim::StateForm{};
  const std::string_view name = take_until(text, " ");
  const bool is_short = text.ends_with(kShortRemainder);
  if (is_short) text.remove_suffix(kShortRemainder.size());
  for (const optim::OptimizerState state : optim::kOptimizerStates) {
    for (const MomentType moments : {MomentType::fp32, MomentType::bf16, MomentType::fp8}) {
      if (name == optim::state_name(state) && text == moment_type_name(moments))
        return optim::StateForm{
            .state = state, .moments = moments, .remainder = is_short ? RemainderType::int8 : RemainderType::int16};
    }
  }
  return std::nullopt;
}

// One line of identity(); nothing when it is not.
std::optional<Line> read_line(std::string_view text) {
  std::array<std::string_view, kFieldCount> fields;
  for (std::string_view& field : fields) field = take_until(text, kSeparator);
  Line line{.unit = std::string(fields[0]), .spec = {.name = std::string(fields[1])}};
  const auto dtype = parse_dtype(fields[2]);
  auto shape = read_shape(fields[3]);
  line.spec.trainable = fields[4] == "trainable";
  take_until(fields[5], "segment ");
  const auto group = parse_number<std::uint32_t>(take_until(fields[5], " at "));
  const auto state = read_state(fields[6]);
  if (!dtype || !shape || !group || !state) return std::nullopt;
  line.spec.dtype = *dtype;
  line.spec.shape = std::move(*shape);
  line.spec.group.index = *group;
  line.state = *state;
  return line;
}

std::string_view trained_by(optim::OptimizerState state) {
  static constexpr std::array kNames{"SGD", "SGD with momentum", "Lion", "Adagrad", "AdamW or Adam"};
  static_assert(kNames.size() == optim::kOptimizerStates.size());
  return kNames[static_cast<std::size_t>(state)];
}

std::string shown(const optim::StateForm& state) {
  return fmt::format("{} with moments of {}{}", trained_by(state.state), moment_type_name(state.moments),
                     state.remainder == RemainderType::int8 ? " and remainders of int8" : "");
}

// What differs of one parameter; nothing if it is another parameter.
std::optional<std::string> difference_of(const Line& stored, const Line& mine) {
  const ParameterSpec& a = stored.spec;
  const ParameterSpec& b = mine.spec;
  if (stored.unit != mine.unit || a.name != b.name || a.shape != b.shape) return std::nullopt;
  if (a.dtype != b.dtype)
    return fmt::format("holds '{}' in {}, and this program has it in {}", a.name, dtype_name(a.dtype),
                       dtype_name(b.dtype));
  if (a.trainable != b.trainable)
    return fmt::format("holds '{}' {}, and this program {}", a.name, a.trainable ? "with optimizer state" : "frozen",
                       b.trainable ? "trains it" : "has frozen it");
  if (stored.state.state != mine.state.state)
    return fmt::format("was trained by {}, and this program asks for {} ('{}')", trained_by(stored.state.state),
                       trained_by(mine.state.state), a.name);
  if (stored.state != mine.state)
    return fmt::format("was trained by {}, and this program asks for {} ('{}')", shown(stored.state), shown(mine.state),
                       a.name);
  return std::nullopt;
}

}  // namespace

std::string UnitTable::difference_from(std::string_view stored) const {
  const std::string text = identity();
  std::string_view theirs = stored;
  std::string_view ours = text;
  while (!theirs.empty() && !ours.empty()) {
    const std::string_view a = take_until(theirs, "\n");
    const std::string_view b = take_until(ours, "\n");
    if (a == b) continue;
    const std::optional<Line> one = read_line(a);
    const std::optional<Line> other = read_line(b);
    if (one && other) {
      if (const auto difference = difference_of(*one, *other)) return *difference;
    }
    break;
  }
  return "holds another model: " + first_difference(stored, text, "stored", "yours");
}

UnitTable UnitTable::from_identity(std::string_view text, int world_size, std::uint64_t elements_max) {
  const auto refuse = [](std::string_view line) {
    throw StoreError(fmt::format("the store describes its model in a way this version does not understand: \"{}\"",
                                 line.substr(0, 200)));
  };
  Model model;
  std::string unit;
  std::vector<ParameterSpec> specs;
  std::vector<optim::StateForm> states;                       // by parameter of the unit
  std::vector<std::vector<optim::StateForm>> states_by_unit;  // by segment, which stands for the group
  const auto end_unit = [&] {
    // A unit has no more segments than parameters, so a damaged line names a group that does not exist.
    std::vector<optim::StateForm> groups(specs.size());
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (specs[i].trainable && specs[i].group.index < groups.size()) groups[specs[i].group.index] = states[i];
    }
    if (!specs.empty()) {
      while (model.added_groups().size() + 1 < specs.size()) model.add_group();
      if (std::ranges::any_of(specs, [&](const ParameterSpec& spec) { return spec.group.index >= specs.size(); }))
        throw UsageError("a segment that its unit has not");
      model.add_unit(unit, specs);
      states_by_unit.push_back(std::move(groups));
    }
    specs.clear();
    states.clear();
  };
  try {
    for (std::string_view rest = text; !rest.empty();) {
      const std::string_view text_line = take_until(rest, "\n");
      auto line = read_line(text_line);
      if (!line) refuse(text_line);
      std::uint64_t elements = 1;
      for (const std::int64_t extent : line->spec.shape) {
        if (extent > 0 && elements > elements_max / static_cast<std::uint64_t>(extent)) refuse(text_line);
        elements *= static_cast<std::uint64_t>(std::max<std::int64_t>(extent, 0));
      }
      elements_max -= elements;
      if (line->unit != unit) end_unit();
      unit = std::move(line->unit);
      specs.push_back(std::move(line->spec));
      states.push_back(line->state);
    }
    end_unit();
  } catch (const UsageError& error) {
    refuse(error.what());
  }
  UnitTable table(
      std::move(model), [&](UnitId id, GroupId group) { return states_by_unit[id.index][group.index]; }, world_size);
  if (table.identity() != text) refuse("its segments are cut differently");
  return table;
}

}  // namespace hoist::detail
