// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <hoist/core/checksum.hpp>
#include <hoist/core/error.hpp>
#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/zero/memory/gradient_spill.hpp>
#include <hoist/zero/memory/record_io.hpp>

namespace hoist::detail {

namespace {

constexpr std::uint32_t kGradientRegion = 2;  // beside those of a record

std::string name_of(const Unit& unit) { return unit.name + " gradient"; }

}  // namespace

GradientSpill::GradientSpill(Runtime& runtime, const UnitTable& table, const Memory& memory,
                             std::unique_ptr<tiers::Scratch> scratch)
    : runtime_(runtime), table_(table), memory_(memory), scratch_(std::move(scratch)), written_(table.units().size()) {}

SubGroup GradientSpill::all_tiles(UnitId unit) const {
  return {unit, 0, static_cast<std::uint32_t>(table_.unit(unit).trainable.tiles().size())};
}

std::uint64_t GradientSpill::checksum(const SubGroup& tile, const std::byte* bytes) const {
  const TileIdentity identity{.store = 0,
                              .record = tile.unit.index,
                              .tile = tile.first_tile,
                              .region = kGradientRegion,
                              .extent = 0,
                              .generation = 0};
  return tile_checksum(identity, {bytes, table_.unit(tile.unit).gradient_part(tile.first_tile, 1).bytes});
}

Completion GradientSpill::write(UnitId id, std::span<const std::byte> shards) {
  const Unit& unit = table_.unit(id);
  const auto tiles = unit.trainable.tiles();
  written_[id.index].wait();  // two writes to one place may be done in any order
  runtime_.update_pool().run(tiles.size(), [&](std::size_t t) {
    memory_.unit(id).gradient_checksums[t] =
        checksum({id, static_cast<std::uint32_t>(t), 1}, shards.data() + unit.gradient_offset(tiles[t]));
  });
  written_[id.index] = scratch_->write(slot(id), shards, aio::Priority::background, name_of(unit));
  return written_[id.index];
}

Completion GradientSpill::start_read(const SubGroup& tiles, std::byte* target, aio::Priority priority) {
  const Unit& unit = table_.unit(tiles.unit);
  const auto [offset, bytes] = unit.gradient_part(tiles.first_tile, tiles.tile_count);
  return followed_by(written_[tiles.unit.index],
                     [=, this, place = slot(tiles.unit) + offset, length = bytes, name = name_of(unit)] {
                       return scratch_->read(place, {target, length}, priority, name);
                     });
}

void GradientSpill::verify(const SubGroup& tiles, const std::byte* bytes) const {
  const Unit& unit = table_.unit(tiles.unit);
  const auto all = unit.trainable.tiles();
  const std::uint64_t begin = unit.gradient_offset(all[tiles.first_tile]);
  const auto verify_one = [&](std::size_t i) {
    const SubGroup tile{tiles.unit, tiles.first_tile + static_cast<std::uint32_t>(i), 1};
    const std::uint64_t offset = unit.gradient_offset(all[tile.first_tile]);
    const std::uint64_t expected = memory_.unit(tile.unit).gradient_checksums[tile.first_tile];
    const std::uint64_t found = checksum(tile, bytes + (offset - begin));
    if (found == expected) return;
    const tiers::Scratch::Place place = scratch_->place(slot(tile.unit) + offset);
    throw CorruptionError({.unit = unit.name,
                           .region = kGradientRegionName,
                           .path = place.path,
                           .offset_bytes = place.offset_bytes,
                           .expected = expected,
                           .found = found});
  };
  if (tiles.tile_count == 1) return verify_one(0);  // on a thread of the pool, as a rule
  runtime_.update_pool().run(tiles.tile_count, verify_one);
}

const std::byte* GradientSpill::view(UnitId id, std::uint64_t offset, std::uint64_t bytes, PartBuffer& buffer) {
  const Unit& unit = table_.unit(id);
  const auto tiles = unit.trainable.tiles();
  const auto index_of = [&](std::uint64_t byte) {
    const auto after =
        std::ranges::upper_bound(tiles, byte, {}, [&](const auto& t) { return unit.gradient_offset(t); });
    return static_cast<std::uint32_t>(after - tiles.begin() - 1);
  };
  const std::uint32_t first = index_of(offset), last = index_of(offset + bytes - 1);
  const SubGroup part{id, first, last - first + 1};
  const std::span<std::byte> target = buffer.of(unit.gradient_part(first, part.tile_count).bytes);
  start_read(part, target.data(), aio::Priority::foreground).wait();
  verify(part, target.data());
  return target.data() + (offset - unit.gradient_offset(tiles[first]));
}

}  // namespace hoist::detail
