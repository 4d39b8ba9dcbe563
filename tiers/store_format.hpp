// SPDX-License-Identifier: Apache-2.0
// tiers/store_format.hpp - the bytes of a store's manifest file: superblock, then slots. See docs/format.md.
//
// Pure encoding and checking; nothing here does I/O, and nothing read from a file is trusted before its checksum and
// its lengths were compared. All numbers are little-endian.
//
// Threading  Pure functions.
// Errors     Checks return what is wrong as a sentence for a person; empty means valid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <hoist/core/units.hpp>
#include <hoist/tiers/commit_header.hpp>
#include <hoist/tiers/durability.hpp>

namespace hoist::tiers {

inline constexpr std::uint32_t kStoreFormatVersion = 4;
inline constexpr std::uint64_t kSuperblockHeaderBytes = 128;
inline constexpr std::uint64_t kSlotHeaderBytes = 128;
inline constexpr std::uint64_t kRecordEntryBytes = 40;
// Commits alternate between these; slots of named checkpoints and held commits follow.
inline constexpr std::uint32_t kSlotCount = 2;
inline constexpr std::uint32_t kCheckpointsMax = 64;        // each costs another extent for every record
inline constexpr std::size_t kCheckpointNameBytesMax = 47;  // without the terminating zero

// Written once, before the file gets its name; constant for the life of the store.
struct Superblock {
  std::uint64_t store_number = 0;
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
  Durability durability = Durability::step;
  std::uint32_t extents_per_record = 2;
  std::uint64_t tile_elements = 0;
  std::uint64_t data_bytes = 0;  // length of the data file
  std::uint64_t caller_state_bytes_max = 0;
  std::uint32_t record_count = 0;
  std::uint64_t tile_count = 0;         // of all records
  std::uint64_t geometry_checksum = 0;  // over every segment of every record: dtype, form of the state, elements
  std::string layout;                   // the identity text
  // How the data is spread over drives: aio::StripeLayout::encode(), then each drive's directory, a line each. Empty:
  // one drive, the manifest's own directory.
  std::string stripes;
  std::uint32_t checkpoints_max = 0;  // places for named checkpoints and held commits (Store::hold) together

  // One slot more than places for checkpoints, so that a new one is whole before an old one goes.
  std::uint32_t slot_count() const { return kSlotCount + (checkpoints_max > 0 ? checkpoints_max + 1 : 0); }
  // Positions, all multiples of 4 KiB.
  std::uint64_t superblock_bytes() const {
    return round_up(kSuperblockHeaderBytes + layout.size() + stripes.size(), kBlockAlignment);
  }
  std::uint64_t slot_bytes() const;  // 0 with durability none, which never commits
  std::uint64_t slot_offset(std::uint32_t slot) const { return superblock_bytes() + slot * slot_bytes(); }
  std::uint64_t manifest_bytes() const { return slot_offset(slot_count()); }
};

// `target` is superblock_bytes() long.
void encode_superblock(const Superblock& superblock, std::span<std::byte> target);

// Bytes of the file that have to be read to decode the superblock whose first 4 KiB are `head`; nothing when the head
// is no superblock, and then `problem` says why. Another format version is such a problem.
std::optional<std::uint64_t> superblock_length(std::span<const std::byte> head, std::uint64_t file_bytes,
                                               std::string& problem);
// `bytes` is as long as superblock_length() said.
std::optional<Superblock> decode_superblock(std::span<const std::byte> bytes, std::string& problem);

struct RecordEntry {
  std::uint32_t extent = 0;
  std::uint32_t tile_count = 0;
  std::uint64_t offset_bytes = 0;  // of the extent in the data file
  std::uint64_t w_bytes = 0;
  std::uint64_t s_bytes = 0;
  std::uint64_t generation = 0;  // the step that wrote the record
};

struct SlotHeader : CommitHeader {
  std::uint64_t caller_state_bytes = 0;
  friend bool operator==(const SlotHeader&, const SlotHeader&) = default;
};

// The parts of one slot's image. Their places depend only on the superblock, so the same view serves for building an
// image and for reading one.
class SlotImage {
 public:
  SlotImage(std::span<std::byte> image, const Superblock& superblock);

  void set_record(std::uint32_t record, const RecordEntry& entry);
  RecordEntry record(std::uint32_t record) const;
  std::vector<std::uint32_t> extents() const;  // of all records
  // Checksums in the order of the records; within a record all W tiles, then all S tiles.
  // `first` counts checksums from the start of the table: a record whose first tile is tile t of the store (counted
  // over all records) begins at 2 t.
  void set_checksums(std::uint64_t first, std::span<const std::uint64_t> values);
  void checksums(std::uint64_t first, std::span<std::uint64_t> values) const;
  std::span<std::byte> caller_state_area() const;

  // Fills in the header and the checksum over everything, zeroes the padding, and returns the bytes to write: a
  // multiple of 4 KiB. Everything else has been set before.
  std::uint64_t seal(const SlotHeader& header);

 private:
  std::span<std::byte> image_;
  const Superblock& superblock_;
};

// The content of a slot.
struct SlotCheck {
  enum class State : std::uint8_t { blank, damaged, valid };  // blank: no slot header was ever written here
  State state = State::blank;
  SlotHeader header;    // when valid
  std::string problem;  // when damaged
  friend bool operator==(const SlotCheck&, const SlotCheck&) = default;
};
// Pre: `slot` is slot_bytes() long.
SlotCheck check_slot(std::span<const std::byte> slot, const Superblock& superblock);

// The problem with a checkpoint's name; empty for 1 to kCheckpointNameBytesMax bytes, none of them a control character.
std::string checkpoint_name_problem(std::string_view name);

}  // namespace hoist::tiers
