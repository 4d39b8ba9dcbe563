// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <hoist/aio/transfer_memory.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/first_difference.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/detail/manifest_view.hpp>
#include <hoist/tiers/detail/store_drives.hpp>
#include <hoist/tiers/detail/store_impl.hpp>
#include <hoist/tiers/store.hpp>

namespace hoist::tiers {

namespace {

using aio::TransferMemory;
using detail::StorePaths;

std::uint64_t random_store_number() {
  std::random_device device;
  std::uint64_t number = 0;
  while (number == 0) number = (std::uint64_t{device()} << 32) | device();
  return number;
}

aio::StripeLayout stripe_layout(const StoreOptions& options) {
  const std::size_t drive_count = options.stripe_directories.size() + 1;
  if (drive_count == 1) return aio::StripeLayout::one_drive();
  std::vector<std::uint32_t> weights = options.stripe_weights;
  if (weights.empty()) weights.assign(drive_count, 1);
  if (weights.size() != drive_count)
    throw UsageError(fmt::format("{} stripe weights for {} drives", weights.size(), drive_count));
  return {options.stripe_unit_bytes, std::move(weights)};
}

// Everything but the store number, which only create() chooses.
Superblock superblock_for(const StoreOptions& options) {
  if (options.directory.empty()) throw UsageError("a store needs a directory");
  const StoreIdentity& identity = options.identity;
  if (identity.world_size < 1 || identity.rank < 0 || identity.rank >= identity.world_size)
    throw UsageError(fmt::format("rank {} of {} ranks cannot have a store", identity.rank, identity.world_size));
  Superblock s;
  s.rank = static_cast<std::uint32_t>(identity.rank);
  s.world_size = static_cast<std::uint32_t>(identity.world_size);
  s.durability = options.durability;
  s.checkpoints_max = options.durability == Durability::step ? options.checkpoints_max + options.held_commits_max : 0;
  if (s.checkpoints_max > kCheckpointsMax)
    throw UsageError(fmt::format("{} checkpoints cannot be kept; at most {}", s.checkpoints_max, kCheckpointsMax));
  s.extents_per_record = options.durability == Durability::step ? 2 + s.checkpoints_max : 1;
  s.tile_elements = kTileElements;
  s.caller_state_bytes_max = options.caller_state_bytes_max;
  s.record_count = static_cast<std::uint32_t>(options.records.size());
  for (const StoreRecord& record : options.records) {
    s.tile_count += record.layout.tiles().size();
    s.data_bytes += s.extents_per_record * record.layout.bytes();
  }
  s.geometry_checksum = detail::geometry_checksum(options.records);
  s.layout = identity.layout;
  s.stripes = detail::encode_stripes(stripe_layout(options),
                                     detail::drive_paths(options.directory, options.stripe_directories, identity.rank));
  return s;
}

const char* durability_name(Durability durability) { return durability == Durability::none ? "none" : "step"; }

// Refuses a stored superblock that is not what `options` describe.
void check_same_model(const Superblock& stored, const Superblock& mine, const StorePaths& paths) {
  const auto refuse = [&](const std::string& why) {
    throw StoreError(fmt::format("the store in {} {}; nothing was changed", paths.directory, why));
  };
  if (stored.world_size != mine.world_size)
    refuse(fmt::format("was written by {} and cannot be continued by {}: start {}", counted(stored.world_size, "rank"),
                       mine.world_size, counted(stored.world_size, "rank")));
  if (stored.rank != mine.rank)
    refuse(fmt::format("was written by rank {}, and its file has the name of rank {}'s: rename the file back",
                       stored.rank, mine.rank));
  if (stored.layout != mine.layout)
    refuse("holds another model: " + first_difference(stored.layout, mine.layout, "stored", "yours"));
  if (stored.tile_elements != mine.tile_elements || stored.record_count != mine.record_count ||
      stored.tile_count != mine.tile_count || stored.geometry_checksum != mine.geometry_checksum)
    refuse(
        fmt::format("holds the same parameters in other records: stored: {} records of {} tiles / yours: {} records "
                    "of {} tiles",
                    stored.record_count, stored.tile_count, mine.record_count, mine.tile_count));
  if (stored.durability == Durability::none)
    refuse("was made with durability 'none' and can hold no commit: remove the directory to start anew");
  if (stored.durability != mine.durability)
    refuse(fmt::format("was made with durability '{}' and cannot be continued with '{}'",
                       durability_name(stored.durability), durability_name(mine.durability)));
  if (stored.checkpoints_max < mine.checkpoints_max)
    refuse(
        fmt::format("has {} places for named checkpoints and a mirror's commit, and {} are asked for "
                    "(hoist.keep_steps, and one with "
                    "hoist.mirror); ask for as many as it has, or start a new store from it",
                    stored.checkpoints_max, mine.checkpoints_max));
  if (stored.caller_state_bytes_max < mine.caller_state_bytes_max)
    refuse(
        fmt::format("has room for {} bytes of caller state, and {} are asked for; ask for {} less "
                    "(hoist.caller_state_max), or start a new store from it",
                    stored.caller_state_bytes_max, mine.caller_state_bytes_max,
                    mine.caller_state_bytes_max - stored.caller_state_bytes_max));
}

[[noreturn]] void throw_unreadable(const StorePaths& paths, const std::string& problem) {
  throw StoreError(
      fmt::format("{} cannot be used: {}; nothing was changed, and its content is not overwritten: "
                  "move the directory away, or remove it",
                  paths.manifest, problem));
}

std::optional<CommitHeader> newest_commit(const detail::ManifestView& view) {
  const Store::Commits found = detail::commits_in(view.slots);
  return found.commits.empty() ? std::nullopt : std::optional(found.commits.front());
}

// Refuses to replace files that hold, or may hold, a training run. `before`: the newest commit before this process had
// the lock.
void refuse_if_committed(const detail::ManifestView& view, const std::optional<CommitHeader>& before,
                         const Superblock& mine, const StorePaths& paths) {
  if (!view.damage.empty()) throw_unreadable(paths, view.damage);
  const Store::Commits found = detail::commits_in(view.slots);
  if (!found.ever_committed) return;
  if (found.commits.empty()) {
    std::string why = "it held commits and none can be read any more";
    for (const ManifestDamage& damage : detail::damaged_slots(view.slots, paths.manifest)) why += "; " + damage.text;
    throw_unreadable(paths, why);
  }
  const bool same = view.superblock->layout == mine.layout;
  const bool is_new = before != found.commits.front();
  const char* remedy = "use another directory, or remove this one";
  if (same)
    remedy = "continue it (Engine::restore(), hoist-gpt --resume, resume=True in Python), or remove the directory";
  if (is_new) remedy = "use another directory";
  if (same && is_new)
    remedy = "start again, with resume (Engine::restore(), hoist-gpt --resume, resume=True in Python)";
  throw StoreError(fmt::format("the store in {} holds step {} of {} model; {}{}", paths.directory,
                               found.commits.front().step, same ? "this" : "another",
                               is_new ? "another process has trained here since this one looked: " : "", remedy));
}

void write_superblock(aio::DriveQueue& queue, const aio::File& manifest, const Superblock& superblock) {
  const TransferMemory buffer(superblock.superblock_bytes());
  encode_superblock(superblock, buffer.span());
  queue.write(manifest, 0, buffer.span(), aio::Priority::foreground).wait();
  queue.sync(manifest).wait();
}

void require_queues(Store::Queues queues, std::size_t drive_count) {
  if (queues.size() != drive_count)
    throw UsageError(fmt::format("{} queues for a store on {} drives", queues.size(), drive_count));
}

// The space of each drive's files.
std::vector<std::uint64_t> drive_needs(const aio::StripeLayout& layout, const Superblock& superblock) {
  std::vector<std::uint64_t> need_bytes;
  for (unsigned d = 0; d < layout.drive_count(); ++d)
    need_bytes.push_back(layout.drive_bytes(d, superblock.data_bytes) + (d == 0 ? superblock.manifest_bytes() : 0));
  return need_bytes;
}

// Makes a new store's files on all its drives; removes them again unless keep() is reached.
class NewFiles {
 public:
  NewFiles(std::vector<StorePaths> drives, const Superblock& superblock, aio::StripeLayout layout)
      : drives_(std::move(drives)), superblock_(superblock), layout_(std::move(layout)) {
    for (const StorePaths& drive : drives_) creations_.push_back(std::make_unique<detail::Creation>(drive));
  }

