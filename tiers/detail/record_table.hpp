// SPDX-License-Identifier: Apache-2.0
// tiers/detail/record_table.hpp - the location and the checksum of every tile of every record.
//
// Each record has a committed location and, once the current step has written to it, a next one. A record is
// rewritten piecewise, so the choice between the two is made per tile: a tile whose write was started is at the next
// location, its neighbours still at the committed one. With durability none there is one location, and the tile bits
// say whether a tile was ever written.
//
// Threading  Every record has its own mutex; tiles of one record may be looked up and rewritten from many threads.
//            begin_step, publish, load and fill exclude each other and writers (the Store sees to it), not readers.
// Memory     All tables are made by the constructor.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include <hoist/aio/striped_file.hpp>
#include <hoist/core/checksum.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/tiers/extent_pool.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/tiers/store_format.hpp>

namespace hoist::tiers::detail {

// A checksum over every segment of every record. Two stores with equal layout texts but different records (units
// divided differently) must not be mixed up either.
std::uint64_t geometry_checksum(std::span<const StoreRecord> records);

class RecordTable {
 public:
  // `extents_per_record`: 2 and one more for each named checkpoint; 1 with durability none.
  RecordTable(std::vector<StoreRecord> records, Durability durability, std::uint32_t extents_per_record,
              std::uint64_t store_number);

  std::span<const StoreRecord> records() const { return records_; }
  const StoreRecord& record(RecordId id) const { return records_[id.index]; }
  std::uint64_t data_bytes() const { return pool_.data_bytes(); }
  static std::uint64_t memory_bytes(std::span<const StoreRecord> records, Durability durability,
                                    std::uint32_t extents_per_record);

  // Length on disk of tiles [first, first + count) of a region. Asserts that they exist.
  std::uint64_t range_bytes(RecordId id, Region region, std::uint32_t first, std::uint32_t count) const;

  // Tiles from `first` on that lie next to each other on disk, at most up to `end`.
  struct Run {
    std::uint64_t offset_bytes = 0;
    std::uint64_t length_bytes = 0;
    std::uint32_t tile_count = 0;
  };
  Run readable_run(RecordId id, Region region, std::uint32_t first, std::uint32_t end) const;

  struct Expected {
    TileIdentity identity;
    std::uint64_t checksum = 0;
    std::uint64_t offset_bytes = 0;
    std::uint64_t length_bytes = 0;
  };
  Expected expected(RecordId id, Region region, std::uint32_t tile) const;
  // The damaged tiles in `bytes`, read as tiles [first, first + count) from `data`: one entry for each, with its drive
  // and its offset there.
  std::vector<CorruptionError::Where> damage(RecordId id, Region region, std::uint32_t first, std::uint32_t count,
                                             std::span<const std::byte> bytes, const aio::StripedFile& data) const;

  void begin_step(std::uint64_t step) { step_ = step; }
  // The identity of a tile written in the current step. Chooses the record's next extent if it has none.
  TileIdentity next_identity(RecordId id, Region region, std::uint32_t tile);
  // From now on the tiles are read at the next location and verified against `checksums`. Returns the location to write
  // to.
  std::uint64_t start_write(RecordId id, Region region, std::uint32_t first, std::uint32_t count,
                            std::span<const std::uint64_t> checksums);

  // The reason why the current step cannot be committed; empty if it can.
  std::string incomplete() const;
  // Enters the records as they will be once the current step is committed.
  void fill(SlotImage& image) const;
  // The current step is committed: next locations become the committed ones, and the previous ones are free.
  void publish();
  // Replaces everything by a commit's content; returns the problem with it, or an empty text. Named checkpoints then
  // hold no extents.
  [[nodiscard]] std::string load(const SlotImage& image);

  // A digest of the committed extent, its generation and checksums.
  std::uint64_t fingerprint(RecordId id) const;

  std::uint32_t extent_at(std::uint64_t offset_bytes) const { return pool_.extent_at(offset_bytes); }
  // The extents of the last commit, one for each record. hold() keeps them from being reused until release().
  std::vector<std::uint32_t> committed_extents() const;
  [[nodiscard]] std::string hold(std::span<const std::uint32_t> extents);  // returns the problem with them
  void release(std::span<const std::uint32_t> extents);

 private:
  struct Location {
    std::uint32_t extent = kNoExtent;
    std::uint64_t generation = 0;
  };
  struct Entry {
    mutable Mutex mutex;
    Location committed;
    Location next;
    std::uint64_t first_tile = 0;  // within the store
    std::uint64_t first_word = 0;  // within written_
    std::uint32_t to_write = 0;    // tiles, of both regions, that the current step has not written yet
    std::uint8_t side = 0;         // which table holds the committed checksums
    bool touched = false;
  };

  static std::uint32_t nonempty_tiles(const RecordLayout& layout);
  std::uint64_t offset_in_record(RecordId id, Region region, std::uint32_t tile) const;
  std::uint64_t checksum_index(RecordId id, Region region, std::uint32_t tile) const;
  std::uint64_t written_word(RecordId id, Region region, std::uint32_t tile) const;
  bool written(RecordId id, Region region, std::uint32_t tile) const;
  void mark_written(RecordId id, Region region, std::uint32_t tile);
  // Whether a tile is read at the record's next location. These functions need the entry's mutex.
  bool at_next(const Entry& entry, RecordId id, Region region, std::uint32_t tile) const;
  const Location& location(RecordId id, Region region, std::uint32_t tile) const;
  void touch(RecordId id);

  std::vector<StoreRecord> records_;
  const Durability durability_;
  const std::uint64_t store_number_;
  std::uint64_t tile_count_ = 0;
  std::uint64_t step_ = 0;
  std::unique_ptr<Entry[]> entries_;
  std::array<std::vector<std::uint64_t>, 2> checksums_;  // the second one only with durability step
  std::vector<std::uint64_t> written_;                   // a bit per tile and region, in whole words per record

  Mutex pool_mutex_;  // what tiles' writers change of the rest; taken after an entry's
  ExtentPool pool_;
  std::vector<std::uint32_t> touched_;
};

}  // namespace hoist::tiers::detail
