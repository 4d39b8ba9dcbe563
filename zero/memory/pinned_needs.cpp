// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>

#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/memory/pinned_needs.hpp>

namespace hoist::detail {

using tiers::Region;

PinnedNeeds::PinnedNeeds(const EngineOptions& options, const UnitTable& table, bool homes_apart)
    : options_(options), table_(table), homes_apart_(homes_apart), states_(options, table) {
  const double fraction = options.optimizer == Placement::nvme ? options.optimizer_pinned_fraction.value_or(0) : 1;
  std::uint64_t bytes = 0, home_bytes = 0;  // of the units so far: what one rounds down, the next may take
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    const Unit& unit = table.units()[u];
    if (state_on_device(UnitId{u})) {
      state_tiles_at_home_.push_back(static_cast<std::uint32_t>(unit.trainable.tiles().size()));
      continue;
    }
    bytes += unit.trainable.region_bytes(Region::state);
    const auto most = static_cast<std::uint64_t>(fraction * static_cast<double>(bytes));
    std::uint64_t count = 0;
    for (const tiers::EqualTiles& run : unit.trainable.equal_tiles()) {
      const std::uint64_t room = run.s_bytes == 0 ? run.tile_count : (most - home_bytes) / run.s_bytes;
      count += std::min(run.tile_count, room);
      home_bytes += std::min(run.tile_count, room) * run.s_bytes;
      if (room < run.tile_count) break;
    }
    state_tiles_at_home_.push_back(static_cast<std::uint32_t>(count));
  }
}

std::uint64_t PinnedNeeds::state_bytes_at_home(UnitId unit) const {
  if (state_on_device(unit)) return 0;
  return table_.unit(unit).trainable.tile_bytes(Region::state, 0, state_tiles_at_home(unit));
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
  const tiers::RecordLayout& layout = table_.unit(piece.unit).trainable;
  const auto bytes = [&](Region region) { return layout.tile_bytes(region, piece.first_tile, piece.tile_count); };
  return {.weights = !weights_at_home() || apart(piece.unit) ? bytes(Region::weights) : 0,
          .state = !state_at_home(piece) || apart(piece.unit) ? bytes(Region::state) : 0};
}

// Of the unit's tiles from `begin` on, cut at every `piece_tiles`. Pieces within a run of equal tiles are alike, so the
// first stands for all of them.
std::uint64_t PinnedNeeds::largest_piece(UnitId unit, std::uint64_t begin, std::uint64_t end,
                                         std::uint64_t piece_tiles) const {
  std::uint64_t most = 0;
  std::uint64_t first = begin;
  for (const tiers::EqualTiles& run : table_.unit(unit).trainable.equal_tiles()) {
    while (first < std::min(end, run.end_tile())) {
      const std::uint64_t count = std::min(piece_tiles, end - first);
      const Piece piece{unit, static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(count)};
      most = std::max(most, buffered_bytes(piece).total());
      const std::uint64_t alike = (std::min(end, run.end_tile()) - first) / piece_tiles;
      first += std::max(alike, std::uint64_t{1}) * piece_tiles;
    }
  }
  return most;
}

std::uint64_t PinnedNeeds::update_buffer_bytes(std::uint64_t piece_tiles) const {
  std::uint64_t most = homes_apart_ ? kBlockAlignment : 0;  // frozen weights pass through them, too
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    const std::uint64_t at_home = state_tiles_at_home_[u], end = table_.units()[u].trainable.tiles().size();
    most = std::max(
        {most, largest_piece(UnitId{u}, 0, at_home, piece_tiles), largest_piece(UnitId{u}, at_home, end, piece_tiles)});
  }
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
  if (copy_buffer_bytes() > 0) plan.add(copy_buffer_bytes());
  return plan.bytes();
}

bool PinnedNeeds::rings_gradients() const {
  return options_.update_mode == UpdateMode::backward && options_.optimizer != Placement::device &&
         gradient_sums(options_) != GradientSums::at_home;
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

}  // namespace hoist::detail