  // Takes and holds the locks. Existing files may be replaced if they never held a commit.
  void claim(const StoreOptions& options) {
    const auto before = newest_commit(detail::view_manifest(drives_.front().manifest));
    for (const auto& creation : creations_) creation->claim(options.lock_timeout);
    const detail::ManifestView view = detail::view_manifest(drives_.front().manifest);
    refuse_if_committed(view, before, superblock_, drives_.front());
    const auto uncommitted = view.superblock ? std::optional(view.superblock->store_number) : std::nullopt;
    for (const StorePaths& drive : drives_) detail::refuse_foreign_data(drive, drives_.front().directory, uncommitted);
    detail::require_space(drives_, drive_needs(layout_, superblock_), options.directory_key);
  }

  std::unique_ptr<aio::StripedFile> make_data(Store::Queues queues, const std::string& key) {
    for (const auto& creation : creations_) creation->replace();
    // Labels first, and durably: data without a label never belongs to the store, and without the manifest only the
    // label says that data of a first commit may be replaced.
    for (unsigned d = 1; d < layout_.drive_count(); ++d) {
      detail::write_label(drives_[d], label(d));
      aio::sync_directory(drives_[d].directory);
      creations_[d]->remember_label();
    }
    for (const auto& creation : creations_) creation->clear();
    std::vector<aio::StripeDrive> files;
    const std::vector<std::uint64_t> need_bytes = drive_needs(layout_, superblock_);
    for (unsigned d = 0; d < layout_.drive_count(); ++d) {
      const std::uint64_t bytes = layout_.drive_bytes(d, superblock_.data_bytes);
      files.push_back({queues[d], std::move(*creations_[d]->make_data(bytes, need_bytes[d], key))});
    }
    detail::remove_file(drives_.front().label);  // it was a further drive of a store that is being replaced
    return std::make_unique<aio::StripedFile>(layout_, std::move(files));
  }

