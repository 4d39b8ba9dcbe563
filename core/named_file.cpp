// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <random>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/named_file.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/standard_descriptors.hpp>

namespace hoist {

namespace {

namespace fs = std::filesystem;

IoError io_error(const char* operation, const std::string& path) {
  const int code = errno;
  const std::string remedy = usual_remedy(code);
  return IoError({.operation = operation, .path = path, .code = code},
                 "nothing was changed; " + (remedy.empty() ? "choose a writable place" : remedy));
}

void write_text(int descriptor, const std::string& text, const std::string& path) {
  errno = write_all(descriptor, std::as_bytes(std::span(text)));
  if (errno != 0) throw io_error("write", path);
}

std::string directory_of(const std::string& path) {
  const std::string directory = fs::path(path).parent_path();
  return directory.empty() ? "." : directory;
}

// A file beside `target`, removed again unless it was renamed.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& target)
      : target_(target),
        path_(fmt::format("{}.{:08x}", target, std::random_device()())),
        directory_(::open(directory_of(target).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    if (directory_.number < 0) throw io_error("open", target);
    const bool replaces = ::access(target.c_str(), F_OK) == 0;  // a file that may be private: take_permissions()
    descriptor_ = beyond_standard_descriptors(
        ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, replaces ? 0600 : 0666));
    if (descriptor_ < 0) throw io_error("create", path_);
  }
  ~TemporaryFile() {
    ::close(descriptor_);
    if (!renamed_) ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(const std::string& text) const { write_text(descriptor_, text, path_); }

  // Those of the file that it replaces, if there is one.
  void take_permissions() const {
    struct stat old {};
    if (::stat(target_.c_str(), &old) != 0) return;
    if (::fchmod(descriptor_, old.st_mode & 07777) != 0) throw io_error("fchmod", path_);
    if (::fchown(descriptor_, old.st_uid, old.st_gid) != 0 && errno != EPERM) throw io_error("fchown", path_);
  }

  // False if the target is a mount of its own, as a file that a container is given.
  [[nodiscard]] bool rename() {
    if (::fsync(descriptor_) != 0) throw io_error("fsync", path_);
    if (::rename(path_.c_str(), target_.c_str()) != 0) {
      if (errno == EBUSY) return false;
      throw io_error("rename", target_);
    }
    renamed_ = true;
    if (::fsync(directory_.number) == 0) return true;
    const int code = errno;
    throw IoError(
        {.operation = "fsync", .path = directory_of(target_), .code = code},
        fmt::format("{} has its new text, which a power failure may undo; check the drive (dmesg, smartctl)", target_));
  }

 private:
  const std::string target_;
  std::string path_;
  const Descriptor directory_;
  int descriptor_ = -1;
  bool renamed_ = false;
};

// Standard output or error, if that is the file `target` (by the name /dev/stdout, say), which also gets what is
// printed.
std::optional<int> standard_descriptor(const struct stat& target) {
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat info {};
    if (::fstat(descriptor, &info) == 0 && info.st_dev == target.st_dev && info.st_ino == target.st_ino)
      return descriptor;
  }
  return std::nullopt;
}

// What `path` leads to through symbolic links, whether that exists or not.
fs::path followed(fs::path path) {
  constexpr int kLinksMax = 40;  // as in the kernel, which then says ELOOP
  std::error_code error;
  for (int links = 0; links < kLinksMax && fs::is_symlink(path, error); ++links)
    path = path.parent_path() / fs::read_symlink(path, error);
  const fs::path real = fs::weakly_canonical(path, error);
  return error ? path : real;
}

// To a pipe, a device or a terminal, or over a file that cannot be replaced.
void write_into(const std::string& path, const std::string& text) {
  std::FILE* file = open_output_file(path, OutputMode::replace);
  if (file == nullptr) {
    const int code = errno;
    throw IoError({.operation = "open", .path = path, .code = code},
                  code == ENXIO ? open_file_remedy(code) : "choose another file");
  }
  errno = 0;
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int code = errno;
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed)
    throw IoError({.operation = "write", .path = path, .code = written ? errno : code}, "choose another file");
}

