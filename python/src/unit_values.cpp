// SPDX-License-Identifier: Apache-2.0
#include "unit_values.hpp"

#include <algorithm>

#include <fmt/format.h>

#include <hoist/core/error.hpp>

namespace hoist::python {

namespace nb = nanobind;

namespace {

void widen(const Values& values, std::uint64_t first, std::span<float> out) {
  if (first > values.count || out.size() > values.count - first)
    throw UsageError("an initial value has fewer elements than its parameter");
  switch (values.dtype) {
    case DType::fp32:
      std::copy_n(static_cast<const float*>(values.data) + first, out.size(), out.begin());
      return;
    case DType::bf16:
      std::transform(static_cast<const bf16*>(values.data) + first,
                     static_cast<const bf16*>(values.data) + first + out.size(), out.begin(), to_float);
      return;
    case DType::fp16:
      std::transform(static_cast<const std::uint16_t*>(values.data) + first,
                     static_cast<const std::uint16_t*>(values.data) + first + out.size(), out.begin(), fp16_to_float);
  }
}

// Throws the same as an Error.
[[noreturn]] void keep_raised(std::optional<nb::python_error>& raised, nb::python_error& error) {
  raised.emplace(std::move(error));
  throw Error(fmt::format("the values of a parameter could not be had: {}: {}",
                          nb::str(raised->type().attr("__name__")).c_str(), nb::str(raised->value()).c_str()));
}

}  // namespace

void UnitValues::fill(ParameterId parameter, std::uint64_t first, std::span<float> out) {
  Values values;
  {
    const std::lock_guard lock(mutex_);
    const std::uint32_t unit = model_.unit_of(parameter).index;
    if (unit_ != unit) load(unit);
    const auto found = values_.find(parameter.index);
    if (found == values_.end())
      throw UsageError("no initial value for parameter '" + model_.parameters()[parameter.index].name + "'");
    values = found->second;
  }
  widen(values, first, out);
}

std::vector<StateChange> UnitWrites::of(UnitId unit) {
  const nb::gil_scoped_acquire acquire;
  arrays_.clear();
  std::vector<StateChange> changes;
  try {
    const nb::object given = changes_(unit.index);
    for (const nb::handle each : given) {
      const auto entry = nb::cast<nb::tuple>(each);
      Arrays& arrays = arrays_.emplace_back(Arrays{.values = nb::cast<ConstFloatArray>(entry[2]), .chosen = {}});
      changes.push_back({.parameter = ParameterId{nb::cast<std::uint32_t>(entry[0])},
                         .state = nb::cast<State>(entry[1]),
                         .values = {arrays.values.data(), arrays.values.size()}});
      if (entry[3].is_none()) continue;
      arrays.chosen = nb::cast<Choice>(entry[3]);
      changes.back().chosen = {arrays.chosen->data(), arrays.chosen->size()};
    }
  } catch (nb::python_error& error) {
    keep_raised(raised_, error);
  }
  return changes;
}

void UnitValues::load(std::uint32_t unit) {
  const nb::gil_scoped_acquire acquire;
  values_.clear();
  unit_.reset();
  nb::object given;
  try {
    given = unit_values_(unit);
  } catch (nb::python_error& error) {
    keep_raised(raised_, error);
  }
  const auto loaded = nb::cast<nb::dict>(given);
  for (const auto [key, value] : loaded) {
    const auto entry = nb::cast<nb::tuple>(value);
    values_[nb::cast<std::uint32_t>(key)] = {reinterpret_cast<const void*>(nb::cast<std::uintptr_t>(entry[0])),
                                             nb::cast<DType>(entry[1]), nb::cast<std::uint64_t>(entry[2])};
  }
  unit_ = unit;
}

}  // namespace hoist::python