  std::unique_ptr<aio::File> make_manifest(aio::DriveQueue& queue) {
    detail::Creation& creation = *creations_.front();
    const auto new_manifest = creation.make_new_manifest(superblock_.manifest_bytes());
    write_superblock(queue, *new_manifest, superblock_);
    creation.name_manifest();
    return std::make_unique<aio::File>(drives_.front().manifest, aio::FileOptions{});
  }

  // The labels after the first commit.
  std::vector<detail::LabelledDrive> committed_labels() const {
    std::vector<detail::LabelledDrive> labels;
    for (unsigned d = 1; d < layout_.drive_count(); ++d) {
      labels.push_back({drives_[d], label(d)});
      labels.back().label.committed = true;
    }
    return labels;
  }

  // In the order in which they can be removed.
  std::vector<std::string> made_directories() const {
    std::vector<std::string> made;
    for (const auto& creation : creations_)
      made.insert(made.end(), creation->made_directories().rbegin(), creation->made_directories().rend());
    return made;
  }

  // The directories to flush with the first commit.
  std::vector<std::string> keep() {
    std::vector<std::string> to_flush;
    for (const auto& creation : creations_) {
      for (std::string& directory : creation->keep()) to_flush.push_back(std::move(directory));
    }
    return to_flush;
  }

 private:
  detail::DriveLabel label(unsigned drive) const {
    return {superblock_.store_number, drive, layout_.drive_count(), drives_.front().directory};
  }

