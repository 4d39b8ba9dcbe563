// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <optional>

#include <hoist/aio/transfer_memory.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/zero/checkpoint/state_access.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/layout/tile_values.hpp>

namespace hoist::detail {

using tiers::Region;
using tiers::Tile;

// The initial values of shard elements [first, first + values.size()) of a segment; zero between parameters.
void StateAccess::fill_segment(UnitId id, const Segment& segment, std::uint64_t first, std::span<float> values,
                               const Initializer& fill) const {
  std::fill(values.begin(), values.end(), 0.0f);
  const Unit& unit = table_.unit(id);
  const std::uint64_t begin = static_cast<std::uint64_t>(runtime_.rank()) * segment.shard_elements + first;
  const std::uint64_t end = begin + values.size();
  for (const ParameterId parameter : unit.parameters) {
    const Parameter& p = table_.parameter(parameter);
    if (&unit.segments[p.segment] != &segment) continue;
    const std::uint64_t low = std::max(begin, p.first_element);
    const std::uint64_t high = std::min(end, p.first_element + p.count);
    if (low >= high) continue;
    const auto part = values.subspan(low - begin, high - low);
    fill(parameter, low - p.first_element, part);
  }
}

void StateAccess::fill(const Initializer& fill, const MomentInitializer& fill_moment) {
  WalkOptions making = walk();
  making.read = making.read_apart = false;
  pipeline_.walk(making, [&](const TileAccess& tile) {
    std::memset(tile.weights, 0, tile.tile->w_bytes);
    begin_state(tile, groups_[tile.segment->group.index]);
    std::vector<float> values(tile.tile->elements);
    fill_segment(tile.unit, *tile.segment, tile.tile->first_element, values, fill);
    store_values(tile, State::master, 0, values);
    if (!fill_moment) return;
    for (const State state : {State::moment1, State::moment2}) {
      if (!tile.segment->has(state)) continue;
      fill_segment(tile.unit, *tile.segment, tile.tile->first_element, values,
                   [&](ParameterId parameter, std::uint64_t first, std::span<float> out) {
                     fill_moment(parameter, state, first, out);
                   });
      store_values(tile, state, 0, values);
    }
  });
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) fill_frozen(UnitId{u}, fill);
}

void StateAccess::fill_frozen(UnitId id, const Initializer& fill) {
  const Unit& unit = table_.unit(id);
  if (unit.frozen.tiles().empty()) return;
  const std::uint64_t bytes = unit.frozen.region_bytes(Region::weights);
  const bool apart = memory_.apart(id);
  const aio::TransferMemory scratch(apart ? bytes : 0);
  std::byte* const home =
      memory_.home(id).weights != nullptr ? memory_.home(id).weights + unit.frozen_offset() : nullptr;
  std::byte* const weights = apart             ? scratch.first(bytes).data()
                             : home != nullptr ? home
                                               : memory_.staging_buffers().front().data();
  std::memset(weights, 0, bytes);
  const std::size_t first_segment = unit.trainable.segments().size();
  for (const tiers::Tile& tile : unit.frozen.tiles()) {
    const Segment& segment = unit.segments[first_segment + tile.segment];
    std::vector<float> values(tile.elements);
    fill_segment(id, segment, tile.first_element, values, fill);
    store_values({.unit = id, .segment = &segment, .tile = &tile, .weights = weights + tile.w_offset}, State::master, 0,
                 values);
  }
  if (apart) pipeline_.write_home(home, {weights, bytes});
  if (stores_frozen()) store_frozen(id, {weights, bytes}).wait();
}

// Writes a unit's frozen record whole, in the step of the store that is open.
Completion StateAccess::store_frozen(UnitId id, std::span<const std::byte> weights) {
  const tiers::RecordId record = *records_.frozen(id);
  std::vector<std::uint64_t> checksums;
  for (const tiers::Tile& tile : table_.unit(id).frozen.tiles()) {
    const auto index = static_cast<std::uint32_t>(checksums.size());
    checksums.push_back(store_->checksum(record, Region::weights, index, weights.subspan(tile.w_offset, tile.w_bytes)));
  }
  return store_->write(record, Region::weights, 0, static_cast<std::uint32_t>(checksums.size()), weights, checksums,
                       aio::Priority::background);
}

