// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <vector>

#include <hoist/core/assert.hpp>
#include <hoist/zero/memory/record_io.hpp>

namespace hoist::detail {

using platform::CopyKind;
using tiers::Region;
using tiers::Tile;

namespace {

// Copied at once between the store and device-only memory, through pageable memory: at most 60 MB.
constexpr std::uint32_t kPieceTiles = 16 * kAccessTiles;

}  // namespace

RecordIo::RecordIo(Runtime& runtime, const UnitTable& table, const Memory& memory, const RecordMap& records,
                   tiers::Store* store, GradientSpill* spill)
    : table_(table), memory_(memory), records_(records), store_(store), spill_(spill) {
  if (memory.has_device_only()) stream_ = runtime.device().create_stream("state");
}

// --- which bytes these are -------------------------------------------------------------------------------------------

const tiers::RecordLayout& RecordIo::layout(const RecordPart& part) const {
  const Unit& unit = table_.unit(part.unit);
  return part.kind == RecordKind::trainable ? unit.trainable : unit.frozen;
}

tiers::RecordId RecordIo::record(const RecordPart& part) const {
  return part.kind == RecordKind::trainable ? *records_.trainable(part.unit) : *records_.frozen(part.unit);
}

RecordPart RecordIo::part(UnitId unit, RecordKind kind, Region region, std::uint32_t first_tile,
                          std::uint32_t tile_count) const {
  RecordPart part{.unit = unit, .kind = kind, .tiles = {}};
  part.tiles = tile_run(layout(part), region, first_tile, tile_count);
  return part;
}

RecordPart RecordIo::whole_region(UnitId unit, RecordKind kind, Region region) const {
  const RecordPart empty{.unit = unit, .kind = kind, .tiles = {}};
  return part(unit, kind, region, 0, static_cast<std::uint32_t>(layout(empty).tiles().size()));
}

std::uint32_t RecordIo::resident_tiles(const RecordPart& part) const {
  const UnitPlacement& placement = memory_.placement(part.unit);
  const TileRun& tiles = part.tiles;
  const std::uint32_t resident = tiles.region == Region::state        ? placement.state_tiles
                                 : part.kind == RecordKind::trainable ? placement.weight_tiles
                                                                      : placement.frozen_tiles;
  return std::clamp(resident, tiles.first, tiles.first + tiles.count) - tiles.first;
}

std::byte* RecordIo::resident(const RecordPart& part) const {
  const UnitMemory& memory = memory_.unit(part.unit);
  if (part.tiles.region == Region::state) return memory.state + part.tiles.offset_bytes;
  const HostPieces pieces = memory_.plan().units().host_pieces(part.unit);
  const HostPiece& piece = part.kind == RecordKind::trainable ? pieces.trainable : pieces.frozen;
  return memory.weights + piece.offset + part.tiles.offset_bytes;
}

std::byte* RecordIo::in_place(const RecordPart& part) const {
  const bool whole = resident_tiles(part) == part.tiles.count;
  return whole && !memory_.device_only(part.unit) ? resident(part) : nullptr;
}

// --- reading ---------------------------------------------------------------------------------------------------------

const std::byte* RecordIo::view(const RecordPart& part, PartBuffer& buffer) {
  if (const std::byte* const bytes = in_place(part)) return bytes;
  const std::span<std::byte> copy = buffer.of(part.tiles.length_bytes);
  read(part, copy);
  return copy.data();
}

// The first tiles of a run may be in memory, and the others not.
void RecordIo::read(const RecordPart& part, std::span<std::byte> out) {
  const std::uint32_t first = part.tiles.first, count = resident_tiles(part);
  const RecordPart here = this->part(part.unit, part.kind, part.tiles.region, first, count);
  const std::uint64_t here_bytes = here.tiles.length_bytes;
  if (here_bytes > 0 && memory_.device_only(part.unit)) {
    copy_from_device(resident(here), out.first(here_bytes));
  } else if (here_bytes > 0) {
    std::memcpy(out.data(), resident(here), here_bytes);
  }
  if (count == part.tiles.count) return;
  read_store(this->part(part.unit, part.kind, part.tiles.region, first + count, part.tiles.count - count),
             out.subspan(here_bytes));
}

const std::byte* RecordIo::view_gradient(UnitId unit, const std::byte* shards, std::uint64_t offset,
                                         std::uint64_t bytes, PartBuffer& buffer) {
  if (spill_ != nullptr && spill_->holds(unit)) return spill_->view(unit, offset, bytes, buffer);
  if (!memory_.device_only(unit)) return shards + offset;
  const std::span<std::byte> copy = buffer.of(bytes);
  copy_from_device(shards + offset, copy);
  return copy.data();
}

void RecordIo::read_store(const RecordPart& part, std::span<std::byte> target) {
  const TileRun& tiles = part.tiles;
  store_->read(record(part), tiles.region, tiles.first, tiles.count, target, aio::Priority::foreground).wait();
  store_->verify(record(part), tiles.region, tiles.first, tiles.count, target);
}

void RecordIo::load(UnitId unit) {
  load(whole_region(unit, RecordKind::trainable, Region::weights));
  load(whole_region(unit, RecordKind::trainable, Region::state));
  load(whole_region(unit, RecordKind::frozen, Region::weights));
}

void RecordIo::load(const RecordPart& wanted) {
  const RecordPart part =
      this->part(wanted.unit, wanted.kind, wanted.tiles.region, wanted.tiles.first, resident_tiles(wanted));
  if (part.tiles.length_bytes == 0) return;
  if (std::byte* const target = in_place(part)) return read_store(part, {target, part.tiles.length_bytes});
  PartBuffer buffer;
  for_each_piece(part, [&](const RecordPart& piece) {
    const std::span<std::byte> bytes = buffer.of(piece.tiles.length_bytes);
    read_store(piece, bytes);
    copy_to_device(resident(piece), bytes);
  });
}

// --- writing ---------------------------------------------------------------------------------------------------------

void RecordIo::change(const RecordPart& part, const ChangeOptions& options, const Edit& edit) {
  const std::uint64_t count = part.tiles.length_bytes;
  std::byte* const here = in_place(part);
  const bool has_memory = here != nullptr || options.buffer.size() >= count;
  const aio::TransferMemory buffer(has_memory ? 0 : count);
  const std::span<std::byte> bytes = here != nullptr ? std::span(here, count)
                                     : has_memory    ? options.buffer.first(count)
                                                     : buffer.first(count);
  if (options.read && here == nullptr) read(part, bytes);
  edit(bytes);
  if (here == nullptr) write_resident(part, bytes);
  if (options.store) write_store(part, bytes).wait();
}

// The first tiles of the part, which are in memory.
void RecordIo::write_resident(const RecordPart& part, std::span<const std::byte> bytes) {
  const RecordPart here = this->part(part.unit, part.kind, part.tiles.region, part.tiles.first, resident_tiles(part));
  if (here.tiles.length_bytes == 0) return;
  const std::span<const std::byte> first = bytes.first(here.tiles.length_bytes);
  if (memory_.device_only(part.unit)) return copy_to_device(resident(here), first);
  std::memcpy(resident(here), first.data(), first.size());
}

Completion RecordIo::store(const RecordPart& part) {
  if (const std::byte* const bytes = in_place(part)) return write_store(part, {bytes, part.tiles.length_bytes});
  PartBuffer buffer;
  for_each_piece(part, [&](const RecordPart& piece) {
    const std::span<std::byte> bytes = buffer.of(piece.tiles.length_bytes);
    copy_from_device(resident(piece), bytes);
    write_store(piece, bytes).wait();
  });
  return {};
}

template <typename Work>
void RecordIo::for_each_piece(const RecordPart& part, const Work& work) {
  const std::uint32_t end = part.tiles.first + part.tiles.count;
  for (std::uint32_t first = part.tiles.first; first < end; first += kPieceTiles)
    work(this->part(part.unit, part.kind, part.tiles.region, first, std::min(kPieceTiles, end - first)));
}

Completion RecordIo::write_store(const RecordPart& part, std::span<const std::byte> bytes) {
  const std::span<const Tile> tiles = layout(part).tiles().subspan(part.tiles.first, part.tiles.count);
  std::vector<std::uint64_t> checksums;
  checksums.reserve(tiles.size());
  const Region region = part.tiles.region;
  for (const Tile& tile : tiles) {
    const auto index = part.tiles.first + static_cast<std::uint32_t>(checksums.size());
    const std::uint64_t offset = tile.offset(region) - part.tiles.offset_bytes;
    checksums.push_back(store_->checksum(record(part), region, index, bytes.subspan(offset, tile.bytes(region))));
  }
  return store_->write(record(part), region, part.tiles.first, part.tiles.count, bytes, checksums,
                       aio::Priority::background);
}

// --- copies ----------------------------------------------------------------------------------------------------------

Completion RecordIo::start_read(const RecordPart& part, std::byte* target, aio::Priority priority) {
  const TileRun& tiles = part.tiles;
  if (!memory_.device_only(part.unit))
    return store_->read(record(part), tiles.region, tiles.first, tiles.count, {target, tiles.length_bytes}, priority);
  if (tiles.length_bytes == 0) return {};
  stream_->copy(target, resident(part), tiles.length_bytes, CopyKind::device_to_host);
  return stream_->record().completion();
}

Completion RecordIo::start_write(const RecordPart& part, const std::byte* source) {
  HOIST_ASSERT(memory_.device_only(part.unit), "unit {} is not device-only", part.unit.index);
  if (part.tiles.length_bytes == 0) return {};
  stream_->copy(resident(part), source, part.tiles.length_bytes, CopyKind::host_to_device);
  return stream_->record().completion();
}

void RecordIo::await_copies() {
  if (stream_) stream_->synchronize();
}

void RecordIo::copy_from_device(const std::byte* source, std::span<std::byte> out) {
  const std::span<std::byte> buffer = memory_.copy_buffer();
  for (std::size_t first = 0; first < out.size(); first += buffer.size()) {
    const std::size_t count = std::min(buffer.size(), out.size() - first);
    stream_->copy(buffer.data(), source + first, count, CopyKind::device_to_host);
    stream_->synchronize();
    std::memcpy(out.data() + first, buffer.data(), count);
  }
}

void RecordIo::copy_to_device(std::byte* target, std::span<const std::byte> bytes) {
  const std::span<std::byte> buffer = memory_.copy_buffer();
  for (std::size_t first = 0; first < bytes.size(); first += buffer.size()) {
    const std::size_t count = std::min(buffer.size(), bytes.size() - first);
    std::memcpy(buffer.data(), bytes.data() + first, count);
    stream_->copy(target + first, buffer.data(), count, CopyKind::host_to_device);
    stream_->synchronize();
  }
}

}  // namespace hoist::detail
