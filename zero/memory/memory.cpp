// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <thread>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/zero/memory/memory.hpp>

namespace hoist::detail {

using tiers::Region;

namespace {

std::uint64_t arena_bytes(std::uint64_t bytes) { return round_up(bytes, tiers::DeviceArena::kAlignment); }

}  // namespace

Memory::Memory(Runtime& runtime, const EngineOptions& options, const UnitTable& table, std::uint64_t store_memory_bytes)
    : runtime_(runtime),
      options_(options),
      table_(table),
      homes_apart_(homes_are_apart(runtime.options(), options)),
      needs_(options, table, homes_apart_),
      pinned_needs_(options, table, homes_apart_),
      homes_(table.units().size()) {
  take_device();
  const PinnedNeeds::Buffers buffers = choose_buffers(store_memory_bytes);
  store_hold_ = runtime_.pinned_budget().take(store_memory_bytes, "the store's checksum tables and manifest");
  piece_tiles_ = buffers.piece_tiles;
  pieces_ = pinned_needs_.cut(buffers.piece_tiles);
  take_pinned(buffers);
}

void require_device_memory(Runtime& runtime, const DeviceNeeds& needs, std::uint64_t program_bytes) {
  const tiers::Budget& budget = runtime.device_budget();
  const std::uint64_t least = arena_bytes(program_bytes) + needs.least_bytes();
  const std::uint64_t available = runtime.device_arena().largest_hole_bytes();
  if (least <= available) return;
  const std::uint64_t program = arena_bytes(program_bytes);
  const auto ratio = needs.offload_ratio_within(available > program ? available - program : 0);
  throw BudgetError(
      {.tier = budget.tier(),
       .have_bytes = budget.limit_bytes(),
       .need_bytes = budget.limit_bytes() - available + least,
       .key = budget.key(),
       .detail = fmt::format(
           "the program's own blocks (activations), resident states{}, what one gather() needs and one unit's gradient",
           ratio ? fmt::format(" (that fit with zero_optimization.offload_optimizer.ratio {:.2f})", *ratio) : "")});
}

// --- pinned memory ---------------------------------------------------------------------------------------------------

PinnedNeeds::Buffers Memory::choose_buffers(std::uint64_t store_memory_bytes) const {
  const tiers::Budget& budget = runtime_.pinned_budget();
  const std::uint64_t taken = budget.held_bytes() + store_memory_bytes;
  const std::uint64_t available = budget.limit_bytes() > taken ? budget.limit_bytes() - taken : 0;
  const PinnedNeeds::Buffers chosen = pinned_needs_.choose(available);
  if (pinned_needs_.bytes(chosen) > available) {
    throw BudgetError({.tier = budget.tier(),
                       .have_bytes = budget.limit_bytes(),
                       .need_bytes = round_up(taken + pinned_needs_.bytes(chosen), kBlockAlignment),
                       .key = budget.key(),
                       .detail = gathering_group(options_, table_.world_size()) > 1
                                     ? "gradients, states kept in memory, secondary shards (a larger or no "
                                       "zero_hpz_partition_size needs less) and the smallest transfer buffers"
                                     : "gradients, states kept in memory and the smallest transfer buffers"});
  }
  return chosen;
}

void Memory::take_pinned(const PinnedNeeds::Buffers& buffers) {
  const unsigned cpus = std::max(1u, std::thread::hardware_concurrency());
  pool_ = std::make_unique<tiers::PinnedPool>(
      runtime_.pinned_budget(),
      tiers::PinnedPoolOptions{
          .bytes = pinned_needs_.bytes(buffers), .huge_pages = runtime_.options().huge_pages, .touch_threads = cpus});
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    const Unit& unit = table_.units()[u];
    UnitHome& home = homes_[u];
    if (pinned_needs_.keeps_host_weights(UnitId{u})) {
      home.weights = pool_->carve(unit.host_bytes(), unit.name).data();
    }
    if (const std::uint64_t bytes = pinned_needs_.secondary_bytes(unit); bytes > 0)
      home.secondary = pool_->carve(bytes, unit.name + " secondary shard").data();
    home.state_tiles = pinned_needs_.state_tiles_at_home(UnitId{u});
    if (state_on_device(UnitId{u})) continue;
    if (const std::uint64_t bytes = pinned_needs_.state_bytes_at_home(UnitId{u}); bytes > 0)
      home.state = pool_->carve(bytes, unit.name).data();
    if (!pinned_needs_.rings_gradients()) home.gradient = pool_->carve(unit.home_gradient_bytes, unit.name).data();
  }
  if (buffers.gradient_ring_bytes > 0) gradient_ring_ = pool_->carve(buffers.gradient_ring_bytes, "gradients");
  const std::uint64_t update_bytes = pinned_needs_.update_buffer_bytes(buffers.piece_tiles);
  for (unsigned i = 0; i < buffers.update_count; ++i)
    update_buffers_.push_back(pool_->carve(update_bytes, "update buffer"));
  for (unsigned i = 0; i < buffers.staging_count; ++i)
    staging_buffers_.push_back(pool_->carve(pinned_needs_.staging_buffer_bytes(), "staging buffer"));
  for (unsigned i = 0; pinned_needs_.sum_buffer_bytes() > 0 && i < PinnedNeeds::kSumBuffers; ++i)
    sum_buffers_.push_back(pool_->carve(pinned_needs_.sum_buffer_bytes(), "gradient on its way to a sum"));
  if (homes_apart_) findings_ = pool_->carve(pinned_needs_.findings_bytes(), "sums of squares");
  if (homes_apart_) copy_buffer_ = pool_->carve(pinned_needs_.copy_buffer_bytes(), "copy buffer");
}

