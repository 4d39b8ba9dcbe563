// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <hoist/tiers/device_arena.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/machine.hpp>
#include <hoist/zero/memory/unit_regions.hpp>

namespace hoist::detail {

using tiers::Region;

std::uint64_t TierLayout::add(std::uint64_t bytes) {
  if (tier_ == MemoryTier::pinned) return pinned_.add(bytes);
  const std::uint64_t offset = tier_ == MemoryTier::device ? bytes_ : 0;
  bytes_ += tier_ == MemoryTier::device ? round_up(bytes, tiers::DeviceArena::kAlignment) : bytes;
  return offset;
}

DeviceAccess device_access(const RuntimeOptions& runtime) {
  const bool readable = device_kind(runtime) == platform::DeviceKind::host && runtime.host_device.host_accessible;
  return readable ? DeviceAccess::cpu_and_device : DeviceAccess::device_only;
}

bool asks_for_device_only(const RuntimeOptions& runtime, const EngineOptions& options) {
  const bool state_on_device = options.optimizer == Placement::device || options.optimizer_offload_ratio < 1;
  return state_on_device && device_access(runtime) == DeviceAccess::device_only;
}

int gathering_group(const EngineOptions& options, int world_size) {
  const int ranks = options.secondary_shard_ranks;
  return options.stage == 3 && ranks > 1 && ranks < world_size ? ranks : 1;
}

namespace {

bool stays_gathered(const EngineOptions& options, const UnitTable& table, const Unit& unit) {
  // Below stage 3 weights are not partitioned: gathered once after each step, they stay.
  const bool whole = options.stage < 3 || table.world_size() == 1;
  const bool resident = options.parameters == Placement::device && whole;
  return resident || unit.options.stable_address || unit.elements <= options.persistence_elements;
}

}  // namespace

UnitRegions::UnitRegions(const EngineOptions& options, const UnitTable& table, DeviceAccess access)
    : table_(table),
      rings_gradients_(detail::hands_gradients_on(options) && options.optimizer != Placement::device &&
                       gradient_sums(options) != GradientSums::in_memory),
      units_(table.units().size()) {
  const int group = gathering_group(options, table.world_size());
  secondary_shard_parts_ = group == 1 ? 0 : static_cast<std::uint64_t>(table.world_size() / group);
  choose_units_on_device(options);
  choose_spilled_gradients(options);
  choose_resident_state(options);
  choose_resident_weights(options);
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    UnitPlacement& unit = units_[u];
    unit.device_only = unit.state_on_device && access == DeviceAccess::device_only;
    has_device_only_ = has_device_only_ || unit.device_only;
    place(UnitId{u}, options);
  }
  device_results_ = {.role = MemoryRole::device_results, .tier = MemoryTier::device, .bytes = device_results_bytes()};
  device_results_.offset = layouts_[static_cast<std::size_t>(MemoryTier::device)].add(device_results_.bytes);
}

void UnitRegions::choose_units_on_device(const EngineOptions& options) {
  std::vector<std::uint64_t> elements;  // by unit
  for (const Unit& unit : table_.units()) {
    elements.push_back(0);
    for (const Segment& segment : unit.trainable_segments()) elements.back() += segment.shard_elements;
    elements_ += elements.back();
  }
  const double offloaded = options.optimizer == Placement::device ? 0 : options.optimizer_offload_ratio;
  if (offloaded == 1) return;
  const std::uint64_t most = elements_ - static_cast<std::uint64_t>(offloaded * static_cast<double>(elements_));
  for (std::size_t u = 0; u < units_.size(); ++u) {
    units_[u].state_on_device = device_elements_ + elements[u] <= most;
    if (units_[u].state_on_device) device_elements_ += elements[u];
  }
}

// The last ones: backward makes their gradients first, and the updates, which begin with the first units, want them
// last.
void UnitRegions::choose_spilled_gradients(const EngineOptions& options) {
  std::uint32_t left = rings_gradients_ ? 0 : options.gradient_spill_units.value_or(0);
  for (std::size_t u = units_.size(); u-- > 0 && left > 0;) {
    if (units_[u].state_on_device || !table_.units()[u].is_trainable()) continue;
    units_[u].gradient_spilled = true;
    --left;
  }
}

