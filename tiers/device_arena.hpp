// SPDX-License-Identifier: Apache-2.0
// tiers/device_arena.hpp - allocates pieces of the device's budgeted block.
//
// For allocations that live long (gather slots, gradient buffers, an embedder's activations): first fit, exact sizes
// rounded to 4 KiB (so that a drive can transfer from a block directly), neighbours joined on release.
//
// Threading  Any thread. The owner of a block ensures that no stream uses it when it is released.
// Errors     BudgetError if no hole is large enough; it names the smallest device budget that works.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>

#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/tiers/budget.hpp>

namespace hoist::tiers {

class DeviceArena;

// Owns bytes of the device until destruction.
class DeviceBlock {
 public:
  DeviceBlock() = default;
  DeviceBlock(DeviceBlock&& other) noexcept;
  DeviceBlock& operator=(DeviceBlock&& other) noexcept;
  ~DeviceBlock();
  std::byte* data() const { return bytes_.data(); }
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  friend class DeviceArena;
  DeviceBlock(DeviceArena* arena, std::span<std::byte> bytes, Budget::Hold hold)
      : arena_(arena), bytes_(bytes), hold_(std::move(hold)) {}
  DeviceArena* arena_ = nullptr;
  std::span<std::byte> bytes_;
  Budget::Hold hold_;
};

class DeviceArena {
 public:
  static constexpr std::uint64_t kAlignment = kBlockAlignment;

  // Arena over all of device.memory(), which holds bytes of `budget` for each block.
  DeviceArena(platform::Device& device, Budget& budget);
  ~DeviceArena();
  // Contents are undefined. 0 bytes give an empty block.
  [[nodiscard]] DeviceBlock allocate(std::uint64_t bytes, const std::string& what);
  std::uint64_t largest_hole_bytes() const;
  std::uint64_t bytes() const { return device_.memory().size(); }
  // The smallest arena in which an allocation of `bytes` succeeds beside the present blocks.
  std::uint64_t least_bytes_for(std::uint64_t bytes) const;

 private:
  friend class DeviceBlock;
  void release(DeviceBlock& block) noexcept;
  BudgetError no_hole(std::uint64_t bytes, const std::string& what) const HOIST_REQUIRES(mutex_);
  std::uint64_t least_arena(std::uint64_t bytes) const HOIST_REQUIRES(mutex_);
  std::uint64_t largest_hole() const HOIST_REQUIRES(mutex_);
  const OwningProcess process_;
  platform::Device& device_;
  Budget& budget_;
  mutable Mutex mutex_;
  std::map<std::uint64_t, std::uint64_t> holes_ HOIST_GUARDED_BY(mutex_);  // offset -> bytes
  std::size_t blocks_alive_ HOIST_GUARDED_BY(mutex_) = 0;
};

}  // namespace hoist::tiers
