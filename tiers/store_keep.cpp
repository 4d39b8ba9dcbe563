// SPDX-License-Identifier: Apache-2.0
// Steps kept under a name: each has a slot of the manifest beyond those of the commits, and holds its records' extents,
// so that nothing is written over them. The newest is whole before an older one goes. A commit held for a reader holds
// extents alike, in this process only.
#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tiers/detail/held_commit.hpp>
#include <hoist/tiers/detail/store_impl.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/tiers/store_reader.hpp>

namespace hoist::tiers {

void Store::Impl::list_kept() {
  std::ranges::sort(kept_, {}, [](const Kept& kept) { return kept.header.kept_serial; });
  kept_listed_ = kept_;
}

std::vector<CommitHeader> Store::Impl::kept() const {
  const std::lock_guard lock(mutex_);
  std::vector<CommitHeader> headers;
  for (const Kept& kept : kept_listed_) headers.push_back(kept.header);
  return headers;
}

std::vector<CommitHeader> Store::Impl::kept_apart_from(const CorruptionError::Where& damage) const {
  const std::lock_guard lock(mutex_);
  const std::vector<std::string> paths = data_paths();
  const auto drive = std::ranges::find(paths, damage.path);
  std::vector<CommitHeader> headers;
  if (drive == paths.end()) return headers;
  const std::uint32_t extent = table_.extent_at(
      files_.data->layout().logical_offset(static_cast<unsigned>(drive - paths.begin()), damage.offset_bytes));
  for (const Kept& kept : kept_listed_) {
    if (std::ranges::find(kept.extents, extent) == kept.extents.end()) headers.push_back(kept.header);
  }
  return headers;
}

void Store::Impl::hold_kept() {
  std::erase_if(kept_, [&](const Kept& kept) {
    const std::string problem = table_.hold(kept.extents);
    if (!problem.empty())
      damage_.push_back(fmt::format("the kept step '{}' in slot {} of {} cannot be used: {}", kept.header.name,
                                    kept.slot, paths_.manifest, problem));
    return !problem.empty();
  });
  list_kept();
}

Completion Store::Impl::keep(const std::string& name, std::span<const std::byte> caller_state, Agree agree) {
  const std::lock_guard lock(mutex_);
  if (failed_) std::rethrow_exception(failed_);
  HOIST_ASSERT(!step_open_ && kept_steps_max() > 0, "step {} cannot be kept", step_);
  HOIST_ASSERT(committing_ || committed_step_, "a step is kept before the first commit of {}", paths_.directory);
  if (const std::string problem = wrong_step_name(name); !problem.empty())
    throw UsageError(fmt::format("'{}' cannot be the name of a step: {}", name, problem));
  if (caller_state.size() > superblock_.caller_state_bytes_max)
    throw UsageError(fmt::format("the caller state is {} bytes long, and the store has room for {}",
                                 caller_state.size(), superblock_.caller_state_bytes_max));
  SlotHeader header{.incarnation = incarnation_, .caller_state_bytes = caller_state.size(), .name = name};
  jobs_.push_back({header, std::move(agree), {}, true, {caller_state.begin(), caller_state.end()}});
  const Completion completion = jobs_.back().promise.completion();
  committing_ = true;
  wake_.notify_all();
  return completion;
}

void Store::Impl::forget(std::uint64_t kept_serial) {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [&] { return !committing_; });
  if (failed_) std::rethrow_exception(failed_);
  const auto found = std::ranges::find(kept_, kept_serial, [](const Kept& kept) { return kept.header.kept_serial; });
  if (found == kept_.end()) return;
  give_up(found);
  list_kept();
}

void Store::Impl::blank_slot(std::uint32_t slot) {
  std::memset(image_.span().data(), 0, image_.span().size());
  engine_.write(*files_.manifest, superblock_.slot_offset(slot), image_.span(), aio::Priority::foreground).wait();
  engine_.sync(*files_.manifest).wait();
}

std::uint32_t Store::Impl::free_kept_slot() const {
  std::uint32_t slot = kSlotCount;
  const auto used = [&] { return std::ranges::find(kept_, slot, &Kept::slot) != kept_.end(); };
  while (used()) ++slot;
  HOIST_ASSERT(slot < superblock_.slot_count(), "{} kept steps have no free slot", kept_.size());
  return slot;
}

void Store::Impl::write_kept(const Job& job) {
  const TraceSpan span(trace_, TraceRow::commit, "keep");
  SlotHeader header = job.header;
  header.step = *committed_step_;
  header.revision = revision_;
  header.kept_serial = kept_.empty() ? 1 : kept_.back().header.kept_serial + 1;
  const std::uint32_t slot = free_kept_slot();
  std::copy(job.state.begin(), job.state.end(), SlotImage(image_.span(), superblock_).caller_state_area().begin());
  write_slot(slot, header);
  SlotCheck written;
  written.header = header;
  kept_.push_back({detail::commit_header(written), slot, table_.committed_extents()});
  const std::string problem = table_.hold(kept_.back().extents);
  HOIST_ASSERT(problem.empty(), "{}", problem);
}

void Store::Impl::make_room(const CommitHeader& newest) {
  auto goes = std::ranges::find_if(kept_, [&](const Kept& kept) {
    return kept.header.name == newest.name && kept.header.kept_serial != newest.kept_serial;
  });
  if (goes == kept_.end()) {
    if (kept_.size() <= kept_steps_max()) return;
    goes = kept_.begin();
  }
  give_up(goes);
}

void Store::Impl::give_up(std::vector<Kept>::iterator kept) {
  blank_slot(kept->slot);
  table_.let_go(kept->extents);
  kept_.erase(kept);
}

std::unique_ptr<StoreReader> Store::Impl::hold() {
  const std::lock_guard lock(mutex_);
  if (failed_) std::rethrow_exception(failed_);
  HOIST_ASSERT(held_max_ > 0 && held_ == 0, "{} commits of {} are held, of {}", held_.load(), paths_.directory,
               held_max_);
  HOIST_ASSERT(!step_open_ && committed_step_, "no commit of {} can be held", paths_.directory);
  std::vector<std::uint32_t> extents = table_.committed_extents();
  if (const std::string problem = table_.hold(extents); !problem.empty()) throw StoreError(problem);
  ++held_;
  const auto let_go = [this, extents = std::move(extents)] {
    table_.let_go(extents);
    --held_;
  };
  try {
    return std::make_unique<StoreReader>(
        detail::HeldCommit{.superblock = superblock_,
                           .directory = paths_.directory,
                           .records = {table_.records().begin(), table_.records().end()},
                           .commit = {.step = *committed_step_, .incarnation = incarnation_, .revision = revision_},
                           .engine = engine_,
                           .data = *files_.data,
                           .let_go = let_go});
  } catch (...) {
    let_go();
    throw;
  }
}

}  // namespace hoist::tiers
