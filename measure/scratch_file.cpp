// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstring>
#include <string_view>

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pwd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <hoist/core/log.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/scratch_file.hpp>

namespace hoist::measure {

namespace {

constexpr std::string_view kMarkerText =
    "Scratch space of a storage measurement by hoist. It is removed when the run ends; files of a killed run may be "
    "deleted.\n";
constexpr int kTakeOverTries = 10;  // a run that is just ending may remove the directory
// Space that a file system needs beside the file itself, and that should stay free.
constexpr std::uint64_t kSpareBytes = 64 * kMiB;

IoError io_error(const char* operation, const std::string& path, const char* remedy = "") {
  return IoError({.operation = operation, .path = path, .code = errno}, remedy);
}

UsageError not_ours(const std::string& directory, const std::string& why) {
  return UsageError(
      fmt::format("{} exists and was not made by a hoist measurement ({}); it was not changed. Rename it, "
                  "or choose another --path",
                  directory, why));
}

// For people: "root", or "the user 1000" if that has no name.
std::string owner_of(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return "another user";
  const passwd* const owner = ::getpwuid(info.st_uid);
  return owner != nullptr ? owner->pw_name : fmt::format("the user {}", info.st_uid);
}

void remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT)
    log_warning("{} could not be removed: {}", path, std::strerror(errno));
}

}  // namespace

void check_scratch_directory(const std::string& directory) {
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0) {
    throw UsageError(
        fmt::format("--path {}: {}; name a directory on the drive to measure", directory, std::strerror(errno)));
  }
  if (!S_ISDIR(info.st_mode)) {
    throw UsageError(
        fmt::format("--path {}: is not a directory; name the directory of a mounted file system on the drive (a block "
                    "device is never written to)",
                    directory));
  }
  if (::access(directory.c_str(), W_OK | X_OK) != 0) {
    throw UsageError(
        fmt::format("--path {}: {}; choose a directory this user may write to", directory, std::strerror(errno)));
  }
}

void check_scratch_space(std::span<const std::string> directories, std::uint64_t bytes) {
  struct statvfs space {};
  if (::statvfs(directories.front().c_str(), &space) != 0) throw io_error("statvfs", directories.front());
  std::uint64_t have = std::uint64_t{space.f_bavail} * space.f_frsize;
  for (const std::string& directory : directories) {
    // A run that was killed left its file, which this one removes.
    const std::string left = directory + "/" + ScratchFile::kDirectoryName + "/" + ScratchFile::kDataName;
    struct stat info {};
    if (::lstat(left.c_str(), &info) == 0 && S_ISREG(info.st_mode))
      have += static_cast<std::uint64_t>(info.st_blocks) * 512;
  }
  const std::uint64_t need = bytes * directories.size() + kSpareBytes;
  if (have < need) {
    throw UsageError(fmt::format("--path {}: {} are free, {} are needed, of which {} stay free; {}free space there",
                                 fmt::join(directories, " --path "), format_bytes(have), format_bytes(need),
                                 format_bytes(kSpareBytes), have > kSpareBytes ? "lower --size or " : ""));
  }
}

