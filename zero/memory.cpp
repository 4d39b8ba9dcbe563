// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <thread>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/zero/detail/memory.hpp>

namespace hoist::detail {

using tiers::Region;

namespace {

std::uint64_t arena_bytes(std::uint64_t bytes) { return round_up(bytes, tiers::DeviceArena::kAlignment); }

}  // namespace

Memory::Memory(Runtime& runtime, const EngineOptions& options, const UnitTable& table, std::uint64_t store_memory_bytes)
    : runtime_(runtime), options_(options), table_(table), needs_(options, table), homes_(table.units().size()) {
  take_device();
  const Buffers buffers = choose_buffers(store_memory_bytes);
  store_hold_ = runtime_.pinned_budget().take(store_memory_bytes, "the store's checksum tables and manifest");
  piece_tiles_ = buffers.piece_tiles;
  pieces_ = cut(buffers.piece_tiles);
  take_pinned(buffers);
}

DeviceNeeds::DeviceNeeds(const EngineOptions& options, const UnitTable& table) : options_(options), table_(table) {
  for (const Unit& unit : table.units()) {
    homes_bytes += homes_of(unit);
    if (!unit.owns_tied) gradient_bytes = std::max(gradient_bytes, arena_bytes(unit.gradient_bytes));
    std::uint64_t slots = is_slotted(unit) ? 1 : 0;
    slot_count += slots;
    if (slots == 1) slot_bytes = std::max(slot_bytes, arena_bytes(unit.gathered_bytes));
    for (const UnitId owner : unit.tied) slots += is_slotted(table.unit(owner)) ? 1u : 0u;
    slots_min = std::max(slots_min, slots);
  }
}

bool DeviceNeeds::has_own_memory(const Unit& unit) const {
  if (unit.options.binding) return false;
  const bool resident = options_.parameters == Placement::device && table_.world_size() == 1;
  return resident || unit.options.stable_address || unit.elements <= options_.persistence_elements;
}

bool DeviceNeeds::needs_device_shard(const Unit& unit) const {
  return options_.parameters == Placement::device && !(table_.world_size() == 1 && has_own_memory(unit));
}

std::uint64_t DeviceNeeds::homes_of(const Unit& unit) const {
  std::uint64_t bytes = 0;
  if (has_own_memory(unit)) bytes += arena_bytes(unit.gathered_bytes);
  if (unit.owns_tied) bytes += arena_bytes(unit.gradient_bytes);
  if (needs_device_shard(unit)) bytes += arena_bytes(unit.host_bytes());
  if (options_.optimizer != Placement::device) return bytes;
  return bytes + arena_bytes(unit.trainable.region_bytes(Region::state)) + arena_bytes(unit.home_gradient_bytes);
}

void require_device_memory(Runtime& runtime, const DeviceNeeds& needs, std::uint64_t program_bytes) {
  const tiers::Budget& budget = runtime.device_budget();
  const std::uint64_t least = arena_bytes(program_bytes) + needs.least_bytes();
  const std::uint64_t available = runtime.device_arena().largest_hole_bytes();
  if (least <= available) return;
  throw BudgetError(
      {.tier = budget.tier(),
       .have_bytes = budget.limit_bytes(),
       .need_bytes = budget.limit_bytes() - available + least,
       .key = budget.key(),
       .detail =
           "the program's own blocks (activations), resident states, what one gather() needs and one unit's gradient"});
}

// --- pinned memory ---------------------------------------------------------------------------------------------------

std::vector<Piece> Memory::cut(std::uint64_t piece_tiles) const {
  std::vector<Piece> pieces;
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    const std::uint64_t tiles = table_.units()[u].trainable.tiles().size();
    for (std::uint64_t first = 0; first < tiles; first += piece_tiles) {
      pieces.push_back({UnitId{u}, static_cast<std::uint32_t>(first),
                        static_cast<std::uint32_t>(std::min(piece_tiles, tiles - first))});
    }
  }
  return pieces;
}