namespace {

std::uint32_t tile_count(const tiers::RecordLayout& layout) {
  return static_cast<std::uint32_t>(layout.tiles().size());
}

std::uint64_t weight_elements(const tiers::RecordLayout& layout) {
  std::uint64_t elements = 0;
  for (const tiers::RecordSegment& segment : layout.segments()) elements += segment.shard_elements;
  return elements;
}

// Chooses the first tiles of every record it is given, up to a share of the bytes so far: what one record rounds down,
// the next may take.
class Share {
 public:
  Share(double fraction, Region region, std::uint64_t elements_max = ~std::uint64_t{0})
      : fraction_(fraction), region_(region), elements_left_(elements_max) {}

  std::uint32_t of(const tiers::RecordLayout& layout) {
    bytes_ += layout.region_bytes(region_);
    const auto most = static_cast<std::uint64_t>(fraction_ * static_cast<double>(bytes_));
    std::uint64_t count = 0;
    for (const tiers::EqualTiles& run : layout.equal_tiles()) {
      const std::uint64_t tile_bytes = region_ == Region::weights ? run.w_bytes : run.s_bytes;
      const std::uint64_t room = tile_bytes == 0 ? run.tile_count : (most - chosen_bytes_) / tile_bytes;
      const std::uint64_t chosen = std::min({run.tile_count, room, elements_left_ / run.elements});
      count += chosen;
      chosen_bytes_ += chosen * tile_bytes;
      elements_left_ -= chosen * run.elements;
      if (chosen < run.tile_count) break;
    }
    return static_cast<std::uint32_t>(count);
  }

 private:
  double fraction_;
  Region region_;
  std::uint64_t elements_left_;
  std::uint64_t bytes_ = 0, chosen_bytes_ = 0;
};

}  // namespace

void UnitRegions::choose_resident_state(const EngineOptions& options) {
  Share share(options.optimizer == Placement::nvme ? options.optimizer_pinned_fraction.value_or(0) : 1, Region::state);
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    const tiers::RecordLayout& layout = table_.units()[u].trainable;
    units_[u].state_tiles = units_[u].state_on_device ? tile_count(layout) : share.of(layout);
  }
}

// A limit in elements counts like the fraction that it is of all of them, so that it is spread over the units, too.
void UnitRegions::choose_resident_weights(const EngineOptions& options) {
  const bool on_nvme = options.parameters == Placement::nvme;
  std::uint64_t elements = 0;
  for (const Unit& unit : table_.units()) elements += weight_elements(unit.trainable) + weight_elements(unit.frozen);
  const std::uint64_t most = on_nvme ? options.parameters_pinned_elements_max : elements;
  const double fraction = on_nvme ? options.parameters_pinned_fraction.value_or(0) : 1;
  const double limit = most < elements ? static_cast<double>(most) / static_cast<double>(elements) : 1;
  Share share(std::min(fraction, limit), Region::weights, most);
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    units_[u].weight_tiles = share.of(table_.units()[u].trainable);
    units_[u].frozen_tiles = share.of(table_.units()[u].frozen);
  }
}

