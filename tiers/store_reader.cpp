// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <tuple>

#include <fmt/format.h>

#include <hoist/aio/transfer_memory.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tiers/detail/held_commit.hpp>
#include <hoist/tiers/detail/manifest_view.hpp>
#include <hoist/tiers/detail/record_table.hpp>
#include <hoist/tiers/detail/store_drives.hpp>
#include <hoist/tiers/store_changed_error.hpp>
#include <hoist/tiers/store_reader.hpp>

namespace hoist::tiers {

namespace {

// How long the last transfers of a process that was killed may still hold its lock.
constexpr Nanoseconds kLockTimeout = std::chrono::seconds(2);

Superblock superblock_of(const detail::StorePaths& paths, int rank, std::span<const StoreRecord> records) {
  detail::ManifestView view = detail::view_manifest(paths.manifest);
  if (!view.exists) throw StoreError(fmt::format("there is no store in {}", paths.directory));
  if (!view.damage.empty()) throw StoreError(fmt::format("{} cannot be used: {}", paths.manifest, view.damage));
  Superblock superblock = std::move(*view.superblock);
  if (superblock.rank != static_cast<std::uint32_t>(rank))
    throw StoreError(fmt::format("{} was written by rank {}, and has the name of rank {}'s: rename the file back",
                                 paths.manifest, superblock.rank, rank));
  if (superblock.durability == Durability::none)
    throw StoreError(
        fmt::format("the store in {} was made with durability 'none' and holds no commit", paths.directory));
  if (superblock.record_count != records.size() || superblock.geometry_checksum != detail::geometry_checksum(records))
    throw StoreError(
        fmt::format("the store in {} divides its model into other records than this version does", paths.directory));
  return superblock;
}

std::unique_ptr<aio::File> open_to_read(const detail::StorePaths& paths, StoreReader::Lock lock) {
  if (lock == StoreReader::Lock::shared) return detail::open_shared(paths, kLockTimeout);
  return std::make_unique<aio::File>(paths.data, aio::FileOptions{.mode = aio::OpenMode::read_only});
}

// The data on all drives, further ones where the superblock says they were, or in one of `elsewhere`.
std::unique_ptr<aio::StripedFile> open_data(aio::File first, const Superblock& superblock,
                                            const detail::StorePaths& paths, int rank, aio::DriveQueue& queue,
                                            StoreReader::Lock lock, std::span<const std::string> elsewhere) {
  const detail::Stripes stripes = detail::decode_stripes(superblock.stripes, paths.manifest);
  const unsigned drive_count = stripes.layout.drive_count();
  std::vector<aio::StripeDrive> files;
  files.push_back({&queue, std::move(first)});
  for (unsigned d = 1; d < drive_count; ++d) {
    const std::string& made_in = stripes.directories[d - 1];
    const auto drive =
        detail::find_drive(made_in, elsewhere, rank, {superblock.store_number, d, drive_count, paths.directory});
    if (!drive)
      throw StoreError(
          fmt::format("drive {} of {} of the store in {} is not in {}, where it was when the store was made: mount it "
                      "there, or make a symbolic link there to its directory",
                      d, drive_count, paths.directory, made_in));
    files.push_back({&queue, std::move(*open_to_read(*drive, lock))});
  }
  for (unsigned d = 0; d < drive_count; ++d)
    detail::check_length(files[d].file, stripes.layout.drive_bytes(d, superblock.data_bytes));
  return std::make_unique<aio::StripedFile>(stripes.layout, std::move(files));
}

}  // namespace

class StoreReader::Impl {
 public:
  Impl(const std::string& directory, int rank, std::vector<StoreRecord> records, const CommitHeader& commit,
       aio::DriveQueue& queue, Lock lock, std::span<const std::string> drives)
      : queue_(queue),
        paths_(directory, rank),
        first_(open_to_read(paths_, lock)),
        superblock_(superblock_of(paths_, rank, records)),
        own_data_(open_data(std::move(*first_), superblock_, paths_, rank, queue, lock, drives)),
        data_(*own_data_),
        table_(std::move(records), Durability::step, superblock_.extents_per_record, superblock_.store_number) {
    load(commit);
  }
  explicit Impl(detail::HeldCommit held)
      : queue_(held.queue),
        paths_(held.directory, static_cast<int>(held.superblock.rank)),
        superblock_(held.superblock),
        data_(held.data),
        priority_(aio::Priority::background),
        table_(std::move(held.records), Durability::step, superblock_.extents_per_record, superblock_.store_number) {
    load(held.commit);
    release_ = std::move(held.release);  // if this fails, the caller releases
  }
  ~Impl() {
    if (release_) release_();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  std::vector<CorruptionError::Where> read(RecordId record, Region region, std::uint32_t first, std::uint32_t count,
                                           std::span<std::byte> target) {
    if (target.empty()) return {};
    const auto run = table_.readable_run(record, region, first, first + count);
    data_.read(run.offset_bytes, target, priority_).wait();
    bytes_read_ += target.size();
    return table_.damage(record, region, first, count, target, data_);
  }

  std::uint64_t fingerprint(RecordId record) const { return table_.fingerprint(record); }
  std::uint64_t bytes_read() const { return bytes_read_; }

  std::span<const std::byte> caller_state() const { return caller_state_; }

  StoreOptions options() const {
    return {.directory = {},
            .identity = {.layout = superblock_.layout,
                         .rank = static_cast<int>(superblock_.rank),
                         .world_size = static_cast<int>(superblock_.world_size)},
            .records = {table_.records().begin(), table_.records().end()},
            .caller_state_bytes_max = superblock_.caller_state_bytes_max,
            .checkpoints_max = superblock_.checkpoints_max,
            .store_number = superblock_.store_number};
  }

  std::uint64_t memory_bytes() const {
    return sizeof *this + caller_state_.size() + superblock_.layout.size() +
           detail::RecordTable::memory_bytes(table_.records(), Durability::step, superblock_.extents_per_record);
  }

 private:
  void load(const CommitHeader& commit) {
    const aio::File manifest(paths_.manifest, {.mode = aio::OpenMode::read_only});
    const aio::TransferMemory bytes(superblock_.slot_bytes());
    for (std::uint32_t slot = 0; slot < superblock_.slot_count(); ++slot) {
      queue_.read(manifest, superblock_.slot_offset(slot), bytes.span(), aio::Priority::foreground).wait();
      bytes_read_ += bytes.span().size();
      const SlotCheck check = check_slot(bytes.span(), superblock_);
      const bool wanted = check.state == SlotCheck::State::valid && check.header == commit;
      if (!wanted) continue;
      const SlotImage image(bytes.span(), superblock_);
      if (const std::string problem = table_.load(image); !problem.empty())
        throw StoreError(
            fmt::format("the commit of step {} in {} cannot be used: {}", commit.step, paths_.manifest, problem));
      const auto state = image.caller_state_area().first(check.header.caller_state_bytes);
      caller_state_.assign(state.begin(), state.end());
      return;
    }
    throw StoreChangedError(
        fmt::format("the store in {} holds no commit of step {} any more: another process has trained here since this "
                    "one looked; start again",
                    paths_.directory, commit.step));
  }

  aio::DriveQueue& queue_;
  const detail::StorePaths paths_;
  const std::unique_ptr<aio::File> first_;  // its lock, if any, is taken before anything is believed; then empty
  const Superblock superblock_;
  const std::unique_ptr<aio::StripedFile> own_data_;  // null for a commit that an open store holds
  aio::StripedFile& data_;
  const aio::Priority priority_ = aio::Priority::foreground;
  detail::RecordTable table_;
  std::vector<std::byte> caller_state_;
  std::function<void()> release_;
  std::uint64_t bytes_read_ = 0;
};

StoreReader::StoreReader(detail::HeldCommit commit) : impl_(std::make_unique<Impl>(std::move(commit))) {}
StoreReader::StoreReader(const std::string& directory, int rank, std::vector<StoreRecord> records,
                         const CommitHeader& commit, aio::DriveQueue& queue, Lock lock,
                         std::span<const std::string> drives)
    : impl_(std::make_unique<Impl>(directory, rank, std::move(records), commit, queue, lock, drives)) {}
StoreReader::~StoreReader() = default;

void StoreReader::read(RecordId record, Region region, std::uint32_t first, std::uint32_t count,
                       std::span<std::byte> target) {
  const auto damaged = impl_->read(record, region, first, count, target);
  if (!damaged.empty()) throw CorruptionError(damaged.front());
}

std::vector<CorruptionError> StoreReader::check(RecordId record, Region region, std::uint32_t first,
                                                std::uint32_t count, std::span<std::byte> target) {
  std::vector<CorruptionError> errors;
  for (CorruptionError::Where& where : impl_->read(record, region, first, count, target))
    errors.emplace_back(std::move(where));
  return errors;
}

std::uint64_t StoreReader::fingerprint(RecordId record) const { return impl_->fingerprint(record); }

std::span<const std::byte> StoreReader::caller_state() const { return impl_->caller_state(); }

StoreOptions StoreReader::options() const { return impl_->options(); }

std::uint64_t StoreReader::memory_bytes() const { return impl_->memory_bytes(); }
std::uint64_t StoreReader::bytes_read() const { return impl_->bytes_read(); }

}  // namespace hoist::tiers
