// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/zero/layout/unit_table.hpp>

namespace hoist::detail {

namespace {

// 10 trillion: a model of one parameter. Bytes of any state of it are far from the end of 64 bits, and its tiles from
// that of 32.
constexpr std::uint64_t kParameterElementsMax = 10'000'000'000'000;

std::uint64_t checked_count(const ParameterSpec& spec) {
  std::uint64_t count = 1;
  for (const std::int64_t extent : spec.shape) {
    if (extent <= 0)
      throw UsageError(fmt::format("parameter '{}' has extent {}; every extent is at least 1", spec.name, extent));
    if (count > kParameterElementsMax / static_cast<std::uint64_t>(extent)) {
      throw UsageError(fmt::format("parameter '{}' has more than {} elements", spec.name, kParameterElementsMax));
    }
    count *= static_cast<std::uint64_t>(extent);
  }
  return count;
}

bool same_segment(const Segment& segment, const ParameterSpec& spec) {
  return segment.dtype == spec.dtype && segment.trainable == spec.trainable && segment.group == spec.group &&
         segment.counts_in_norm == spec.counts_in_norm;
}

void check(const ParameterSpec& spec, const std::string& unit, std::size_t group_count) {
  if (spec.name.empty()) throw UsageError(fmt::format("a parameter of unit '{}' has no name", unit));
  const auto is_unfit = [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7f' || c == '|'; };
  if (std::ranges::any_of(spec.name, is_unfit) || std::ranges::any_of(unit, is_unfit)) {
    throw UsageError(
        fmt::format("the name '{}' of unit '{}' holds a control character or '|'", spec.name.c_str(), unit.c_str()));
  }
  if (spec.dtype > DType::fp32)
    throw UsageError(
        fmt::format("parameter '{}' has dtype {}, which is none", spec.name, static_cast<unsigned>(spec.dtype)));
  if (spec.group.index >= group_count) {
    throw UsageError(
        fmt::format("parameter '{}' names group {}, but only {} exist", spec.name, spec.group.index, group_count));
  }
}

}  // namespace

bool Segment::has(State moment) const {
  if (!trainable) return false;
  return moment == State::moment1 ? optim::has_moment1(state.state)
                                  : moment == State::moment2 && optim::has_moment2(state.state);
}

UnitId UnitTable::add(std::string name, std::span<const ParameterSpec> specs, UnitOptions options,
                      std::span<const optim::StateForm> groups) {
  if (specs.empty()) throw UsageError(fmt::format("unit '{}' has no parameters", name));
  if (!units_.empty() && units_.back().name == name)
    throw UsageError(fmt::format("two units in a row are called '{}': a store could not tell them apart", name));
  for (std::size_t i = 0; i < specs.size(); ++i) {
    check(specs[i], name, groups.size());
    checked_count(specs[i]);
    const bool repeated = by_name_.contains(specs[i].name) ||
                          std::any_of(specs.begin(), specs.begin() + static_cast<std::ptrdiff_t>(i),
                                      [&](const ParameterSpec& other) { return other.name == specs[i].name; });
    if (repeated) throw UsageError(fmt::format("two parameters are called '{}'", specs[i].name));
  }

  const UnitId id{static_cast<std::uint32_t>(units_.size())};
  Unit unit{.name = std::move(name), .options = std::move(options)};
  // Segments in order of first appearance, trainable ones before frozen ones.
  for (const bool trainable : {true, false}) {
    for (const ParameterSpec& spec : specs) {
      if (spec.trainable != trainable) continue;
      if (std::any_of(unit.segments.begin(), unit.segments.end(),
                      [&](const Segment& s) { return same_segment(s, spec); }))
        continue;
      optim::StateForm state = groups[spec.group.index];
      if (spec.dtype != DType::bf16) state.remainder = RemainderType::int16;  // there is none
      unit.segments.push_back({.dtype = spec.dtype,
                               .trainable = spec.trainable,
                               .group = spec.group,
                               .counts_in_norm = spec.counts_in_norm,
                               .state = state});
    }
  }
  for (const ParameterSpec& spec : specs) {
    const auto segment = std::find_if(unit.segments.begin(), unit.segments.end(),
                                      [&](const Segment& s) { return same_segment(s, spec); });
    const std::uint64_t count = checked_count(spec);
    segment->elements = round_up(segment->elements, kParameterAlignment);
    const ParameterId parameter{static_cast<std::uint32_t>(specs_.size())};
    parameters_.push_back({.unit = id,
                           .segment = static_cast<std::uint32_t>(segment - unit.segments.begin()),
                           .first_element = segment->elements,
                           .count = count});
    segment->elements += count;
    unit.elements += count;
    unit.parameters.push_back(parameter);
    by_name_.emplace(spec.name, parameter);
    specs_.push_back(spec);
  }
  lay_out(unit);
  units_.push_back(std::move(unit));
  return id;
}

// Layers are alike: the layout of one before it, where there is an equal one.
tiers::RecordLayout UnitTable::layout_of(std::span<const tiers::RecordSegment> segments) const {
  constexpr std::size_t kLookedAtMax = 8;  // a model has few kinds of layers
  std::size_t looked_at = 0;
  for (auto unit = units_.rbegin(); unit != units_.rend() && looked_at < kLookedAtMax; ++unit, ++looked_at) {
    for (const tiers::RecordLayout* layout : {&unit->trainable, &unit->frozen})
      if (std::ranges::equal(layout->segments(), segments)) return *layout;
  }
  return tiers::RecordLayout(segments);
}

void UnitTable::lay_out(Unit& unit) const {
  std::vector<tiers::RecordSegment> records[2];  // trainable, frozen
  for (Segment& segment : unit.segments) {
    segment.shard_elements = shard_elements(segment.elements, world_size_);
    auto& record = records[segment.trainable ? 0 : 1];
    segment.record_segment = static_cast<std::uint32_t>(record.size());
    record.push_back(segment.record());
  }
  unit.trainable = layout_of(records[0]);
  unit.frozen = layout_of(records[1]);

  const auto world = static_cast<std::uint64_t>(world_size_);
  for (Segment& segment : unit.segments) {
    segment.host_offset = segment.trainable
                              ? unit.trainable.segment_w_offset(segment.record_segment)
                              : unit.frozen_offset() + unit.frozen.segment_w_offset(segment.record_segment);
    segment.gathered_offset = unit.gathered_bytes;
    unit.gathered_bytes += round_up(world * segment.shard_bytes(), kBlockAlignment);
    if (!segment.trainable) continue;
    segment.gradient_offset = unit.gradient_bytes;
    unit.gradient_bytes += round_up(world * segment.shard_bytes(), 256);
    segment.home_gradient_offset = unit.home_gradient_bytes;
    segment.home_gradient_dtype = sums_ == GradientSums::at_home ? DType::fp32 : segment.dtype;
    unit.home_gradient_bytes += round_up(segment.shard_elements * dtype_bytes(segment.home_gradient_dtype), 64);
  }
  if (sums_ == GradientSums::on_device) {
    for (Segment& segment : unit.segments) {
      if (!segment.trainable) continue;
      segment.gradient_sum_offset = unit.gradient_buffer_bytes();
      unit.gradient_sum_bytes += round_up(world * segment.shard_elements * sizeof(float), 256);
    }
  }
  HOIST_ASSERT(world_size_ > 1 || unit.gathered_bytes == unit.host_bytes(), "{} and {}", unit.gathered_bytes,
               unit.host_bytes());
}

void UnitTable::tie(UnitId user, ParameterId owner) {
  if (user.index >= units_.size() || owner.index >= parameters_.size())
    throw UsageError("tie: unknown unit or parameter");
  const UnitId owner_unit = parameters_[owner.index].unit;
  if (owner_unit == user) return;
  auto& tied = units_[user.index].tied;
  if (std::find(tied.begin(), tied.end(), owner_unit) == tied.end()) tied.push_back(owner_unit);
  units_[owner_unit.index].owns_tied = true;
}

std::optional<ParameterId> UnitTable::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? std::nullopt : std::optional(found->second);
}

std::uint64_t UnitTable::parameter_count() const {
  std::uint64_t count = 0;
  for (const Parameter& parameter : parameters_) count += parameter.count;
  return count;
}

}  // namespace hoist::detail