void UnitRegions::place(UnitId id, const EngineOptions& options) {
  const Unit& unit = table_.unit(id);
  UnitPlacement& placement = units_[id.index];
  const bool on_device = options.parameters == Placement::device;
  placement.stays_gathered = stays_gathered(options, table_, unit);
  const bool has_device_shard = on_device && !(table_.world_size() == 1 && placement.stays_gathered);
  const bool weights_on_device = on_device && placement.state_on_device;
  const HostPieces pieces = host_pieces(id);
  const std::uint64_t weight_bytes = pieces.trainable.bytes + pieces.frozen.bytes;
  if (weight_bytes > 0) {
    placement.weights = !weights_on_device ? MemoryRole::weights
                        : has_device_shard ? MemoryRole::device_shard
                                           : MemoryRole::gathered;
  }

  std::uint64_t secondary_bytes = 0;
  for (const Segment& segment : unit.segments) secondary_bytes += secondary_shard_parts_ * segment.shard_bytes();
  if (placement.stays_gathered) secondary_bytes = 0;
  const std::uint64_t state_bytes = unit.trainable.tile_bytes(Region::state, 0, placement.state_tiles);
  const MemoryTier tier = placement.state_on_device ? MemoryTier::device : MemoryTier::pinned;
  if (!weights_on_device) add(id, MemoryRole::weights, MemoryTier::pinned, weight_bytes);
  add(id, MemoryRole::stored_weights, MemoryTier::nvme, unit.host_bytes() - weight_bytes);
  if (placement.stays_gathered) add(id, MemoryRole::gathered, MemoryTier::device, unit.gathered_bytes);
  if (unit.has_own_gradient_memory) add(id, MemoryRole::own_gradient, MemoryTier::device, unit.gradient_buffer_bytes());
  if (has_device_shard) add(id, MemoryRole::device_shard, MemoryTier::device, unit.host_bytes());
  add(id, MemoryRole::secondary_shard, on_device ? MemoryTier::device : MemoryTier::pinned, secondary_bytes);
  add(id, MemoryRole::state, tier, state_bytes);
  add(id, MemoryRole::stored_state, MemoryTier::nvme, unit.trainable.region_bytes(Region::state) - state_bytes);
  placement.gradient_in_ring = !placement.state_on_device && (rings_gradients_ || placement.gradient_spilled);
  if (!placement.gradient_in_ring) add(id, MemoryRole::gradient, tier, unit.gradient_shard_bytes);
  if (!placement.gradient_spilled) return;
  add(id, MemoryRole::spilled_gradient, MemoryTier::nvme, unit.gradient_shard_bytes);
  add(id, MemoryRole::gradient_checksums, MemoryTier::pinned, unit.trainable.tiles().size() * sizeof(std::uint64_t));
}

HostPieces UnitRegions::host_pieces(UnitId id) const {
  const Unit& unit = table_.unit(id);
  const std::uint64_t all = unit.frozen_offset(), all_frozen = unit.frozen.region_bytes(Region::weights);
  const std::uint64_t here = unit.trainable.tile_bytes(Region::weights, 0, units_[id.index].weight_tiles);
  const std::uint64_t frozen_here = unit.frozen.tile_bytes(Region::weights, 0, units_[id.index].frozen_tiles);
  return {.trainable = {.host_offset = 0, .offset = 0, .bytes = here},
          .stored_trainable = {.host_offset = here, .offset = 0, .bytes = all - here},
          .frozen = {.host_offset = all, .offset = here, .bytes = frozen_here},
          .stored_frozen = {.host_offset = all + frozen_here, .offset = all - here, .bytes = all_frozen - frozen_here}};
}

void UnitRegions::add(UnitId id, MemoryRole role, MemoryTier tier, std::uint64_t bytes) {
  if (bytes == 0) return;
  std::uint64_t offset = layouts_[static_cast<std::size_t>(tier)].add(bytes);
  if (role == MemoryRole::spilled_gradient) offset = std::exchange(scratch_bytes_, scratch_bytes_ + bytes);
  units_[id.index].regions[static_cast<std::size_t>(role)] = {
      .role = role, .tier = tier, .unit = id, .offset = offset, .bytes = bytes};
}

std::uint64_t UnitRegions::device_results_bytes() const {
  if (!has_device_only_) return 0;
  std::uint64_t sums = 0;
  for (std::uint32_t u = 0; u < units_.size(); ++u) sums += units_[u].device_only ? table_.units()[u].norm_chunks() : 0;
  return (sums + 1) * sizeof(double);
}

std::uint64_t UnitRegions::device_state_bytes() const {
  std::uint64_t bytes = 0;
  for (const UnitPlacement& unit : units_) bytes += unit.state_on_device ? unit.region(MemoryRole::state).bytes : 0;
  return bytes;
}

double UnitRegions::pinned_weight_share() const {
  std::uint64_t pinned = 0, stored = 0;
  for (const UnitPlacement& unit : units_) {
    pinned += unit.region(MemoryRole::weights).bytes;
    stored += unit.region(MemoryRole::stored_weights).bytes;
  }
  return pinned == 0 ? 0 : static_cast<double>(pinned) / static_cast<double>(pinned + stored);
}

