// SPDX-License-Identifier: Apache-2.0
#include "checksum_twice.hpp"

#include <atomic>

#include <hoist/core/checksum.hpp>

namespace hoist::bench {
namespace {

std::atomic<bool> twice{false};
std::atomic<std::uint64_t> differences{0};  // keeps the second computation from being left out

}  // namespace

// HOIST_TILE_CHECKSUM: tile_checksum() as the linker names it.
std::uint64_t real_checksum(const TileIdentity& identity,
                            std::span<const std::byte> bytes) asm("__real_" HOIST_TILE_CHECKSUM);
std::uint64_t wrapped_checksum(const TileIdentity& identity,
                               std::span<const std::byte> bytes) asm("__wrap_" HOIST_TILE_CHECKSUM);

std::uint64_t wrapped_checksum(const TileIdentity& identity, std::span<const std::byte> bytes) {
  const std::uint64_t sum = real_checksum(identity, bytes);
  if (twice.load(std::memory_order_relaxed) && real_checksum(identity, bytes) != sum)
    differences.fetch_add(1, std::memory_order_relaxed);
  return sum;
}

void set_checksum_twice(bool on) { twice.store(on, std::memory_order_relaxed); }

}  // namespace hoist::bench
