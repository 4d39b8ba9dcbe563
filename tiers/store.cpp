// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/tiers/detail/held_commit.hpp>
#include <hoist/tiers/detail/manifest_view.hpp>
#include <hoist/tiers/detail/store_impl.hpp>
#include <hoist/tiers/scratch.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/tiers/store_reader.hpp>

namespace hoist::tiers {

Store::Impl::Impl(const StoreOptions& options, Superblock superblock, detail::StorePaths paths, aio::DriveQueue& queue)
    : queue_(queue),
      superblock_(std::move(superblock)),
      paths_(std::move(paths)),
      durability_(options.durability),
      held_max_(options.durability == Durability::step ? options.held_commits_max : 0),
      trace_(options.trace),
      table_(options.records, options.durability, superblock_.extents_per_record, superblock_.store_number),
      image_(superblock_.slot_bytes()) {
  if (durability_ == Durability::step) caller_state_.reserve(superblock_.caller_state_bytes_max);
}

Store::Impl::~Impl() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();  // after a commit that was started
  if (!detail::drain_or_leak(transfers_, paths_.directory, files_.data, files_.manifest) || !files_.data) return;
  if (drive_gave_up()) return;  // removing a name would wait for it
  ::unlink(paths_.lock_info.c_str());
  for (unsigned drive = 0; drive < files_.data->layout().drive_count(); ++drive) files_.data->file(drive).unlock();
}

bool Store::Impl::drive_gave_up() const { return queue_.gave_up() || (files_.data && files_.data->gave_up()); }

std::uint64_t Store::Impl::memory_bytes(const StoreOptions& options, const Superblock& superblock) {
  std::uint64_t bytes = sizeof(Impl) + sizeof(detail::Transfers) + sizeof(aio::File) + sizeof(aio::StripedFile);
  bytes += detail::RecordTable::memory_bytes(options.records, options.durability, superblock.extents_per_record);
  bytes += superblock.layout.size() + superblock.slot_bytes();
  if (options.durability == Durability::step) bytes += superblock.caller_state_bytes_max;
  if (options.held_commits_max > 0) bytes += detail::held_commit_bytes(options.records, superblock);
  return bytes;
}

void Store::Impl::use(Files files) {
  files_ = std::move(files);
  for (unsigned drive = 0; drive < files_.data->layout().drive_count(); ++drive) names_.add(files_.data->file(drive));
  names_.add(*files_.manifest);
}

void Store::Impl::start_new(Files files, std::vector<std::string> directories_to_flush,
                            std::vector<std::string> made_directories,
                            std::vector<detail::LabelledDrive> labels_to_write) {
  use(std::move(files));
  made_directories_ = std::move(made_directories);
  labels_to_write_ = std::move(labels_to_write);
  directories_to_flush_ = std::move(directories_to_flush);
  adopted_ = true;
  thread_ = start_thread("hoist-commit", [this] { commit_loop(); });
}

// The data first: data without a manifest would be taken for those of a store that has lost it.
void Store::Impl::remove_new() noexcept {
  if (drive_gave_up()) return;  // removing a name would wait for it
  names_.remove();
  for (const detail::LabelledDrive& drive : labels_to_write_) ::unlink(drive.paths.label.c_str());
  ::unlink(paths_.lock_info.c_str());
  for (const std::string& directory : made_directories_) ::rmdir(directory.c_str());
}

bool Store::Impl::remove_remains() noexcept {
  if (drive_gave_up() || !names_.are_some_gone()) return false;
  names_.remove();
  ::unlink(paths_.lock_info.c_str());
  return true;
}

void Store::Impl::start_existing(Files files) {
  use(std::move(files));
  for (std::uint32_t slot = 0; slot < superblock_.slot_count(); ++slot) {
    read_slot(slot);
    slots_.push_back(check_slot(image_.span(), superblock_));
    if (slots_[slot].state != SlotCheck::State::valid) continue;
    incarnation_ = std::max(incarnation_, slots_[slot].header.incarnation);
    if (slot >= kSlotCount && slots_[slot].header.checkpoint_serial != 0)
      checkpoints_.push_back({slots_[slot].header, slot, SlotImage(image_.span(), superblock_).extents()});
  }
  list_checkpoints();
  found_ = detail::commits_in(slots_);
  damage_ = detail::damaged_slots(slots_, paths_.manifest);
  thread_ = start_thread("hoist-commit", [this] { commit_loop(); });
}

void Store::Impl::read_slot(std::uint32_t slot) {
  queue_.read(*files_.manifest, superblock_.slot_offset(slot), image_.span(), aio::Priority::foreground).wait();
}

