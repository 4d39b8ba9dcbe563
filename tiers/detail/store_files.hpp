// SPDX-License-Identifier: Apache-2.0
// tiers/detail/store_files.hpp - names, locks and the making and unmaking of a store's files.
//
// Everything about a store that is not a transfer: directories, who holds the lock, free space, and what a manifest
// says to somebody who only looks. Transfers of data and manifest go through aio::DriveQueue instead.
//
// Threading  One thread per object.
// Errors     IoError for what the system refuses, StoreError for stores that cannot be used, BudgetError for space.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <hoist/aio/file.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/tiers/store_format.hpp>

namespace hoist::tiers::detail {

struct StorePaths {
  StorePaths(std::string directory_path, int rank);
  std::string directory;
  std::string data;
  std::string manifest;
  std::string manifest_new;  // before it is whole; then renamed
  std::string lock_info;     // who holds the lock, for people
  std::string label;         // on further drives: whose data this is
};

// What is in a directory; nothing when there is none. That it cannot be listed does not mean that nothing is there:
// IoError.
std::vector<std::string> names_in(const std::string& directory);
// The ranks whose manifests are in `directory`, by their names, ascending.
std::vector<int> ranks_in(const std::string& directory);

// A manifest as it lies on disk, read without lock and without an engine.
struct ManifestView {
  bool exists = false;
  std::string damage;                    // why the superblock cannot be used; empty when it can
  std::optional<Superblock> superblock;  // when it exists and is not damaged
  std::vector<SlotCheck> slots;          // of commits, then of kept steps; with the superblock
  // A commit was made here once, whether or not it can still be read. Commits alternate between the slots, so once
  // the second slot was ever touched, the commit in the first had been flushed.
  bool ever_committed() const;
};
ManifestView view_manifest(const std::string& path);

CommitHeader commit_header(const SlotCheck& slot);
// The slots a store can be continued from, newest first: by incarnation, then by step. A commit of an older
// incarnation whose step lies beyond the newest incarnation's was abandoned and is left out.
std::vector<CommitHeader> usable_commits(std::span<const SlotCheck> slots);
// Those left out: what ranks go back to when a crash between their adoptions left them no commit in common.
std::vector<CommitHeader> abandoned_commits(std::span<const SlotCheck> slots);
// Kept steps, oldest first.
std::vector<CommitHeader> kept_steps(std::span<const SlotCheck> slots);
std::vector<std::string> damaged_slots(std::span<const SlotCheck> slots, const std::string& path);

// Opens the data file and takes its lock. Null when there is no such file. Throws StoreError naming the holder.
std::unique_ptr<aio::File> open_locked(const StorePaths& paths, Nanoseconds timeout);
// The same for somebody who only reads: readers share the lock, and a trainer that starts meanwhile waits for them.
std::unique_ptr<aio::File> open_shared(const StorePaths& paths, Nanoseconds timeout);
// See Store::holder().
std::optional<std::string> holder(const StorePaths& paths);
[[noreturn]] void throw_in_use(const StorePaths& paths, Nanoseconds waited);
void write_lock_info(const StorePaths& paths) noexcept;  // information only: failing is no failure

std::uint64_t free_bytes(const std::string& directory);
BudgetError too_little_space(const std::string& directory, std::uint64_t have_bytes, std::uint64_t need_bytes);

// The making of a rank's files on one drive. Whoever holds the lock of the data file, by its name, may change them and
// nobody else; so that file is there, empty, before anything is decided, and is never replaced by another of its name.
// What was made is removed again by the destructor, still under the lock, unless keep() was called.
class Creation {
 public:
  explicit Creation(StorePaths paths) : paths_(std::move(paths)) {}
  ~Creation();
  Creation(const Creation&) = delete;
  Creation& operator=(const Creation&) = delete;

  // Makes the directory and what is missing above it, 0700; opens the data file, or makes an empty one, and takes its
  // lock. Throws StoreError naming the holder.
  void claim(Nanoseconds timeout);
  // From here on what was there gives way, whatever happens.
  void replace();
  // Removes what a store that is to be replaced left, but for the data and its label.
  void clear();
  // Drops what the data file held and reserves its space.
  std::unique_ptr<aio::File> make_data(std::uint64_t bytes);
  std::unique_ptr<aio::File> make_new_manifest(std::uint64_t bytes);
  // A file beside the data that somebody else has just written.
  void remember_label();
  // Gives the manifest, whose superblock is on disk, its name.
  void name_manifest();
  // From here on everything stays. Returns the directories to flush so that the names last: the store's own and the
  // parents of those that were made.
  std::vector<std::string> keep();

 private:
  struct Made {
    std::string path;
    std::uint64_t device = 0, inode = 0;  // another process may have put its own file there since
  };
  void make_directories();
  void remember(const std::string& path, int descriptor);

  const StorePaths paths_;
  std::unique_ptr<aio::File> data_;       // until make_data()
  int lock_ = -1;                         // a second descriptor of it: the lock outlasts the caller's File
  std::vector<std::string> directories_;  // outermost first
  std::vector<Made> files_;
  bool kept_ = false;
};

// See Store::remove().
bool remove_store(std::span<const std::string> directories, Nanoseconds lock_timeout);

// Removes a file if it is there.
void remove_file(const std::string& path);

}  // namespace hoist::tiers::detail
