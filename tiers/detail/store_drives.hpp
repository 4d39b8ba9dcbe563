// SPDX-License-Identifier: Apache-2.0
// tiers/detail/store_drives.hpp - a store's data on its drives: one file on each, described in the superblock.
//
// The first drive is the store's own directory, which also has the manifest. Every further one has a label beside its
// data file that names its store. Without it, a directory in the wrong order, or one shared by mistake with another
// store, would look damaged or be overwritten.
//
// Threading  Pure functions, or one thread.
// Errors     StoreError naming the directory and the remedy; UsageError for contradictory options.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include <hoist/aio/stripe_layout.hpp>
#include <hoist/tiers/detail/store_files.hpp>

namespace hoist::tiers::detail {

// The absolute paths of one rank's files on every drive, the store's own directory first.
// Errors: UsageError for a directory that is named twice, or holds a line break.
std::vector<StorePaths> drive_paths(const std::string& directory, std::span<const std::string> others, int rank);

struct Stripes {
  aio::StripeLayout layout = aio::StripeLayout::one_drive();
  std::vector<std::string> directories;  // of further drives
};
// As Superblock::stripes has it: "" for one drive.
std::string encode_stripes(const aio::StripeLayout& layout, std::span<const StorePaths> drives);
// Errors: StoreError if encode_stripes() cannot have made `text`.
Stripes decode_stripes(const std::string& text, const std::string& manifest);

// The drive and the store of a data file, and whether that store was ever committed. Only data that was never committed
// may be replaced, and the manifest that knows is on another drive, which may be missing.
struct DriveLabel {
  std::uint64_t store_number = 0;
  unsigned drive = 0;
  unsigned drive_count = 1;
  std::string home;  // the store's own directory
  bool committed = false;
};
// Writes, flushes and then renames the label.
void write_label(const StorePaths& drive, const DriveLabel& label);
// Refuses a further drive without a label, or with another store's.
void check_label(const StorePaths& drive, const DriveLabel& expected);
// Where a further drive of a store is now: in one of `elsewhere`, or in the directory where it was when the store was
// made. nullopt if no label says so. Errors: StoreError if the latter is a drive of the store in another directory, and
// this one is a copy of that one's files.
std::optional<StorePaths> find_drive(const std::string& made_in, std::span<const std::string> elsewhere, int rank,
                                     const DriveLabel& expected);
// Whether a rank has lost its manifest: its data, which are not blank, are on its own drive without any.
bool has_lost_manifest(const StorePaths& home);
void refuse_data_without_manifest(const StorePaths& home);  // Errors: StoreError
// The ranks of which that is true.
std::vector<int> ranks_without_manifest(const std::string& directory);
// Refuses to make files in a directory that has data of a store that was, or may have been, committed. `home`: the
// directory of the store that is being made; its own drive, too, may be a further one of another store. `uncommitted`:
// the number of a store whose manifest proves that it was never committed, even if its labels say otherwise.
void refuse_foreign_data(const StorePaths& drive, const std::string& home, std::optional<std::uint64_t> uncommitted);

struct LabelledDrive {
  StorePaths paths;
  DriveLabel label;
};

// Refuses unless every file system has enough space for its drives; several drives may be on one. `need_bytes` is for
// each drive. Space of the store's files that will be replaced counts as free. `key`: of StoreOptions::directory_key.
void require_space(std::span<const StorePaths> drives, std::span<const std::uint64_t> need_bytes,
                   const std::string& key);

}  // namespace hoist::tiers::detail
