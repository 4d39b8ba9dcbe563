// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/zero/detail/engine_impl.hpp>
#include <hoist/zero/layout/tile_values.hpp>

namespace hoist {

using detail::TileAccess;
using tiers::Region;
using tiers::Tile;

void Engine::Impl::settle() {
  require_undecided("settle()");
  if (!pass) drain();
  if (live.deferred) live.deferred->finish();
  last_commit.wait();
  if (uncommitted) live.store->begin_step(step_count);  // waits for the writes that no commit waits for yet
  Completion kept;
  {
    const std::lock_guard lock(saves_mutex);
    kept = last_keep;
  }
  kept.wait();
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

void Engine::Impl::check_kept(ParameterId parameter, State state) const {
  const std::string& name = table.spec(parameter).name;
  if (state == State::master) return;
  if (!table.spec(parameter).trainable)
    throw UsageError(fmt::format("parameter '{}' is frozen: it has weights only", name));
  if (state != State::gradient && !table.segment_of(parameter).has(state))
    throw UsageError(fmt::format("the optimizer of parameter '{}' keeps no {} moment", name,
                                 state == State::moment1 ? "first" : "second"));
}

// --- reading ---------------------------------------------------------------------------------------------------------

void Engine::Impl::read(ParameterId parameter, State state, std::uint64_t first, std::span<float> out) {
  check_range(parameter, first, out.size());
  if (pass) throw UsageError("state is read between passes, not inside of one");
  check_kept(parameter, state);
  if (state == State::gradient && !gradients_due)
    throw UsageError("gradients are there after the last pass of a step, and until step()");
  if (state == State::gradient && !live.gradients->finished(table.parameter(parameter).unit)) {
    throw UsageError(
        fmt::format("the gradient of parameter '{}' was not finished in the pass", table.spec(parameter).name));
  }
  require_undecided("read()");
  settle_together();
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
  if (state == State::gradient) {
    const auto mean = static_cast<float>(gradient_mean());
    const std::uint64_t element_bytes = dtype_bytes(segment.home_gradient_dtype);
    detail::PartScratch scratch;
    const std::byte* const gradient = live.record_io->view_gradient(
        id, live.gradients->home(id) + segment.home_gradient_offset + first * element_bytes, out.size() * element_bytes,
        scratch);
    for (std::uint64_t i = 0; i < out.size(); ++i)
      out[i] = mean * detail::load_element(gradient, segment.home_gradient_dtype, i);
    return;
  }
  const auto kind = segment.trainable ? detail::RecordKind::trainable : detail::RecordKind::frozen;
  detail::PartScratch weights, states;
  detail::read_values(segment.trainable ? unit.trainable : unit.frozen, segment, state, first, out,
                      [&](const detail::TileRun& run) {
                        return live.record_io->view({.unit = id, .kind = kind, .tiles = run},
                                                    run.region == Region::weights ? weights : states);
                      });
}

// --- writing ---------------------------------------------------------------------------------------------------------

// A unit's record is rewritten whole, in a commit of its own, so that the change is atomic like any other.
void Engine::Impl::write(ParameterId parameter, State state, std::uint64_t first, std::span<const float> values) {
  check_range(parameter, first, values.size());
  if (pass) throw UsageError("state is written between passes, not inside of one");
  if (state == State::gradient) throw UsageError("gradients cannot be written; use accumulate() in a pass");
  const bool trainable = table.spec(parameter).trainable;
  check_kept(parameter, state);
  for (const float value : values) {
    if (!master_is_committable(value, state == State::master ? table.spec(parameter).dtype : DType::fp32) ||
        (state == State::moment2 && value < 0)) {
      throw UsageError(
          fmt::format("{} cannot be committed as state of parameter '{}'", value, table.spec(parameter).name));
    }
  }
  require_undecided("write()");
  // A commit is the whole job's: a group that made one alone would be one ahead from here on.
  if (nvme_placement() && runtime.has_several_groups())
    comm::agree(job(), step_count, fmt::format("write() after step {}", step_count));
  settle_together();
  const Ledger::Apart apart(runtime.ledger());
  live.gatherer->quiesce();
  changed_since_save = true;
  together("begin the change", [&] {
    if (nvme_placement()) live.store->begin_step(step_count);
    if (!std::exchange(uncommitted, false)) return;
    write_homes(/*with_frozen=*/false);  // the records that this call leaves alone are committed as well
    live.store->begin_step(step_count);
  });
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
    commit("", step_state).wait();
  }
  live.gatherer->invalidate();
  book_io();
}

void Engine::Impl::write_trainable(ParameterId parameter, State state, const OwnedRange& owned,
                                   std::span<const float> values) {
  const detail::Parameter& p = table.parameter(parameter);
  live.pipeline->walk(
      step_writes(),
      [&](const TileAccess& tile) {
        if (tile.segment != &table.segment_of(parameter)) return;
        const ElementRange range = detail::overlap(*tile.tile, owned.shard.first, owned.shard.count);
        if (range.count == 0) return;
        const std::uint64_t first = tile.tile->first_element + range.first - owned.shard.first;
        detail::store_values(tile, state, range.first, values.subspan(first, range.count));
      },
      p.unit);
}

void Engine::Impl::write_frozen(ParameterId parameter, const OwnedRange& owned, std::span<const float> values) {
  const UnitId id = table.parameter(parameter).unit;
  const detail::Unit& unit = table.unit(id);
  const detail::Segment& segment = table.segment_of(parameter);
  live.record_io->change(
      live.record_io->whole_region(id, detail::RecordKind::frozen, Region::weights), {.store = stores_frozen()},
      [&](std::span<std::byte> weights) {
        for (const Tile& tile : unit.frozen.tiles()) {
          if (tile.segment != segment.record_segment) continue;
          const ElementRange range = detail::overlap(tile, owned.shard.first, owned.shard.count);
          if (range.count == 0) continue;
          const TileAccess access{
              .unit = id, .segment = &segment, .tile = &tile, .weights = weights.data() + tile.w_offset};
          const std::uint64_t first = tile.first_element + range.first - owned.shard.first;
          detail::store_values(access, State::master, range.first, values.subspan(first, range.count));
        }
      });
}

void Engine::read(ParameterId parameter, State state, std::uint64_t first_element, std::span<float> out) {
  impl_->guarded([&] { impl_->read(parameter, state, first_element, out); });
}

void Engine::write(ParameterId parameter, State state, std::uint64_t first_element, std::span<const float> values) {
  impl_->guarded([&] { impl_->write(parameter, state, first_element, values); });
}

}  // namespace hoist
