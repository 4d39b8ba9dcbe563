// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <set>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/tiers/detail/record_table.hpp>

namespace hoist::tiers::detail {

namespace {

std::vector<std::uint64_t> lengths(std::span<const StoreRecord> records) {
  std::vector<std::uint64_t> bytes;
  bytes.reserve(records.size());
  for (const StoreRecord& record : records) bytes.push_back(record.layout.bytes());
  return bytes;
}

std::uint32_t tiles_of(const StoreRecord& record) { return static_cast<std::uint32_t>(record.layout.tiles().size()); }
std::uint64_t words_per_region(const StoreRecord& record) { return divide_up(record.layout.tiles().size(), 64); }

// With durability none a tile has one checksum; otherwise it has the commit's and the next one's.
std::size_t table_count(Durability durability) { return durability == Durability::step ? 2 : 1; }

}  // namespace

std::uint32_t RecordTable::nonempty_tiles(const RecordLayout& layout) {
  std::uint32_t count = 0;
  for (const Tile& tile : layout.tiles()) count += (tile.w_bytes != 0 ? 1u : 0u) + (tile.s_bytes != 0 ? 1u : 0u);
  return count;
}

std::uint64_t geometry_checksum(std::span<const StoreRecord> records) {
  std::vector<std::uint64_t> words;
  for (const StoreRecord& record : records) {
    words.push_back(record.layout.segments().size());
    for (const RecordSegment& segment : record.layout.segments()) {
      words.push_back(static_cast<std::uint64_t>(segment.dtype));
      // 1 for the common form, two moments of fp32.
      const std::uint64_t short_master = segment.remainder == RemainderType::int8 ? 256 : 0;
      const std::uint64_t moment_width = segment.moment_type == MomentType::fp32   ? 4
                                         : segment.moment_type == MomentType::bf16 ? 2
                                                                                   : 1;
      const std::uint64_t moments = short_master + 16 * segment.moment_count + moment_width;
      words.push_back(!segment.trainable ? 0 : moments == 16 * 2 + 4 ? 1 : moments);
      words.push_back(segment.shard_elements);
    }
  }
  return hoist::checksum(std::as_bytes(std::span(words)));
}

RecordTable::RecordTable(std::vector<StoreRecord> records, Durability durability, std::uint32_t extents_per_record,
                         std::uint64_t store_number)
    : records_(std::move(records)),
      durability_(durability),
      store_number_(store_number),
      entries_(std::make_unique<Entry[]>(records_.size())),
      pool_(lengths(records_), extents_per_record) {
  std::uint64_t word_count = 0;
  for (std::uint32_t index = 0; index < records_.size(); ++index) {
    Entry& entry = entries_[index];
    entry.first_tile = tile_count_;
    entry.first_word = word_count;
    tile_count_ += tiles_of(records_[index]);
    word_count += 2 * words_per_region(records_[index]);
    if (durability_ == Durability::none) entry.committed.extent = pool_.take(records_[index].layout.bytes());
  }
  for (std::size_t side = 0; side < table_count(durability_); ++side) checksums_[side].assign(2 * tile_count_, 0);
  written_.assign(word_count, 0);
  touched_.reserve(records_.size());
}

std::uint64_t RecordTable::memory_bytes(std::span<const StoreRecord> records, Durability durability,
                                        std::uint32_t extents_per_record) {
  std::uint64_t bytes = records.size() * (sizeof(Entry) + sizeof(std::uint32_t));
  std::set<std::uint64_t> classes;
  for (const StoreRecord& record : records) {
    const std::uint64_t tiles = record.layout.tiles().size();
    bytes += sizeof(StoreRecord) + record.unit.size() + tiles * sizeof(Tile);
    bytes += record.layout.segments().size() * (sizeof(RecordSegment) + sizeof(std::uint64_t));
    bytes += table_count(durability) * 2 * tiles * sizeof(std::uint64_t);
    bytes += 2 * words_per_region(record) * sizeof(std::uint64_t);
    classes.insert(record.layout.bytes());
  }
  // The extents of each named checkpoint, and of the one that is being made.
  bytes += (extents_per_record - 1) * records.size() * sizeof(std::uint32_t);
  return bytes + ExtentPool::memory_bytes(records.size(), classes.size(), extents_per_record);
}

std::uint64_t RecordTable::range_bytes(RecordId id, Region region, std::uint32_t first, std::uint32_t count) const {
  HOIST_ASSERT(id.index < records_.size(), "record {} of {}", id.index, records_.size());
  const std::uint32_t tiles = tiles_of(record(id));
  HOIST_ASSERT(first <= tiles && count <= tiles - first, "tiles [{}, {} + {}) of {} in unit {}", first, first, count,
               tiles, record(id).unit);
  return record(id).layout.tile_bytes(region, first, count);
}

std::uint64_t RecordTable::offset_in_record(RecordId id, Region region, std::uint32_t tile) const {
  const RecordLayout& layout = record(id).layout;
  return (region == Region::state ? layout.region_bytes(Region::weights) : 0) + layout.tiles()[tile].offset(region);
}

std::uint64_t RecordTable::checksum_index(RecordId id, Region region, std::uint32_t tile) const {
  return 2 * entries_[id.index].first_tile + (region == Region::state ? tiles_of(record(id)) : 0) + tile;
}

std::uint64_t RecordTable::written_word(RecordId id, Region region, std::uint32_t tile) const {
  return entries_[id.index].first_word + (region == Region::state ? words_per_region(record(id)) : 0) + tile / 64;
}

bool RecordTable::written(RecordId id, Region region, std::uint32_t tile) const {
  return (written_[written_word(id, region, tile)] >> (tile % 64)) & 1;
}

void RecordTable::mark_written(RecordId id, Region region, std::uint32_t tile) {
  written_[written_word(id, region, tile)] |= std::uint64_t{1} << (tile % 64);
}

bool RecordTable::at_next(const Entry& entry, RecordId id, Region region, std::uint32_t tile) const {
  return durability_ == Durability::step && entry.touched && written(id, region, tile);
}

const RecordTable::Location& RecordTable::location(RecordId id, Region region, std::uint32_t tile) const {
  const Entry& entry = entries_[id.index];
  if (at_next(entry, id, region, tile)) return entry.next;
  // A reserved but unwritten extent reads as zeros, faster than any drive.
  const bool readable =
      durability_ == Durability::step ? entry.committed.extent != kNoExtent : written(id, region, tile);
  HOIST_ASSERT(readable, "tile {} of region {} of unit {} is read before it is written", tile,
               static_cast<unsigned>(region), record(id).unit);
  return entry.committed;
}

RecordTable::Run RecordTable::readable_run(RecordId id, Region region, std::uint32_t first, std::uint32_t end) const {
  const RecordLayout& layout = record(id).layout;
  const MutexLock lock(entries_[id.index].mutex);
  Run run;
  std::uint32_t extent = kNoExtent;
  for (std::uint32_t tile = first; tile < end; ++tile) {
    const std::uint64_t bytes = layout.tiles()[tile].bytes(region);
    if (bytes != 0) {
      const Location& where = location(id, region, tile);
      if (extent == kNoExtent) {
        extent = where.extent;
        run.offset_bytes = pool_.extent(extent).offset_bytes + offset_in_record(id, region, tile);
      } else if (where.extent != extent) {
        break;
      }
    }
    run.length_bytes += bytes;
    ++run.tile_count;
  }
  return run;
}

RecordTable::Expected RecordTable::expected(RecordId id, Region region, std::uint32_t tile) const {
  Expected result;
  result.length_bytes = record(id).layout.tiles()[tile].bytes(region);
  if (result.length_bytes == 0) return result;
  const Entry& entry = entries_[id.index];
  const MutexLock lock(entry.mutex);
  const Location& where = location(id, region, tile);
  const std::uint8_t side = at_next(entry, id, region, tile) ? entry.side ^ 1 : entry.side;
  result.identity = {store_number_, id.index, tile, static_cast<std::uint32_t>(region), where.extent, where.generation};
  result.checksum = checksums_[side][checksum_index(id, region, tile)];
  result.offset_bytes = pool_.extent(where.extent).offset_bytes + offset_in_record(id, region, tile);
  return result;
}

std::vector<CorruptionError::Where> RecordTable::damage(RecordId id, Region region, std::uint32_t first,
                                                        std::uint32_t count, std::span<const std::byte> bytes,
                                                        const aio::StripedFile& data) const {
  const std::uint64_t length = range_bytes(id, region, first, count);
  HOIST_ASSERT(bytes.size() == length, "{} bytes for {}", bytes.size(), length);
  std::vector<CorruptionError::Where> damaged;
  for (std::uint32_t tile = first; tile < first + count; ++tile) {
    const Expected wanted = expected(id, region, tile);
    if (wanted.length_bytes == 0) continue;
    const std::uint64_t found = tile_checksum(wanted.identity, bytes.first(wanted.length_bytes));
    bytes = bytes.subspan(wanted.length_bytes);
    if (found == wanted.checksum) continue;
    const aio::StripeLayout::DriveOffset place = data.layout().place(wanted.offset_bytes);
    damaged.push_back({.unit = record(id).unit,
                       .region = region == Region::weights ? "weights" : "optimizer state",
                       .path = data.file(place.drive).path(),
                       .offset_bytes = place.offset_bytes,
                       .expected = wanted.checksum,
                       .found = found});
  }
  return damaged;
}

void RecordTable::touch(RecordId id) {
  Entry& entry = entries_[id.index];
  if (entry.touched || durability_ == Durability::none) return;
  entry.touched = true;
  entry.to_write = nonempty_tiles(record(id).layout);
  entry.next.generation = step_;
  const auto words = written_.begin() + static_cast<std::ptrdiff_t>(entry.first_word);
  std::fill(words, words + static_cast<std::ptrdiff_t>(2 * words_per_region(record(id))), 0);
  const MutexLock lock(pool_mutex_);
  entry.next.extent = pool_.take(record(id).layout.bytes());
  touched_.push_back(id.index);
}

TileIdentity RecordTable::next_identity(RecordId id, Region region, std::uint32_t tile) {
  Entry& entry = entries_[id.index];
  const MutexLock lock(entry.mutex);
  touch(id);
  const Location& where = durability_ == Durability::step ? entry.next : entry.committed;
  return {store_number_, id.index, tile, static_cast<std::uint32_t>(region), where.extent, where.generation};
}

std::uint64_t RecordTable::start_write(RecordId id, Region region, std::uint32_t first, std::uint32_t count,
                                       std::span<const std::uint64_t> checksums) {
  Entry& entry = entries_[id.index];
  const MutexLock lock(entry.mutex);
  touch(id);
  const bool in_place = durability_ == Durability::none;
  std::vector<std::uint64_t>& table = checksums_[in_place ? entry.side : entry.side ^ 1];
  for (std::uint32_t tile = first; tile < first + count; ++tile) {
    if (record(id).layout.tiles()[tile].bytes(region) == 0) continue;
    table[checksum_index(id, region, tile)] = checksums[tile - first];
    if (!in_place && !written(id, region, tile)) --entry.to_write;
    mark_written(id, region, tile);
  }
  const Location& where = in_place ? entry.committed : entry.next;
  return pool_.extent(where.extent).offset_bytes + offset_in_record(id, region, first);
}

std::string RecordTable::incomplete() const {
  for (std::uint32_t index = 0; index < records_.size(); ++index) {
    const RecordId id{index};
    const Entry& entry = entries_[index];
    const MutexLock lock(entry.mutex);
    if (entry.touched && entry.to_write != 0) {
      for (const Region region : {Region::weights, Region::state})
        for (std::uint32_t tile = 0; tile < tiles_of(record(id)); ++tile)
          if (record(id).layout.tiles()[tile].bytes(region) != 0 && !written(id, region, tile))
            return fmt::format("unit '{}' was rewritten in part: tile {} of its {} is missing, {} tiles in all",
                               record(id).unit, tile, region == Region::weights ? "weights" : "optimizer state",
                               entry.to_write);
    }
    if (!entry.touched && entry.committed.extent == kNoExtent && record(id).layout.bytes() != 0)
      return fmt::format("unit '{}' was never written", record(id).unit);
  }
  return {};
}

void RecordTable::fill(SlotImage& image) const {
  for (std::uint32_t index = 0; index < records_.size(); ++index) {
    const Entry& entry = entries_[index];
    const RecordLayout& layout = records_[index].layout;
    const MutexLock lock(entry.mutex);
    const Location& where = entry.touched ? entry.next : entry.committed;
    RecordEntry written;
    written.extent = where.extent;
    written.tile_count = tiles_of(records_[index]);
    written.offset_bytes = where.extent == kNoExtent ? 0 : pool_.extent(where.extent).offset_bytes;
    written.w_bytes = layout.region_bytes(Region::weights);
    written.s_bytes = layout.region_bytes(Region::state);
    written.generation = where.generation;
    image.set_record(index, written);
    const auto& table = checksums_[entry.touched ? entry.side ^ 1 : entry.side];
    image.set_checksums(2 * entry.first_tile,
                        std::span(table).subspan(2 * entry.first_tile, 2 * layout.tiles().size()));
  }
}

void RecordTable::publish() {
  for (const std::uint32_t index : touched_) {
    Entry& entry = entries_[index];
    const MutexLock lock(entry.mutex);
    if (entry.committed.extent != kNoExtent) {
      const MutexLock pool_lock(pool_mutex_);
      pool_.give_back(entry.committed.extent);
    }
    entry.committed = entry.next;
    entry.next = {};
    entry.side ^= 1;
    entry.touched = false;
  }
  touched_.clear();
}

std::uint64_t RecordTable::fingerprint(RecordId id) const {
  const Entry& entry = entries_[id.index];
  const MutexLock lock(entry.mutex);
  const auto sums =
      std::span(checksums_[entry.side]).subspan(2 * entry.first_tile, 2 * std::size_t{tiles_of(record(id))});
  const std::array<std::uint64_t, 3> words{entry.committed.extent, entry.committed.generation,
                                           hoist::checksum(std::as_bytes(sums))};
  return hoist::checksum(std::as_bytes(std::span(words)));
}

std::vector<std::uint32_t> RecordTable::committed_extents() const {
  std::vector<std::uint32_t> extents;
  for (std::uint32_t index = 0; index < records_.size(); ++index) {
    const MutexLock lock(entries_[index].mutex);
    extents.push_back(entries_[index].committed.extent);
  }
  return extents;
}

std::string RecordTable::hold(std::span<const std::uint32_t> extents) {
  const MutexLock lock(pool_mutex_);
  if (std::string problem = pool_.check(extents, lengths(records_)); !problem.empty()) return problem;
  pool_.hold(extents);
  return {};
}

void RecordTable::release(std::span<const std::uint32_t> extents) {
  const MutexLock lock(pool_mutex_);
  for (const std::uint32_t extent : extents)
    if (extent != kNoExtent) pool_.give_back(extent);
}

std::string RecordTable::load(const SlotImage& image) {
  std::vector<std::uint32_t> extents;
  for (std::uint32_t index = 0; index < records_.size(); ++index) {
    const RecordLayout& layout = records_[index].layout;
    const RecordEntry stored = image.record(index);
    if (stored.tile_count != layout.tiles().size() || stored.w_bytes != layout.region_bytes(Region::weights) ||
        stored.s_bytes != layout.region_bytes(Region::state))
      return fmt::format(
          "unit '{}' has {} tiles of {} + {} bytes in the store, {} tiles of {} + {} bytes in the program",
          records_[index].unit, stored.tile_count, stored.w_bytes, stored.s_bytes, layout.tiles().size(),
          layout.region_bytes(Region::weights), layout.region_bytes(Region::state));
    extents.push_back(stored.extent);
  }
  if (std::string problem = pool_.adopt(extents, lengths(records_)); !problem.empty()) return problem;
  for (std::uint32_t index = 0; index < records_.size(); ++index) {
    Entry& entry = entries_[index];
    const MutexLock lock(entry.mutex);
    const RecordEntry stored = image.record(index);
    if (stored.extent != kNoExtent && stored.offset_bytes != pool_.extent(stored.extent).offset_bytes)
      return fmt::format("unit '{}' lies at offset {} of extent {}, which begins at {}", records_[index].unit,
                         stored.offset_bytes, stored.extent, pool_.extent(stored.extent).offset_bytes);
    entry.committed = {stored.extent, stored.generation};
    entry.next = {};
    entry.side = 0;
    entry.touched = false;
    image.checksums(2 * entry.first_tile,
                    std::span(checksums_[0]).subspan(2 * entry.first_tile, 2 * std::size_t{stored.tile_count}));
  }
  touched_.clear();
  return {};
}

}  // namespace hoist::tiers::detail