Memory::PieceBytes Memory::buffered_bytes(const Piece& piece) const {
  const auto tiles = table_.unit(piece.unit).trainable.tiles().subspan(piece.first_tile, piece.tile_count);
  PieceBytes bytes;
  for (const tiers::Tile& tile : tiles) {
    if (!weights_at_home()) bytes.weights += tile.w_bytes;
    if (!state_at_home()) bytes.state += tile.s_bytes;
  }
  return bytes;
}

std::uint64_t Memory::piece_bytes_max(std::uint64_t piece_tiles) const {
  std::uint64_t most = 0;
  for (const Piece& piece : cut(piece_tiles)) most = std::max(most, buffered_bytes(piece).total());
  return most;
}

void Memory::plan_homes(tiers::PinnedPlan& plan) const {
  const bool optimizer_on_device = on_device(options_.optimizer);
  for (const Unit& unit : table_.units()) {
    if (weights_at_home() && !(optimizer_on_device && on_device(options_.parameters))) plan.add(unit.host_bytes());
    if (options_.optimizer == Placement::pinned) plan.add(unit.trainable.region_bytes(Region::state));
    if (!optimizer_on_device) plan.add(unit.home_gradient_bytes);
  }
}

void Memory::plan_buffers(tiers::PinnedPlan& plan, const Buffers& buffers) const {
  const std::uint64_t update_bytes = piece_bytes_max(buffers.piece_tiles);
  for (unsigned i = 0; i < buffers.update_count; ++i) plan.add(update_bytes);
  std::uint64_t staging_bytes = 0;
  for (const Unit& unit : table_.units()) staging_bytes = std::max(staging_bytes, unit.host_bytes());
  for (unsigned i = 0; i < buffers.staging_count; ++i) plan.add(staging_bytes);
}

std::uint64_t Memory::pinned_bytes(const Buffers& buffers) const {
  tiers::PinnedPlan plan;
  plan_homes(plan);
  plan_buffers(plan, buffers);
  return plan.bytes();
}

// What was asked for when it fits; else fewer staging buffers, then smaller pieces, then the least that makes progress.
Memory::Buffers Memory::choose_buffers(std::uint64_t store_memory_bytes) const {
  const bool stream_state = !weights_at_home() || !state_at_home();
  std::uint64_t tiles_max = 1;
  for (const Unit& unit : table_.units()) tiles_max = std::max(tiles_max, std::uint64_t{unit.trainable.tiles().size()});
  const auto units = static_cast<unsigned>(table_.units().size());

  Buffers wanted;
  wanted.piece_tiles = std::clamp(options_.sub_group_elements / tiers::kTileElements, std::uint64_t{1}, tiles_max);
  wanted.update_count = stream_state ? std::max(options_.update_buffer_count, 3u) : 0;
  wanted.staging_count = weights_at_home() ? 0 : std::clamp(options_.staging_buffer_count, 1u, units);

  const tiers::Budget& budget = runtime_.pinned_budget();
  const std::uint64_t available = budget.limit_bytes() - budget.held_bytes();
  const auto fits = [&](const Buffers& b) { return pinned_bytes(b) + store_memory_bytes <= available; };

  Buffers chosen = wanted;
  while (!fits(chosen) && chosen.staging_count > 2) --chosen.staging_count;
  while (!fits(chosen) && chosen.piece_tiles > 1) chosen.piece_tiles = divide_up(chosen.piece_tiles, 2);
  while (!fits(chosen) && chosen.staging_count > 1) --chosen.staging_count;
  while (!fits(chosen) && chosen.update_count > 3) --chosen.update_count;
  if (!fits(chosen)) {
    throw BudgetError(
        {.tier = budget.tier(),
         .have_bytes = budget.limit_bytes(),
         .need_bytes = round_up(budget.held_bytes() + pinned_bytes(chosen) + store_memory_bytes, kBlockAlignment),
         .key = budget.key(),
         .detail = "gradients, states kept in memory and the smallest transfer buffers"});
  }
  return chosen;
}

