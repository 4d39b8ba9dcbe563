// SPDX-License-Identifier: Apache-2.0
// zero/layout/record_map.hpp - which of the store's records hold a unit.
#pragma once

#include <optional>
#include <vector>

#include <hoist/tiers/store.hpp>
#include <hoist/zero/layout/unit_table.hpp>

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

}  // namespace hoist::detail