void Store::Impl::write_slot(std::uint32_t slot, const SlotHeader& header) {
  names_.check();
  SlotImage image(image_.span(), superblock_);
  table_.fill(image);
  const std::uint64_t bytes = image.seal(header);
  queue_.write(*files_.manifest, superblock_.slot_offset(slot), image_.span().first(bytes), aio::Priority::foreground)
      .wait();
  queue_.sync(*files_.manifest).wait();
}

void Store::Impl::load_slot(std::uint32_t slot) {
  read_slot(slot);
  const SlotCheck check = check_slot(image_.span(), superblock_);
  std::string problem = check.problem;
  if (check.state == SlotCheck::State::valid && check.header == slots_[slot].header) {
    const SlotImage image(image_.span(), superblock_);
    problem = table_.load(image);
    const auto state = image.caller_state_area().first(check.header.caller_state_bytes);
    caller_state_.assign(state.begin(), state.end());
  } else if (problem.empty()) {
    problem = "it changed since the store was opened";
  }
  if (!problem.empty())
    throw StoreError(fmt::format("the commit of step {} in slot {} of {} cannot be used: {}", slots_[slot].header.step,
                                 slot, paths_.manifest, problem));
}

void Store::Impl::load(const CommitHeader& commit) {
  const MutexLock lock(mutex_);
  load_commit(commit);
}

std::uint32_t Store::Impl::load_commit(const CommitHeader& commit) {
  if (failed_) std::rethrow_exception(failed_);
  HOIST_ASSERT(!adopted_, "the store in {} has a current state already", paths_.directory);
  const auto is_commit = [&](const SlotCheck& slot) {
    return slot.state == SlotCheck::State::valid && slot.header == commit;
  };
  const auto found = std::find_if(slots_.begin(), slots_.end(), is_commit);
  if (found == slots_.end())
    throw StoreError(fmt::format("the store in {} holds no commit of step {} (revision {}, incarnation {})",
                                 paths_.directory, commit.step, commit.revision, commit.incarnation));
  const auto slot = static_cast<std::uint32_t>(found - slots_.begin());
  load_slot(slot);
  return slot;
}

void Store::Impl::verify_records(std::span<std::byte> buffer, const std::function<bool()>& go_on) {
  for (std::uint32_t r = 0; r < table_.records().size(); ++r) {
    const RecordId record{r};
    const auto tiles = static_cast<std::uint32_t>(table_.record(record).layout.tiles().size());
    for (const Region region : {Region::weights, Region::state}) {
      const auto bytes_of = [&](std::uint32_t first, std::uint32_t count) {
        return table_.range_bytes(record, region, first, count);
      };
      for (std::uint32_t first = 0, count = 0; first < tiles; first += count) {
        if (!go_on()) return;
        count = 1;
        while (first + count < tiles && bytes_of(first, count + 1) <= buffer.size()) ++count;
        const auto piece = buffer.first(bytes_of(first, count));
        read(record, region, first, count, piece, aio::Priority::foreground).wait();
        verify(record, region, first, count, piece);
      }
    }
  }
}

void Store::Impl::adopt(const CommitHeader& commit) {
  const MutexLock lock(mutex_);
  const std::uint32_t slot = load_commit(commit);
  hold_checkpoint();
  // Does not overwrite the newest commit until this one is durable.
  const bool newest_in_0 = !found_.commits.empty() && slots_[0].state == SlotCheck::State::valid &&
                           slots_[0].header == found_.commits.front();
  const std::uint32_t other = slot < kSlotCount ? 1 - slot : (newest_in_0 ? 1 : 0);
  try {
    // The previous process may have died between writing this manifest and flushing it. It must be durable before the
    // other slot, until then the only one that certainly is, is overwritten. (Its data is durable: it was flushed
    // before the manifest was written.)
    queue_.sync(*files_.manifest).wait();
    write_slot(other, {{.step = commit.step, .incarnation = incarnation_ + 1, .revision = commit.revision},
                       caller_state_.size()});
  } catch (...) {
    failed_ = std::current_exception();
    throw;
  }
  ++incarnation_;
  slot_ = other;
  committed_step_ = commit.step;
  revision_ = commit.revision;
  adopted_ = true;
}

std::unique_ptr<Scratch> Store::Impl::make_scratch(std::uint64_t bytes, Queues queues) const {
  ScratchOptions options{.layout = files_.data->layout(), .bytes = bytes, .trace = trace_};
  for (const std::string& data : data_paths()) options.paths.push_back(detail::scratch_path(data));
  return std::make_unique<Scratch>(options, queues);
}

