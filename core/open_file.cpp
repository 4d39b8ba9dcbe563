// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cerrno>
#include <exception>
#include <filesystem>

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/standard_descriptors.hpp>

namespace hoist {

namespace {

int failed(int descriptor, int code) noexcept {
  if (descriptor >= 0) ::close(descriptor);
  errno = code;
  return -1;
}

int open_at_once(const std::string& path, int flags, mode_t mode) noexcept {
  int descriptor = -1;
  do {
    descriptor = ::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, mode);
  } while (descriptor < 0 && errno == EINTR);
  return beyond_standard_descriptors(descriptor);
}

// io_uring would understand the flag as a request to fail instead of waiting for a slow read.
int waiting_from_here_on(int descriptor) noexcept {
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags < 0 || ::fcntl(descriptor, F_SETFL, flags & ~O_NONBLOCK) != 0) return failed(descriptor, errno);
  return descriptor;
}

// 0, or why this kind of file is refused.
int refusal(const struct stat& info) noexcept {
  if (S_ISREG(info.st_mode)) return 0;
  return S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
}

// An unnamed pipe: its creator passed both ends on open.
bool is_nameless_pipe(int descriptor) noexcept {
  struct stat info {};
  struct statfs system {};
  return ::fstat(descriptor, &info) == 0 && S_ISFIFO(info.st_mode) && ::fstatfs(descriptor, &system) == 0 &&
         system.f_type == PIPEFS_MAGIC;
}

bool names_pipe(const std::string& path) noexcept {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISFIFO(info.st_mode);
}

}  // namespace

Descriptor::~Descriptor() {
  if (number >= 0) ::close(number);
}

int open_regular_file(const std::string& path, int flags, mode_t mode) noexcept {
  // Checked before and after opening: a device should not be opened at all, and the name may mean another file by then.
  // open() follows or refuses a link.
  struct stat info {};
  const bool follows = (flags & O_NOFOLLOW) == 0;
  if ((follows ? ::stat : ::lstat)(path.c_str(), &info) == 0 && !S_ISLNK(info.st_mode) && (flags & O_EXCL) == 0) {
    if (const int code = refusal(info)) return failed(-1, code);
  }
  const int descriptor = open_at_once(path, flags, mode);
  if (descriptor < 0) return descriptor;
  if (::fstat(descriptor, &info) != 0) return failed(descriptor, errno);
  if (const int code = refusal(info)) return failed(descriptor, code);
  return waiting_from_here_on(descriptor);
}

int open_input_file(const std::string& path) noexcept {
  if (!names_pipe(path)) return open_regular_file(path, O_RDONLY);
  const int descriptor = open_at_once(path, O_RDONLY, 0);
  if (descriptor < 0) return descriptor;
  if (!is_nameless_pipe(descriptor)) return failed(descriptor, EINVAL);
  return waiting_from_here_on(descriptor);
}

int read_and_close(int descriptor, std::size_t bytes_max, std::string& text) {
  std::array<char, 8192> buffer;
  ssize_t length = 0;
  int code = 0;
  while (code == 0 && (length = ::read(descriptor, buffer.data(), buffer.size())) != 0) {
    if (length > 0) text.append(buffer.data(), static_cast<std::size_t>(length));
    if (length < 0 && errno != EINTR) code = errno;
    if (text.size() > bytes_max) code = EFBIG;
  }
  ::close(descriptor);
  return code;
}

int write_all(int descriptor, std::span<const std::byte> bytes) noexcept {
  while (!bytes.empty()) {
    const ssize_t count = ::write(descriptor, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : EIO;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return 0;
}

std::FILE* open_output_file(const std::string& path, OutputMode mode) noexcept {
  const bool appends = mode == OutputMode::append;
  const int opened = open_at_once(path, O_WRONLY | O_CREAT | (appends ? O_APPEND : O_TRUNC), 0666);
  const int descriptor = opened < 0 ? opened : waiting_from_here_on(opened);
  if (descriptor < 0) return nullptr;
  std::FILE* file = ::fdopen(descriptor, appends ? "a" : "w");
  if (file == nullptr) failed(descriptor, ENOMEM);
  return file;
}

const char* open_file_remedy(int code) noexcept {
  if (code == EINVAL) return "this is a pipe, a socket or a device, and only regular files are supported";
  return code == ENXIO ? "no process reads from this pipe" : "";
}

std::string plain_path(const std::string& path) {
  std::filesystem::path plain;
  for (const auto& part : std::filesystem::path(path))
    if (!part.empty() && part != ".") plain /= part.has_root_directory() ? "/" : part;
  return plain.empty() && !path.empty() ? "." : plain.string();
}

std::string absolute_path(const std::string& path) {
  std::error_code failed;
  const std::filesystem::path absolute = std::filesystem::absolute(path, failed);
  if (!failed) return absolute.string();
  throw IoError({"find", path, 0, 0, failed.value()},
                "the working directory of this process is gone; name paths from the root on, or start the program in "
                "another directory");
}

bool is_same_place(const std::string& one, const std::string& other) noexcept {
  namespace fs = std::filesystem;
  try {
    std::error_code failed;
    if (one == other || fs::equivalent(one, other, failed)) return true;
    const fs::path first = fs::weakly_canonical(fs::absolute(plain_path(one)), failed);
    if (failed) return false;
    const fs::path second = fs::weakly_canonical(fs::absolute(plain_path(other)), failed);
    return !failed && first == second;
  } catch (const std::exception&) {  // the working directory is gone
    return false;
  }
}

bool is_absent(const std::error_code& failure) noexcept {
  return failure.value() == ENOENT || failure.value() == ENOTDIR;
}

}  // namespace hoist