// State that lives in memory comes back from the store, verified.
void StateAccess::load(UnitId id) {
  const Unit& unit = table_.unit(id);
  const UnitHome& home = memory_.home(id);
  const auto load = [&](std::optional<tiers::RecordId> record, std::span<const tiers::Tile> tiles, Region region,
                        std::byte* target) {
    if (!record || target == nullptr || tiles.empty()) return;
    const tiers::Tile& last = tiles.back();
    const std::span bytes(target,
                          region == Region::weights ? last.w_offset + last.w_bytes : last.s_offset + last.s_bytes);
    if (bytes.empty()) return;
    const auto count = static_cast<std::uint32_t>(tiles.size());
    const bool apart = memory_.apart(id);
    const aio::TransferMemory scratch(apart ? bytes.size() : 0);
    const std::span<std::byte> here = apart ? scratch.first(bytes.size()) : bytes;
    store_->read(*record, region, 0, count, here, aio::Priority::foreground).wait();
    store_->verify(*record, region, 0, count, here);
    if (apart) pipeline_.write_home(target, here);
  };
  load(records_.trainable(id), unit.trainable.tiles(), Region::weights, home.weights);
  load(records_.trainable(id), unit.trainable.tiles().first(home.state_tiles), Region::state, home.state);
  load(records_.frozen(id), unit.frozen.tiles(), Region::weights,
       home.weights == nullptr ? nullptr : home.weights + unit.frozen_offset());
}

void StateAccess::load() {
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) load(UnitId{u});
}

void StateAccess::write_resident() {
  pipeline_.walk({.read = false,
                  .write_streamed = false,
                  .write_homes = true,
                  .change_apart = false,
                  .waits = WaitCause::none,
                  .in_background = true},
                 [](const TileAccess&) {});
}

void StateAccess::write_frozen_resident() {
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    const UnitId id{u};
    const Unit& unit = table_.unit(id);
    if (unit.frozen.tiles().empty()) continue;
    const std::uint64_t bytes = unit.frozen.region_bytes(Region::weights);
    const std::byte* const home = memory_.home(id).weights + unit.frozen_offset();
    if (!memory_.apart(id)) {
      store_frozen(id, {home, bytes});
      continue;
    }
    const aio::TransferMemory scratch(bytes);
    pipeline_.read_home(home, scratch.first(bytes));
    store_frozen(id, scratch.first(bytes)).wait();
  }
}

WalkOptions StateAccess::walk() const { return {.write_homes = writes_homes(options_, /*committed=*/true)}; }

bool StateAccess::stores_frozen() const { return options_.parameters == Placement::nvme || walk().write_homes; }

namespace {

// Where one run of tiles after another is read to: no longer than the longest, which as a rule is the first.
class RunMemory {
 public:
  std::span<std::byte> of(std::uint64_t bytes) {
    if (!memory_ || memory_->span().size() < bytes) memory_.emplace(bytes);
    return memory_->first(bytes);
  }

 private:
  std::optional<aio::TransferMemory> memory_;
};

}  // namespace

void StateAccess::read_gradient(ParameterId parameter, const std::byte* gradient, float scale, std::uint64_t first,
                                std::span<float> out) {
  const Segment& segment = table_.segment_of(parameter);
  const std::uint64_t element_bytes = dtype_bytes(segment.home_gradient_dtype);
  gradient += segment.home_gradient_offset + first * element_bytes;
  std::vector<std::byte> here;
  if (memory_.apart(table_.parameter(parameter).unit)) {
    here.resize(out.size() * element_bytes);
    pipeline_.read_home(gradient, here);
    gradient = here.data();
  }
  for (std::uint64_t i = 0; i < out.size(); ++i)
    out[i] = scale * load_element(gradient, segment.home_gradient_dtype, i);
}