void Memory::take_pinned(const Buffers& buffers) {
  const unsigned cpus = std::max(1u, std::thread::hardware_concurrency());
  pool_ = std::make_unique<tiers::PinnedPool>(
      runtime_.pinned_budget(),
      tiers::PinnedPoolOptions{
          .bytes = pinned_bytes(buffers), .huge_pages = runtime_.options().huge_pages, .touch_threads = cpus});
  const bool optimizer_on_device = on_device(options_.optimizer);
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    const Unit& unit = table_.units()[u];
    UnitHome& home = homes_[u];
    if (weights_at_home() && !(optimizer_on_device && on_device(options_.parameters))) {
      home.weights = pool_->carve(unit.host_bytes(), unit.name).data();
    }
    if (options_.optimizer == Placement::pinned) {
      home.state = pool_->carve(unit.trainable.region_bytes(Region::state), unit.name).data();
    }
    if (!optimizer_on_device) home.gradient = pool_->carve(unit.home_gradient_bytes, unit.name).data();
  }
  const std::uint64_t update_bytes = piece_bytes_max(buffers.piece_tiles);
  for (unsigned i = 0; i < buffers.update_count; ++i)
    update_buffers_.push_back(pool_->carve(update_bytes, "update buffer"));
  std::uint64_t staging_bytes = 0;
  for (const Unit& unit : table_.units()) staging_bytes = std::max(staging_bytes, unit.host_bytes());
  for (unsigned i = 0; i < buffers.staging_count; ++i)
    staging_buffers_.push_back(pool_->carve(staging_bytes, "staging buffer"));
}

// --- device memory ---------------------------------------------------------------------------------------------------

std::byte* Memory::take_device_block(std::uint64_t bytes, const std::string& what) {
  if (bytes == 0) return nullptr;
  device_blocks_.push_back(runtime_.device_arena().allocate(bytes, what));
  return device_blocks_.back().data();
}

void Memory::take_device() {
  require_device_memory(runtime_, needs_, 0);
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    const Unit& unit = table_.units()[u];
    UnitHome& home = homes_[u];
    if (needs_.has_own_memory(unit)) home.own_memory = take_device_block(unit.gathered_bytes, unit.name + " weights");
    if (unit.owns_tied) home.own_gradient = take_device_block(unit.gradient_bytes, unit.name + " gradient");
    if (needs_.needs_device_shard(unit)) home.device_shard = take_device_block(unit.host_bytes(), unit.name + " shard");
    if (!on_device(options_.optimizer)) continue;
    home.state = take_device_block(unit.trainable.region_bytes(Region::state), unit.name + " optimizer state");
    home.gradient = take_device_block(unit.home_gradient_bytes, unit.name + " gradient shard");
    if (on_device(options_.parameters))
      home.weights = home.device_shard != nullptr ? home.device_shard : home.own_memory;
  }

  // A second gradient buffer lets one layer's gradient travel down while the next layer's is made; more gather slots
  // let weights come up earlier and stay longer.
  const std::uint64_t slot = needs_.slot_bytes, gradient = needs_.gradient_bytes;
  std::uint64_t left = runtime_.device_arena().largest_hole_bytes();
  if (gradient != 0) {
    const unsigned buffers = left >= (needs_.slots_min + 1) * slot + 2 * gradient ? 2 : 1;
    for (unsigned i = 0; i < buffers; ++i) gradient_slots_.push_back(take_device_block(gradient, "gradient buffer"));
    left -= buffers * gradient;
  }
  if (slot == 0) return;
  const std::uint64_t slots = std::min(left / slot, needs_.slot_count);
  for (std::uint64_t i = 0; i < slots; ++i) gather_slots_.push_back(take_device_block(slot, "gathered unit"));
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
