// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <map>
#include <optional>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/kernel_files.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/detail/manifest_view.hpp>
#include <hoist/tiers/detail/store_drives.hpp>

namespace hoist::tiers::detail {

namespace {

constexpr std::size_t kLabelBytesMax = 8192;

// Its first lines identify the drive; the others are for people, and say whether the data may be replaced.
std::string identity_lines(const DriveLabel& label) {
  return fmt::format("hoist drive {} of {}\nstore {:016x}\n", label.drive, label.drive_count, label.store_number);
}

constexpr std::string_view kCommitted = "state committed\n";
constexpr std::string_view kNew = "state new\n";

std::string label_text(const DriveLabel& label) {
  return fmt::format("{}home {}\n{}", identity_lines(label), label.home, label.committed ? kCommitted : kNew);
}

// In one line, for a message.
std::string shown(const std::string& label) {
  std::string text = label.substr(0, label.find_last_not_of('\n') + 1);
  std::ranges::replace(text, '\n', ',');
  return text;
}

// Codes of a file that is not there, or whose drive or host has gone: nobody can read it.
bool is_gone(int code) {
  constexpr std::array kCodes{ENOENT, ENOTDIR, EIO, ENXIO, ENODEV, ESTALE, ENOTCONN, EHOSTDOWN};
  return std::ranges::find(kCodes, code) != kCodes.end();
}

// The label of a drive's data; nullopt if it is gone. Errors: IoError if this process cannot read it.
std::optional<std::string> read_label(const StorePaths& drive) {
  const int file = open_regular_file(drive.label, O_RDONLY | O_NOFOLLOW);
  std::string text;
  const int code = file < 0 ? errno : read_and_close(file, kLabelBytesMax, text);
  if (code == 0) return text;
  if (is_gone(code)) return std::nullopt;
  throw IoError({.operation = file < 0 ? "open" : "read", .path = drive.label, .code = code});
}

std::uint64_t blocks_bytes(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 ? static_cast<std::uint64_t>(status.st_blocks) * 512 : 0;
}

bool exists(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0;
}

bool is_empty(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 && status.st_size == 0;
}

// Whether the file, which may be as large as a drive, holds nothing but zeros. Ranges that were reserved and never
// written are not read if the file system knows them.
bool is_blank(const std::string& path) {
  const Descriptor file(open_regular_file(path, O_RDONLY | O_NOFOLLOW));
  if (file.number < 0 && errno == ENOENT) return true;
  const auto refuse = [&](const char* call) {
    throw IoError({call, path, 0, 0, errno}, "whether it holds data cannot be known; nothing was changed");
  };
  if (file.number < 0) refuse("open");
  std::vector<char> piece(kMiB);
  off_t at = 0;
  bool blank = true;
  while (blank) {
    const off_t written = ::lseek(file.number, at, SEEK_DATA);
    if (written < 0 && errno == ENXIO) break;  // nothing further
    if (written >= 0) at = written;
    const ssize_t got = ::pread(file.number, piece.data(), piece.size(), at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse("read");
    if (got == 0) break;
    blank = std::all_of(piece.begin(), piece.begin() + got, [](char byte) { return byte == 0; });
    at += got;
  }
  return blank;
}

}  // namespace

// A manifest is on disk before any data are. Data without one are of a store that has lost it, unless that store was
// being replaced or removed, which leaves the manifest under the other name.
void refuse_data_without_manifest(const StorePaths& home) {
  if (exists(home.manifest) || exists(home.manifest_new) || is_blank(home.data)) return;
  throw StoreError(
      fmt::format("{} holds data, and its manifest {} is missing; nothing was changed: bring the manifest back, or "
                  "remove the data to start anew",
                  home.data, home.manifest));
}

bool has_lost_manifest(const StorePaths& home) {
  const auto lacks = [&] { return !exists(home.label) && !exists(home.manifest_new) && !exists(home.manifest); };
  bool blank = false;  // of a start that was killed, or that is still reserving it
  try {
    blank = !lacks() || is_blank(home.data);
  } catch (const IoError&) {  // another user's
  }
  // Looked at again, last: a manifest changes its name while a store is made, and a removal takes the data first.
  return !blank && lacks() && exists(home.data);
}

std::vector<int> ranks_without_manifest(const std::string& directory) {
  std::vector<int> ranks = ranks_with_files(std::span(&directory, 1));
  std::erase_if(ranks, [&](int rank) { return !has_lost_manifest(StorePaths(directory, rank)); });
  return ranks;
}

std::vector<StorePaths> drive_paths(const std::string& directory, std::span<const std::string> others, int rank) {
  std::vector<StorePaths> drives;
  const auto add = [&](const std::string& name) {
    if (name.empty()) throw UsageError("a directory of the store has no name");
    if (name.find_first_of(std::string_view("\n\0", 2)) != std::string::npos)
      throw UsageError(fmt::format("the directory '{}' has a line break or a zero byte in its name", name.c_str()));
    // A relative path would mean another place in the next process.
    drives.emplace_back(plain_path(absolute_path(name)), rank);
    for (std::size_t i = 0; i + 1 < drives.size(); ++i) {
      if (is_same_place(drives[i].directory, drives.back().directory))
        throw UsageError(fmt::format("{} and {} are one directory: name each drive of a store once",
                                     drives[i].directory, drives.back().directory));
    }
  };
  add(directory);
  for (const std::string& other : others) add(other);
  return drives;
}

std::string encode_stripes(const aio::StripeLayout& layout, std::span<const StorePaths> drives) {
  if (drives.size() == 1) return {};
  std::string text = layout.encode();
  for (const StorePaths& drive : drives) text += "\n" + drive.directory;
  return text;
}

Stripes decode_stripes(const std::string& text, const std::string& manifest) {
  if (text.empty()) return {};
  Stripes stripes;
  std::size_t at = text.find('\n');
  const auto layout = aio::StripeLayout::decode(std::string_view(text).substr(0, at));
  std::vector<std::string> directories;
  while (at != std::string::npos) {
    const std::size_t end = text.find('\n', at + 1);
    directories.push_back(text.substr(at + 1, end == std::string::npos ? end : end - at - 1));
    at = end;
  }
  if (!layout || directories.size() != layout->drive_count())
    throw StoreError(fmt::format(
        "{} describes the spread of its data over drives in a way that this version does not understand", manifest));
  stripes.layout = *layout;
  stripes.directories.assign(directories.begin() + 1, directories.end());
  return stripes;
}

void write_label(const StorePaths& drive, const DriveLabel& label) {
  const std::string partial = drive.label + "-new";
  remove_file(partial);
  const Descriptor file(open_regular_file(partial, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, S_IRUSR | S_IWUSR));
  if (file.number < 0) throw IoError({"open", partial, 0, 0, errno});
  const std::string text = label_text(label);
  int code = write_all(file.number, std::as_bytes(std::span(text)));
  if (code == 0 && ::fsync(file.number) != 0) code = errno;
  if (code == 0 && ::rename(partial.c_str(), drive.label.c_str()) != 0) code = errno;
  if (code == 0) return;
  ::unlink(partial.c_str());
  throw IoError({"write", drive.label, 0, text.size(), code});
}

void check_label(const StorePaths& drive, const DriveLabel& expected) {
  const auto found = read_label(drive);
  if (!found)
    throw StoreError(
        fmt::format("{} holds no data of the store in {}: {} is missing; mount the drive that held it, name the "
                    "directory where it is now, or continue from a mirror or a copy",
                    drive.directory, expected.home, drive.label));
  // Does not compare the home: directories may be mounted elsewhere now.
  if (found->starts_with(identity_lines(expected))) return;
  throw StoreError(fmt::format(
      "{} is not drive {} of {} of the store in {}, number {:016x}: its label says \"{}\"; give "
      "the store's directories in the order in which it was made",
      drive.directory, expected.drive, expected.drive_count, expected.home, expected.store_number, shown(*found)));
}

namespace {

// The store's own directory, as a label has it.
std::string home_in(const std::string& label) {
  constexpr std::string_view kKey = "\nhome ";
  const std::size_t key = label.find(kKey);
  if (key == std::string::npos) return {};
  const std::size_t begin = key + kKey.size();
  return label.substr(begin, label.find('\n', begin) - begin);
}

// The drive was found where the store was made. If that store is still there, and the one that is read is in another
// directory, the latter is a copy of its files, and its drives are elsewhere.
void refuse_originals_drive(const StorePaths& drive, const std::string& label, int rank, const DriveLabel& expected) {
  const std::string home = home_in(label);
  if (home.empty() || is_same_place(home, expected.home)) return;
  std::optional<Superblock> original;
  try {
    original = view_superblock(StorePaths(home, rank).manifest).superblock;
  } catch (const IoError&) {  // out of reach: the drives may have been moved without it
  }
  if (!original || original->store_number != expected.store_number) return;
  throw StoreError(fmt::format(
      "{0} belongs to the store in {1}, and {2} is a copy of that store. If the copy has drives of its own, "
      "name them in nvme_path or mount them at {0}; if {1} is no longer used, move it away",
      drive.directory, home, expected.home));
}

}  // namespace

std::optional<StorePaths> find_drive(const std::string& made_in, std::span<const std::string> elsewhere, int rank,
                                     const DriveLabel& expected) {
  std::vector<std::string> candidates{elsewhere.begin(), elsewhere.end()};
  candidates.push_back(made_in);
  std::exception_ptr unreadable;  // the first: the drive may be in another place, and that one another's
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    StorePaths drive(candidates[i], rank);
    std::optional<std::string> found;
    try {
      found = read_label(drive);
    } catch (const IoError&) {
      if (!unreadable) unreadable = std::current_exception();
    }
    if (!found || !found->starts_with(identity_lines(expected))) continue;
    if (i == elsewhere.size()) refuse_originals_drive(drive, *found, rank, expected);
    return drive;
  }
  if (unreadable) std::rethrow_exception(unreadable);
  return std::nullopt;
}

void refuse_foreign_data(const StorePaths& drive, const std::string& home, std::optional<std::uint64_t> uncommitted) {
  const bool is_home = drive.directory == home;
  if (!is_home && exists(drive.manifest))
    throw StoreError(
        fmt::format("{} is a store of its own and cannot hold the data of the one in {}; nothing was changed",
                    drive.directory, home));
  const auto label = read_label(drive);
  if (label && label->ends_with(kNew)) return;  // of a store that never reached its first commit
  if (label && uncommitted && label->find(fmt::format("\nstore {:016x}\n", *uncommitted)) != std::string::npos) return;
  if (is_home && !label) return refuse_data_without_manifest(drive);
  if (!label && (is_empty(drive.data) || !exists(drive.data))) return;  // made by the caller, or not there
  const std::string manifest = home + drive.manifest.substr(drive.directory.size());
  if (label && label->find(fmt::format("\nhome {}\n", home)) != std::string::npos && !exists(manifest))
    throw StoreError(
        fmt::format("{} holds data of the store in {}, and {} is missing: that drive is not mounted, or was lost; "
                    "nothing was changed: mount it, or continue from a mirror or a copy",
                    drive.directory, home, manifest));
  throw StoreError(
      fmt::format("{} holds data of another store (\"{}\"); nothing was changed: name that store's "
                  "directories, or remove the files if it is gone",
                  drive.directory, label ? shown(*label) : "no label says which"));
}

void require_space(std::span<const StorePaths> drives, std::span<const std::uint64_t> need_bytes,
                   const std::string& key) {
  struct FileSystem {
    std::string directory;
    std::uint64_t have_bytes = 0, need_bytes = 0;
  };
  std::map<std::string, FileSystem> systems;
  for (std::size_t d = 0; d < drives.size(); ++d) {
    const std::string key_of_system = file_system_key(drives[d].directory);
    if (key_of_system.empty()) throw IoError({"stat", drives[d].directory, 0, 0, errno});
    auto [system, is_new] = systems.try_emplace(key_of_system);
    if (is_new) system->second = {drives[d].directory, free_bytes(drives[d].directory), 0};
    system->second.have_bytes += blocks_bytes(drives[d].data) + blocks_bytes(drives[d].manifest);
    system->second.need_bytes += need_bytes[d];
  }
  for (const auto& [device, system] : systems) {
    if (system.have_bytes < system.need_bytes)
      throw too_little_space({system.directory, system.need_bytes, key}, system.have_bytes);
  }
}

}  // namespace hoist::tiers::detail
