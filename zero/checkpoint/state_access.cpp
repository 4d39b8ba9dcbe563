// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/checkpoint/state_access.hpp>
#include <hoist/zero/layout/tile_values.hpp>

namespace hoist::detail {

using tiers::Region;
using tiers::Tile;

void require_committable(const ParameterSpec& spec, State state, std::span<const float> values) {
  const bool is_master = state == State::master;
  for (const float value : values) {
    const bool in_range = master_is_committable(value, is_master ? spec.dtype : DType::fp32);
    if (in_range && (state != State::moment2 || value >= 0)) continue;
    if (!is_master)
      throw UsageError(fmt::format("{} cannot be a {} moment of parameter '{}'", value,
                                   state == State::moment1 ? "first" : "second", spec.name));
    if (!std::isfinite(value)) throw UsageError(fmt::format("{} of parameter '{}' is not finite", value, spec.name));
    throw UsageError(fmt::format("{} of parameter '{}' is too large for {}", value, spec.name,
                                 dtype_name(spec.dtype == DType::fp16 ? DType::fp16 : DType::bf16)));
  }
}

namespace {

MomentInitializer as_states(const Initializer& masters) {
  return [&masters](ParameterId parameter, State, std::uint64_t first, std::span<float> out) {
    masters(parameter, first, out);
  };
}

}  // namespace

// Stores new values of the tile's elements, which `make` writes to `values`. Padding between parameters keeps its
// values.
void StateAccess::make_values(const TileAccess& tile, State state, std::span<float> values,
                              const MomentInitializer& make) const {
  const Unit& unit = table_.unit(tile.unit);
  const std::uint64_t begin =
      static_cast<std::uint64_t>(rank_) * tile.segment->shard_elements + tile.tile->first_element;
  const std::uint64_t end = begin + values.size();
  for (const ParameterId parameter : unit.parameters) {
    const Parameter& p = table_.parameter(parameter);
    if (&unit.segments[p.segment] != tile.segment) continue;
    const std::uint64_t low = std::max(begin, p.first_element);
    const std::uint64_t high = std::min(end, p.first_element + p.count);
    if (low >= high) continue;
    const auto part = values.subspan(low - begin, high - low);
    make(parameter, state, low - p.first_element, part);
    require_committable(table_.spec(parameter), state, part);
  }
  store_values(tile, state, 0, values);
}

void StateAccess::fill(const Initializer& initializer, std::span<std::byte> buffer, const MomentInitializer& moments) {
  WalkOptions making = walk();
  making.read = making.read_device_only = false;
  const MomentInitializer masters = as_states(initializer);
  pipeline_.walk(making, [&](const TileAccess& tile) {
    std::memset(tile.weights, 0, tile.tile->w_bytes);
    begin_state(tile, groups_[tile.segment->group.index]);
    std::vector<float> values(tile.tile->elements);
    make_values(tile, State::master, values, masters);
    for (const State state : {State::moment1, State::moment2}) {
      if (!moments || !tile.segment->has(state)) continue;
      load_values(tile, state, 0, values);
      make_values(tile, state, values, moments);
    }
  });
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) fill_frozen(UnitId{u}, masters, buffer);
}

void StateAccess::change_masters(const Initializer& change) {
  pipeline_.walk(walk(), [&, masters = as_states(change)](const TileAccess& tile) {
    std::vector<float> values(tile.tile->elements);
    load_values(tile, State::master, 0, values);
    make_values(tile, State::master, values, masters);
  });
}

void StateAccess::load() {
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) records_.load(UnitId{u});
}

std::uint64_t StateAccess::write_resident() {
  return pipeline_.walk({.read = false,
                         .write_stored = false,
                         .write_resident = true,
                         .change_device_only = false,
                         .waits = WaitCause::none,
                         .in_background = true},
                        [](const TileAccess&) {});
}

WalkOptions StateAccess::walk() const { return {.write_resident = options_.commits_steps()}; }

bool StateAccess::stores_frozen() const { return options_.parameters == Placement::nvme || walk().write_resident; }

