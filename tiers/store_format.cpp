// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstring>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/checksum.hpp>
#include <hoist/core/printable.hpp>
#include <hoist/tiers/store_format.hpp>

namespace hoist::tiers {

// Integers go to disk as they lie in memory.
static_assert(std::endian::native == std::endian::little, "the store's format is little-endian");

namespace {

constexpr char kSuperblockMagic[8] = {'H', 'O', 'I', 'S', 'T', 'S', 'T', 'O'};
constexpr char kSlotMagic[8] = {'H', 'O', 'I', 'S', 'T', 'C', 'M', 'T'};
constexpr std::uint64_t kMagicBytes = 8;
constexpr std::uint64_t kChecksumAt = 8;    // of everything from kCoveredFrom on
constexpr std::uint64_t kCoveredFrom = 16;  // the first byte after the checksum

// Offsets of the superblock's fields.
namespace super {
constexpr std::uint64_t version = 16, durability = 20, store_number = 24, rank = 32, world_size = 36,
                        tile_elements = 40, data_bytes = 48, superblock_bytes = 56, slot_bytes = 64,
                        caller_state_bytes_max = 72, record_count = 80, extents_per_record = 84, tile_count = 88,
                        geometry_checksum = 96, layout_bytes = 104, stripes_bytes = 112, checkpoints_max = 120;
}  // namespace super

// Offsets of a slot header's fields.
namespace slot {
constexpr std::uint64_t version = 16, incarnation = 20, store_number = 24, step = 32, used_bytes = 40,
                        caller_state_bytes = 48, tile_count = 56, record_count = 64, revision = 68,
                        checkpoint_serial = 72, name = 80;
static_assert(name + kCheckpointNameBytesMax + 1 == kSlotHeaderBytes);
}  // namespace slot

template <typename T>
void put(std::span<std::byte> target, std::uint64_t at, T value) {
  std::memcpy(target.subspan(at, sizeof(T)).data(), &value, sizeof(T));
}

void put_text(std::span<std::byte> target, std::uint64_t at, std::string_view text) {
  if (!text.empty()) std::memcpy(target.subspan(at, text.size()).data(), text.data(), text.size());
}

template <typename T>
T get(std::span<const std::byte> source, std::uint64_t at) {
  T value;
  std::memcpy(&value, source.subspan(at, sizeof(T)).data(), sizeof(T));
  return value;
}

bool is_blank(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

bool has_magic(std::span<const std::byte> bytes, const char (&magic)[8]) {
  return std::memcmp(bytes.data(), magic, kMagicBytes) == 0;
}

// Called before the checksum is checked: another version may compute it otherwise.
std::string wrong_version(std::uint32_t version) {
  if (version == kStoreFormatVersion) return {};
  return fmt::format("it is of format version {}, and this program reads version {}", version, kStoreFormatVersion);
}

std::string wrong_checksum(std::span<const std::byte> covered, std::uint64_t recorded) {
  const std::uint64_t found = checksum(covered);
  if (found == recorded) return {};
  return fmt::format("checksum {:016x} was recorded, {:016x} was found", recorded, found);
}

std::uint64_t records_at(std::uint32_t record) { return kSlotHeaderBytes + record * kRecordEntryBytes; }
std::uint64_t caller_state_at(const Superblock& s) {
  return records_at(s.record_count) + 2 * s.tile_count * sizeof(std::uint64_t);
}

}  // namespace

std::uint64_t Superblock::slot_bytes() const {
  if (durability == Durability::none) return 0;
  return round_up(caller_state_at(*this) + caller_state_bytes_max, kBlockAlignment);
}

void encode_superblock(const Superblock& s, std::span<std::byte> target) {
  HOIST_ASSERT(target.size() == s.superblock_bytes(), "{} bytes for {}", target.size(), s.superblock_bytes());
  std::fill(target.begin(), target.end(), std::byte{0});
  std::memcpy(target.data(), kSuperblockMagic, kMagicBytes);
  put(target, super::version, kStoreFormatVersion);
  put(target, super::durability, static_cast<std::uint32_t>(s.durability));
  put(target, super::store_number, s.store_number);
  put(target, super::rank, s.rank);
  put(target, super::world_size, s.world_size);
  put(target, super::tile_elements, s.tile_elements);
  put(target, super::data_bytes, s.data_bytes);
  put(target, super::superblock_bytes, s.superblock_bytes());
  put(target, super::slot_bytes, s.slot_bytes());
  put(target, super::caller_state_bytes_max, s.caller_state_bytes_max);
  put(target, super::record_count, s.record_count);
  put(target, super::extents_per_record, s.extents_per_record);
  put(target, super::tile_count, s.tile_count);
  put(target, super::geometry_checksum, s.geometry_checksum);
  put(target, super::layout_bytes, std::uint64_t{s.layout.size()});
  put(target, super::stripes_bytes, std::uint64_t{s.stripes.size()});
  put(target, super::checkpoints_max, s.checkpoints_max);
  put_text(target, kSuperblockHeaderBytes, s.layout);
  put_text(target, kSuperblockHeaderBytes + s.layout.size(), s.stripes);
  put(target, kChecksumAt, checksum(target.subspan(kCoveredFrom)));
}

std::optional<std::uint64_t> superblock_length(std::span<const std::byte> head, std::uint64_t file_bytes,
                                               std::string& problem) {
  if (head.size() < kSuperblockHeaderBytes) {
    problem = fmt::format("it ends after {} bytes", head.size());
    return std::nullopt;
  }
  if (!has_magic(head, kSuperblockMagic)) {
    problem = "it does not begin like a manifest";
    return std::nullopt;
  }
  if (problem = wrong_version(get<std::uint32_t>(head, super::version)); !problem.empty()) return std::nullopt;
  const auto bytes = get<std::uint64_t>(head, super::superblock_bytes);
  if (bytes < kBlockAlignment || bytes % kBlockAlignment != 0 || bytes > file_bytes) {
    problem = fmt::format("its superblock claims {} bytes of a file of {}", bytes, file_bytes);
    return std::nullopt;
  }
  return bytes;
}

std::optional<Superblock> decode_superblock(std::span<const std::byte> bytes, std::string& problem) {
  HOIST_ASSERT(bytes.size() >= kBlockAlignment, "{} bytes", bytes.size());
  problem = wrong_checksum(bytes.subspan(kCoveredFrom), get<std::uint64_t>(bytes, kChecksumAt));
  if (!problem.empty()) return std::nullopt;
  Superblock s;
  s.store_number = get<std::uint64_t>(bytes, super::store_number);
  s.rank = get<std::uint32_t>(bytes, super::rank);
  s.world_size = get<std::uint32_t>(bytes, super::world_size);
  s.extents_per_record = get<std::uint32_t>(bytes, super::extents_per_record);
  s.tile_elements = get<std::uint64_t>(bytes, super::tile_elements);
  s.data_bytes = get<std::uint64_t>(bytes, super::data_bytes);
  s.caller_state_bytes_max = get<std::uint64_t>(bytes, super::caller_state_bytes_max);
  s.record_count = get<std::uint32_t>(bytes, super::record_count);
  s.tile_count = get<std::uint64_t>(bytes, super::tile_count);
  s.geometry_checksum = get<std::uint64_t>(bytes, super::geometry_checksum);
  const auto layout_bytes = get<std::uint64_t>(bytes, super::layout_bytes);
  if (layout_bytes > bytes.size() - kSuperblockHeaderBytes) {
    problem = fmt::format("its layout text of {} bytes does not fit its superblock of {}", layout_bytes, bytes.size());
    return std::nullopt;
  }
  const auto stripes_bytes = get<std::uint64_t>(bytes, super::stripes_bytes);
  if (stripes_bytes > bytes.size() - kSuperblockHeaderBytes - layout_bytes) {
    problem =
        fmt::format("its list of drives of {} bytes does not fit its superblock of {}", stripes_bytes, bytes.size());
    return std::nullopt;
  }
  s.checkpoints_max = get<std::uint32_t>(bytes, super::checkpoints_max);
  const char* const text = reinterpret_cast<const char*>(bytes.data()) + kSuperblockHeaderBytes;
  s.layout.assign(text, layout_bytes);
  s.stripes.assign(text + layout_bytes, stripes_bytes);
  constexpr std::uint64_t kSane = 1ull << 52;  // no product below overflows, nor the length of all slots together
  constexpr std::uint32_t kRanksMax = 1u << 24;
  const auto durability = get<std::uint32_t>(bytes, super::durability);
  if (s.world_size < 1 || s.world_size > kRanksMax || s.rank >= s.world_size || durability > 1) {
    problem = fmt::format("it names rank {} of {} and durability {}", s.rank, s.world_size, durability);
    return std::nullopt;
  }
  s.durability = static_cast<Durability>(durability);
  const std::uint32_t extents = s.durability == Durability::none ? 1 : 2 + s.checkpoints_max;
  if (s.checkpoints_max > kCheckpointsMax || s.extents_per_record != extents) {
    problem =
        fmt::format("it names {} checkpoints and {} extents for each record", s.checkpoints_max, s.extents_per_record);
    return std::nullopt;
  }
  if (s.tile_count > kSane || s.caller_state_bytes_max > kSane || s.superblock_bytes() != bytes.size() ||
      s.slot_bytes() != get<std::uint64_t>(bytes, super::slot_bytes)) {
    problem = "its lengths contradict each other";
    return std::nullopt;
  }
  return s;
}

SlotImage::SlotImage(std::span<std::byte> image, const Superblock& superblock)
    : image_(image), superblock_(superblock) {
  HOIST_ASSERT(image.size() == superblock.slot_bytes(), "{} bytes for {}", image.size(), superblock.slot_bytes());
}

void SlotImage::set_record(std::uint32_t record, const RecordEntry& entry) {
  const auto target = image_.subspan(records_at(record), kRecordEntryBytes);
  put(target, 0, entry.extent);
  put(target, 4, entry.tile_count);
  put(target, 8, entry.offset_bytes);
  put(target, 16, entry.w_bytes);
  put(target, 24, entry.s_bytes);
  put(target, 32, entry.generation);
}

RecordEntry SlotImage::record(std::uint32_t record) const {
  const std::span<const std::byte> source = image_.subspan(records_at(record), kRecordEntryBytes);
  return {get<std::uint32_t>(source, 0),  get<std::uint32_t>(source, 4),  get<std::uint64_t>(source, 8),
          get<std::uint64_t>(source, 16), get<std::uint64_t>(source, 24), get<std::uint64_t>(source, 32)};
}

std::vector<std::uint32_t> SlotImage::extents() const {
  std::vector<std::uint32_t> all(superblock_.record_count);
  for (std::uint32_t i = 0; i < superblock_.record_count; ++i) all[i] = record(i).extent;
  return all;
}

void SlotImage::set_checksums(std::uint64_t first, std::span<const std::uint64_t> values) {
  const std::uint64_t at = records_at(superblock_.record_count) + first * sizeof(std::uint64_t);
  const std::span<const std::byte> source = std::as_bytes(values);
  std::copy(source.begin(), source.end(), image_.subspan(at, source.size()).begin());
}

void SlotImage::checksums(std::uint64_t first, std::span<std::uint64_t> values) const {
  const std::uint64_t at = records_at(superblock_.record_count) + first * sizeof(std::uint64_t);
  const std::span<const std::byte> source = image_.subspan(at, values.size_bytes());
  std::copy(source.begin(), source.end(), std::as_writable_bytes(values).begin());
}

std::span<std::byte> SlotImage::caller_state_area() const {
  return image_.subspan(caller_state_at(superblock_), superblock_.caller_state_bytes_max);
}

std::uint64_t SlotImage::seal(const SlotHeader& header) {
  HOIST_ASSERT(header.caller_state_bytes <= superblock_.caller_state_bytes_max, "{} bytes of caller state",
               header.caller_state_bytes);
  const std::uint64_t used_bytes = caller_state_at(superblock_) + header.caller_state_bytes;
  const std::uint64_t written_bytes = round_up(used_bytes, kBlockAlignment);
  const auto head = image_.first(kSlotHeaderBytes);
  std::fill(head.begin(), head.end(), std::byte{0});
  const auto padding = image_.subspan(used_bytes, written_bytes - used_bytes);
  std::fill(padding.begin(), padding.end(), std::byte{0});
  std::memcpy(image_.data(), kSlotMagic, kMagicBytes);
  put(image_, slot::version, kStoreFormatVersion);
  put(image_, slot::incarnation, header.incarnation);
  put(image_, slot::store_number, superblock_.store_number);
  put(image_, slot::step, header.step);
  put(image_, slot::used_bytes, used_bytes);
  put(image_, slot::caller_state_bytes, header.caller_state_bytes);
  put(image_, slot::tile_count, superblock_.tile_count);
  put(image_, slot::record_count, superblock_.record_count);
  put(image_, slot::revision, header.revision);
  put(image_, slot::checkpoint_serial, header.checkpoint_serial);
  HOIST_ASSERT(header.name.size() <= kCheckpointNameBytesMax, "a name of {} bytes", header.name.size());
  put_text(image_, slot::name, header.name);
  put(image_, kChecksumAt, checksum(image_.subspan(kCoveredFrom, used_bytes - kCoveredFrom)));
  return written_bytes;
}

SlotCheck check_slot(std::span<const std::byte> bytes, const Superblock& s) {
  HOIST_ASSERT(bytes.size() == s.slot_bytes(), "{} bytes for {}", bytes.size(), s.slot_bytes());
  SlotCheck check;
  // A crash may tear a slot so that its first block is lost and a later one is not; so check that all of it is blank.
  if (is_blank(bytes)) return check;
  check.state = SlotCheck::State::damaged;
  if (!has_magic(bytes, kSlotMagic)) {
    check.problem = "it does not begin like a commit";
    return check;
  }
  if (check.problem = wrong_version(get<std::uint32_t>(bytes, slot::version)); !check.problem.empty()) return check;
  const auto used_bytes = get<std::uint64_t>(bytes, slot::used_bytes);
  if (used_bytes < kSlotHeaderBytes || used_bytes > bytes.size()) {
    check.problem = fmt::format("it claims {} bytes of a slot of {}", used_bytes, bytes.size());
    return check;
  }
  check.problem =
      wrong_checksum(bytes.subspan(kCoveredFrom, used_bytes - kCoveredFrom), get<std::uint64_t>(bytes, kChecksumAt));
  if (!check.problem.empty()) return check;
  const std::string_view name(reinterpret_cast<const char*>(bytes.data()) + slot::name, kCheckpointNameBytesMax);
  check.header = {{.step = get<std::uint64_t>(bytes, slot::step),
                   .incarnation = get<std::uint32_t>(bytes, slot::incarnation),
                   .revision = get<std::uint32_t>(bytes, slot::revision),
                   .name = std::string(name.substr(0, name.find('\0'))),
                   .checkpoint_serial = get<std::uint64_t>(bytes, slot::checkpoint_serial)},
                  get<std::uint64_t>(bytes, slot::caller_state_bytes)};
  if (get<std::uint64_t>(bytes, slot::store_number) != s.store_number)
    check.problem = "it belongs to another store";
  else if (get<std::uint32_t>(bytes, slot::record_count) != s.record_count ||
           get<std::uint64_t>(bytes, slot::tile_count) != s.tile_count ||
           check.header.caller_state_bytes > s.caller_state_bytes_max ||
           used_bytes != caller_state_at(s) + check.header.caller_state_bytes)
    check.problem = "its lengths contradict the superblock";
  else if (const std::string& given = check.header.name; !given.empty() && !checkpoint_name_problem(given).empty())
    check.problem = fmt::format("the name of its checkpoint is wrong: {}", checkpoint_name_problem(given));
  if (check.problem.empty()) check.state = SlotCheck::State::valid;
  return check;
}

std::string checkpoint_name_problem(std::string_view name) {
  if (name.empty()) return "it is empty";
  if (name.size() > kCheckpointNameBytesMax)
    return fmt::format("it has {} bytes; at most {}", name.size(), kCheckpointNameBytesMax);
  return has_control_characters(name) ? "it has control characters" : "";
}

}  // namespace hoist::tiers
