// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/state_access.hpp - this rank's masters, moments and frozen weights as values: made, loaded, read,
// changed and written to the store, wherever they live.
//
// Threading  The program's thread, or the save thread between two steps. Pre: nothing else uses the state meanwhile.
// Errors     IoError, CorruptionError; whatever an initializer throws; UsageError for a value that no commit may hold.
#pragma once

#include <functional>
#include <span>

#include <hoist/zero/layout/partition.hpp>
#include <hoist/zero/memory/record_io.hpp>
#include <hoist/zero/options.hpp>
#include <hoist/zero/update/tile_pipeline.hpp>

namespace hoist::detail {

// UsageError for a value that no commit may hold.
void require_committable(const ParameterSpec& spec, State state, std::span<const float> values);

class StateAccess {
 public:
  // `groups`: every parameter group.
  StateAccess(int rank, const EngineOptions& options, const UnitTable& table, std::span<const GroupOptions> groups,
              RecordIo& records, TilePipeline& pipeline)
      : rank_(rank), options_(options), table_(table), groups_(groups), records_(records), pipeline_(pipeline) {}

  // Makes all state; with state on NVMe into the step of the store that is open.
  // `buffer`: memory for frozen weights that have no place in memory; new memory is taken if it is too small.
  void fill(const Initializer& initializer, std::span<std::byte> buffer, const MomentInitializer& moments = {});
  // `change` finds the present master of each trainable element in its `out`, and replaces those that it wants to.
  void change_masters(const Initializer& change);
  // Loads what lives in memory from the commit that the store has adopted, verified.
  void load();
  // Writes the records' trainable state that lives in memory into the step of the store that is open. Returns its
  // bytes.
  std::uint64_t write_resident();
  void write_frozen_resident();  // likewise the frozen weights

  // Values of elements [first, first + out.size()) of this rank's shard of the parameter's segment.
  void read(ParameterId parameter, State state, std::uint64_t first, std::span<float> out);
  // The same of a reduced gradient, each element multiplied by `scale`. `shards`: this rank's, of the unit; null if its
  // gradient is spilled.
  void read_gradient(ParameterId parameter, const std::byte* shards, float scale, std::uint64_t first,
                     std::span<float> out);
  // Makes those of one unit's changes that are of this rank's shard. With state on NVMe the unit's record is rewritten
  // whole, once, in the step of the store that is open, so that a commit makes the changes atomic.
  void write(UnitId unit, std::span<const StateChange> changes);

 private:
  void make_values(const TileAccess& tile, State state, std::span<float> values, const MomentInitializer& make) const;
  void fill_frozen(UnitId unit, const MomentInitializer& masters, std::span<std::byte> buffer);
  using FrozenWork = std::function<void(const TileAccess& tile)>;
  // Runs `work` on the unit's frozen tiles.
  void change_frozen(UnitId unit, RecordIo::ChangeOptions options, const FrozenWork& work);
  OwnedRange owned(const StateChange& change) const;
  void apply(const TileAccess& tile, std::span<const StateChange> changes) const;
  bool stores_frozen() const;
  WalkOptions walk() const;

  const int rank_;
  const EngineOptions& options_;
  const UnitTable& table_;
  const std::span<const GroupOptions> groups_;
  RecordIo& records_;
  TilePipeline& pipeline_;
};

}  // namespace hoist::detail
