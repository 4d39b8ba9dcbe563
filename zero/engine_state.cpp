// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/zero/detail/engine_impl.hpp>

namespace hoist {

using detail::TileAccess;
using tiers::Region;
using tiers::Tile;

namespace {

// Tiles looked at in one go by state access: 3 MiB of record.
constexpr std::uint32_t kAccessTiles = 16;

// Page-aligned memory for direct transfers outside of steps.
class Scratch {
 public:
  explicit Scratch(std::uint64_t bytes)
      : data_(static_cast<std::byte*>(
            std::aligned_alloc(kBlockAlignment, round_up(std::max<std::uint64_t>(bytes, 1), kBlockAlignment)))),
        bytes_(bytes) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::span<std::byte> first(std::uint64_t bytes) const { return {data_, bytes}; }

 private:
  std::byte* data_;
  std::uint64_t bytes_;
};

float load_state(const TileAccess& tile, State state, std::uint64_t i) {
  if (state == State::moment1) return tile.view().moment1[i];
  if (state == State::moment2) return tile.view().moment2[i];
  if (tile.segment->dtype == DType::fp32) return reinterpret_cast<const float*>(tile.weights)[i];
  const bf16 weight = reinterpret_cast<const bf16*>(tile.weights)[i];
  return tile.state == nullptr ? to_float(weight) : join_master(weight, tile.view().remainder[i]);
}

void store_state(const TileAccess& tile, State state, std::uint64_t i, float value) {
  if (state == State::moment1) {
    tile.view().moment1[i] = value;
  } else if (state == State::moment2) {
    tile.view().moment2[i] = value;
  } else if (tile.segment->dtype == DType::fp32) {
    reinterpret_cast<float*>(tile.weights)[i] = value;
  } else {
    const SplitMaster split = split_master(value);
    reinterpret_cast<bf16*>(tile.weights)[i] = split.weight;
    if (tile.state != nullptr) tile.view().remainder[i] = split.remainder;
  }
}

// The part of shard elements [first, first + count) that lies in a tile, relative to the tile.
ElementRange overlap(const Tile& tile, std::uint64_t first, std::uint64_t count) {
  const std::uint64_t low = std::max(first, tile.first_element);
  const std::uint64_t high = std::min(first + count, tile.first_element + tile.elements);
  return low < high ? ElementRange{low - tile.first_element, high - low} : ElementRange{};
}

}  // namespace

void Engine::Impl::settle() {
  if (!pass) drain();
  last_commit.wait();
  book_io();
}

void Engine::Impl::check_range(ParameterId parameter, std::uint64_t first, std::uint64_t count) const {
  if (parameter.index >= table.specs().size())
    throw UsageError(fmt::format("there is no parameter {}", parameter.index));
  const std::uint64_t elements = table.parameter(parameter).count;
  if (first > elements || count > elements - first) {
    throw UsageError(fmt::format("elements [{}, {}) of parameter '{}', which has {}", first, first + count,
                                 table.spec(parameter).name, elements));
  }
}

// --- reading ---------------------------------------------------------------------------------------------------------

void Engine::Impl::read(ParameterId parameter, State state, std::uint64_t first, std::span<float> out) {
  check_range(parameter, first, out.size());
  if (pass) throw UsageError("state is read between passes, not inside of one");
  const bool trainable = table.spec(parameter).trainable;
  if (!trainable && state != State::master) {
    throw UsageError(fmt::format("parameter '{}' is frozen: it has weights only", table.spec(parameter).name));
  }
  if (state == State::gradient && !gradients_due)
    throw UsageError("there are no gradients between step() and the next pass");
  if (state == State::gradient && !live.gradients->finished(table.parameter(parameter).unit)) {
    throw UsageError(
        fmt::format("the gradient of parameter '{}' was not finished in the pass", table.spec(parameter).name));
  }
  settle();
  const Ledger::Apart apart(runtime.ledger());
  live.gradients->wait();

  const detail::Parameter& p = table.parameter(parameter);
  const std::uint64_t shard = table.segment_of(parameter).shard_elements;
  for (int rank = 0; rank < runtime.world_size(); ++rank) {
    const OwnedRange owned = owned_range(p.first_element + first, out.size(), shard, rank);
    if (owned.shard.count == 0) continue;
    const std::span<float> part = out.subspan(owned.offset, owned.shard.count);
    if (rank == runtime.rank()) read_owned(parameter, state, owned.shard.first, part);
    if (runtime.world_size() > 1) runtime.communicator().broadcast_host(std::as_writable_bytes(part), rank);
  }
  book_io();
}

// Elements of this rank's own shard.
void Engine::Impl::read_owned(ParameterId parameter, State state, std::uint64_t first, std::span<float> out) {
  const UnitId id = table.parameter(parameter).unit;
  const detail::Unit& unit = table.unit(id);
  const detail::Segment& segment = table.segment_of(parameter);
  const detail::UnitHome& home = live.memory->home(id);
  if (state == State::gradient) {
    const std::byte* gradient = home.gradient + segment.home_gradient_offset;
    for (std::uint64_t i = 0; i < out.size(); ++i) {
      out[i] = segment.dtype == DType::fp32 ? reinterpret_cast<const float*>(gradient)[first + i]
                                            : to_float(reinterpret_cast<const bf16*>(gradient)[first + i]);
    }
    return;
  }
  const tiers::RecordLayout& layout = segment.trainable ? unit.trainable : unit.frozen;
  const tiers::RecordId record = segment.trainable ? live.records->trainable(id).value_or(tiers::RecordId{})
                                                   : live.records->frozen(id).value_or(tiers::RecordId{});
  const std::uint64_t base = segment.trainable ? 0 : unit.frozen_offset();
  const auto tiles = layout.tiles();
  const auto wanted = [&](const Tile& tile) {
    return tile.segment == segment.record_segment && overlap(tile, first, out.size()).count > 0;
  };
  const auto begin = std::find_if(tiles.begin(), tiles.end(), wanted);
  const auto end = std::find_if_not(begin, tiles.end(), wanted);

  const Scratch weights_scratch(home.weights == nullptr ? kAccessTiles * tiers::kTileElements * 4 : 0);
  const Scratch state_scratch(segment.trainable && home.state == nullptr ? kAccessTiles * tiers::kTileElements * 10
                                                                         : 0);
  for (auto run = begin; run != end;) {
    const auto run_end = run + std::min<std::ptrdiff_t>(kAccessTiles, end - run);
    const auto index = static_cast<std::uint32_t>(run - tiles.begin());
    const auto count = static_cast<std::uint32_t>(run_end - run);
    const Tile& last = *(run_end - 1);
    const auto fetch = [&](Region region, std::span<std::byte> target) {
      live.store->read(record, region, index, count, target, aio::Priority::foreground).wait();
      live.store->verify(record, region, index, count, target);
      return target.data();
    };
    std::byte* weights =
        home.weights != nullptr
            ? home.weights + base + run->w_offset
            : fetch(Region::weights, weights_scratch.first(last.w_offset + last.w_bytes - run->w_offset));
    std::byte* states = nullptr;
    if (segment.trainable) {
      states = home.state != nullptr
                   ? home.state + run->s_offset
                   : fetch(Region::state, state_scratch.first(last.s_offset + last.s_bytes - run->s_offset));
    }
    for (auto tile = run; tile != run_end; ++tile) {
      const TileAccess access{.unit = id,
                              .segment = &segment,
                              .tile = &*tile,
                              .weights = weights + (tile->w_offset - run->w_offset),
                              .state = states == nullptr ? nullptr : states + (tile->s_offset - run->s_offset)};
      const ElementRange range = overlap(*tile, first, out.size());
      for (std::uint64_t i = 0; i < range.count; ++i) {
        out[tile->first_element + range.first + i - first] = load_state(access, state, range.first + i);
      }
    }
    run = run_end;
  }
}

// --- writing ---------------------------------------------------------------------------------------------------------

// A unit's record is rewritten whole, in a commit of its own, so that the change is atomic like any other.
void Engine::Impl::write(ParameterId parameter, State state, std::uint64_t first, std::span<const float> values) {
  check_range(parameter, first, values.size());
  if (pass) throw UsageError("state is written between passes, not inside of one");
  if (state == State::gradient) throw UsageError("gradients cannot be written; use accumulate() in a pass");
  const bool trainable = table.spec(parameter).trainable;
  if (!trainable && state != State::master) {
    throw UsageError(fmt::format("parameter '{}' is frozen: it has weights only", table.spec(parameter).name));
  }
  for (const float value : values) {
    if (!master_is_committable(value) || (state == State::moment2 && value < 0)) {
      throw UsageError(
          fmt::format("{} cannot be committed as state of parameter '{}'", value, table.spec(parameter).name));
    }
  }
  settle();
  const Ledger::Apart apart(runtime.ledger());
  live.gatherer->quiesce();
  if (nvme_placement()) live.store->begin_step(step_count);
  const detail::Parameter& p = table.parameter(parameter);
  const OwnedRange owned =
      owned_range(p.first_element + first, values.size(), table.segment_of(parameter).shard_elements, runtime.rank());
  const auto part = values.subspan(owned.offset, owned.shard.count);
  if (owned.shard.count > 0) {
    if (trainable) {
      write_trainable(parameter, state, owned, part);
    } else {
      write_frozen(parameter, owned, part);
    }
  }
  if (nvme_placement()) {
    const std::vector<std::byte> unchanged = caller_state;
    commit("", unchanged).wait();
  }
  live.gatherer->invalidate();
  book_io();
}

void Engine::Impl::write_trainable(ParameterId parameter, State state, const OwnedRange& owned,
                                   std::span<const float> values) {
  const detail::Parameter& p = table.parameter(parameter);
  live.updater->walk(
      step_writes(),
      [&](const TileAccess& tile) {
        if (tile.segment != &table.segment_of(parameter)) return;
        const ElementRange range = overlap(*tile.tile, owned.shard.first, owned.shard.count);
        for (std::uint64_t i = 0; i < range.count; ++i) {
          store_state(tile, state, range.first + i,
                      values[tile.tile->first_element + range.first + i - owned.shard.first]);
        }
      },
      p.unit);
}

void Engine::Impl::write_frozen(ParameterId parameter, const OwnedRange& owned, std::span<const float> values) {
  const UnitId id = table.parameter(parameter).unit;
  const detail::Unit& unit = table.unit(id);
  const detail::Segment& segment = table.segment_of(parameter);
  const std::byte* home = live.memory->home(id).weights;
  const auto tiles = unit.frozen.tiles();
  const auto count = static_cast<std::uint32_t>(tiles.size());
  const std::uint64_t bytes = unit.frozen.region_bytes(Region::weights);
  const Scratch scratch(home == nullptr ? bytes : 0);
  std::byte* weights =
      home != nullptr ? live.memory->home(id).weights + unit.frozen_offset() : scratch.first(bytes).data();
  if (home == nullptr) {
    live.store->read(*live.records->frozen(id), Region::weights, 0, count, {weights, bytes}, aio::Priority::foreground)
        .wait();
    live.store->verify(*live.records->frozen(id), Region::weights, 0, count, {weights, bytes});
  }
  for (const Tile& tile : tiles) {
    if (tile.segment != segment.record_segment) continue;
    const ElementRange range = overlap(tile, owned.shard.first, owned.shard.count);
    const TileAccess access{.unit = id, .segment = &segment, .tile = &tile, .weights = weights + tile.w_offset};
    for (std::uint64_t i = 0; i < range.count; ++i) {
      const std::uint64_t element = tile.first_element + range.first + i;
      store_state(access, State::master, range.first + i, values[element - owned.shard.first]);
    }
  }
  if (step_writes().write_weights) store_frozen(id, {weights, bytes}).wait();
}

// --- saving ----------------------------------------------------------------------------------------------------------

Completion Engine::Impl::save(const std::string& name, std::span<const std::byte> program_state) {
  if (pass || gradients_due) throw UsageError("save() belongs between step() and the next pass");
  if (program_state.size() > options.caller_state_bytes_max) {
    throw UsageError(
        fmt::format("the caller state has {} bytes; at most {} were reserved (EngineOptions::caller_state_bytes_max)",
                    program_state.size(), options.caller_state_bytes_max));
  }
  if (!live.store) throw UsageError("nothing to save to: the configuration names no hoist.checkpoint_path");
  if (nvme_placement() && !stores_steps()) {
    throw UsageError("the store was made with durability \"none\" and cannot be resumed; use durability \"step\"");
  }
  settle();
  const Ledger::Apart apart(runtime.ledger());
  live.store->begin_step(step_count);
  if (!nvme_placement()) {
    live.updater->walk({.read = false}, [](const TileAccess&) {});
    for (std::uint32_t u = 0; u < table.units().size(); ++u) {
      const UnitId id{u};
      const detail::Unit& unit = table.unit(id);
      if (unit.frozen.tiles().empty()) continue;
      store_frozen(id,
                   {live.memory->home(id).weights + unit.frozen_offset(), unit.frozen.region_bytes(Region::weights)});
    }
  }
  const std::vector<std::byte> state(program_state.begin(), program_state.end());
  return commit(name, state);
}

void Engine::read(ParameterId parameter, State state, std::uint64_t first_element, std::span<float> out) {
  impl_->guarded([&] { impl_->read(parameter, state, first_element, out); });
}

void Engine::write(ParameterId parameter, State state, std::uint64_t first_element, std::span<const float> values) {
  impl_->guarded([&] { impl_->write(parameter, state, first_element, values); });
}

Completion Engine::save(std::string name, std::span<const std::byte> caller_state) {
  return impl_->guarded([&] { return impl_->save(name, caller_state); });
}

}  // namespace hoist
