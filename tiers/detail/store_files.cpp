// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string_view>
#include <thread>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/tiers/detail/store_files.hpp>
#include <hoist/tiers/store_changed_error.hpp>

namespace hoist::tiers::detail {

namespace {

constexpr auto kPollInterval = std::chrono::milliseconds(20);

// Whether `path` still names the open file.
bool same_file(const std::string& path, std::uint64_t device, std::uint64_t inode) {
  struct stat named {};
  return ::lstat(path.c_str(), &named) == 0 && named.st_dev == device && named.st_ino == inode;
}

// Whether `path` leads to the open file or directory.
bool is_at(const std::string& path, const Descriptor& file) {
  struct stat opened {
  }, named{};
  return ::fstat(file.number, &opened) == 0 && ::stat(path.c_str(), &named) == 0 && opened.st_dev == named.st_dev &&
         opened.st_ino == named.st_ino;
}

bool still_named(const aio::File& file) {
  struct stat opened {};
  if (::fstat(file.descriptor(), &opened) != 0) throw IoError({"fstat", file.path(), 0, 0, errno});
  return same_file(file.path(), opened.st_dev, opened.st_ino);
}

std::string parent_of(const std::string& path) {
  const auto slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown host";
}

void flush_file_system(const std::string& directory) {
  const Descriptor opened(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened.number < 0 || ::syncfs(opened.number) != 0) throw IoError({"syncfs", directory, 0, 0, errno});
}

std::string without_trailing_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

}  // namespace

StorePaths::StorePaths(std::string directory_path, int rank)
    : directory(without_trailing_slashes(std::move(directory_path))) {
  const std::string stem = fmt::format("{}/rank-{:05}", directory, rank);
  data = stem + ".data";
  manifest = stem + ".manifest";
  manifest_new = stem + ".manifest-new";
  lock_info = stem + ".lock-info";
  label = stem + ".label";
}

std::string scratch_path(const std::string& data_path) {
  constexpr std::string_view kSuffix = ".data";
  HOIST_ASSERT(data_path.ends_with(kSuffix), "{} is no store's data file", data_path);
  return data_path.substr(0, data_path.size() - kSuffix.size()) + ".scratch";
}

namespace {

// The rank whose file of this kind has this name; nullopt for other names, such as copies.
std::optional<int> rank_of(const std::string& name, std::string_view suffix) {
  constexpr std::string_view kPrefix = "rank-";
  if (!name.starts_with(kPrefix) || !name.ends_with(suffix)) return std::nullopt;
  int rank = -1;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), rank);
  const bool own = rank >= 0 && name == fmt::format("{}{:05}{}", kPrefix, rank, suffix);
  return own ? std::optional(rank) : std::nullopt;
}

}  // namespace

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code failed;
  for (std::filesystem::directory_iterator entry(directory, failed), end; !failed && entry != end;
       entry.increment(failed))
    names.push_back(entry->path().filename().string());
  if (!failed || is_absent(failed)) return names;
  throw IoError({"list", directory, 0, 0, failed.value()}, "what is in it cannot be known; nothing was changed");
}

