// SPDX-License-Identifier: Apache-2.0
// zero/detail/records.hpp - from units to the store's records.
#pragma once

#include <optional>
#include <vector>

#include <hoist/tiers/store.hpp>
#include <hoist/zero/detail/commit_state.hpp>
#include <hoist/zero/detail/store_places.hpp>
#include <hoist/zero/detail/unit_table.hpp>
#include <hoist/zero/options.hpp>

namespace hoist::detail {

class RecordMap {
 public:
  explicit RecordMap(const UnitTable& table) {
    for (const Unit& unit : table.units()) {
      Entry entry;
      if (!unit.trainable.tiles().empty()) entry.trainable = add(unit, unit.trainable);
      if (!unit.frozen.tiles().empty()) entry.frozen = add(unit, unit.frozen);
      entries_.push_back(entry);
    }
  }

  std::optional<tiers::RecordId> trainable(UnitId unit) const { return entries_[unit.index].trainable; }
  std::optional<tiers::RecordId> frozen(UnitId unit) const { return entries_[unit.index].frozen; }
  const std::vector<tiers::StoreRecord>& records() const { return records_; }

 private:
  struct Entry {
    std::optional<tiers::RecordId> trainable, frozen;
  };
  tiers::RecordId add(const Unit& unit, const tiers::RecordLayout& layout) {
    records_.push_back({unit.name, layout});
    return {static_cast<std::uint32_t>(records_.size() - 1)};
  }
  std::vector<Entry> entries_;
  std::vector<tiers::StoreRecord> records_;
};

// The store that an engine's options ask for.
inline tiers::StoreOptions store_options(const EngineOptions& options, const UnitTable& table, const RecordMap& records,
                                         int rank, const StorePlace& place = {}, Trace* trace = nullptr) {
  const bool nvme = options.parameters == Placement::nvme || options.optimizer == Placement::nvme;
  std::vector<std::string> stripes;
  for (const std::string& directory : options.stripe_directories) stripes.push_back(place.in(directory));
  return {.directory = place.in(options.store_directory),
          .stripe_directories = std::move(stripes),
          .identity = {.layout = table.identity(), .rank = rank, .world_size = table.world_size()},
          .records = records.records(),
          .durability = nvme ? options.durability : tiers::Durability::step,  // without, commits are explicit saves
          .caller_state_bytes_max = options.caller_state_bytes_max + kCommitHeadBytes,
          .kept_steps_max = options.keep_steps,
          .lock_timeout = options.lock_timeout,
          .trace = trace};
}

}  // namespace hoist::detail