void StateAccess::read(ParameterId parameter, State state, std::uint64_t first, std::span<float> out) {
  const UnitId id = table_.parameter(parameter).unit;
  const Unit& unit = table_.unit(id);
  const Segment& segment = table_.segment_of(parameter);
  const UnitHome& home = memory_.home(id);
  const tiers::RecordLayout& layout = segment.trainable ? unit.trainable : unit.frozen;
  const tiers::RecordId record = segment.trainable ? records_.trainable(id).value_or(tiers::RecordId{})
                                                   : records_.frozen(id).value_or(tiers::RecordId{});
  const std::uint64_t base = segment.trainable ? 0 : unit.frozen_offset();
  const bool apart = memory_.apart(id);
  RunMemory weights_scratch, state_scratch;
  read_values(layout, segment, state, first, out, [&](const TileRun& run) -> const std::byte* {
    const bool weights = run.region == Region::weights;
    if (apart) {
      const auto here = (weights ? weights_scratch : state_scratch).of(run.length_bytes);
      pipeline_.read_home((weights ? home.weights + base : home.state) + run.offset_bytes, here);
      return here.data();
    }
    if (weights && home.weights != nullptr) return home.weights + base + run.offset_bytes;
    // The first tiles of a run of state may be at home, and the others not.
    const std::uint32_t at_home =
        weights ? 0 : std::clamp(home.state_tiles, run.first, run.first + run.count) - run.first;
    if (at_home > 0 && at_home == run.count) return home.state + run.offset_bytes;
    const auto target = (weights ? weights_scratch : state_scratch).of(run.length_bytes);
    std::uint64_t home_bytes = 0;
    if (at_home > 0) {
      home_bytes = layout.tiles()[run.first + at_home].s_offset - run.offset_bytes;
      std::memcpy(target.data(), home.state + run.offset_bytes, home_bytes);
    }
    const auto streamed = target.subspan(home_bytes);
    const std::uint32_t first_tile = run.first + at_home, count = run.count - at_home;
    store_->read(record, run.region, first_tile, count, streamed, aio::Priority::foreground).wait();
    store_->verify(record, run.region, first_tile, count, streamed);
    return target.data();
  });
}

void StateAccess::write(ParameterId parameter, State state, ElementRange shard, std::span<const float> values) {
  if (shard.count == 0) return;
  if (table_.spec(parameter).trainable)
    write_trainable(parameter, state, shard, values);
  else
    write_frozen(parameter, shard, values);
}

void StateAccess::write_trainable(ParameterId parameter, State state, ElementRange shard,
                                  std::span<const float> values) {
  const Parameter& p = table_.parameter(parameter);
  pipeline_.walk(
      walk(),
      [&](const TileAccess& tile) {
        if (tile.segment != &table_.segment_of(parameter)) return;
        const ElementRange range = overlap(*tile.tile, shard.first, shard.count);
        if (range.count == 0) return;
        const std::uint64_t first = tile.tile->first_element + range.first - shard.first;
        store_values(tile, state, range.first, values.subspan(first, range.count));
      },
      p.unit);
}

void StateAccess::write_frozen(ParameterId parameter, ElementRange shard, std::span<const float> values) {
  const UnitId id = table_.parameter(parameter).unit;
  const Unit& unit = table_.unit(id);
  const Segment& segment = table_.segment_of(parameter);
  const std::byte* home = memory_.home(id).weights;
  const auto tiles = unit.frozen.tiles();
  const auto count = static_cast<std::uint32_t>(tiles.size());
  const std::uint64_t bytes = unit.frozen.region_bytes(Region::weights);
  const bool apart = memory_.apart(id);
  const aio::TransferMemory scratch(home == nullptr || apart ? bytes : 0);
  std::byte* const at_home = home != nullptr ? memory_.home(id).weights + unit.frozen_offset() : nullptr;
  std::byte* const weights = home != nullptr && !apart ? at_home : scratch.first(bytes).data();
  if (apart) pipeline_.read_home(at_home, {weights, bytes});
  if (home == nullptr) {
    store_->read(*records_.frozen(id), Region::weights, 0, count, {weights, bytes}, aio::Priority::foreground).wait();
    store_->verify(*records_.frozen(id), Region::weights, 0, count, {weights, bytes});
  }
  for (const Tile& tile : tiles) {
    if (tile.segment != segment.record_segment) continue;
    const ElementRange range = overlap(tile, shard.first, shard.count);
    const TileAccess access{.unit = id, .segment = &segment, .tile = &tile, .weights = weights + tile.w_offset};
    if (range.count == 0) continue;
    const std::uint64_t first = tile.first_element + range.first - shard.first;
    store_values(access, State::master, range.first, values.subspan(first, range.count));
  }
  if (apart) pipeline_.write_home(at_home, {weights, bytes});
  if (stores_frozen()) store_frozen(id, {weights, bytes}).wait();
}

}  // namespace hoist::detail