double UnitRegions::device_state_share() const {
  return elements_ == 0 ? 0 : static_cast<double>(device_elements_) / static_cast<double>(elements_);
}

// --- sub-groups ------------------------------------------------------------------------------------------------------

std::array<std::uint64_t, 4> UnitRegions::boundaries(UnitId id) const {
  const auto [first, second] = std::minmax(unit(id).state_tiles, unit(id).weight_tiles);
  return {0, first, second, table_.unit(id).trainable.tiles().size()};
}

// The next sub-group is of the kind with tiles left that is least far; of the last such kind if there are several.
std::vector<SubGroup> UnitRegions::sub_groups(std::uint64_t tiles_max) const {
  std::vector<SubGroup> sub_groups;
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    const auto bounds = boundaries(UnitId{u});
    std::array<std::uint64_t, 3> done{};
    const auto count = [&](std::size_t kind) { return bounds[kind + 1] - bounds[kind]; };
    for (std::uint64_t left = bounds.back(); left > 0;) {
      std::size_t next = done.size();
      for (std::size_t kind = 0; kind < done.size(); ++kind) {
        if (done[kind] == count(kind)) continue;
        if (next == done.size() || done[kind] * count(next) <= done[next] * count(kind)) next = kind;
      }
      const std::uint64_t tiles = std::min(tiles_max, count(next) - done[next]);
      sub_groups.push_back(
          {UnitId{u}, static_cast<std::uint32_t>(bounds[next] + done[next]), static_cast<std::uint32_t>(tiles)});
      done[next] += tiles;
      left -= tiles;
    }
  }
  return sub_groups;
}

UnitRegions::BufferedBytes UnitRegions::buffered_bytes(const SubGroup& sub_group) const {
  const tiers::RecordLayout& layout = table_.unit(sub_group.unit).trainable;
  const auto bytes = [&](Region region) {
    return layout.tile_bytes(region, sub_group.first_tile, sub_group.tile_count);
  };
  const bool device_only = unit(sub_group.unit).device_only;
  return {.weights = !are_weights_resident(sub_group) || device_only ? bytes(Region::weights) : 0,
          .state = !is_state_resident(sub_group) || device_only ? bytes(Region::state) : 0,
          .gradient = unit(sub_group.unit).gradient_spilled
                          ? table_.unit(sub_group.unit).gradient_part(sub_group.first_tile, sub_group.tile_count).bytes
                          : 0};
}

bool UnitRegions::uses_update_buffers() const {
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    const UnitPlacement& unit = units_[u];
    const std::uint32_t resident = std::min(unit.state_tiles, unit.weight_tiles);
    if (unit.device_only || unit.gradient_spilled || resident < tile_count(table_.units()[u].trainable)) return true;
  }
  return false;
}

// The most that one of the unit's sub-groups takes; its tiles from `begin` on are cut at every `tiles_max`. Sub-groups
// within a run of equal tiles are alike, so the first stands for all of them.
std::uint64_t UnitRegions::largest_buffered_bytes(UnitId id, std::uint64_t begin, std::uint64_t end,
                                                  std::uint64_t tiles_max) const {
  std::uint64_t most = 0;
  std::uint64_t first = begin;
  for (const tiers::EqualTiles& run : table_.unit(id).trainable.equal_tiles()) {
    while (first < std::min(end, run.end_tile())) {
      const std::uint64_t count = std::min(tiles_max, end - first);
      const SubGroup sub_group{id, static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(count)};
      most = std::max(most, buffered_bytes(sub_group).total());
      const std::uint64_t alike = (std::min(end, run.end_tile()) - first) / tiles_max;
      first += std::max(alike, std::uint64_t{1}) * tiles_max;
    }
  }
  return most;
}

std::uint64_t UnitRegions::update_buffer_bytes(std::uint64_t tiles_max) const {
  std::uint64_t most = 0;
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    const auto bounds = boundaries(UnitId{u});
    for (std::size_t kind = 0; kind + 1 < bounds.size(); ++kind)
      most = std::max(most, largest_buffered_bytes(UnitId{u}, bounds[kind], bounds[kind + 1], tiles_max));
  }
  return most;
}

}  // namespace hoist::detail
