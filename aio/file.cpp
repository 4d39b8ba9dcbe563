// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <set>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <hoist/aio/file.hpp>
#include <hoist/aio/given_up.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/open_file.hpp>

namespace hoist::aio {

namespace {

constexpr Nanoseconds kLockPollInterval = std::chrono::milliseconds(5);
constexpr std::uint64_t kZeroFillBytes = kMiB;

const char* open_remedy(int code, const std::string& path, OpenMode mode) {
  switch (code) {
    case EINVAL:
      if (path.starts_with("/dev/ng"))
        return "NVMe passthrough is not supported, it bypasses the file system; name a file on the drive";
      return open_file_remedy(code);
    case ENOENT:
      return mode == OpenMode::create || mode == OpenMode::open_or_create
                 ? "create the directory first, or correct the path"
                 : "the file is missing: bring it back, or correct the path";
    case EEXIST:
      return "the file already exists and was not changed; remove it or choose another path";
    default:
      return usual_remedy(code);
  }
}

int open_flags(OpenMode mode) {
  switch (mode) {
    case OpenMode::read_only:
      return O_NOFOLLOW | O_RDONLY;
    case OpenMode::read_write:
      return O_NOFOLLOW | O_RDWR;
    case OpenMode::create:
      return O_NOFOLLOW | O_RDWR | O_CREAT | O_EXCL;
    case OpenMode::open_or_create:
      return O_NOFOLLOW | O_RDWR | O_CREAT;
  }
  return O_NOFOLLOW;
}

// False if the file system reports that it cannot do direct transfers at our alignment. Most kernels and file systems
// report nothing; then setting O_DIRECT is the probe.
bool direct_alignment_fits(int descriptor) {
#ifdef STATX_DIOALIGN
  struct statx info {};
  if (::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) != 0) return true;
  if ((info.stx_mask & STATX_DIOALIGN) == 0) return true;
  return info.stx_dio_offset_align != 0 && info.stx_dio_offset_align <= File::kAlignment &&
         info.stx_dio_mem_align <= File::kAlignment;
#else
  (void)descriptor;
  return true;
#endif
}

// Some kernels accept O_DIRECT on an in-memory file system, and then copy anyway.
bool is_memory(int descriptor) {
  struct statfs info {};
  return ::fstatfs(descriptor, &info) == 0 && (info.f_type == TMPFS_MAGIC || info.f_type == RAMFS_MAGIC);
}

// O_DIRECT is set after opening: an open() that creates the file and then refuses O_DIRECT leaves the file behind.
bool set_direct(int descriptor) {
  if (is_memory(descriptor) || !direct_alignment_fits(descriptor)) return false;
  const int flags = ::fcntl(descriptor, F_GETFL);
  return flags >= 0 && ::fcntl(descriptor, F_SETFL, flags | O_DIRECT) == 0;
}

// Logged once for each file system: everything works, but a measurement would be misleading.
void say_buffered_once(int descriptor, const std::string& path, dev_t device) {
  static Mutex mutex;
  static std::set<dev_t> said;
  {
    const MutexLock lock(mutex);
    if (!said.insert(device).second) return;
  }
  log_warning(
      "{} is on a file system without direct transfers ({}): transfers work, but through memory, so a measurement "
      "there shows {}. For a drive's own speed choose a directory on ext4 or xfs, on a drive with sectors of at most 4 "
      "KiB and without the mount option data=journal.",
      path, is_memory(descriptor) ? "tmpfs" : "no O_DIRECT",
      is_memory(descriptor) ? "memory and no drive" : "the page cache and copying to and from it");
}

// btrfs writes a changed block to newly allocated space, which may run out although the file's is reserved, and does
// direct writes through the page cache. FS_NOCOW_FL on an empty file turns both off, and btrfs's checksums with them.
// If the kernel refuses the flag, nothing changes.
void turn_off_copy_on_write(int descriptor) {
  struct statfs system {};
  struct stat info {};
  if (::fstatfs(descriptor, &system) != 0 || system.f_type != BTRFS_SUPER_MAGIC) return;
  if (::fstat(descriptor, &info) != 0 || info.st_size != 0) return;
  int flags = 0;  // the kernel takes an int, whatever the request's name says
  if (::ioctl(descriptor, FS_IOC_GETFLAGS, &flags) != 0) return;
  flags |= FS_NOCOW_FL;
  [[maybe_unused]] const int marked = ::ioctl(descriptor, FS_IOC_SETFLAGS, &flags);
}

std::uint64_t next_file_id() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

// Returns an errno. Pre: bytes is a multiple of File::kAlignment. Writes the blocks, because fallocate would have
// reserved them.
int write_zeros(int descriptor, std::uint64_t bytes) {
  const std::uint64_t buffer_bytes = std::min(kZeroFillBytes, bytes);
  void* buffer = std::aligned_alloc(File::kAlignment, buffer_bytes);
  if (buffer == nullptr) return ENOMEM;
  std::fill_n(static_cast<std::byte*>(buffer), buffer_bytes, std::byte{0});
  int code = 0;
  for (std::uint64_t at = 0; at < bytes && code == 0;) {
    const ssize_t written = ::pwrite(descriptor, buffer, std::min(buffer_bytes, bytes - at), static_cast<off_t>(at));
    if (written > 0) {
      at += static_cast<std::uint64_t>(written);
    } else if (written == 0) {
      code = EIO;
    } else if (errno != EINTR) {
      code = errno;
    }
  }
  std::free(buffer);
  // Otherwise delayed allocation would report missing space later.
  if (code == 0 && ::fdatasync(descriptor) != 0) code = errno;
  return code;
}

}  // namespace