std::vector<int> ranks_in(const std::string& directory) {
  std::vector<int> ranks;
  for (const std::string& name : names_in(directory))
    if (const auto rank = rank_of(name, ".manifest")) ranks.push_back(*rank);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

std::vector<int> given_up_ranks_in(const std::string& directory) {
  const std::vector<int> whole = ranks_in(directory);
  std::vector<int> ranks;
  for (const std::string& name : names_in(directory)) {
    const auto rank = rank_of(name, ".manifest-new");
    if (rank && std::ranges::find(whole, *rank) == whole.end()) ranks.push_back(*rank);
  }
  return ranks;
}

std::vector<int> ranks_with_files(std::span<const std::string> directories) {
  std::set<int> ranks;
  for (const std::string& directory : directories)
    for (const std::string& name : names_in(directory))
      for (const std::string_view suffix :
           {".data", ".manifest", ".manifest-new", ".label", ".label-new", ".lock-info"})
        if (const auto rank = rank_of(name, suffix)) ranks.insert(*rank);
  return {ranks.begin(), ranks.end()};
}

namespace {

// Null if there is no such file, or its directory is gone.
std::unique_ptr<aio::File> open_if_there(const std::string& path, aio::OpenMode mode) {
  try {
    return std::make_unique<aio::File>(path, aio::FileOptions{.mode = mode});
  } catch (const IoError& error) {
    if (error.where.code == ENOENT) return nullptr;
    throw;
  }
}

// Takes the lock of `file`, which was opened by the name of the data. False if that name now means another file: the
// holder removed the old one while this process waited, and only the lock on the named file counts.
bool locked_by_name(aio::File& file, const StorePaths& paths, TimePoint start, Nanoseconds timeout) {
  const Nanoseconds left = timeout - (Clock::now() - start);
  if (!file.lock(std::max(left, Nanoseconds{0}))) throw_in_use(paths, timeout);
  return still_named(file);
}

}  // namespace

std::unique_ptr<aio::File> open_locked(const StorePaths& paths, Nanoseconds timeout) {
  const TimePoint start = Clock::now();
  while (true) {
    struct stat status {};
    if (::lstat(paths.data.c_str(), &status) != 0 && (errno == ENOENT || errno == ENOTDIR)) return nullptr;
    auto file = open_if_there(paths.data, aio::OpenMode::read_write);
    if (file && locked_by_name(*file, paths, start, timeout)) return file;
  }
}

std::unique_ptr<aio::File> open_shared(const StorePaths& paths, Nanoseconds timeout) {
  const TimePoint start = Clock::now();
  auto file = std::make_unique<aio::File>(paths.data, aio::FileOptions{.mode = aio::OpenMode::read_only});
  while (::flock(file->descriptor(), LOCK_SH | LOCK_NB) != 0) {
    const int code = errno;
    if (code != EWOULDBLOCK && code != EINTR)
      throw IoError({"flock", paths.data, 0, 0, code},
                    "the file system must support locks; copy the store to a local one");
    if (Clock::now() - start >= timeout) throw_in_use(paths, timeout);
    std::this_thread::sleep_for(kPollInterval);
  }
  if (!still_named(*file)) throw StoreError(fmt::format("{} was replaced while it was being opened", paths.data));
  return file;
}

namespace {

// Whether `holder`, as write_lock_info() wrote it, was a process of this machine that has ended.
bool has_ended(std::string_view holder) {
  constexpr std::string_view kBefore = "process ", kBetween = " on ";
  const std::size_t between = holder.find(kBetween);
  if (!holder.starts_with(kBefore) || between == std::string_view::npos) return false;
  pid_t process = 0;
  std::from_chars(holder.data() + kBefore.size(), holder.data() + between, process);
  return process > 0 && holder.substr(between + kBetween.size()) == host_name() && ::kill(process, 0) != 0 &&
         errno == ESRCH;
}

// The text that this process writes about itself.
std::string own_name() { return fmt::format("process {} on {}", ::getpid(), host_name()); }

// The text that the holder of the lock wrote about itself.
std::string said_by_holder(const StorePaths& paths) {
  const Descriptor info(open_regular_file(paths.lock_info, O_RDONLY | O_NOFOLLOW));
  char text[300] = {};
  const ssize_t got = info.number < 0 ? -1 : ::read(info.number, text, sizeof(text) - 1);
  const std::string_view line(text, got > 0 ? static_cast<std::size_t>(got) : 0);
  return std::string(line.substr(0, line.find('\n')));
}

// Whether processes that only read the store hold its lock. They share it, and leave no name.
bool is_being_read(const StorePaths& paths) {
  const Descriptor data(open_regular_file(paths.data, O_RDONLY | O_NOFOLLOW));
  return data.number >= 0 && ::flock(data.number, LOCK_SH | LOCK_NB) == 0 &&
         ::flock(data.number, LOCK_EX | LOCK_NB) != 0;
}

}  // namespace

std::optional<std::string> holder(const StorePaths& paths) {
  const Descriptor data(open_regular_file(paths.data, O_RDONLY | O_NOFOLLOW));
  if (data.number < 0 || ::flock(data.number, LOCK_SH | LOCK_NB) == 0 || errno != EWOULDBLOCK) return std::nullopt;
  const std::string name = said_by_holder(paths);
  return name.empty() ? "a process that left no name" : name;
}

void throw_in_use(const StorePaths& paths, Nanoseconds waited) {
  if (is_being_read(paths)) {
    throw StoreError(fmt::format(
        "the store in {} is being read, by `hoist export`, `hoist copy` or a run that takes it over: {} was not "
        "released within {:.1f} s; wait for that process to end, or use another directory",
        paths.directory, paths.data, to_seconds(waited)));
  }
  const std::string name = said_by_holder(paths);
  if (name == own_name()) {
    throw StoreError(fmt::format(
        "the store in {} is in use by {}, which is this process: an engine that it made earlier has not been closed. "
        "Close it (in Python: close() of the engine, of trainer.engine or of the optimizer), or use another "
        "directory",
        paths.directory, name));
  }
  const char* const kept_by = has_ended(name) ? ", which has ended, but left a process that it had forked, or a "
                                                "transfer that its drive still works on"
                                              : "";
  throw StoreError(
      fmt::format("the store in {} is in use by {}{}: its lock on {} was not released within {:.1f} s; wait "
                  "for that process to end, or use another directory",
                  paths.directory, name.empty() ? "another process" : name, kept_by, paths.data, to_seconds(waited)));
}

void write_lock_info(const StorePaths& paths) noexcept {
  const Descriptor info(
      open_regular_file(paths.lock_info, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, S_IRUSR | S_IWUSR));
  if (info.number < 0) return;
  const std::string text = own_name() + "\n";
  [[maybe_unused]] const ssize_t written = ::write(info.number, text.data(), text.size());
}

std::uint64_t free_bytes(const std::string& directory) {
  struct statvfs status {};
  if (::statvfs(directory.c_str(), &status) != 0) throw IoError({"statvfs", directory, 0, 0, errno});
  return std::uint64_t{status.f_bavail} * status.f_frsize;
}

BudgetError too_little_space(const SpaceNeed& need, std::uint64_t have_bytes) {
  return BudgetError({.tier = "nvme",
                      .have_bytes = have_bytes,
                      .need_bytes = need.bytes,
                      .key = fmt::format("the free space of the file system of {}{}{}", need.directory,
                                         need.key.empty() ? "" : fmt::format(" ({})", need.key), need.other_remedy),
                      .detail = fmt::format("{} in {}", need.purpose, need.directory)});
}

void reserve(aio::File& file, std::uint64_t bytes, const SpaceNeed& need) {
  try {
    file.start_over(bytes);
  } catch (const IoError& error) {
    const std::uint64_t have_bytes = free_bytes(need.directory);
    if (error.where.code == ENOSPC && have_bytes < need.bytes) throw too_little_space(need, have_bytes);
    throw;
  }
}

bool remove_store(std::span<const std::string> directories, Nanoseconds lock_timeout,
                  const std::function<void()>& check) {
  const TimePoint start = Clock::now();
  std::vector<StorePaths> of_ranks;
  std::vector<std::unique_ptr<Creation>> claims;  // the locks, to the end; they make the data file that is missing
  for (const std::string& directory : directories)
    for (const int rank : ranks_with_files(std::span(&directory, 1))) of_ranks.emplace_back(directory, rank);
  if (of_ranks.empty()) return true;
  try {
    for (const StorePaths& paths : of_ranks) {
      claims.push_back(std::make_unique<Creation>(paths));
      claims.back()->claim(std::max(lock_timeout - (Clock::now() - start), Nanoseconds{0}));
    }
  } catch (const Error&) {  // also too few descriptors for the files of a large job
    if (check) throw;
    return false;
  }
  if (check) check();
  // A manifest that is about to be removed says that its data may be overwritten, should this process be killed.
  std::vector<std::unique_ptr<Descriptor>> manifests;
  for (const StorePaths& paths : of_ranks) {
    if (::rename(paths.manifest.c_str(), paths.manifest_new.c_str()) != 0 && errno != ENOENT)
      throw IoError({"rename", paths.manifest, 0, 0, errno});
    manifests.push_back(std::make_unique<Descriptor>(::open(paths.manifest_new.c_str(), O_PATH | O_CLOEXEC)));
  }
  for (const StorePaths& paths : of_ranks)
    for (const std::string& path : {paths.label, paths.label + "-new", paths.lock_info, scratch_path(paths.data)})
      remove_file(path);
  for (const StorePaths& paths : of_ranks) remove_file(paths.data);
  // Durably before the manifest's other name is gone: data without it count as a store that has lost its manifest.
  for (const std::string& directory : directories) {
    try {
      aio::sync_directory(directory);
    } catch (const IoError& error) {
      if (error.where.code != ENOENT) throw;  // another rank has removed the directory, which was empty
    }
  }
  for (std::size_t i = 0; i < of_ranks.size(); ++i)  // another process may make a store here already
    if (is_at(of_ranks[i].manifest_new, *manifests[i])) remove_file(of_ranks[i].manifest_new);
  return true;
}

void check_length(const aio::File& file, std::uint64_t expected_bytes) {
  if (file.size_bytes() == expected_bytes) return;
  const bool shorter = file.size_bytes() < expected_bytes;
  throw StoreError(
      fmt::format("{} is {} bytes long and should be {}: it {}, or is another store's; nothing was changed",
                  file.path(), file.size_bytes(), expected_bytes, shorter ? "was cut off" : "was made longer"));
}

void FileNames::add(const aio::File& file) {
  struct stat opened {};
  if (::fstat(file.descriptor(), &opened) != 0) throw IoError({"fstat", file.path(), 0, 0, errno});
  const std::string path = absolute_path(file.path());
  struct stat directory {};
  if (::stat(parent_of(path).c_str(), &directory) != 0) throw IoError({"stat", parent_of(path), 0, 0, errno});
  files_.push_back({path, opened.st_dev, opened.st_ino, file.size_bytes(), directory.st_dev});
}

namespace {

// The device number of the path, or of its nearest parent directory that exists.
std::uint64_t device_of_nearest(std::string path) {
  struct stat status {};
  while (::stat(path.c_str(), &status) != 0 && path != "/" && path != ".") path = parent_of(path);
  return status.st_dev;
}

}  // namespace

void FileNames::check() const {
  constexpr std::string_view kRemedy =
      "while this process wrote to it: this store has lost the steps since its last commit, and that commit too unless "
      "the file is brought back";
  for (const Named& file : files_) {
    struct stat status {};
    if (::lstat(file.path.c_str(), &status) != 0) {
      const int code = errno;
      if (code != ENOENT && code != ENOTDIR) throw IoError({"lstat", file.path, 0, 0, code});
      if (device_of_nearest(file.path) != file.directory_device) continue;  // its mount is gone, not the file
      throw StoreChangedError(fmt::format("{} was removed or renamed {}", file.path, kRemedy));
    }
    if (status.st_dev != file.device || status.st_ino != file.inode)
      throw StoreChangedError(fmt::format("{} was replaced by another file {}", file.path, kRemedy));
    const auto bytes = static_cast<std::uint64_t>(status.st_size);
    if (bytes < file.bytes)
      throw StoreChangedError(
          fmt::format("{} was cut off, to {} of {} bytes, {}", file.path, bytes, file.bytes, kRemedy));
  }
}

bool FileNames::are_some_gone() const noexcept {
  const auto is_gone = [](const Named& file) {
    struct stat status {};
    return ::lstat(file.path.c_str(), &status) != 0 && errno == ENOENT;
  };
  const auto is_there = [](const Named& file) { return same_file(file.path, file.device, file.inode); };
  return std::ranges::any_of(files_, is_gone) && std::ranges::any_of(files_, is_there);
}

void FileNames::remove() const noexcept {
  for (const Named& file : files_)
    if (same_file(file.path, file.device, file.inode)) ::unlink(file.path.c_str());
}

void remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) throw IoError({"unlink", path, 0, 0, errno});
}

