// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/norm_order.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/layout/unit_table.hpp>

namespace hoist::detail {

namespace {

bool same_segment(const Segment& segment, const ParameterSpec& spec) {
  return segment.dtype == spec.dtype && segment.trainable == spec.trainable && segment.group == spec.group &&
         segment.counts_in_norm == spec.counts_in_norm;
}

}  // namespace

bool Segment::has(State moment) const {
  if (!trainable) return false;
  return moment == State::moment1 ? optim::has_moment1(state.state)
                                  : moment == State::moment2 && optim::has_moment2(state.state);
}

std::uint64_t Unit::norm_chunks() const {
  std::uint64_t chunks = 0;
  for (const Segment& segment : trainable_segments()) chunks += divide_up(segment.shard_elements, kNormChunkElements);
  return chunks;
}

Unit::GradientPart Unit::gradient_part(std::uint32_t first_tile, std::uint32_t tile_count) const {
  const auto tiles = trainable.tiles();
  const std::size_t end = first_tile + tile_count;
  const std::uint64_t begin = gradient_offset(tiles[first_tile]);
  return {begin, (end == tiles.size() ? gradient_shard_bytes : gradient_offset(tiles[end])) - begin};
}

bool UnitTable::keeps(ParameterId id, State state) const {
  if (state == State::master) return true;
  return state == State::gradient ? segment_of(id).trainable : segment_of(id).has(state);
}

void UnitTable::require_kept(ParameterId id, State state) const {
  if (keeps(id, state)) return;
  if (!spec(id).trainable)
    throw UsageError(fmt::format("parameter '{}' is frozen: it has weights only", spec(id).name));
  throw UsageError(fmt::format("the optimizer of parameter '{}' keeps no {} moment", spec(id).name,
                               state == State::moment1 ? "first" : "second"));
}

void UnitTable::require(ParameterId id) const {
  if (id.index >= parameters_.size()) throw UsageError(fmt::format("there is no parameter {}", id.index));
}

void UnitTable::require(UnitId id) const {
  if (id.index >= units_.size()) throw UsageError(fmt::format("there is no unit {}", id.index));
}

UnitTable::UnitTable(Model model, std::span<const optim::StateForm> groups, int world_size, GradientSums sums)
    : UnitTable(
          std::move(model), [groups](UnitId, GroupId group) { return groups[group.index]; }, world_size, sums) {}

UnitTable::UnitTable(Model model, const StateOf& state_of, int world_size, GradientSums sums)
    : model_(std::move(model)), world_size_(world_size), sums_(sums), parameters_(model_.parameters().size()) {
  for (std::uint32_t u = 0; u < model_.units().size(); ++u) units_.push_back(make_unit(UnitId{u}, state_of));
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    for (const ParameterId owner : model_.units()[u].tied) {
      const UnitId owner_unit = model_.unit_of(owner);
      std::vector<UnitId>& tied = units_[u].tied;
      if (std::ranges::find(tied, owner_unit) == tied.end()) tied.push_back(owner_unit);
      units_[owner_unit.index].has_own_gradient_memory = true;
    }
  }
}

Unit UnitTable::make_unit(UnitId id, const StateOf& state_of) {
  const ModelUnit& declared = model_.units()[id.index];
  Unit unit{.name = declared.name,
            .options = declared.options,
            .parameters = declared.parameters,
            .has_own_gradient_memory = declared.options.own_gradient_memory};
  // Segments in order of first appearance, trainable ones before frozen ones.
  for (const bool trainable : {true, false}) {
    for (const ParameterId parameter : unit.parameters) {
      const ParameterSpec& of = spec(parameter);
      if (of.trainable != trainable) continue;
      if (std::ranges::any_of(unit.segments, [&](const Segment& s) { return same_segment(s, of); })) continue;
      optim::StateForm state = state_of(id, of.group);
      if (of.dtype != DType::bf16) state.remainder = RemainderType::int16;  // there is none
      unit.segments.push_back({.dtype = of.dtype,
                               .trainable = of.trainable,
                               .group = of.group,
                               .counts_in_norm = of.counts_in_norm,
                               .state = state});
    }
  }
  for (const ParameterId parameter : unit.parameters) {
    const auto segment =
        std::ranges::find_if(unit.segments, [&](const Segment& s) { return same_segment(s, spec(parameter)); });
    segment->elements = round_up(segment->elements, kParameterAlignment);
    parameters_[parameter.index] = {.unit = id,
                                    .segment = static_cast<std::uint32_t>(segment - unit.segments.begin()),
                                    .first_element = segment->elements,
                                    .count = element_count(spec(parameter))};
    segment->elements += parameters_[parameter.index].count;
    unit.elements += parameters_[parameter.index].count;
  }
  lay_out(unit);
  return unit;
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
    segment.gradient_shard_offset = unit.gradient_shard_bytes;
    segment.gradient_shard_dtype = sums_ == GradientSums::in_memory ? DType::fp32 : segment.dtype;
    unit.gradient_shard_bytes +=
        round_up(segment.shard_elements * dtype_bytes(segment.gradient_shard_dtype), kBlockAlignment);
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

}  // namespace hoist::detail
