// SPDX-License-Identifier: Apache-2.0
// zero/memory/record_io.hpp - reads and writes tiles of a unit's records wherever they live.
//
//   memory that the CPU can read   in place
//   device-only memory             by copies on a stream; pageable memory on the other side goes through a pinned
//                                  buffer that nothing else uses
//   NVMe                           through the store, verified
//
// Threading  One caller at a time; start_read() of tiles on NVMe from any thread.
// Memory     Borrows all it is given. view(), read() and change() copy parts whole, except where the caller can use
//            them in place.
// Errors     IoError, CorruptionError; DeviceError.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>

#include <hoist/aio/transfer_memory.hpp>
#include <hoist/zero/layout/record_map.hpp>
#include <hoist/zero/layout/tile_values.hpp>
#include <hoist/zero/memory/gradient_spill.hpp>
#include <hoist/zero/memory/memory.hpp>

namespace hoist::detail {

enum class RecordKind : std::uint8_t { trainable, frozen };

// Consecutive tiles in one region of one of a unit's two records.
struct RecordPart {
  UnitId unit{};
  RecordKind kind = RecordKind::trainable;
  TileRun tiles;
};

// Memory that grows to the longest part it is asked for, which as a rule is the first.
class PartBuffer {
 public:
  std::span<std::byte> of(std::uint64_t bytes) {
    if (!memory_ || memory_->span().size() < bytes) memory_.emplace(bytes);
    return memory_->first(bytes);
  }

 private:
  std::optional<aio::TransferMemory> memory_;
};

class RecordIo {
 public:
  // `store` is null without one, `spill` unless some gradients are spilled.
  RecordIo(Runtime& runtime, const UnitTable& table, const Memory& memory, const RecordMap& records,
           tiers::Store* store, GradientSpill* spill);

  RecordPart part(UnitId unit, RecordKind kind, tiers::Region region, std::uint32_t first_tile,
                  std::uint32_t tile_count) const;
  RecordPart whole_region(UnitId unit, RecordKind kind, tiers::Region region) const;

  // --- on the caller's thread; these block
  // The verified bytes of a part: in place, or copied to `buffer`.
  const std::byte* view(const RecordPart& part, PartBuffer& buffer);
  void read(const RecordPart& part, std::span<std::byte> out);
  // Bytes of a unit's gradient, at an offset among its `shards`. Those are in device-only memory when the unit's state
  // is; null if the gradient is spilled.
  const std::byte* view_gradient(UnitId unit, const std::byte* shards, std::uint64_t offset, std::uint64_t bytes,
                                 PartBuffer& buffer);
  struct ChangeOptions {
    bool read = true;    // false: `edit` overwrites all of the part, and finds anything in it
    bool store = false;  // also writes the part to the open step of the store; tiles on NVMe have no other place
    std::span<std::byte> buffer{};  // is used instead of new memory if it is large enough
  };
  using Edit = std::function<void(std::span<std::byte>)>;
  // Replaces the bytes of a part by what `edit` makes of them.
  void change(const RecordPart& part, const ChangeOptions& options, const Edit& edit);
  // Fills all memory that holds records of the unit from the store, verified.
  void load(UnitId unit);
  // Writes a part that is in memory to the open step of the store. Done when it is written; the memory stays as it is
  // until then.
  Completion store(const RecordPart& part);

  // --- between a part and memory that the device and the drives can transfer from and to
  // Copies the part to `target`. Bytes from NVMe are not verified yet. Pre: the part is device-only or on NVMe.
  Completion start_read(const RecordPart& part, std::byte* target, aio::Priority priority);
  // Copies `source` to a part in device-only memory.
  Completion start_write(const RecordPart& part, const std::byte* source);
  // Returns when every copy to and from device-only memory has ended.
  void await_copies();

 private:
  const tiers::RecordLayout& layout(const RecordPart& part) const;
  tiers::RecordId record(const RecordPart& part) const;
  std::uint32_t resident_tiles(const RecordPart& part) const;  // the first ones, which are in memory
  std::byte* resident(const RecordPart& part) const;           // in whichever memory. Pre: there are such tiles
  std::byte* in_place(const RecordPart& part) const;           // null unless the CPU can use all of the part there
  void load(const RecordPart& part);
  template <typename Work>  // a function of a RecordPart
  void for_each_piece(const RecordPart& part, const Work& work);
  void write_resident(const RecordPart& part, std::span<const std::byte> bytes);
  void read_store(const RecordPart& part, std::span<std::byte> target);
  Completion write_store(const RecordPart& part, std::span<const std::byte> bytes);
  void copy_from_device(const std::byte* source, std::span<std::byte> out);
  void copy_to_device(std::byte* target, std::span<const std::byte> bytes);

  const UnitTable& table_;
  const Memory& memory_;
  const RecordMap& records_;
  tiers::Store* store_;
  GradientSpill* spill_;
  std::unique_ptr<platform::Stream> stream_;  // null unless some units are device-only
};

}  // namespace hoist::detail
