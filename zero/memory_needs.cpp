// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <hoist/core/norm_order.hpp>
#include <hoist/tiers/device_arena.hpp>
#include <hoist/zero/detail/memory_needs.hpp>

namespace hoist::detail {

using tiers::Region;

namespace {

std::uint64_t arena_bytes(std::uint64_t bytes) { return round_up(bytes, tiers::DeviceArena::kAlignment); }

bool has_own_memory(const EngineOptions& options, const UnitTable& table, const Unit& unit) {
  if (unit.options.binding) return false;
  // Below stage 3 weights are not partitioned: gathered once after each step, they stay.
  const bool whole = options.stage < 3 || table.world_size() == 1;
  const bool resident = options.parameters == Placement::device && whole;
  return resident || unit.options.stable_address || unit.elements <= options.persistence_elements;
}

}  // namespace

DeviceStates::DeviceStates(const EngineOptions& options, const UnitTable& table) : held_(table.units().size()) {
  std::vector<std::uint64_t> elements;  // by unit, of this rank; equal parts of all
  for (const Unit& unit : table.units()) {
    elements.push_back(0);
    for (const Segment& segment : unit.segments) elements.back() += segment.trainable ? segment.shard_elements : 0;
    all_elements_ += elements.back();
  }
  const double offloaded = options.optimizer == Placement::device ? 0 : options.optimizer_offload_ratio;
  if (offloaded == 1) return;
  const std::uint64_t most = all_elements_ - static_cast<std::uint64_t>(offloaded * static_cast<double>(all_elements_));
  for (std::size_t u = 0; u < held_.size(); ++u) {
    held_[u] = elements_ + elements[u] <= most;
    if (!held_[u]) continue;
    elements_ += elements[u];
    bytes_ += table.units()[u].trainable.region_bytes(Region::state);
  }
}

double DeviceStates::share() const {
  return all_elements_ == 0 ? 0 : static_cast<double>(elements_) / static_cast<double>(all_elements_);
}

bool homes_are_apart(const RuntimeOptions& runtime, const EngineOptions& options) {
  const bool readable = runtime.device == platform::DeviceKind::host && runtime.host_device.host_accessible;
  return (options.optimizer == Placement::device || options.optimizer_offload_ratio < 1) && !readable;
}

Findings::Findings(const UnitTable& table, const DeviceStates& states) {
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    for (const Segment& segment : table.units()[u].segments)
      if (segment.trainable && states.holds(UnitId{u})) sums += divide_up(segment.shard_elements, kNormChunkElements);
  }
}

// --- secondary shards ------------------------------------------------------------------------------------------------

int gathering_group(const EngineOptions& options, int world_size) {
  const int ranks = options.secondary_shard_ranks;
  return options.stage == 3 && ranks > 1 && ranks < world_size ? ranks : 1;
}

SecondaryShard secondary_shard(const EngineOptions& options, const UnitTable& table, const Unit& unit) {
  const int ranks = gathering_group(options, table.world_size());
  if (ranks == 1 || has_own_memory(options, table, unit)) return {};
  SecondaryShard shard{.shards = static_cast<std::uint64_t>(table.world_size() / ranks)};
  for (const Segment& segment : unit.segments) shard.bytes += shard.shards * segment.shard_bytes();
  return shard;
}

// --- device memory ---------------------------------------------------------------------------------------------------

DeviceNeeds::DeviceNeeds(const EngineOptions& options, const UnitTable& table, bool homes_apart)
    : options_(options), table_(table), homes_apart_(homes_apart), states_(options, table) {
  if (homes_apart) homes_bytes += arena_bytes(Findings(table, states_).bytes());
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    const Unit& unit = table.units()[u];
    homes_bytes += homes_of(UnitId{u});
    if (!unit.owns_tied) gradient_bytes = std::max(gradient_bytes, arena_bytes(unit.gradient_buffer_bytes()));
    std::uint64_t slots = is_slotted(unit) ? 1 : 0;
    slot_count += slots;
    if (slots == 1) slot_bytes = std::max(slot_bytes, arena_bytes(unit.gathered_bytes));
    for (const UnitId owner : unit.tied) slots += is_slotted(table.unit(owner)) ? 1u : 0u;
    slots_min = std::max(slots_min, slots);
  }
}

