// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/detail/engine_impl.hpp>
#include <hoist/zero/layout/tile_values.hpp>

namespace hoist {

using tiers::Region;

// The initial values of shard elements [first, first + values.size()) of a segment; zero between parameters.
void Engine::Impl::fill_segment(UnitId id, const detail::Segment& segment, std::uint64_t first, std::span<float> values,
                                const Initializer& fill) const {
  std::fill(values.begin(), values.end(), 0.0f);
  const detail::Unit& unit = table.unit(id);
  const std::uint64_t begin = static_cast<std::uint64_t>(runtime.rank()) * segment.shard_elements + first;
  const std::uint64_t end = begin + values.size();
  for (const ParameterId parameter : unit.parameters) {
    const detail::Parameter& p = table.parameter(parameter);
    if (&unit.segments[p.segment] != &segment) continue;
    const std::uint64_t low = std::max(begin, p.first_element);
    const std::uint64_t high = std::min(end, p.first_element + p.count);
    if (low >= high) continue;
    const auto part = values.subspan(low - begin, high - low);
    fill(parameter, low - p.first_element, part);
  }
}

namespace {

// Stores fp32 values as the weights (and remainders) of a tile.
void store_masters(const detail::TileAccess& access, std::span<const float> values) {
  if (access.segment->dtype == DType::fp32) {
    std::memcpy(access.weights, values.data(), values.size_bytes());
    return;
  }
  if (access.segment->dtype == DType::fp16) {
    std::ranges::transform(values, reinterpret_cast<std::uint16_t*>(access.weights), float_to_fp16);
    if (access.state != nullptr) std::ranges::copy(values, access.view().master);
    return;
  }
  auto* weights = reinterpret_cast<bf16*>(access.weights);
  const detail::StateArrays state = access.state != nullptr ? access.view() : detail::StateArrays{};
  for (std::size_t i = 0; i < values.size(); ++i) {
    const SplitMaster split = split_master(state.remainder8 != nullptr ? to_master24(values[i]) : values[i]);
    weights[i] = split.weight;
    if (state.remainder != nullptr) state.remainder[i] = split.remainder;
    if (state.remainder8 != nullptr) state.remainder8[i] = static_cast<std::int8_t>(split.remainder / 256);
  }
}

}  // namespace

void Engine::Impl::initialize(const Initializer& fill, std::span<const std::byte> program_state) {
  if (!fill) throw UsageError("initialize() needs a Initializer, which makes the initial values");
  const Initializer checked = [&](ParameterId parameter, std::uint64_t first, std::span<float> out) {
    fill(parameter, first, out);
    for (const float value : out) {
      const ParameterSpec& spec = table.spec(parameter);
      if (master_is_committable(value, spec.dtype)) continue;
      if (!std::isfinite(value))
        throw UsageError(fmt::format("the initial value {} of parameter '{}' is not finite", value, spec.name));
      throw UsageError(fmt::format("the initial value {} of parameter '{}' is too large for {}", value, spec.name,
                                   dtype_name(spec.dtype == DType::fp16 ? DType::fp16 : DType::bf16)));
    }
  };
  enliven([&] {
    compare_groups();
    agree_on_model("initialize()");
    all_together("keep its program's state", [&] { require_room_for(program_state); });
    refuse_resharded();
    seal(/*create_store=*/true);
    const Ledger::Apart apart(runtime.ledger());
    all_together("make its initial state", [&] { fill_homes(checked); });
    step_state = commit_state(program_state);
    if (!nvme_placement()) return;
    commit("", step_state);
    last_commit.wait();
    book_io();
  });
}

void Engine::Impl::fill_homes(const Initializer& fill, const MomentInitializer& fill_moment) {
  if (nvme_placement()) live.store->begin_step(step_count);
  detail::WalkOptions walk = step_writes();
  walk.read = walk.read_device_only = false;
  live.pipeline->walk(walk, [&](const detail::TileAccess& tile) {
    std::memset(tile.weights, 0, tile.tile->w_bytes);
    detail::begin_state(tile, groups[tile.segment->group.index]);
    std::vector<float> values(tile.tile->elements);
    fill_segment(tile.unit, *tile.segment, tile.tile->first_element, values, fill);
    store_masters(tile, values);
    if (!fill_moment) return;
    for (const State state : {State::moment1, State::moment2}) {
      if (!tile.segment->has(state)) continue;
      fill_segment(tile.unit, *tile.segment, tile.tile->first_element, values,
                   [&](ParameterId parameter, std::uint64_t first, std::span<float> out) {
                     fill_moment(parameter, state, first, out);
                   });
      detail::store_values(tile, state, 0, values);
    }
  });
  for (std::uint32_t u = 0; u < table.units().size(); ++u) initialize_frozen(UnitId{u}, fill);
}

void Engine::Impl::initialize_frozen(UnitId id, const Initializer& fill) {
  const detail::Unit& unit = table.unit(id);
  if (unit.frozen.tiles().empty()) return;
  const auto& staging = live.memory->staging_buffers();
  live.record_io->change(
      live.record_io->whole_region(id, detail::RecordKind::frozen, Region::weights),
      {.read = false, .store = stores_frozen(), .scratch = staging.empty() ? std::span<std::byte>() : staging.front()},
      [&](std::span<std::byte> weights) {
        std::ranges::fill(weights, std::byte{0});
        const std::size_t first_segment = unit.trainable.segments().size();
        for (const tiers::Tile& tile : unit.frozen.tiles()) {
          const detail::Segment& segment = unit.segments[first_segment + tile.segment];
          std::vector<float> values(tile.elements);
          fill_segment(id, segment, tile.first_element, values, fill);
          store_masters({.unit = id, .segment = &segment, .tile = &tile, .weights = weights.data() + tile.w_offset},
                        values);
        }
      });
}

void Engine::initialize(const Initializer& fill, std::span<const std::byte> caller_state) {
  impl_->initialize(fill, caller_state);
}

}  // namespace hoist
