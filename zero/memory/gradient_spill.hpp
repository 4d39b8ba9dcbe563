// SPDX-License-Identifier: Apache-2.0
// zero/memory/gradient_spill.hpp - gradients that pinned memory has no room for: on NVMe, beside the store's data.
//
// A spilled unit has a slot in a scratch file, laid out as its gradient would be in memory. Each tile has a checksum in
// memory, so a read is verified like one of the store; a slot means nothing to another process.
//
// Threading  write() of a unit excludes everything else with that unit, until it returns; reads from any thread.
// Errors     IoError; CorruptionError naming unit, file and offset.
// Main path  write (checksums, transfer) -> start_read -> verify.
#pragma once

#include <memory>
#include <vector>

#include <hoist/tiers/scratch.hpp>
#include <hoist/zero/memory/memory.hpp>

namespace hoist::detail {

class PartBuffer;

// CorruptionError::Where::region of a spilled gradient.
inline constexpr const char* kGradientRegionName = "gradient";

class GradientSpill {
 public:
  GradientSpill(Runtime& runtime, const UnitTable& table, const Memory& memory,
                std::unique_ptr<tiers::Scratch> scratch);

  bool holds(UnitId unit) const { return memory_.placement(unit).gradient_spilled; }

  // Takes the checksums of a unit's gradient and starts writing it, when its last write is done. `shards` stay as they
  // are until this one is.
  Completion write(UnitId unit, std::span<const std::byte> shards);
  // Starts reading the gradient of consecutive tiles, when their last write is done. Unit::gradient_part() says how
  // much.
  Completion start_read(const SubGroup& tiles, std::byte* target, aio::Priority priority);
  // Throws CorruptionError unless these are the bytes that were written.
  void verify(const SubGroup& tiles, const std::byte* bytes) const;
  // Reads bytes of a unit's gradient, at an offset among its shards, and verifies them. Blocks.
  const std::byte* view(UnitId unit, std::uint64_t offset, std::uint64_t bytes, PartBuffer& buffer);

  SubGroup all_tiles(UnitId unit) const;

 private:
  std::uint64_t checksum(const SubGroup& tile, const std::byte* bytes) const;
  std::uint64_t slot(UnitId unit) const { return memory_.placement(unit).region(MemoryRole::spilled_gradient).offset; }

  Runtime& runtime_;
  const UnitTable& table_;
  const Memory& memory_;
  const std::unique_ptr<tiers::Scratch> scratch_;
  std::vector<Completion> written_;  // by unit
};

}  // namespace hoist::detail