bool DeviceNeeds::has_own_memory(const Unit& unit) const { return detail::has_own_memory(options_, table_, unit); }

bool DeviceNeeds::needs_device_shard(const Unit& unit) const {
  return options_.parameters == Placement::device && !(table_.world_size() == 1 && has_own_memory(unit));
}

std::uint64_t DeviceNeeds::homes_of(UnitId id) const {
  const Unit& unit = table_.unit(id);
  std::uint64_t bytes = 0;
  if (has_own_memory(unit)) bytes += arena_bytes(unit.gathered_bytes);
  if (unit.owns_tied) bytes += arena_bytes(unit.gradient_buffer_bytes());
  if (needs_device_shard(unit)) bytes += arena_bytes(unit.host_bytes());
  if (options_.parameters == Placement::device) bytes += arena_bytes(secondary_shard(options_, table_, unit).bytes);
  if (!states_.holds(id)) return bytes;
  return bytes + arena_bytes(unit.trainable.region_bytes(Region::state)) + arena_bytes(unit.home_gradient_bytes);
}

std::optional<double> DeviceNeeds::offload_ratio_within(std::uint64_t available_bytes) const {
  if (options_.optimizer == Placement::device) return std::nullopt;
  EngineOptions options = options_;
  for (auto hundredths = static_cast<unsigned>(100 * options_.optimizer_offload_ratio) + 1; hundredths <= 100;
       ++hundredths) {
    options.optimizer_offload_ratio = hundredths / 100.0;
    if (DeviceNeeds(options, table_, homes_apart_).least_bytes() <= available_bytes)
      return options.optimizer_offload_ratio;
  }
  return std::nullopt;
}

// A second gradient buffer lets one layer's gradient travel down while the next layer's is made; more gather slots let
// weights come up earlier and stay longer.
DeviceNeeds::Buffers DeviceNeeds::choose(std::uint64_t free_bytes) const {
  Buffers buffers;
  std::uint64_t left = free_bytes - homes_bytes;
  if (gradient_bytes != 0) {
    buffers.gradients = left >= (slots_min + 1) * slot_bytes + 2 * gradient_bytes ? 2 : 1;
    left -= buffers.gradients * gradient_bytes;
  }
  if (slot_bytes != 0) buffers.gather_slots = std::min(left / slot_bytes, slot_count);
  return buffers;
}

scheduler::DirectorOptions director_options(const EngineOptions& options, const UnitTable& table,
                                            const DeviceNeeds& needs, std::uint64_t gather_slots) {
  scheduler::DirectorOptions result{.slot_count = static_cast<std::uint32_t>(gather_slots),
                                    .prefetch_elements = options.prefetch_elements,
                                    .live_elements_max = options.live_elements_max,
                                    .reuse_distance_elements = options.reuse_distance_elements};
  for (const Unit& unit : table.units())
    result.items.push_back({.elements = unit.elements,
                            .slotted = needs.is_slotted(unit),
                            .bound = static_cast<bool>(unit.options.binding)});
  return result;
}

// --- pinned memory ---------------------------------------------------------------------------------------------------

PinnedNeeds::PinnedNeeds(const EngineOptions& options, const UnitTable& table, bool homes_apart)
    : options_(options), table_(table), homes_apart_(homes_apart), states_(options, table) {
  const double fraction = options.optimizer == Placement::nvme ? options.optimizer_pinned_fraction.value_or(0) : 1;
  std::uint64_t bytes = 0, home_bytes = 0;  // of the units so far: what one rounds down, the next may take
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    const Unit& unit = table.units()[u];
    const auto tiles = unit.trainable.tiles();
    if (state_on_device(UnitId{u})) {
      state_tiles_at_home_.push_back(static_cast<std::uint32_t>(tiles.size()));
      continue;
    }
    bytes += unit.trainable.region_bytes(Region::state);
    const auto most = static_cast<std::uint64_t>(fraction * static_cast<double>(bytes));
    std::uint32_t count = 0;
    while (count < tiles.size() && home_bytes + tiles[count].s_bytes <= most) home_bytes += tiles[count++].s_bytes;
    state_tiles_at_home_.push_back(count);
  }
}