  const std::vector<StorePaths> drives_;
  const Superblock& superblock_;
  const aio::StripeLayout layout_;
  std::vector<std::unique_ptr<detail::Creation>> creations_;
};

// Opens and locks a store's data on its further drives, beside the first one, which is locked already.
std::unique_ptr<aio::StripedFile> open_data(const StoreOptions& options, Store::Queues queues, aio::File first,
                                            const Superblock& stored) {
  const detail::Stripes stripes = detail::decode_stripes(stored.stripes, options.directory);
  const auto drives = detail::drive_paths(options.directory, options.stripe_directories, options.identity.rank);
  if (stripes.layout.drive_count() != drives.size())
    throw StoreError(fmt::format("the store in {} is spread over {} drives, and {} are given; it was made with{}",
                                 options.directory, stripes.layout.drive_count(), drives.size(),
                                 stripes.directories.empty()
                                     ? " this directory alone"
                                     : fmt::format(" these beside it: {}", fmt::join(stripes.directories, ", "))));
  std::vector<aio::StripeDrive> files;
  files.push_back({queues.front(), std::move(first)});
  for (unsigned d = 1; d < drives.size(); ++d) {
    detail::check_label(drives[d], {stored.store_number, d, stripes.layout.drive_count(), drives.front().directory});
    auto file = detail::open_locked(drives[d], options.lock_timeout);
    if (!file)
      throw StoreError(fmt::format("the store in {} has lost its data on drive {}: {} does not exist",
                                   options.directory, d, drives[d].data));
    files.push_back({queues[d], std::move(*file)});
  }
  for (unsigned d = 0; d < drives.size(); ++d)
    detail::check_length(files[d].file, stripes.layout.drive_bytes(d, stored.data_bytes));
  return std::make_unique<aio::StripedFile>(stripes.layout, std::move(files));
}

}  // namespace

Store::Cost Store::cost(const StoreOptions& options) {
  const Superblock superblock = superblock_for(options);
  return {Impl::memory_bytes(options, superblock), superblock.data_bytes + superblock.manifest_bytes()};
}

std::unique_ptr<Store> Store::create(const StoreOptions& options, Queues queues) {
  Superblock superblock = superblock_for(options);
  superblock.store_number = options.store_number != 0 ? options.store_number : random_store_number();
  const StorePaths paths(options.directory, options.identity.rank);
  Impl::Files files;
  std::vector<std::string> to_flush, made_directories;
  std::vector<detail::LabelledDrive> labels;
  {
    NewFiles made(detail::drive_paths(options.directory, options.stripe_directories, options.identity.rank), superblock,
                  stripe_layout(options));
    require_queues(queues, options.stripe_directories.size() + 1);
    made.claim(options);
    files.data = made.make_data(queues, options.directory_key);
    files.manifest = made.make_manifest(*queues.front());
    labels = made.committed_labels();
    made_directories = made.made_directories();
    to_flush = made.keep();
  }
  auto impl = std::make_unique<Impl>(options, std::move(superblock), paths, *queues.front());
  impl->start_new(std::move(files), std::move(to_flush), std::move(made_directories), std::move(labels));
  detail::write_lock_info(paths);
  return impl;
}

std::unique_ptr<Store> Store::open(const StoreOptions& options, Queues queues) {
  const Superblock mine = superblock_for(options);
  require_queues(queues, options.stripe_directories.size() + 1);
  aio::DriveQueue& queue = *queues.front();
  const StorePaths paths(options.directory, options.identity.rank);
  auto first = detail::open_locked(paths, options.lock_timeout);
  struct stat status {};
  if (::lstat(paths.manifest.c_str(), &status) != 0 && (errno == ENOENT || errno == ENOTDIR))
    throw StoreError(fmt::format("there is no store in {}: {} does not exist", paths.directory, paths.manifest));
  if (!first)
    throw StoreError(fmt::format("the store in {} has lost its data: {} does not exist", paths.directory, paths.data));
  Impl::Files files;
  files.manifest = std::make_unique<aio::File>(paths.manifest, aio::FileOptions{});
  detail::ManifestView view = detail::view_superblock(paths.manifest);
  if (!view.superblock) throw_unreadable(paths, view.damage);
  Superblock& stored = *view.superblock;
  check_same_model(stored, mine, paths);
  files.data = open_data(options, queues, std::move(*first), stored);
  auto impl = std::make_unique<Impl>(options, std::move(stored), paths, queue);
  impl->start_existing(std::move(files));
  detail::write_lock_info(paths);
  return impl;
}

}  // namespace hoist::tiers
