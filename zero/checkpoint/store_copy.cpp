// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/aio/transfer_memory.hpp>
#include <hoist/core/completion.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/zero/checkpoint/store_copy.hpp>
#include <hoist/zero/layout/record_pieces.hpp>

namespace hoist::detail {

namespace {

// While one buffer is being written, the next piece is read into the other.
class Copier {
 public:
  Copier(tiers::StoreReader& source, tiers::Store& target) : source_(source), target_(target) {}
  ~Copier() {
    for (const Buffer& buffer : buffers_) buffer.written.wait_quietly();  // an error is told by the commit
  }
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  void copy(const RecordPiece& piece) {
    Buffer& buffer = buffers_[turn_++ % buffers_.size()];
    buffer.written.wait();
    const std::span<std::byte> bytes = buffer.memory.first(piece.bytes());
    source_.read(piece.record, piece.region, piece.first, piece.count(), bytes);
    buffer.checksums.clear();
    std::uint64_t offset = 0;
    for (std::uint32_t t = 0; t < piece.count(); ++t) {
      const std::uint64_t length = piece.tiles[t].bytes(piece.region);
      buffer.checksums.push_back(
          target_.checksum(piece.record, piece.region, piece.first + t, bytes.subspan(offset, length)));
      offset += length;
    }
    buffer.written = target_.write(piece.record, piece.region, piece.first, piece.count(), bytes, buffer.checksums,
                                   aio::Priority::background);
  }

 private:
  struct Buffer {
    aio::TransferMemory memory{kPieceBytesMax};
    std::vector<std::uint64_t> checksums;
    Completion written;
  };
  tiers::StoreReader& source_;
  tiers::Store& target_;
  std::array<Buffer, 2> buffers_;
  std::size_t turn_ = 0;
};

// A copy that is there already keeps its drives: they are the further ones that are named, in any order. UsageError
// otherwise. The reader finds those that are elsewhere now by their labels.
void check_drives(const tiers::StoreOptions& target, const tiers::Store::Found& found) {
  const std::vector<std::string>& named = target.stripe_directories;
  const std::vector<std::string>& drives = found.stripe_directories;
  const auto is_named = [&](const std::string& drive) {
    return std::ranges::any_of(named, [&](const std::string& directory) { return is_same_place(directory, drive); });
  };
  if (drives.size() == named.size() && (std::ranges::all_of(drives, is_named) ||
                                        tiers::Store::lacks_a_drive(target.directory, target.identity.rank, {})))
    return;
  throw UsageError(
      fmt::format("{} holds this copy already, and its further drives are {}; name these, or another directory for a "
                  "new copy",
                  target.directory, drives.empty() ? "none" : fmt::format("{}", fmt::join(drives, ", "))));
}

// StoreError unless the destination's commit is a copy of the source's; UsageError if it is one of another step.
void compare(tiers::StoreReader& source, const tiers::StoreOptions& target, const tiers::Store::Found& found,
             std::uint64_t step, const CopyProgress& progress) {
  const auto refuse = [&](std::string_view why) {
    throw StoreError(fmt::format("{} holds another store already: {}; choose another directory, or remove it",
                                 target.directory, why));
  };
  const bool same_run = found.identity && found.store_number == target.store_number &&
                        found.identity->layout == target.identity.layout &&
                        found.identity->world_size == target.identity.world_size;
  if (!same_run) refuse("of another run");
  if (const std::uint64_t copied = found.commits.front().step; copied != step)
    throw UsageError(
        fmt::format("{} holds {} copy of this run, of step {}, and step {} is to be copied; copy to a new "
                    "directory",
                    target.directory, copied < step ? "an older" : "a newer", copied, step));
  check_drives(target, found);
  aio::DriveQueue io(aio::DriveQueueOptions{});
  const aio::TransferMemory here(kPieceBytesMax), there(kPieceBytesMax);
  tiers::StoreReader copy(target.directory, target.identity.rank, target.records, found.commits.front(), io,
                          tiers::StoreReader::Lock::shared, target.stripe_directories);
  for_each_piece(target.records, [&](const RecordPiece& piece) {
    const auto wanted = here.first(piece.bytes()), is = there.first(piece.bytes());
    source.read(piece.record, piece.region, piece.first, piece.count(), wanted);
    copy.read(piece.record, piece.region, piece.first, piece.count(), is);
    if (!std::ranges::equal(wanted, is)) refuse("the same step with other values");
    progress(piece.bytes());
  });
  if (!std::ranges::equal(source.caller_state(), copy.caller_state()))
    refuse("the same step with another program state");
}

}  // namespace

void copy_records(tiers::StoreReader& source, tiers::Store& target, std::span<const tiers::StoreRecord> records,
                  const std::function<bool(tiers::RecordId)>& wanted, const CopyProgress& progress) {
  Copier copier(source, target);
  for_each_piece(records, [&](const RecordPiece& piece) {
    if (!wanted(piece.record)) return;
    copier.copy(piece);
    progress(piece.bytes());
  });
}

bool copy_commit(tiers::StoreReader& source, const tiers::StoreOptions& target, std::uint64_t step,
                 const CopyProgress& progress) {
  const tiers::Store::Found found = tiers::Store::look(target.directory, target.identity.rank);
  if (!found.commits.empty()) {
    compare(source, target, found, step, progress);
    return false;
  }
  aio::DriveQueue io(aio::DriveQueueOptions{});
  const std::vector<aio::DriveQueue*> drives(1 + target.stripe_directories.size(), &io);
  const std::unique_ptr<tiers::Store> store = tiers::Store::create(target, drives);
  try {
    store->begin_step(step);
    copy_records(
        source, *store, target.records, [](tiers::RecordId) { return true; }, progress);
    store->commit(source.caller_state()).wait();
  } catch (...) {
    try {
      if (!io.gave_up() && tiers::Store::look(target.directory, target.identity.rank).commits.empty())
        store->remove_new();
    } catch (const std::exception& error) {
      log_warning("what was copied to {} stays there: {}", target.directory, error.what());
    }
    throw;
  }
  return true;
}

}  // namespace hoist::detail