std::uint64_t PinnedNeeds::state_bytes_at_home(UnitId unit) const {
  const std::uint32_t count = state_on_device(unit) ? 0 : state_tiles_at_home(unit);
  if (count == 0) return 0;
  const tiers::Tile& last = table_.unit(unit).trainable.tiles()[count - 1];
  return last.s_offset + last.s_bytes;
}

std::uint64_t PinnedNeeds::secondary_bytes(const Unit& unit) const {
  return options_.parameters == Placement::device ? 0 : secondary_shard(options_, table_, unit).bytes;
}

bool PinnedNeeds::streams() const {
  if (!weights_at_home() || homes_apart_) return true;
  for (std::uint32_t u = 0; u < table_.units().size(); ++u)
    if (state_tiles_at_home_[u] < table_.units()[u].trainable.tiles().size()) return true;
  return false;
}

bool PinnedNeeds::keeps_host_weights(UnitId unit) const {
  const bool all_on_device = state_on_device(unit) && options_.parameters == Placement::device;
  return weights_at_home() && !all_on_device;
}

std::vector<Piece> PinnedNeeds::cut(std::uint64_t piece_tiles) const {
  std::vector<Piece> pieces;
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    const std::uint64_t tiles = table_.units()[u].trainable.tiles().size();
    const std::uint64_t at_home = state_tiles_at_home_[u];
    std::uint64_t home = 0, streamed = at_home;  // the next of each kind
    const auto take = [&](std::uint64_t& next, std::uint64_t end) {
      const std::uint64_t count = std::min(piece_tiles, end - next);
      pieces.push_back({UnitId{u}, static_cast<std::uint32_t>(next), static_cast<std::uint32_t>(count)});
      next += count;
    };
    while (home < at_home || streamed < tiles) {
      const bool streamed_lags = (streamed - at_home) * at_home <= home * (tiles - at_home);
      if (streamed < tiles && (home == at_home || streamed_lags)) {
        take(streamed, tiles);
      } else {
        take(home, at_home);
      }
    }
  }
  return pieces;
}

PinnedNeeds::PieceBytes PinnedNeeds::buffered_bytes(const Piece& piece) const {
  const auto tiles = table_.unit(piece.unit).trainable.tiles().subspan(piece.first_tile, piece.tile_count);
  PieceBytes bytes;
  for (const tiers::Tile& tile : tiles) {
    if (!weights_at_home() || apart(piece.unit)) bytes.weights += tile.w_bytes;
    if (!state_at_home(piece) || apart(piece.unit)) bytes.state += tile.s_bytes;
  }
  return bytes;
}

std::uint64_t PinnedNeeds::update_buffer_bytes(std::uint64_t piece_tiles) const {
  std::uint64_t most = homes_apart_ ? kBlockAlignment : 0;  // frozen weights pass through them, too
  for (const Piece& piece : cut(piece_tiles)) most = std::max(most, buffered_bytes(piece).total());
  return most;
}

std::uint64_t PinnedNeeds::staging_buffer_bytes() const {
  std::uint64_t most = 0;
  for (const Unit& unit : table_.units()) most = std::max(most, unit.host_bytes());
  return most;
}

std::uint64_t PinnedNeeds::sum_buffer_bytes() const {
  if (gradient_sums(options_) != GradientSums::at_home) return 0;
  std::uint64_t most = 0;
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    if (state_on_device(UnitId{u})) continue;
    std::uint64_t bytes = 0;
    for (const Segment& segment : table_.units()[u].segments)
      bytes += segment.trainable ? round_up(segment.shard_bytes(), 64) : 0;
    most = std::max(most, bytes);
  }
  return most;
}

std::uint64_t PinnedNeeds::findings_bytes() const { return homes_apart_ ? Findings(table_, states_).bytes() : 0; }