Completion Store::Impl::read(RecordId record, Region region, std::uint32_t first, std::uint32_t count,
                             std::span<std::byte> target, aio::Priority priority) {
  const std::uint64_t bytes = table_.range_bytes(record, region, first, count);
  HOIST_ASSERT(target.size() == bytes, "{} bytes of room for {}", target.size(), bytes);
  if (bytes == 0) return {};
  const auto start = [&](const detail::RecordTable::Run& run) {
    const auto part = target.first(run.length_bytes);
    target = target.subspan(run.length_bytes);
    if (run.length_bytes == 0) return Completion{};
    return detail::drawn(trace_, TraceRow::nvme_read, table_.record(record).unit, run.length_bytes,
                         transfers_->read([&] { return files_.data->read(run.offset_bytes, part, priority); }));
  };
  const std::uint32_t end = first + count;
  auto run = table_.readable_run(record, region, first, end);
  if (run.tile_count == count) return start(run);
  std::vector<Completion> parts{start(run)};  // partly rewritten: rare
  for (first += run.tile_count; first < end; first += run.tile_count) {
    run = table_.readable_run(record, region, first, end);
    parts.push_back(start(run));
  }
  return when_all(parts);
}

void Store::Impl::verify(RecordId record, Region region, std::uint32_t first, std::uint32_t count,
                         std::span<const std::byte> bytes) const {
  const auto damaged = table_.damage(record, region, first, count, bytes, *files_.data);
  if (!damaged.empty()) throw CorruptionError(damaged.front());
}

void Store::Impl::begin_step(std::uint64_t step, std::uint32_t revision) {
  MutexLock lock(mutex_);
  idle_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return !committing_; });
  if (failed_) std::rethrow_exception(failed_);
  if (step_open_) return continue_step(step);
  HOIST_ASSERT(adopted_, "step {} begins before a commit of {} was adopted", step, paths_.directory);
  HOIST_ASSERT(checkpoints_.size() <= checkpoints_max(), "{} named checkpoints leave no extents to write to",
               checkpoints_.size());
  HOIST_ASSERT(!committed_step_ || step >= *committed_step_, "step {} begins after step {} was committed", step,
               *committed_step_);
  revision_ = std::max(revision, committed_step_ == step ? revision_ + 1 : 0);
  step_ = step;
  table_.begin_step(step);
  step_open_ = true;
}

void Store::Impl::continue_step(std::uint64_t step) {
  HOIST_ASSERT(step >= step_, "step {} begins inside step {}", step, step_);
  try {
    transfers_->wait_for_writes();  // two writes to one place may be done in any order
  } catch (...) {
    failed_ = std::current_exception();
    throw;
  }
  if (step > step_) revision_ = 0;
  step_ = step;
}

std::uint64_t Store::Impl::checksum(RecordId record, Region region, std::uint32_t tile,
                                    std::span<const std::byte> bytes) {
  HOIST_ASSERT(step_open_, "a checksum is asked for outside a step");
  const std::uint64_t length = table_.range_bytes(record, region, tile, 1);
  HOIST_ASSERT(bytes.size() == length, "{} bytes for {}", bytes.size(), length);
  if (length == 0) return 0;
  return tile_checksum(table_.next_identity(record, region, tile), bytes);
}

Completion Store::Impl::write(RecordId record, Region region, std::uint32_t first, std::uint32_t count,
                              std::span<const std::byte> source, std::span<const std::uint64_t> checksums,
                              aio::Priority priority) {
  HOIST_ASSERT(step_open_, "unit {} is written outside a step", table_.record(record).unit);
  const std::uint64_t length = table_.range_bytes(record, region, first, count);
  HOIST_ASSERT(source.size() == length, "{} bytes for {}", source.size(), length);
  HOIST_ASSERT(checksums.size() == count, "{} checksums for {} tiles", checksums.size(), count);
  if (length == 0) return {};
  return detail::drawn(trace_, TraceRow::nvme_write, table_.record(record).unit, length, transfers_->write([&] {
    const std::uint64_t offset = table_.start_write(record, region, first, count, checksums);
    return files_.data->write(offset, source, priority);
  }));
}

