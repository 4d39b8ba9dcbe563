// SPDX-License-Identifier: Apache-2.0
// Named checkpoints: each has a slot of the manifest beyond those of the commits, and holds its records' extents,
// so that nothing is written over them. A new checkpoint is durable before an older one is removed. A commit that
// hold() gives to a reader keeps its extents in the same way, but only in this process.
#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/printable.hpp>
#include <hoist/tiers/detail/held_commit.hpp>
#include <hoist/tiers/detail/store_impl.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/tiers/store_reader.hpp>

namespace hoist::tiers {

void Store::Impl::list_checkpoints() {
  std::ranges::sort(checkpoints_, {}, [](const Checkpoint& checkpoint) { return checkpoint.header.checkpoint_serial; });
  listed_ = checkpoints_;
}

std::vector<CommitHeader> Store::Impl::checkpoints() const {
  const MutexLock lock(mutex_);
  std::vector<CommitHeader> headers;
  for (const Checkpoint& checkpoint : listed_) headers.push_back(checkpoint.header);
  return headers;
}

std::vector<CommitHeader> Store::Impl::checkpoints_apart_from(const CorruptionError::Where& damage) const {
  const MutexLock lock(mutex_);
  const std::vector<std::string> paths = data_paths();
  const auto drive = std::ranges::find(paths, damage.path);
  std::vector<CommitHeader> headers;
  if (drive == paths.end()) return headers;
  const std::uint32_t extent = table_.extent_at(
      files_.data->layout().logical_offset(static_cast<unsigned>(drive - paths.begin()), damage.offset_bytes));
  for (const Checkpoint& checkpoint : listed_) {
    if (std::ranges::find(checkpoint.extents, extent) == checkpoint.extents.end()) headers.push_back(checkpoint.header);
  }
  return headers;
}

void Store::Impl::hold_checkpoint() {
  std::erase_if(checkpoints_, [&](const Checkpoint& checkpoint) {
    const std::string problem = table_.hold(checkpoint.extents);
    if (!problem.empty())
      damage_.push_back({fmt::format("the named checkpoint '{}' in slot {} of {} cannot be used: {}",
                                     checkpoint.header.name, checkpoint.slot, paths_.manifest, problem),
                         /*is_of_checkpoint=*/true});
    return !problem.empty();
  });
  list_checkpoints();
}

Completion Store::Impl::add_checkpoint(const std::string& name, std::span<const std::byte> caller_state, Agree agree) {
  const MutexLock lock(mutex_);
  if (failed_) std::rethrow_exception(failed_);
  HOIST_ASSERT(!step_open_ && checkpoints_max() > 0, "step {} cannot become a checkpoint", step_);
  HOIST_ASSERT(committing_ || committed_step_, "a checkpoint is made before the first commit of {}", paths_.directory);
  if (const std::string problem = checkpoint_name_problem(name); !problem.empty())
    throw UsageError(fmt::format("'{}' cannot be the name of a step: {}", on_one_line(name), problem));
  require_room(caller_state);
  const SlotHeader header{{.incarnation = incarnation_, .name = name}, caller_state.size()};
  return enqueue({header, std::move(agree), {}, Job::Kind::checkpoint, {caller_state.begin(), caller_state.end()}});
}

void Store::Impl::remove_checkpoint(std::uint64_t checkpoint_serial) {
  MutexLock lock(mutex_);
  idle_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return !committing_; });
  if (failed_) std::rethrow_exception(failed_);
  const auto found = std::ranges::find(checkpoints_, checkpoint_serial, [](const Checkpoint& checkpoint) {
    return checkpoint.header.checkpoint_serial;
  });
  if (found == checkpoints_.end()) return;
  try {
    remove(found);
  } catch (...) {
    failed_ = std::current_exception();
    throw;
  }
  list_checkpoints();
}

void Store::Impl::blank_slot(std::uint32_t slot) {
  std::memset(image_.span().data(), 0, image_.span().size());
  queue_.write(*files_.manifest, superblock_.slot_offset(slot), image_.span(), aio::Priority::foreground).wait();
  queue_.sync(*files_.manifest).wait();
}

std::uint32_t Store::Impl::free_checkpoint_slot() const {
  std::uint32_t slot = kSlotCount;
  const auto used = [&] { return std::ranges::find(checkpoints_, slot, &Checkpoint::slot) != checkpoints_.end(); };
  while (used()) ++slot;
  HOIST_ASSERT(slot < superblock_.slot_count(), "{} named checkpoints have no free slot", checkpoints_.size());
  return slot;
}

void Store::Impl::write_checkpoint(const Job& job) {
  const TraceSpan span(trace_, TraceRow::commit, "keep");
  SlotHeader header = job.header;
  header.step = *committed_step_;
  header.revision = revision_;
  header.checkpoint_serial = checkpoints_.empty() ? 1 : checkpoints_.back().header.checkpoint_serial + 1;
  const std::uint32_t slot = free_checkpoint_slot();
  std::copy(job.state.begin(), job.state.end(), SlotImage(image_.span(), superblock_).caller_state_area().begin());
  write_slot(slot, header);
  checkpoints_.push_back({header, slot, table_.committed_extents()});
  const std::string problem = table_.hold(checkpoints_.back().extents);
  HOIST_ASSERT(problem.empty(), "{}", problem);
}

void Store::Impl::remove_oldest(const CommitHeader& newest) {
  auto goes = std::ranges::find_if(checkpoints_, [&](const Checkpoint& checkpoint) {
    return checkpoint.header.name == newest.name && checkpoint.header.checkpoint_serial != newest.checkpoint_serial;
  });
  if (goes == checkpoints_.end()) {
    if (checkpoints_.size() <= checkpoints_max()) return;
    goes = checkpoints_.begin();
  }
  remove(goes);
}

void Store::Impl::remove(std::vector<Checkpoint>::iterator checkpoint) {
  blank_slot(checkpoint->slot);
  table_.release(checkpoint->extents);
  checkpoints_.erase(checkpoint);
}

std::unique_ptr<StoreReader> Store::Impl::hold() {
  const MutexLock lock(mutex_);
  if (failed_) std::rethrow_exception(failed_);
  HOIST_ASSERT(held_max_ > 0 && held_ == 0, "{} commits of {} are held, of {}", held_.load(), paths_.directory,
               held_max_);
  HOIST_ASSERT(!step_open_ && committed_step_, "no commit of {} can be held", paths_.directory);
  std::vector<std::uint32_t> extents = table_.committed_extents();
  if (const std::string problem = table_.hold(extents); !problem.empty()) throw StoreError(problem);
  ++held_;
  const auto release = [this, extents = std::move(extents)] {
    table_.release(extents);
    --held_;
  };
  try {
    return std::make_unique<StoreReader>(
        detail::HeldCommit{.superblock = superblock_,
                           .directory = paths_.directory,
                           .records = {table_.records().begin(), table_.records().end()},
                           .commit = {.step = *committed_step_, .incarnation = incarnation_, .revision = revision_},
                           .queue = queue_,
                           .data = *files_.data,
                           .release = release});
  } catch (...) {
    release();
    throw;
  }
}

}  // namespace hoist::tiers