// The locked marker file; its holder owns the directory.
class ScratchFile::Marker {
 public:
  explicit Marker(const std::string& directory) : directory_(directory), path_(directory + "/" + kMarkerName) {
    for (int i = 0; i < kTakeOverTries; ++i) {
      if (make_or_take_over()) return;
      ::usleep(10'000);
    }
    throw UsageError(fmt::format("other runs make and remove {}; try again", directory));
  }

  ~Marker() {
    remove();
    ::close(descriptor_);
  }
  Marker(const Marker&) = delete;
  Marker& operator=(const Marker&) = delete;

 private:
  // False: another process changed the directory meanwhile.
  bool make_or_take_over() {
    const bool made = ::mkdir(directory_.c_str(), 0700) == 0;
    if (!made && errno != EEXIST) throw io_error("mkdir", directory_);
    if (!made) check_directory();
    descriptor_ = open_regular_file(path_, O_RDWR | O_NOFOLLOW | (made ? O_CREAT | O_EXCL : 0), 0600);
    if (descriptor_ < 0) return missing_marker(made);
    try {
      if (lock()) {
        claim();
        return true;
      }
    } catch (const IoError&) {  // A UsageError means that the directory belongs to another run: keep it.
      if (made) remove();
      ::close(descriptor_);
      throw;
    } catch (...) {
      ::close(descriptor_);
      throw;
    }
    ::close(descriptor_);
    return false;
  }

  void remove() const {
    remove_file(path_);
    if (::rmdir(directory_.c_str()) != 0 && errno != ENOENT)
      log_warning("{} is kept: {}", directory_, std::strerror(errno));
  }

  void check_directory() const {
    struct stat info {};
    if (::lstat(directory_.c_str(), &info) != 0) {
      if (errno == ENOENT) return;  // just removed; opening the marker will say so
      throw io_error("lstat", directory_);
    }
    if (!S_ISDIR(info.st_mode)) throw not_ours(directory_, "it is not a directory");
  }

  // A run may have been killed between making the directory and the marker; then the directory is empty and can go.
  bool missing_marker(bool made) const {
    const int code = errno;
    if (code == ELOOP) throw not_ours(directory_, "its marker is a link");
    if (code == EISDIR || code == EINVAL) throw not_ours(directory_, "its marker is not a regular file");
    if (code == EACCES && !made)
      throw UsageError(
          fmt::format("{} belongs to {}, whose measurement uses it or was killed; remove it as that user, or choose "
                      "another --path",
                      directory_, owner_of(directory_)));
    if (code != ENOENT && !(made && code == EEXIST)) {
      if (made) ::rmdir(directory_.c_str());
      throw IoError({.operation = "open", .path = path_, .code = code});
    }
    if (code == ENOENT && ::rmdir(directory_.c_str()) != 0 && errno != ENOENT)
      throw not_ours(directory_, fmt::format("there is no {} in it", kMarkerName));
    return false;
  }

  // False when the marker was removed before we had the lock.
  bool lock() const {
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) throw io_error("flock", path_);
      throw UsageError(
          fmt::format("{} is in use by another measurement, and the two would disturb each other; wait for it, "
                      "or choose another drive",
                      directory_));
    }
    struct stat info {};
    if (::fstat(descriptor_, &info) != 0) throw io_error("fstat", path_);
    return info.st_nlink > 0;
  }

  // Checks that the marker is ours (a killed run may have written only part of it) and writes it.
  void claim() const {
    char text[kMarkerText.size() + 1];
    const ssize_t length = ::pread(descriptor_, text, sizeof text, 0);
    if (length < 0) throw io_error("read", path_);
    if (!kMarkerText.starts_with(std::string_view(text, static_cast<std::size_t>(length))))
      throw not_ours(directory_, fmt::format("its {} holds something else", kMarkerName));
    if (::pwrite(descriptor_, kMarkerText.data(), kMarkerText.size(), 0) < 0) throw io_error("write", path_);
  }

  std::string directory_;
  std::string path_;
  int descriptor_ = -1;
};

ScratchFile::ScratchFile(const std::string& directory, std::uint64_t bytes)
    : parent_(directory),
      directory_(directory + "/" + kDirectoryName),
      data_path_(directory_ + "/" + kDataName),
      bytes_(bytes),
      marker_(std::make_unique<Marker>(directory_)) {
  remove_file(data_path_);  // of a run that was killed
  file_ =
      std::make_unique<aio::File>(data_path_, aio::FileOptions{.mode = aio::OpenMode::create, .reserve_bytes = bytes});
}

ScratchFile::~ScratchFile() {
  file_.reset();
  remove_file(data_path_);
}

}  // namespace hoist::measure