Creation::~Creation() {
  if (!kept_) {
    for (const Made& made : files_)
      if (same_file(made.path, made.device, made.inode)) ::unlink(made.path.c_str());
    for (auto directory = directories_.rbegin(); directory != directories_.rend(); ++directory)
      ::rmdir(directory->c_str());  // stays if another rank has put something there
  }
  if (lock_ >= 0) ::close(lock_);
}

void Creation::claim(Nanoseconds timeout) {
  const TimePoint start = Clock::now();
  while (!data_) {
    make_directories();
    struct stat status {};
    const bool missing = ::lstat(paths_.data.c_str(), &status) != 0;
    const Descriptor directory(::open(paths_.directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    auto file = open_if_there(paths_.data, aio::OpenMode::open_or_create);
    if (!file) {  // another process made the directory, failed, and has removed it again
      if (Clock::now() - start <= timeout) {
        std::this_thread::sleep_for(kPollInterval);
        continue;
      }
      if (is_at(paths_.directory, directory))
        throw IoError({"create", paths_.data, 0, 0, ENOENT}, "this file system takes no files; use another directory");
      throw_in_use(paths_, timeout);
    }
    try {
      if (!locked_by_name(*file, paths_, start, timeout)) continue;
    } catch (const IoError&) {  // a file system without locks
      if (missing) remember(paths_.data, file->descriptor());
      throw;
    }
    // An empty file may be removed even if another process made it. Checked now, because its maker may have filled it
    // meanwhile.
    if (::fstat(file->descriptor(), &status) != 0) throw IoError({"fstat", paths_.data, 0, 0, errno});
    if (missing && status.st_size == 0) remember(paths_.data, file->descriptor());
    lock_ = ::fcntl(file->descriptor(), F_DUPFD_CLOEXEC, 0);
    if (lock_ < 0) throw IoError({"dup", paths_.data, 0, 0, errno});
    data_ = std::move(file);
  }
}

void Creation::make_directories() {
  std::vector<std::string> missing;
  struct stat status {};
  std::string path = paths_.directory;
  while (::stat(path.c_str(), &status) != 0) {
    const int code = errno;
    if (code != ENOENT || path.ends_with("/.."))  // of a directory that is not there
      throw IoError({"stat", path, 0, 0, code}, code == ENOTDIR ? "the store's path must be a directory" : "");
    missing.push_back(path);
    path = parent_of(path);
  }
  if (!S_ISDIR(status.st_mode)) throw IoError({"open", path, 0, 0, ENOTDIR}, "the store's path must be a directory");
  for (auto directory = missing.rbegin(); directory != missing.rend(); ++directory) {
    if (::mkdir(directory->c_str(), S_IRWXU) == 0)
      directories_.push_back(*directory);
    else if (errno != EEXIST)  // another rank made it
      throw IoError({"mkdir", *directory, 0, 0, errno});
  }
  if (::lstat(paths_.directory.c_str(), &status) == 0 && S_ISLNK(status.st_mode))
    throw StoreError(fmt::format("{} is a symbolic link, which a store does not follow; name the directory it leads to",
                                 paths_.directory));
}

void Creation::remember(const std::string& path, int descriptor) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) throw IoError({"fstat", path, 0, 0, errno});
  files_.push_back({path, status.st_dev, status.st_ino});
}