void StateAccess::change_frozen(UnitId id, RecordIo::ChangeOptions options, const FrozenWork& work) {
  const Unit& unit = table_.unit(id);
  options.store = stores_frozen();
  records_.change(records_.whole_region(id, RecordKind::frozen, Region::weights), options,
                  [&](std::span<std::byte> weights) {
                    if (!options.read) std::ranges::fill(weights, std::byte{0});
                    const std::size_t first_segment = unit.trainable.segments().size();
                    for (const Tile& tile : unit.frozen.tiles())
                      work({.unit = id,
                            .segment = &unit.segments[first_segment + tile.segment],
                            .tile = &tile,
                            .weights = weights.data() + tile.w_offset});
                  });
}

void StateAccess::fill_frozen(UnitId id, const MomentInitializer& masters, std::span<std::byte> buffer) {
  if (table_.unit(id).frozen.tiles().empty()) return;
  change_frozen(id, {.read = false, .buffer = buffer}, [&](const TileAccess& tile) {
    std::vector<float> values(tile.tile->elements);
    make_values(tile, State::master, values, masters);
  });
}

void StateAccess::write_frozen_resident() {
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    if (table_.units()[u].frozen.tiles().empty()) continue;
    records_.store(records_.whole_region(UnitId{u}, RecordKind::frozen, Region::weights));
  }
}

void StateAccess::read_gradient(ParameterId parameter, const std::byte* shards, float scale, std::uint64_t first,
                                std::span<float> out) {
  const Segment& segment = table_.segment_of(parameter);
  const std::uint64_t element_bytes = dtype_bytes(segment.gradient_shard_dtype);
  PartBuffer buffer;
  const std::byte* const gradient =
      records_.view_gradient(table_.parameter(parameter).unit, shards,
                             segment.gradient_shard_offset + first * element_bytes, out.size() * element_bytes, buffer);
  load_elements(gradient, segment.gradient_shard_dtype, 0, out);
  for (float& value : out) value *= scale;
}

void StateAccess::read(ParameterId parameter, State state, std::uint64_t first, std::span<float> out) {
  const UnitId id = table_.parameter(parameter).unit;
  const Unit& unit = table_.unit(id);
  const Segment& segment = table_.segment_of(parameter);
  const auto kind = segment.trainable ? RecordKind::trainable : RecordKind::frozen;
  PartBuffer weights, states;
  read_values(segment.trainable ? unit.trainable : unit.frozen, segment, state, first, out, [&](const TileRun& run) {
    return records_.view({.unit = id, .kind = kind, .tiles = run}, run.region == Region::weights ? weights : states);
  });
}

OwnedRange StateAccess::owned(const StateChange& change) const {
  const std::uint64_t first = table_.parameter(change.parameter).first_element + change.first_element;
  return owned_range(first, change.values.size(), table_.segment_of(change.parameter).shard_elements, rank_);
}

void StateAccess::apply(const TileAccess& tile, std::span<const StateChange> changes) const {
  std::vector<float> mixed;
  for (const StateChange& change : changes) {
    if (tile.segment != &table_.segment_of(change.parameter)) continue;
    const auto [shard, offset] = owned(change);
    const ElementRange range = overlap(*tile.tile, shard.first, shard.count);
    if (range.count == 0) continue;
    const std::uint64_t first = offset + tile.tile->first_element + range.first - shard.first;
    std::span<const float> values = change.values.subspan(first, range.count);
    if (!change.chosen.empty()) {
      mixed.resize(range.count);
      load_values(tile, change.state, range.first, mixed);
      for (std::size_t i = 0; i < values.size(); ++i)
        if (change.chosen[first + i] != 0) mixed[i] = values[i];
      values = mixed;
    }
    store_values(tile, change.state, range.first, values);
  }
}

void StateAccess::write(UnitId unit, std::span<const StateChange> changes) {
  const auto changes_here = [&](bool trainable) {
    return std::ranges::any_of(changes, [&](const StateChange& change) {
      return table_.spec(change.parameter).trainable == trainable && owned(change).shard.count > 0;
    });
  };
  const auto apply_to = [&](const TileAccess& tile) { apply(tile, changes); };
  if (changes_here(true)) pipeline_.walk(walk(), apply_to, unit);
  if (changes_here(false)) change_frozen(unit, {}, apply_to);
}

}  // namespace hoist::detail