// In the order in which Memory carves them.
std::uint64_t PinnedNeeds::bytes(const Buffers& buffers) const {
  tiers::PinnedPlan plan;
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    const Unit& unit = table_.units()[u];
    if (keeps_host_weights(UnitId{u})) plan.add(unit.host_bytes());
    if (const std::uint64_t secondary = secondary_bytes(unit); secondary > 0) plan.add(secondary);
    if (state_on_device(UnitId{u})) continue;
    plan.add(state_bytes_at_home(UnitId{u}));
    if (!rings_gradients()) plan.add(unit.home_gradient_bytes);
  }
  if (buffers.gradient_ring_bytes > 0) plan.add(buffers.gradient_ring_bytes);
  const std::uint64_t update_bytes = update_buffer_bytes(buffers.piece_tiles);
  for (unsigned i = 0; i < buffers.update_count; ++i) plan.add(update_bytes);
  for (unsigned i = 0; i < buffers.staging_count; ++i) plan.add(staging_buffer_bytes());
  if (sum_buffer_bytes() > 0) {
    for (unsigned i = 0; i < kSumBuffers; ++i) plan.add(sum_buffer_bytes());
  }
  if (findings_bytes() > 0) plan.add(findings_bytes());
  return plan.bytes();
}

std::uint64_t PinnedNeeds::ring_bytes(unsigned gradients) const {
  if (!rings_gradients()) return 0;
  std::uint64_t largest = 0, all = 0;
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    if (state_on_device(UnitId{u})) continue;
    largest = std::max(largest, table_.units()[u].home_gradient_bytes);
    all += table_.units()[u].home_gradient_bytes;
  }
  return round_up(std::min(all, gradients * largest), kBlockAlignment);
}

PinnedNeeds::Buffers PinnedNeeds::wanted() const {
  std::uint64_t tiles_max = 1;
  for (const Unit& unit : table_.units()) tiles_max = std::max(tiles_max, std::uint64_t{unit.trainable.tiles().size()});
  const auto units = static_cast<unsigned>(table_.units().size());
  return {.piece_tiles = std::clamp(options_.sub_group_elements / tiers::kTileElements, std::uint64_t{1}, tiles_max),
          .update_count = streams() ? std::max(options_.update_buffer_count, 3u) : 0,
          .staging_count = weights_at_home() ? 0 : std::clamp(options_.staging_buffer_count, 1u, units),
          .gradient_ring_bytes = ring_bytes(kRingGradients)};
}

// In the order of what a byte brings. Update buffers of one tile are small, and the drive is idle without them. With a
// second staging buffer a unit is read while the one before it is copied up. Larger pieces keep the drive's queue full.
// With two gradients in the ring, one comes down while the other's unit is updated. More staging buffers only bridge
// what is uneven.
PinnedNeeds::Buffers PinnedNeeds::choose(std::uint64_t available_bytes) const {
  const Buffers most = wanted();
  Buffers chosen{.piece_tiles = 1,
                 .update_count = std::min(most.update_count, 3u),
                 .staging_count = std::min(most.staging_count, 1u),
                 .gradient_ring_bytes = ring_bytes(1)};
  const auto fits = [&] { return bytes(chosen) <= available_bytes; };
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
  for (std::uint64_t tiles = most.piece_tiles; tiles > 1; tiles = divide_up(tiles, 2))
    if (raise(chosen.piece_tiles, tiles)) break;
  raise(chosen.gradient_ring_bytes, most.gradient_ring_bytes);
  raise_staging(most.staging_count);
  if (rings_gradients()) grow_ring(chosen, available_bytes);
  return chosen;
}

// As far as the budget goes: the more gradients wait for their update, the further the drive may lag behind the pass.
void PinnedNeeds::grow_ring(Buffers& chosen, std::uint64_t available_bytes) const {
  std::uint64_t fits = chosen.gradient_ring_bytes / kBlockAlignment;
  std::uint64_t too_much = ring_bytes(static_cast<unsigned>(table_.units().size())) / kBlockAlignment + 1;
  while (too_much - fits > 1) {
    const std::uint64_t middle = fits + (too_much - fits) / 2;
    chosen.gradient_ring_bytes = middle * kBlockAlignment;
    (bytes(chosen) <= available_bytes ? fits : too_much) = middle;
  }
  chosen.gradient_ring_bytes = fits * kBlockAlignment;
}