void Creation::replace() { remember(paths_.data, lock_); }

void Creation::clear() {
  remove_file(paths_.lock_info);
  struct stat status {};
  if (::lstat(paths_.manifest.c_str(), &status) != 0) return;
  if (::rename(paths_.manifest.c_str(), paths_.manifest_new.c_str()) != 0)
    throw IoError({"rename", paths_.manifest, 0, 0, errno});
  files_.push_back({paths_.manifest_new, status.st_dev, status.st_ino});
  // Durably before the data change; otherwise, after a power loss, a manifest would refer to missing data.
  aio::sync_directory(paths_.directory);
}

std::unique_ptr<aio::File> Creation::make_data(std::uint64_t bytes, std::uint64_t need_bytes, const std::string& key) {
  reserve(*data_, bytes, {paths_.directory, need_bytes, key});
  return std::move(data_);
}

void Creation::remember_label() {
  struct stat status {};
  if (::lstat(paths_.label.c_str(), &status) == 0) files_.push_back({paths_.label, status.st_dev, status.st_ino});
}

std::unique_ptr<aio::File> Creation::make_new_manifest(std::uint64_t bytes) {
  remove_file(paths_.manifest_new);
  auto file = std::make_unique<aio::File>(paths_.manifest_new,
                                          aio::FileOptions{.mode = aio::OpenMode::create, .reserve_bytes = bytes});
  remember(paths_.manifest_new, file->descriptor());
  return file;
}

