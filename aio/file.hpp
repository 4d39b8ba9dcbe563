// SPDX-License-Identifier: Apache-2.0
// aio/file.hpp - an open file fit for direct transfers.
//
// Threading  Constant after open; any thread. A file is not moved or closed while a transfer on it is in flight.
// Errors     IoError with path and errno. A file that is a symbolic link is refused; a file that we create is 0600.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <hoist/core/clock.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/units.hpp>

namespace hoist::aio {

enum class OpenMode : std::uint8_t {
  read_only,
  read_write,      // must exist
  create,          // must not exist
  open_or_create,  // existing content stays
};

struct FileOptions {
  OpenMode mode = OpenMode::read_write;
  // Reserves this many bytes (fallocate; zeros are written where the file system has none; on btrfs, an empty file is
  // marked to be rewritten in place). If they are not available, throws, and with `create` removes the
  // file. 0: none.
  std::uint64_t reserve_bytes = 0;
  // Uses O_DIRECT if the file system supports it; is_direct() tells. Otherwise (tmpfs) transfers go through memory, and
  // the log says once what a measurement then shows.
  bool direct = true;
};

// Called just before a descriptor is closed, so that a backend can remove the kernel's registration of the file. A
// registered file would stay open, and locked, without its owner's knowledge.
class FileObserver {
 public:
  virtual ~FileObserver() = default;
  virtual void closing(std::uint64_t file_id) noexcept = 0;
};

class File {
 public:
  // Errors: IoError with ELOOP if `path` is a symbolic link (O_NOFOLLOW); links among its directories are followed.
  File(std::string path, const FileOptions& options);
  ~File();
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  File(const File&) = delete;

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  bool is_direct() const { return direct_; }
  // When it was opened or started over, the reserve included.
  std::uint64_t size_bytes() const { return size_bytes_; }
  // Offset, length and address of a transfer are multiples of this.
  static constexpr std::uint64_t kAlignment = kBlockAlignment;

  // Takes the exclusive lock (flock) of this open file description, trying until `timeout` has passed. False if another
  // process still holds it. The kernel releases it only when the last in-flight transfer of a dead owner has ended.
  [[nodiscard]] bool lock(Nanoseconds timeout);
  // Releases the lock now. Closing releases it only if no other process has this open file description, and a forked
  // process has it as long as it lives. Pre: nothing is in flight. Does nothing once a drive of this process was given
  // up (DriveQueue::gave_up), because the kernel may still write.
  void unlock() const noexcept;

  // Drops the file's content and reserves `bytes` of it anew, as FileOptions::reserve_bytes does. Pre: the caller holds
  // its lock; nothing is in flight on it.
  void start_over(std::uint64_t bytes);

  // Unique among all files this process ever opens; descriptor numbers and addresses are used again.
  std::uint64_t id() const { return id_; }
  // For backends. Destroyed observers are dropped.
  void observe(std::weak_ptr<FileObserver> observer) const;

 private:
  struct Observers {
    Mutex mutex;
    std::vector<std::weak_ptr<FileObserver>> list HOIST_GUARDED_BY(mutex);
  };

  void open(const FileOptions& options);
  void reserve(std::uint64_t bytes) const;
  void close() noexcept;

  std::string path_;
  int descriptor_ = -1;
  bool direct_ = false;
  std::uint64_t size_bytes_ = 0;
  std::uint64_t id_ = 0;
  std::unique_ptr<Observers> observers_;
};

// fsync of a directory: makes created, renamed and removed names durable.
void sync_directory(const std::string& path);

}  // namespace hoist::aio