double largest_pinned_fraction(EngineOptions options, const UnitTable& table, bool homes_apart,
                               std::uint64_t available_bytes) {
  const auto buffers = [&](double fraction) {
    options.optimizer_pinned_fraction = fraction;
    const PinnedNeeds needs(options, table, homes_apart);
    const PinnedNeeds::Buffers chosen = needs.choose(available_bytes);
    return needs.bytes(chosen) <= available_bytes ? std::optional(chosen) : std::nullopt;
  };
  const auto asked = buffers(options.optimizer_pinned_fraction.value_or(0));
  if (!asked) return 0;
  std::uint64_t largest_gradient = 0;
  for (const Unit& unit : table.units()) largest_gradient = std::max(largest_gradient, unit.home_gradient_bytes);
  const std::uint64_t least_ring = std::min(asked->gradient_ring_bytes, 2 * largest_gradient);
  const auto fits = [&](unsigned hundredths) {
    const auto chosen = buffers(hundredths / 100.0);
    if (!chosen || chosen->staging_count != asked->staging_count || chosen->gradient_ring_bytes < least_ring)
      return false;
    // With all of it in memory there may be nothing left to buffer.
    return chosen->update_count == 0 ||
           (chosen->update_count == asked->update_count && chosen->piece_tiles == asked->piece_tiles);
  };
  if (fits(100)) return 1;
  unsigned most = 0, too_much = 100;
  while (too_much - most > 1) {
    const unsigned middle = (most + too_much) / 2;
    (fits(middle) ? most : too_much) = middle;
  }
  return most / 100.0;
}

// --- bytes of a step -------------------------------------------------------------------------------------------------

GradientSums gradient_sums(const EngineOptions& options) {
  if (options.micro_batches_max <= 1) return GradientSums::none;
  return options.micro_batch_order == MicroBatchOrder::vertical ? GradientSums::on_device : GradientSums::at_home;
}

unsigned passes_of_a_step(const EngineOptions& options) {
  return gradient_sums(options) == GradientSums::at_home ? options.micro_batches_max : 1;
}

bool PinnedNeeds::rings_gradients() const {
  return options_.update_mode == UpdateMode::backward && options_.optimizer != Placement::device &&
         gradient_sums(options_) != GradientSums::at_home;
}

UpdateMode update_mode(const EngineOptions& options) {
  if (options.update_mode != UpdateMode::automatic) return options.update_mode;
  return options.optimizer == Placement::device ? UpdateMode::step : UpdateMode::forward;
}

std::string describe_update_mode(const EngineOptions& options) {
  switch (options.update_mode) {
    case UpdateMode::step:
      return "step";
    case UpdateMode::forward:
      return "forward";
    case UpdateMode::backward:
      return "backward";
    case UpdateMode::automatic:
      break;
  }
  return options.optimizer == Placement::device ? "step (auto: optimizer states are on the device)"
                                                : "forward (auto: optimizer states are offloaded)";
}

bool writes_homes(const EngineOptions& options, bool committed) {
  const bool nvme = options.parameters == Placement::nvme || options.optimizer == Placement::nvme;
  return nvme && options.durability == tiers::Durability::step && committed;
}

namespace {

// Of the elements alone, without what fills the last tile of a segment up. Full tiles are whole pages, but for those of
// one moment of fp8, which move the page's rest with every step.
std::uint64_t state_bytes(const Unit& unit, std::span<const tiers::Tile> tiles) {
  std::uint64_t bytes = 0;
  for (const tiers::Tile& tile : tiles) {
    const bool full = tile.elements == tiers::kTileElements;
    bytes += full ? tile.s_bytes : unit.segments[tile.segment].record().state_bytes(tile.elements);
  }
  return bytes;
}

}  // namespace