File::File(std::string path, const FileOptions& options)
    : path_(std::move(path)), id_(next_file_id()), observers_(std::make_unique<Observers>()) {
  if (options.mode == OpenMode::read_only && options.reserve_bytes > 0)
    throw UsageError("space cannot be reserved in " + path_ + ", which is opened for reading only");
  if (options.reserve_bytes % kAlignment != 0)
    throw UsageError("the space to reserve in " + path_ + " must be a multiple of 4096 bytes");
  open(options);
  try {
    reserve(options.reserve_bytes);
    struct stat info {};
    if (::fstat(descriptor_, &info) != 0) throw IoError({"fstat", path_, 0, 0, errno});
    size_bytes_ = static_cast<std::uint64_t>(info.st_size);
    if (options.direct) direct_ = set_direct(descriptor_);
    if (options.direct && !direct_) say_buffered_once(descriptor_, path_, info.st_dev);
  } catch (...) {
    if (options.mode == OpenMode::create) ::unlink(path_.c_str());
    close();
    throw;
  }
}

File::~File() { close(); }

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      direct_(other.direct_),
      size_bytes_(other.size_bytes_),
      id_(other.id_),
      observers_(std::move(other.observers_)) {}

void File::open(const FileOptions& options) {
  descriptor_ = open_regular_file(path_, open_flags(options.mode), S_IRUSR | S_IWUSR);
  if (descriptor_ < 0) {
    const int code = errno;
    throw IoError({"open", path_, 0, 0, code}, open_remedy(code, path_, options.mode));
  }
}

void File::reserve(std::uint64_t bytes) const {
  if (bytes == 0) return;  // fallocate refuses it
  turn_off_copy_on_write(descriptor_);
  int code = 0;
  do {
    code = ::fallocate(descriptor_, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (code == EINTR);
  if (code == EOPNOTSUPP) {
    // Zeros would overwrite what an existing file holds, so only a new, empty file may be filled.
    struct stat info {};
    if (::fstat(descriptor_, &info) == 0 && info.st_size == 0) code = write_zeros(descriptor_, bytes);
  }
  if (code == 0) return;
  throw IoError({"reserve", path_, 0, bytes, code});
}

void File::start_over(std::uint64_t bytes) {
  HOIST_ASSERT(bytes % kAlignment == 0, "the space to reserve in {} must be a multiple of 4096 bytes", path_);
  if (::ftruncate(descriptor_, 0) != 0) throw IoError({"truncate", path_, 0, 0, errno});
  size_bytes_ = 0;
  try {
    reserve(bytes);
  } catch (...) {
    [[maybe_unused]] const int given_back = ::ftruncate(descriptor_, 0);
    throw;
  }
  size_bytes_ = bytes;
}

void File::close() noexcept {
  if (descriptor_ < 0) return;
  std::vector<std::weak_ptr<FileObserver>> list;
  {
    const MutexLock lock(observers_->mutex);
    list.swap(observers_->list);
  }
  for (const auto& weak : list) {
    if (const auto observer = weak.lock()) observer->closing(id_);
  }
  ::close(descriptor_);  // not repeated after EINTR: the descriptor is gone either way
  descriptor_ = -1;
}

bool File::lock(Nanoseconds timeout) {
  const TimePoint start = Clock::now();
  while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    const int code = errno;
    if (code != EWOULDBLOCK && code != EINTR)
      throw IoError({"flock", path_, 0, 0, code}, "the file system must support locks; choose a local one");
    const Nanoseconds left = timeout - (Clock::now() - start);
    if (left <= Nanoseconds::zero()) return false;
    std::this_thread::sleep_for(std::min(kLockPollInterval, left));
  }
  return true;
}

void File::unlock() const noexcept {
  if (!a_drive_was_given_up()) ::flock(descriptor_, LOCK_UN);
}

void File::observe(std::weak_ptr<FileObserver> observer) const {
  const MutexLock lock(observers_->mutex);
  std::erase_if(observers_->list, [](const auto& weak) { return weak.expired(); });
  observers_->list.push_back(std::move(observer));
}

void sync_directory(const std::string& path) {
  const Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.number < 0) {
    const int code = errno;
    throw IoError({"open", path, 0, 0, code}, open_remedy(code, path, OpenMode::create));
  }
  if (::fsync(directory.number) != 0) throw IoError({"fsync", path, 0, 0, errno});  // never repeated, like every flush
}

}  // namespace hoist::aio
