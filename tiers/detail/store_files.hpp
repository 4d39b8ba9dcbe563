// SPDX-License-Identifier: Apache-2.0
// tiers/detail/store_files.hpp - names and locks of a store's files; creates and removes them.
//
// Everything about a store that is not a transfer: directories, the lock's holder, free space. Transfers of data and
// manifest go through aio::DriveQueue instead.
//
// Threading  One thread per object.
// Errors     IoError if the system refuses, StoreError for unusable stores, BudgetError for space.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
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
  std::string manifest_new;  // until it is complete; then renamed
  std::string lock_info;     // the lock's holder, for people
  std::string label;         // on further drives: the store of this data
};

// The scratch file beside a data file: rank-00000.scratch beside rank-00000.data.
std::string scratch_path(const std::string& data_path);

// The entries of a directory; none if it does not exist. IoError if it cannot be listed, which does not mean that it is
// empty.
std::vector<std::string> names_in(const std::string& directory);
// The ranks whose manifests are in `directory`, by their names, ascending.
std::vector<int> ranks_in(const std::string& directory);
// The ranks that have only a manifest of the other name, which says that their data may be overwritten.
std::vector<int> given_up_ranks_in(const std::string& directory);
// The ranks that have a file of a store in one of these directories.
std::vector<int> ranks_with_files(std::span<const std::string> directories);

// Opens the data file and takes its lock. Null if there is no such file. Throws StoreError naming the holder.
std::unique_ptr<aio::File> open_locked(const StorePaths& paths, Nanoseconds timeout);
// The same for readers: they share the lock, and a trainer that starts meanwhile waits for them.
std::unique_ptr<aio::File> open_shared(const StorePaths& paths, Nanoseconds timeout);
// See Store::holder().
std::optional<std::string> holder(const StorePaths& paths);
[[noreturn]] void throw_in_use(const StorePaths& paths, Nanoseconds waited);
void write_lock_info(const StorePaths& paths) noexcept;  // information only: errors are ignored

std::uint64_t free_bytes(const std::string& directory);
// What the file system of `directory` needs free.
struct SpaceNeed {
  std::string directory;
  std::uint64_t bytes = 0;
  std::string key{};  // the configuration key that names the directory
  std::string purpose = "the store";
  std::string other_remedy{};  // beside more space
};
BudgetError too_little_space(const SpaceNeed& need, std::uint64_t have_bytes);
// Makes `file` one of `bytes` bytes. BudgetError if that fails for lack of space and less than `need` is free.
void reserve(aio::File& file, std::uint64_t bytes, const SpaceNeed& need);

// Creates a rank's files on one drive. Only the holder of the lock of the data file, by its name, may change them. That
// file therefore exists, empty, before anything is decided, and is never replaced by another of its name. The
// destructor removes the new files, still under the lock, unless keep() was called.
class Creation {
 public:
  explicit Creation(StorePaths paths) : paths_(std::move(paths)) {}
  ~Creation();
  Creation(const Creation&) = delete;
  Creation& operator=(const Creation&) = delete;

  // Makes the directory and its missing parents, 0700; opens the data file, or makes an empty one, and takes its
  // lock. Throws StoreError naming the holder.
  void claim(Nanoseconds timeout);
  // From now on the old files are lost, whatever happens.
  void replace();
  // Takes the manifest of the store that is being replaced away from its data, durably, and removes its lock's text.
  // Until make_new_manifest() it stays as manifest_new, which says of the data that they may be overwritten.
  void clear();
  // Drops the content of the data file and reserves its space. `need_bytes`: what all files of this drive need;
  // `key`: of StoreOptions::directory_key.
  std::unique_ptr<aio::File> make_data(std::uint64_t bytes, std::uint64_t need_bytes, const std::string& key);
  std::unique_ptr<aio::File> make_new_manifest(std::uint64_t bytes);
  // Registers a file beside the data that other code has just written.
  void remember_label();
  // Gives the manifest, whose superblock is on disk, its name.
  void name_manifest();
  // From here on everything stays. Returns the directories to flush so that the names last: the store's own and, on its
  // file system, those above it. A process that was killed before its first commit may have made one of them.
  std::vector<std::string> keep();
  // Outermost first.
  const std::vector<std::string>& made_directories() const { return directories_; }

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
bool remove_store(std::span<const std::string> directories, Nanoseconds lock_timeout,
                  const std::function<void()>& check = {});

// StoreError unless the file is so long.
void check_length(const aio::File& file, std::uint64_t expected_bytes);

// Names that must lead to the files that a store writes, as long as it writes them: a commit into a file that has lost
// its name could not be found again.
class FileNames {
 public:
  void add(const aio::File& file);
  // StoreChangedError, naming the file that was removed, renamed, replaced or cut off since. A file whose mount was
  // taken away (umount --lazy) is whole where it is, and stays in use.
  void check() const;
  // Whether some names are gone, and some still lead to these files.
  bool are_some_gone() const noexcept;
  // Removes the names that still lead to these files.
  void remove() const noexcept;

 private:
  struct Named {
    std::string path;  // absolute: the process may change its directory
    std::uint64_t device = 0, inode = 0, bytes = 0;
    std::uint64_t directory_device = 0;
  };
  std::vector<Named> files_;
};

// Removes a file if it is there.
void remove_file(const std::string& path);

}  // namespace hoist::tiers::detail