void Creation::name_manifest() {
  if (::rename(paths_.manifest_new.c_str(), paths_.manifest.c_str()) != 0)
    throw IoError({"rename", paths_.manifest_new, 0, 0, errno});
  for (Made& made : files_)
    if (made.path == paths_.manifest_new) made.path = paths_.manifest;
  // Before any data: whoever finds data without a manifest knows that one was lost.
  aio::sync_directory(paths_.directory);
}

std::vector<std::string> Creation::keep() {
  std::vector<std::string> to_flush{paths_.directory};
  const auto device = [](const std::string& directory) {
    struct stat status {};
    return ::stat(directory.c_str(), &status) == 0 ? std::optional(status.st_dev) : std::nullopt;
  };
  std::size_t made_left = directories_.size();
  for (std::string path = absolute_path(paths_.directory), parent; path != "/"; path = parent) {
    parent = parent_of(path);
    const bool made = made_left > 0;
    if (made) --made_left;
    const bool can_be_flushed = Descriptor(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)).number >= 0;
    if (!made && (device(parent) != device(path) || !can_be_flushed)) break;
    if (can_be_flushed)
      to_flush.push_back(parent);
    else
      flush_file_system(path);  // this user may write to the parent, and not list it
  }
  kept_ = true;
  return to_flush;
}

}  // namespace hoist::tiers::detail
