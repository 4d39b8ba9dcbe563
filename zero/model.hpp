// SPDX-License-Identifier: Apache-2.0
// zero/model.hpp - what is trained: units (layers) and their parameters, optimizer groups, ties. A plain value.
//
// Engine::create and Engine::restore train a model; predict() and the command line's check and plan describe what
// training it will take.
//
// Threading  As any value's.
// Errors     UsageError from every call that cannot be right for any engine; the model is then unchanged.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <hoist/zero/types.hpp>

namespace hoist {

// A unit as it was declared.
struct ModelUnit {
  std::string name;
  std::vector<ParameterId> parameters;
  std::vector<ParameterId> tied;  // parameters of other units that this one uses, too
  UnitOptions options;
};

class Model {
 public:
  // A further parameter group. Group 0 exists from the start; its options are EngineOptions::optimizer_defaults, and so
  // are those of a group that is added without any.
  GroupId add_group(std::optional<GroupOptions> options = std::nullopt);

  // A unit is what is used together: a layer. Its parameters of one dtype, trainability, group and norm membership are
  // stored and moved as one segment.
  // Errors: UsageError for a unit without parameters, a parameter whose name is repeated or unprintable, an extent
  // below 1, more than 10^13 elements in one parameter, a group that was not added.
  UnitId add_unit(std::string name, std::span<const ParameterSpec> parameters, UnitOptions options = {});
  UnitId add_unit(std::string name, std::initializer_list<ParameterSpec> parameters, UnitOptions options = {});

  // `user` also uses `owner`, a parameter of another unit: gathering `user` gathers the owner's unit, too. The
  // parameter has one record and one gradient, its owner's.
  void tie(UnitId user, ParameterId owner);

  ParameterId parameter(std::string_view name) const;  // UsageError when there is none; look up once, not per layer
  std::optional<ParameterId> find(std::string_view name) const;

  std::span<const ModelUnit> units() const { return units_; }                            // UnitId::index
  std::span<const ParameterSpec> parameters() const { return parameters_; }              // ParameterId::index
  std::span<const std::optional<GroupOptions>> added_groups() const { return groups_; }  // GroupId::index - 1
  UnitId unit_of(ParameterId parameter) const { return unit_of_[parameter.index]; }  // Pre: a parameter of this model
  std::uint64_t parameter_count() const { return element_count_; }                   // elements of all parameters

 private:
  std::vector<ModelUnit> units_;
  std::vector<ParameterSpec> parameters_;
  std::vector<UnitId> unit_of_;  // by parameter
  std::vector<std::optional<GroupOptions>> groups_;
  std::map<std::string, ParameterId, std::less<>> by_name_;
  std::uint64_t element_count_ = 0;
};

// Elements of a parameter. Pre: a model accepted it.
std::uint64_t element_count(const ParameterSpec& spec);

// `parameters` elements in `units` equal units: for when no more is known about the model.
Model uniform_model(std::uint64_t parameters, std::uint64_t units, DType dtype = DType::bf16);

}  // namespace hoist