// --- device memory ---------------------------------------------------------------------------------------------------

std::byte* Memory::take_device_block(std::uint64_t bytes, const std::string& what) {
  if (bytes == 0) return nullptr;
  device_blocks_.push_back(runtime_.device_arena().allocate(bytes, what));
  return device_blocks_.back().data();
}

void Memory::take_device() {
  require_device_memory(runtime_, needs_, 0);
  if (homes_apart_)
    device_findings_ = take_device_block(Findings(table_, pinned_needs_.device_states()).bytes(), "sums of squares");
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    const Unit& unit = table_.units()[u];
    UnitHome& home = homes_[u];
    if (needs_.has_own_memory(unit)) home.own_memory = take_device_block(unit.gathered_bytes, unit.name + " weights");
    if (unit.owns_tied) home.own_gradient = take_device_block(unit.gradient_buffer_bytes(), unit.name + " gradient");
    if (needs_.needs_device_shard(unit)) home.device_shard = take_device_block(unit.host_bytes(), unit.name + " shard");
    if (on_device(options_.parameters))
      home.secondary = take_device_block(secondary_shard(options_, table_, unit).bytes, unit.name + " secondary shard");
    if (!state_on_device(UnitId{u})) continue;
    home.state = take_device_block(unit.trainable.region_bytes(Region::state), unit.name + " optimizer state");
    home.gradient = take_device_block(unit.home_gradient_bytes, unit.name + " gradient shard");
    if (on_device(options_.parameters))
      home.weights = home.device_shard != nullptr ? home.device_shard : home.own_memory;
  }

  const DeviceNeeds::Buffers buffers = needs_.choose(needs_.homes_bytes + runtime_.device_arena().largest_hole_bytes());
  for (std::uint64_t i = 0; i < buffers.gradients; ++i)
    gradient_slots_.push_back(take_device_block(needs_.gradient_bytes, "gradient buffer"));
  for (std::uint64_t i = 0; i < buffers.gather_slots; ++i)
    gather_slots_.push_back(take_device_block(needs_.slot_bytes, "gathered unit"));
}

std::string Memory::describe() const {
  return fmt::format(
      "device: {} gather slots of {}, {} gradient buffers of {}; pinned: {} update buffers of {} ({} parameters each), "
      "{} staging buffers of {}",
      gather_slots_.size(), format_bytes(needs_.slot_bytes), gradient_slots_.size(),
      format_bytes(needs_.gradient_bytes), update_buffers_.size(),
      format_bytes(update_buffers_.empty() ? 0 : update_buffers_[0].size()), piece_tiles_ * tiers::kTileElements,
      staging_buffers_.size(), format_bytes(staging_buffers_.empty() ? 0 : staging_buffers_[0].size()));
}

}  // namespace hoist::detail
