// SPDX-License-Identifier: Apache-2.0
// zero/passes/weight_reader.hpp - weights on their way from NVMe: a few pinned buffers, read ahead in the planned
// order. Where a unit's update is still to come, the buffer is filled by the update instead. Tiles that live in memory
// are not in the buffers; of a unit that has no others, only the update is asked for.
//
// Threading  expect() and invalidate() come from the program's thread, take() and outdate() from the executor,
//            hand_back() from whichever thread saw the copy finish. One mutex.
// Errors     take() throws what the read failed with, or CorruptionError.
// Main path  expect(order) -> reads start while buffers are free -> take(unit) waits and verifies -> copy up ->
//            hand_back(buffer) -> the next read starts.
#pragma once

#include <deque>
#include <vector>

#include <hoist/core/mutex.hpp>
#include <hoist/zero/layout/record_map.hpp>
#include <hoist/zero/memory/memory.hpp>
#include <hoist/zero/update/update_queue.hpp>

namespace hoist::detail {

class WeightReader {
 public:
  WeightReader(tiers::Store& store, const UnitRegions& units, const RecordMap& records,
               const std::vector<std::span<std::byte>>& buffers, UpdateQueue& updates);
  ~WeightReader();  // waits for reads under way and for buffers under copy

  // Units whose weights will be asked for, in order. Replaces what was expected before; buffers already filled with
  // units that come early in the new order are kept.
  void expect(std::vector<UnitId> order);
  // Nothing staged is valid any more: the store has newer weights. Waits until buffers under copy are handed back.
  void invalidate();
  // The unit's weights are about to change: staged weights of it are dropped, and later reads wait for the new ones.
  // Must not be called while the unit is being taken.
  void outdate(UnitId unit);

  // The unit's weights on NVMe, in host layout, verified. Blocks for the read. Pre: there are any.
  std::byte* take(UnitId unit);
  void hand_back(std::byte* buffer);

 private:
  enum class Use : std::uint8_t { free, staged, taken };
  struct Buffer {
    std::span<std::byte> bytes;
    Use use = Use::free;
    UnitId unit{};
    Completion read;
  };
  void await_copies(MutexLock& lock) HOIST_REQUIRES(mutex_);
  void start_reads() HOIST_REQUIRES(mutex_);
  void start_read(Buffer& buffer, UnitId unit);
  Completion read_weights(UnitId unit, std::span<std::byte> target);
  Completion read_frozen(UnitId unit, std::span<std::byte> target);
  // The tiles from `first` on, which come last in the record.
  Completion read_record(std::optional<tiers::RecordId> record, const tiers::RecordLayout& layout, std::uint32_t first,
                         std::span<std::byte> target);
  Buffer* staged(UnitId unit) HOIST_REQUIRES(mutex_);
  Buffer& buffer_for(UnitId unit, MutexLock& lock) HOIST_REQUIRES(mutex_);
  void verify(UnitId unit, std::span<const std::byte> bytes) const;

  tiers::Store& store_;
  const UnitRegions& units_;
  const RecordMap& records_;
  UpdateQueue& updates_;
  Mutex mutex_;
  ConditionVariable changed_;
  std::vector<Buffer> buffers_ HOIST_GUARDED_BY(mutex_);
  std::deque<UnitId> expected_ HOIST_GUARDED_BY(mutex_);  // not yet being read
};

}  // namespace hoist::detail
