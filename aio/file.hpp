// SPDX-License-Identifier: Apache-2.0
// aio/file.hpp - an open file fit for direct transfers.
//
// Threading  Constant after open; any thread.
// Errors     IoError with path and errno. Links are never followed; a file is 0600.
#pragma once

#include <hoist/core/clock.hpp>
#include <hoist/core/units.hpp>

#include <cstdint>
#include <string>

namespace hoist::aio {

enum class OpenMode : std::uint8_t {
  read_only,
  read_write,  // must exist
  create,      // must not exist
};

struct FileOptions {
  OpenMode mode = OpenMode::read_write;
  // Reserves this many bytes (fallocate) after creating; ENOSPC is thrown and the new file removed. 0: none.
  std::uint64_t reserve_bytes = 0;
  bool direct = true;  // O_DIRECT where the file system has it; is_direct() says what was had
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
  std::uint64_t size_bytes() const { return size_bytes_; }
  // Offset, length and address of a transfer are multiples of this.
  static constexpr std::uint64_t kAlignment = kBlockAlignment;

  // Takes the exclusive lock (flock) of this open file description, trying until `timeout` has passed. False when
  // somebody else still holds it. The kernel drops it only when the last in-flight transfer of a dead owner ended.
  [[nodiscard]] bool lock(Nanoseconds timeout);

 private:
  std::string path_;
  int descriptor_ = -1;
  bool direct_ = false;
  std::uint64_t size_bytes_ = 0;
};

// fsync of a directory: makes created, renamed and removed names durable.
void sync_directory(const std::string& path);

}  // namespace hoist::aio
