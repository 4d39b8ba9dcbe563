// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/printable.hpp>
#include <hoist/zero/model.hpp>

namespace hoist {

namespace {

// 10^13: one parameter may be a whole model. The bytes of its state stay far below 2^64, and its tiles below 2^32.
constexpr std::uint64_t kParameterElementsMax = 10'000'000'000'000;

bool is_unprintable(const std::string& name) {
  return has_control_characters(name) || name.find('|') != std::string::npos;
}

void check(const ParameterSpec& spec, const std::string& unit, std::size_t group_count) {
  if (spec.name.empty()) throw UsageError(fmt::format("a parameter of unit '{}' has no name", unit));
  if (is_unprintable(spec.name))
    throw UsageError(fmt::format("the name '{}' of a parameter of unit '{}' holds a control character or '|'",
                                 on_one_line(spec.name), unit));
  if (spec.dtype > DType::fp32)
    throw UsageError(
        fmt::format("parameter '{}' has dtype {}, which is none", spec.name, static_cast<unsigned>(spec.dtype)));
  if (spec.group.index >= group_count) {
    throw UsageError(
        fmt::format("parameter '{}' names group {}, but only {} exist", spec.name, spec.group.index, group_count));
  }
  std::uint64_t count = 1;
  for (const std::int64_t extent : spec.shape) {
    if (extent <= 0)
      throw UsageError(fmt::format("parameter '{}' has extent {}; every extent is at least 1", spec.name, extent));
    if (count > kParameterElementsMax / static_cast<std::uint64_t>(extent))
      throw UsageError(fmt::format("parameter '{}' has more than {} elements", spec.name, kParameterElementsMax));
    count *= static_cast<std::uint64_t>(extent);
  }
}

}  // namespace

std::uint64_t element_count(const ParameterSpec& spec) {
  std::uint64_t count = 1;
  for (const std::int64_t extent : spec.shape) count *= static_cast<std::uint64_t>(extent);
  return count;
}

GroupId Model::add_group(std::optional<GroupOptions> options) {
  if (options) optim::check(*options);
  groups_.push_back(std::move(options));
  return {static_cast<std::uint32_t>(groups_.size())};
}

UnitId Model::add_unit(std::string name, std::span<const ParameterSpec> parameters, UnitOptions options) {
  if (is_unprintable(name))
    throw UsageError(fmt::format("the name '{}' of a unit holds a control character or '|'", on_one_line(name)));
  if (parameters.empty()) throw UsageError(fmt::format("unit '{}' has no parameters", name));
  if (!units_.empty() && units_.back().name == name)
    throw UsageError(fmt::format("two units in a row are called '{}': a store could not tell them apart", name));
  std::set<std::string_view> names;
  for (const ParameterSpec& spec : parameters) {
    check(spec, name, groups_.size() + 1);
    if (by_name_.contains(spec.name) || !names.insert(spec.name).second)
      throw UsageError(fmt::format("two parameters are called '{}'", spec.name));
  }

  const UnitId id{static_cast<std::uint32_t>(units_.size())};
  for (const UnitId other : options.gathered_with)
    if (other.index >= id.index)
      throw UsageError(fmt::format("unit '{}' is gathered with a unit that is not there", name));
  ModelUnit unit{.name = std::move(name), .parameters = {}, .tied = {}, .options = std::move(options)};
  for (const ParameterSpec& spec : parameters) {
    const ParameterId parameter{static_cast<std::uint32_t>(parameters_.size())};
    unit.parameters.push_back(parameter);
    by_name_.emplace(spec.name, parameter);
    unit_of_.push_back(id);
    parameters_.push_back(spec);
    element_count_ += element_count(spec);
  }
  units_.push_back(std::move(unit));
  return id;
}

UnitId Model::add_unit(std::string name, std::initializer_list<ParameterSpec> parameters, UnitOptions options) {
  return add_unit(std::move(name), std::span(parameters.begin(), parameters.size()), std::move(options));
}

void Model::tie(UnitId user, ParameterId owner) {
  if (user.index >= units_.size() || owner.index >= parameters_.size())
    throw UsageError("tie: unknown unit or parameter");
  if (unit_of(owner) == user) return;
  std::vector<ParameterId>& tied = units_[user.index].tied;
  if (std::ranges::find(tied, owner) == tied.end()) tied.push_back(owner);
}

std::optional<ParameterId> Model::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? std::nullopt : std::optional(found->second);
}

ParameterId Model::parameter(std::string_view name) const {
  const auto found = find(name);
  if (!found) throw UsageError(fmt::format("there is no parameter '{}'", name));
  return *found;
}

Model uniform_model(std::uint64_t parameters, std::uint64_t units, DType dtype) {
  if (parameters == 0 || units == 0) throw UsageError("a model has at least one parameter and one unit");
  Model model;
  units = std::min(units, parameters);
  for (std::uint64_t u = 0; u < units; ++u) {
    const std::uint64_t count = parameters / units + (u < parameters % units ? 1 : 0);
    model.add_unit(
        fmt::format("unit {}", u),
        {{.name = fmt::format("unit {}.weights", u), .shape = {static_cast<std::int64_t>(count)}, .dtype = dtype}});
  }
  return model;
}

}  // namespace hoist
