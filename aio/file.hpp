// SPDX-License-Identifier: Apache-2.0
// aio/file.hpp - an open file fit for direct transfers.
//
// Threading  Constant after open; any thread. A file is not moved or closed while a transfer on it is in flight.
// Errors     IoError with path and errno. Links are never followed; a file that we create is 0600.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <hoist/core/clock.hpp>
#include <hoist/core/units.hpp>

namespace hoist::aio {

enum class OpenMode : std::uint8_t {
  read_only,
  read_write,      // must exist
  create,          // must not exist
  open_or_create,  // what is there is left as it is
};

struct FileOptions {
  OpenMode mode = OpenMode::read_write;
  // Reserves this many bytes (fallocate; zeros are written where the file system has none; on btrfs, an empty file is
  // marked to be rewritten in place). When they cannot be had, the error is thrown and a file that was just created is
  // removed. 0: none.
  std::uint64_t reserve_bytes = 0;
  // O_DIRECT where the file system has it; is_direct() says what was had. Where it has not (tmpfs), transfers work
  // through memory, and the log says once what is then measured.
  bool direct = true;
};

// Told just before a descriptor is closed, so that a backend can make the kernel forget its registration of the file:
// a registered file would stay open, and locked, behind its owner's back.
class FileObserver {
 public:
  virtual ~FileObserver() = default;
  virtual void closing(std::uint64_t file_id) noexcept = 0;
};

class File {
 public:
  // Pre: no component of `path` that is ours to create is a symbolic link (O_NOFOLLOW on the last one).
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

  // Takes the exclusive lock (flock) of this open file description, trying until `timeout` has passed. False when
  // somebody else still holds it. The kernel drops it only when the last in-flight transfer of a dead owner ended.
  [[nodiscard]] bool lock(Nanoseconds timeout);
  // Lets go of the lock now. Closing does so only when nobody else has this open file description, and a process that
  // was forked meanwhile has it for as long as it lives. Pre: nothing is in flight. Nothing happens once a drive of
  // this process was given up (DriveQueue::gave_up): the kernel may still write.
  void unlock() const noexcept;

  // Drops what the file holds and reserves `bytes` of it anew, as FileOptions::reserve_bytes does. For whoever holds
  // its lock; nothing may be in flight on it.
  void start_over(std::uint64_t bytes);

  // Unique among all files this process ever opens; descriptor numbers and addresses are used again.
  std::uint64_t id() const { return id_; }
  // For backends. An observer that has gone is forgotten.
  void observe(std::weak_ptr<FileObserver> observer) const;

 private:
  struct Observers {
    std::mutex mutex;
    std::vector<std::weak_ptr<FileObserver>> list;
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