// Text for a pipe or a device overwrites nothing.
bool is_same_file(const std::string& one, const std::string& other) {
  std::error_code ignored;
  if (one.empty() || other.empty() || one == "-" || fs::is_other(one, ignored)) return false;
  return is_same_place(one, other);
}

}  // namespace

void replace_file(const std::string& path, const std::string& text) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) {
    if (!S_ISREG(info.st_mode)) return write_into(path, text);
    if (const auto descriptor = standard_descriptor(info)) {
      std::fflush(nullptr);
      return write_text(*descriptor, text, path);
    }
  }
  TemporaryFile draft(followed(path).string());
  draft.write(text);
  draft.take_permissions();
  if (!draft.rename()) write_into(path, text);
}

void check_replaceable(const std::string& path, const std::string& remedy) {
  const auto refuse = [&](int code) { throw IoError({.operation = "open", .path = path, .code = code}, remedy); };
  struct stat info {};
  const bool exists = ::stat(path.c_str(), &info) == 0;
  if (!exists && errno != ENOENT) refuse(errno);
  if (exists && S_ISDIR(info.st_mode)) refuse(EISDIR);
  if (exists && ::access(path.c_str(), W_OK) != 0) refuse(errno);
  if (exists && (!S_ISREG(info.st_mode) || standard_descriptor(info))) return;
  try {
    const TemporaryFile probe(followed(path).string());
  } catch (const IoError& error) {
    refuse(error.where.code);
  }
}

std::string read_file(const std::string& path, const std::string& remedy) {
  const int descriptor = open_input_file(path);
  if (descriptor < 0) {
    const int code = errno;
    const std::string kind = open_file_remedy(code);
    throw IoError({.operation = "open", .path = path, .code = code}, kind.empty() ? remedy : kind + "; " + remedy);
  }
  std::string text;
  const int code = read_and_close(descriptor, kReadBytesMax, text);
  if (code != 0) throw IoError({.operation = "read", .path = path, .code = code}, remedy);
  return text;
}

bool is_file_of_a_store(const std::string& path) {
  constexpr std::array kEndings{".manifest",  ".manifest-new", ".data",   ".label",
                                ".label-new", ".lock-info",    ".scratch"};
  constexpr std::string_view kPrefix = "rank-";
  constexpr std::size_t kDigitsMin = 5;
  std::error_code ignored;
  const fs::path real = fs::weakly_canonical(path, ignored);
  const std::string name = real.stem().string();
  const std::string rank = name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : "";
  return rank.size() >= kDigitsMin && std::ranges::all_of(rank, [](char c) { return c >= '0' && c <= '9'; }) &&
         std::ranges::find(kEndings, real.extension().string()) != kEndings.end();
}

void check_outputs_apart(const std::vector<OutputPath>& outputs, const std::vector<std::string>& inputs) {
  for (auto output = outputs.begin(); output != outputs.end(); ++output) {
    if (is_file_of_a_store(output->path))
      throw UsageError(fmt::format("{} {} is a file of a store, and would be overwritten; name another file",
                                   output->option, output->path));
    for (const std::string& input : inputs) {
      if (!is_same_file(output->path, input)) continue;
      throw UsageError(fmt::format("{} {} is the input file, and would be overwritten; name another file",
                                   output->option, output->path));
    }
    for (auto other = output + 1; other != outputs.end(); ++other) {
      if (!is_same_file(output->path, other->path)) continue;
      throw UsageError(fmt::format("{} {} and {} {} are the same file; name two", output->option, output->path,
                                   other->option, other->path));
    }
  }
}

void check_replaces_only(const OutputPath& output, const std::string& merged, const std::string& how) {
  struct stat info {};
  if (::stat(output.path.c_str(), &info) != 0 || !S_ISREG(info.st_mode) || standard_descriptor(info)) return;
  if (!merged.empty() && is_same_place(output.path, merged)) return;
  throw UsageError(fmt::format(
      "{} {}: the file exists, and nothing of it would stay; remove it first, {} to keep its other keys, or "
      "write to another file",
      output.option, output.path, how));
}

}  // namespace hoist