StepPhases step_phases(const EngineOptions& options, const UnitTable& table, std::span<const std::uint32_t> fetches,
                       bool homes_apart) {
  const bool weights_on_nvme = options.parameters == Placement::nvme;
  const bool weights_on_device = options.parameters == Placement::device;
  const DeviceNeeds needs(options, table, homes_apart);
  const PinnedNeeds pinned(options, table, homes_apart);
  const bool commits_homes = writes_homes(options, /*committed=*/true);
  std::uint64_t committed_bytes = 0, between_bytes = 0, brought_down_bytes = 0;
  const auto others = static_cast<std::uint64_t>(table.world_size() - 1);
  const auto peers_in_group = static_cast<std::uint64_t>(gathering_group(options, table.world_size()) - 1);
  const std::uint64_t passes = passes_of_a_step(options);
  StepPhases phases;
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    const Unit& unit = table.units()[u];
    std::uint64_t weights = 0, trainable = 0, made = 0;  // of the trainable ones, what an update does not read
    for (const Segment& segment : unit.segments) {
      weights += segment.shard_bytes();
      if (!segment.trainable) continue;
      trainable += segment.shard_bytes();
      if (segment.update_makes_weights()) made += segment.shard_bytes();
    }
    const auto tiles = unit.trainable.tiles();
    const std::uint64_t state = state_bytes(unit, tiles);
    const std::uint64_t streamed = state_bytes(unit, tiles.subspan(pinned.state_tiles_at_home(UnitId{u})));
    const bool state_on_device = pinned.state_on_device(UnitId{u});
    // What stays is fetched once after each step, whatever passes there are.
    const bool stays = needs.has_own_memory(unit);
    const std::uint64_t count = stays ? std::min(fetches[u], 1u) : passes * fetches[u];
    const std::uint64_t forward = stays ? count : passes * std::min(fetches[u], 1u);
    // With a secondary shard, only the first fetch after an update is from the unit's home and from all ranks.
    const SecondaryShard secondary = secondary_shard(options, table, unit);
    const auto fetch = [&](StepBytes& phase, std::uint64_t whole, std::uint64_t in_group) {
      if (weights_on_nvme) phase.nvme_read += whole * weights;
      if (!weights_on_device) phase.host_to_device += whole * weights + in_group * secondary.bytes;
      const std::uint64_t group_bytes = peers_in_group * in_group * secondary.bytes;
      phase.wire += others * whole * weights + group_bytes;
      phase.wire_in_group += group_bytes;
    };
    const std::uint64_t in_group = secondary.bytes > 0 && count > 0 ? count - 1 : 0;
    const std::uint64_t forward_in_group = std::min(in_group, forward > 0 ? forward - 1 : 0);
    const std::uint64_t backward_in_group = in_group - forward_in_group;
    fetch(phases.forward, forward - forward_in_group, forward_in_group);
    fetch(phases.backward, count - forward - backward_in_group, backward_in_group);
    if (!weights_on_device && in_group > 0) phases.forward.device_to_host += secondary.bytes;
    if (!state_on_device && weights_on_device) phases.forward.host_to_device += weights;  // once after each update
    if (!state_on_device) phases.backward.device_to_host += passes * trainable;
    phases.backward.wire += others * passes * trainable;
    // Under the next forward, the first fetch takes its weights from the update, which has read, or made, them already.
    const bool shared = update_mode(options) == UpdateMode::forward && count > 0;
    if (weights_on_nvme && shared) phases.forward.nvme_read -= made;
    phases.update.nvme_read += (weights_on_nvme && !shared ? trainable - made : 0) + streamed;
    between_bytes += (weights_on_nvme ? trainable : 0) + streamed;
    if (commits_homes && pinned.apart(UnitId{u})) brought_down_bytes += trainable + state;
    committed_bytes += commits_homes ? trainable + state : (weights_on_nvme ? trainable : 0) + streamed;
  }
  phases.update.device_to_host = brought_down_bytes / options.commit_every;
  phases.update.nvme_write = (committed_bytes + (options.commit_every - 1) * between_bytes) / options.commit_every;
  return phases;
}

}  // namespace hoist::detail