Completion Store::Impl::commit(std::span<const std::byte> caller_state, Agree agree) {
  const MutexLock lock(mutex_);
  if (failed_) std::rethrow_exception(failed_);
  HOIST_ASSERT(step_open_, "no step is under way");
  if (durability_ == Durability::step) {
    require_room(caller_state);
    if (const std::string problem = table_.incomplete(); !problem.empty())
      throw StoreError(fmt::format("step {} cannot be committed: {}", step_, problem));
    SlotImage image(image_.span(), superblock_);
    std::ranges::copy(caller_state, image.caller_state_area().begin());
  }
  step_open_ = false;
  const CommitHeader header{.step = step_, .incarnation = incarnation_, .revision = revision_};
  return enqueue({{header, caller_state.size()}, std::move(agree), {}});
}

Completion Store::Impl::recommit(std::span<const std::byte> caller_state, Agree agree) {
  const MutexLock lock(mutex_);
  if (failed_) std::rethrow_exception(failed_);
  HOIST_ASSERT(durability_ == Durability::step && !step_open_ && (committing_ || committed_step_),
               "there is no commit of {} to be made again", paths_.directory);
  require_room(caller_state);
  const SlotHeader header{{.incarnation = incarnation_}, caller_state.size()};
  return enqueue({header, std::move(agree), {}, Job::Kind::recommit, {caller_state.begin(), caller_state.end()}});
}

void Store::Impl::require_room(std::span<const std::byte> caller_state) const {
  if (caller_state.size() > superblock_.caller_state_bytes_max)
    throw UsageError(fmt::format("the caller state is {} bytes long, and the store has room for {}",
                                 caller_state.size(), superblock_.caller_state_bytes_max));
}

Completion Store::Impl::enqueue(Job job) {
  const Completion completion = job.promise.completion();
  jobs_.push_back(std::move(job));
  committing_ = true;
  wake_.notify_all();
  return completion;
}

void Store::Impl::make_durable_and_agree(Job& job) {
  try {
    switch (job.kind) {
      case Job::Kind::commit:
        make_durable(job.header);
        break;
      case Job::Kind::recommit:
        write_again(job);
        break;
      case Job::Kind::checkpoint:
        write_checkpoint(job);
        break;
    }
  } catch (...) {
    // The other ranks must not wait for a rank that will never come; this error is the one to report.
    try {
      if (job.agree && durability_ == Durability::step) job.agree(std::current_exception());
    } catch (...) {
    }
    throw;
  }
  if (durability_ == Durability::none) return;
  const TraceSpan span(trace_, TraceRow::commit, "agree");
  if (job.agree) job.agree(nullptr);
  if (job.kind == Job::Kind::checkpoint) remove_oldest(CommitHeader(checkpoints_.back().header));
}

void Store::Impl::make_durable(const SlotHeader& header) {
  {
    const TraceSpan span(trace_, TraceRow::commit, "last writes");
    transfers_->wait_for_writes();
  }
  if (durability_ == Durability::none) return;
  {
    const TraceSpan span(trace_, TraceRow::commit, "flush data");
    files_.data->sync().wait();
  }
  // Once the manifest is written, no drive may look replaceable.
  for (const detail::LabelledDrive& drive : labels_to_write_) detail::write_label(drive.paths, drive.label);
  labels_to_write_.clear();
  for (const std::string& directory : directories_to_flush_) aio::sync_directory(directory);
  directories_to_flush_.clear();
  const TraceSpan span(trace_, TraceRow::commit, "manifest");
  // The first commit goes to both slots, one after the other. Slot 0 therefore stays blank until it is durable in slot
  // 1, and damage to one of them leaves the other.
  if (!committed_step_) write_slot(slot_, header);
  write_slot(1 - slot_, header);
}

// No record has changed since the last commit, whose slot stays as it is.
void Store::Impl::write_again(Job& job) {
  const TraceSpan span(trace_, TraceRow::commit, "manifest");
  job.header.step = *committed_step_;
  job.header.revision = revision_ + 1;
  std::ranges::copy(job.state, SlotImage(image_.span(), superblock_).caller_state_area().begin());
  write_slot(1 - slot_, job.header);
}

void Store::Impl::commit_loop() {
  MutexLock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return !jobs_.empty() || stopping_; });
    if (jobs_.empty()) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    std::exception_ptr error = failed_;  // a named checkpoint of a failed commit fails with it
    lock.unlock();
    try {
      if (!error) make_durable_and_agree(job);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) {
      failed_ = error;
    } else if (job.kind == Job::Kind::checkpoint) {
      list_checkpoints();
    } else {
      if (durability_ == Durability::step) {
        table_.publish();
        slot_ = 1 - slot_;
      }
      committed_step_ = job.header.step;
      revision_ = job.header.revision;
    }
    committing_ = !jobs_.empty();
    idle_.notify_all();
    lock.unlock();
    job.promise.settle(error);
    lock.lock();
  }
}

}  // namespace hoist::tiers
