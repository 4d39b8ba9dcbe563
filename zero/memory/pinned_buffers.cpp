// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>

#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/memory/pinned_buffers.hpp>

namespace hoist::detail {

namespace {

// The first number above `low` for which `predicate` is true. Pre: it is false for `low` and true for `high`.
template <typename Number, typename Predicate>
Number first_true(Number low, Number high, const Predicate& predicate) {
  while (high - low > 1) {
    const Number middle = low + (high - low) / 2;
    (predicate(middle) ? high : low) = middle;
  }
  return high;
}

}  // namespace

PinnedBufferChooser::PinnedBufferChooser(const EngineOptions& options, const UnitRegions& regions) : regions_(regions) {
  const auto& units = regions.table().units();
  const bool sums_in_memory = gradient_sums(options) == GradientSums::in_memory;
  std::uint64_t tiles_max = 1;
  unsigned stored = 0;  // units of which weights come from NVMe
  for (std::uint32_t u = 0; u < units.size(); ++u) {
    const Unit& unit = units[u];
    tiles_max = std::max(tiles_max, std::uint64_t{unit.trainable.tiles().size()});
    staging_bytes_ = std::max(staging_bytes_, regions.unit(UnitId{u}).region(MemoryRole::stored_weights).bytes);
    if (regions.unit(UnitId{u}).reads_weights()) ++stored;
    if (regions.unit(UnitId{u}).state_on_device) continue;
    std::uint64_t gradient_bytes = 0;
    for (const Segment& segment : unit.trainable_segments()) gradient_bytes += round_up(segment.shard_bytes(), 64);
    if (sums_in_memory) sum_bytes_ = std::max(sum_bytes_, gradient_bytes);
    if (!regions.unit(UnitId{u}).gradient_in_ring) continue;
    largest_gradient_bytes_ = std::max(largest_gradient_bytes_, unit.gradient_shard_bytes);
    all_gradient_bytes_ += unit.gradient_shard_bytes;
  }
  wanted_ = {
      .sub_group_tiles = std::clamp(options.sub_group_elements / tiers::kTileElements, std::uint64_t{1}, tiles_max),
      .update_count = regions.uses_update_buffers() ? std::max(options.update_buffer_count, 3u) : 0,
      .staging_count = std::min(std::max(options.staging_buffer_count, 1u), stored),
      .gradient_ring_bytes = ring_bytes(kRingGradients)};
}

std::uint64_t PinnedBufferChooser::bytes(const PinnedBuffers& buffers) const {
  std::uint64_t sum = regions_.layout(MemoryTier::pinned).bytes();
  for_each(buffers, [&](MemoryRole, std::uint64_t bytes) { sum += tiers::PinnedPlan::piece_bytes(bytes); });
  return sum;
}

std::uint64_t PinnedBufferChooser::update_buffer_bytes(const PinnedBuffers& buffers) const {
  const auto [entry, is_new] = update_buffer_bytes_.try_emplace(buffers.sub_group_tiles);
  if (is_new) entry->second = regions_.update_buffer_bytes(buffers.sub_group_tiles);
  return entry->second;
}

std::uint64_t PinnedBufferChooser::ring_bytes(std::uint64_t gradients) const {
  return round_up(std::min(all_gradient_bytes_, gradients * largest_gradient_bytes_), kBlockAlignment);
}

// In the order of what a byte brings. Update buffers of one tile are small, and the drive is idle without them. With a
// second staging buffer a unit is read while the one before it is copied up. Larger sub-groups keep the drive's queue
// full. With two gradients in the ring, one comes down while the other's unit is updated. More staging buffers only
// bridge what is uneven.
PinnedBuffers PinnedBufferChooser::choose(std::uint64_t free_bytes) const {
  const PinnedBuffers& most = wanted_;
  PinnedBuffers chosen{.sub_group_tiles = 1,
                       .update_count = std::min(most.update_count, 3u),
                       .staging_count = std::min(most.staging_count, 1u),
                       .gradient_ring_bytes = ring_bytes(1)};
  const auto fits = [&] { return bytes(chosen) <= free_bytes; };
  if (!fits()) return chosen;
  const auto raise = [&](auto& count, auto to) {
    const auto before = std::exchange(count, to);
    if (fits()) return true;
    count = before;
    return false;
  };
  const auto raise_staging = [&](unsigned end) {
    while (chosen.staging_count < std::min(end, most.staging_count) &&
           raise(chosen.staging_count, chosen.staging_count + 1)) {
    }
  };
  while (chosen.update_count < most.update_count && raise(chosen.update_count, chosen.update_count + 1)) {
  }
  raise_staging(2);
  for (std::uint64_t tiles = most.sub_group_tiles; tiles > 1; tiles = divide_up(tiles, 2))
    if (raise(chosen.sub_group_tiles, tiles)) break;
  raise(chosen.gradient_ring_bytes, most.gradient_ring_bytes);
  raise_staging(most.staging_count);
  if (chosen.gradient_ring_bytes > 0) grow_ring(chosen, free_bytes);
  return chosen;
}

// As far as the budget goes: the more gradients wait for their update, the further the drive may lag behind the pass.
void PinnedBufferChooser::grow_ring(PinnedBuffers& chosen, std::uint64_t free_bytes) const {
  const std::uint64_t most = ring_bytes(regions_.table().units().size()) / kBlockAlignment;
  const std::uint64_t too_much =
      first_true(chosen.gradient_ring_bytes / kBlockAlignment, most + 1, [&](std::uint64_t blocks) {
        chosen.gradient_ring_bytes = blocks * kBlockAlignment;
        return bytes(chosen) > free_bytes;
      });
  chosen.gradient_ring_bytes = (too_much - 1) * kBlockAlignment;
}

double largest_pinned_share(EngineOptions options, PinnedShare share, const UnitTable& table, DeviceAccess access,
                            std::uint64_t free_bytes) {
  PinnedBuffers wanted;
  const auto buffers = [&](double fraction) {
    options.*share = fraction;
    const UnitRegions regions(options, table, access);
    const PinnedBufferChooser chooser(options, regions);
    wanted = chooser.wanted();
    const PinnedBuffers chosen = chooser.choose(free_bytes);
    return chooser.bytes(chosen) <= free_bytes ? std::optional(chosen) : std::nullopt;
  };
  const auto asked = buffers((options.*share).value_or(0));
  if (!asked) return 0;
  std::uint64_t largest_gradient = 0;
  for (const Unit& unit : table.units()) largest_gradient = std::max(largest_gradient, unit.gradient_shard_bytes);
  const std::uint64_t least_ring = std::min(asked->gradient_ring_bytes, 2 * largest_gradient);
  const auto fits = [&](unsigned hundredths) {
    const auto chosen = buffers(hundredths / 100.0);
    // With more of it in memory there may be less left to buffer.
    return chosen && chosen->staging_count >= std::min(asked->staging_count, wanted.staging_count) &&
           chosen->gradient_ring_bytes >= least_ring &&
           (wanted.update_count == 0 ||
            (chosen->update_count >= asked->update_count && chosen->sub_group_tiles >= asked->sub_group_tiles));
  };
  if (fits(100)) return 1;
  return (first_true(0u, 100u, [&](unsigned hundredths) { return !fits(hundredths); }) - 1) / 100.0;
}

namespace {

// Searches for the fewest units that leave room for the buffers that keep a drive busy: those asked for, but no more
// and no larger update buffers than the default ones and two staging buffers; and two gradients in the ring. More
// buffers bring less than a gradient in memory saves. If nothing leaves that room, the pool holds the least.
std::uint32_t fitting_spill(EngineOptions options, const UnitTable& table, DeviceAccess access,
                            std::uint64_t free_bytes) {
  static const EngineOptions kDefaults;
  struct Needs {
    std::uint64_t working_bytes = 0, least_bytes = 0;
  };
  const auto needs = [&](std::uint32_t count) {
    options.gradient_spill_units = count;
    const UnitRegions regions(options, table, access);
    const PinnedBufferChooser chooser(options, regions);
    PinnedBuffers working = chooser.wanted();
    working.staging_count = std::min(working.staging_count, 2u);
    working.update_count = std::min(working.update_count, kDefaults.update_buffer_count);
    working.sub_group_tiles = std::min(working.sub_group_tiles, kDefaults.sub_group_elements / tiers::kTileElements);
    return Needs{chooser.bytes(working), chooser.bytes(chooser.choose(0))};
  };
  const auto all = static_cast<std::uint32_t>(table.units().size());
  const Needs with_none = needs(0), with_all = needs(all);
  if (with_none.working_bytes <= free_bytes) return 0;
  if (with_all.working_bytes > free_bytes) return with_all.least_bytes < with_none.least_bytes ? all : 0;
  return first_true(0u, all, [&](std::uint32_t count) { return needs(count).working_bytes <= free_bytes; });
}

}  // namespace

void choose_pinned_shares(EngineOptions& options, const UnitTable& table, DeviceAccess access,
                          std::uint64_t free_bytes) {
  if (!options.gradient_spill_units) options.gradient_spill_units = fitting_spill(options, table, access, free_bytes);
  for (const PinnedShare share :
       {&EngineOptions::parameters_pinned_fraction, &EngineOptions::optimizer_pinned_fraction})
    if (!(options.*share)) options.*share = largest_pinned_share(options, share, table, access, free_bytes);
}

}  // namespace hoist::detail
