// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <hoist/aio/file.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/interchange/safetensors_writer.hpp>

namespace hoist::interchange {

namespace fs = std::filesystem;

std::vector<Shard> plan_shards(std::span<const TensorSpec> tensors, std::uint64_t shard_bytes_max) {
  std::vector<Shard> shards(1);
  for (const TensorSpec& tensor : tensors) {
    const auto bytes = tensor_bytes(tensor.type, tensor.shape);
    if (!bytes) {
      throw UsageError(fmt::format("tensor '{}' of {} {} is not a whole number of bytes that 64 bits can count",
                                   tensor.name, tensor_type_name(tensor.type), shape_text(tensor.shape)));
    }
    const std::uint64_t used = shards.back().data_bytes();
    if (!shards.back().tensors.empty() && (used > shard_bytes_max || *bytes > shard_bytes_max - used)) {
      shards.emplace_back();
    }
    const std::uint64_t begin = shards.back().data_bytes();
    if (begin % std::max(tensor_type_bits(tensor.type) / 8, 1u) != 0) {
      throw UsageError(fmt::format("tensor '{}' of {} would begin at byte {} of its file; put wider types first",
                                   tensor.name, tensor_type_name(tensor.type), begin));
    }
    shards.back().tensors.push_back({tensor.name, tensor.type, tensor.shape, begin, begin + *bytes});
  }
  return shards;
}

// --- the lock of a directory -----------------------------------------------------------------------------------------

class SafetensorsWriter::Lock {
 public:
  explicit Lock(const std::string& directory) : path_((fs::path(directory) / "export.lock").string()) {
    while (!open_and_lock()) {
    }
  }
  ~Lock() {
    ::unlink(path_.c_str());
    ::close(descriptor_);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  // False if the file lost its name before it was locked: its holder has finished.
  bool open_and_lock() {
    descriptor_ = open_regular_file(path_, O_WRONLY | O_CREAT | O_NOFOLLOW, 0666);
    if (descriptor_ < 0) {
      const int code = errno;
      throw IoError({.operation = "open", .path = path_, .code = code}, open_file_remedy(code));
    }
    const int code = ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    // Some file systems are mounted without locks, such as Lustre and NFS.
    if (code != 0 && code != ENOLCK && code != ENOSYS && code != ENOTSUP) {
      ::close(descriptor_);
      throw IoError({.operation = "flock", .path = path_, .code = code},
                    code == EWOULDBLOCK ? "another export writes there; choose another directory" : "");
    }
    struct stat locked {};
    struct stat named {};
    if (::fstat(descriptor_, &locked) == 0 && ::lstat(path_.c_str(), &named) == 0 && named.st_dev == locked.st_dev &&
        named.st_ino == locked.st_ino)
      return true;
    ::close(descriptor_);
    return false;
  }

  const std::string path_;
  int descriptor_ = -1;
};

// --- a file under its temporary name ---------------------------------------------------------------------------------

class SafetensorsWriter::OpenFile {
 public:
  explicit OpenFile(const std::string& path) : path_(path), partial_(path + ".partial") {
    // Overwrites the file of a killed export; the lock keeps others away.
    descriptor_ = open_regular_file(partial_, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0666);
    if (descriptor_ >= 0) return;
    const int code = errno;
    fail("open", code, open_file_remedy(code));
  }
  ~OpenFile() {
    if (!renamed_ && (descriptor_ >= 0 || closed_)) ::unlink(partial_.c_str());
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  void write(std::span<const std::byte> bytes) {
    const int code = write_all(descriptor_, bytes);
    if (code != 0) fail("write", code, "", bytes.size());
    written_ += bytes.size();
  }

  // After the last write.
  void close() {
    sync();
    ::close(std::exchange(descriptor_, -1));
    closed_ = true;
  }

  void sync() {
    if (closed_) return;
    if (::fsync(descriptor_) != 0) fail("fsync", errno, "choose another directory; this drive lost data");
  }

  // Never replaces a file that was created meanwhile.
  void give_name() {
    int result = ::renameat2(AT_FDCWD, partial_.c_str(), AT_FDCWD, path_.c_str(), RENAME_NOREPLACE);
    if (result != 0 && errno == EINVAL)
      result = ::rename(partial_.c_str(), path_.c_str());  // some network file systems
    if (result != 0) fail("rename", errno, "choose an empty directory");
    renamed_ = true;
  }

  // Called after give_name() if a later file of the set failed.
  void take_back() noexcept {
    if (renamed_) ::unlink(path_.c_str());
  }

 private:
  // `length_bytes`: of a write that failed, at the present end of the file; 0 for other operations.
  [[noreturn]] void fail(const char* operation, int code, const char* remedy = "",
                         std::uint64_t length_bytes = 0) const {
    throw IoError({.operation = operation,
                   .path = partial_,
                   .offset_bytes = length_bytes == 0 ? 0 : written_,
                   .length_bytes = length_bytes,
                   .code = code},
                  remedy);
  }

  const std::string path_;
  const std::string partial_;
  int descriptor_ = -1;
  std::uint64_t written_ = 0;
  bool closed_ = false;
  bool renamed_ = false;
};

// --- the set of files ------------------------------------------------------------------------------------------------

namespace {

std::string shard_name(std::size_t index, std::size_t count) {
  return count == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

constexpr std::string_view kIndexName = "model.safetensors.index.json";

}  // namespace

SafetensorsWriter::SafetensorsWriter(SafetensorsWriterOptions options, std::span<const TensorSpec> tensors)
    : options_(std::move(options)), shards_(plan_shards(tensors, options_.shard_bytes_max)) {
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    data_bytes_ += shards_[i].data_bytes();
    files_.push_back((fs::path(options_.directory) / shard_name(i, shards_.size())).string());
  }
  if (shards_.size() > 1) files_.push_back((fs::path(options_.directory) / kIndexName).string());
  std::error_code failed;
  if (fs::create_directories(options_.directory, failed)) made_directory_.path = options_.directory;
  if (failed) throw IoError({.operation = "mkdir", .path = options_.directory, .code = failed.value()});
  lock_ = std::make_unique<Lock>(options_.directory);
  check_directory();
  check_space();
  next_shard();
}

SafetensorsWriter::~SafetensorsWriter() {
  if (finished_) return;
  for (const auto& file : open_) file->take_back();
}

SafetensorsWriter::MadeDirectory::~MadeDirectory() {
  std::error_code ignored;
  if (!path.empty()) fs::remove(path, ignored);  // which leaves a directory that is not empty
}

// People or a loader would confuse a model beside the new one with it.
void SafetensorsWriter::check_directory() const {
  std::error_code failed;
  for (fs::directory_iterator entry(options_.directory, failed), end; !failed && entry != end;
       entry.increment(failed)) {
    const std::string name = entry->path().filename().string();
    if (!name.ends_with(".safetensors") && !name.ends_with(".safetensors.index.json")) continue;
    throw SafetensorsError(options_.directory, fmt::format("it already holds {}; choose another directory", name));
  }
}

void SafetensorsWriter::check_space() const {
  struct statvfs system {};
  if (::statvfs(options_.directory.c_str(), &system) != 0) return;  // then writing reports it
  std::uint64_t free_bytes = std::uint64_t{system.f_bavail} * system.f_frsize;
  for (const std::string& file : files_) {  // a killed export's files are overwritten
    struct stat left {};
    if (::lstat((file + ".partial").c_str(), &left) == 0)
      free_bytes += static_cast<std::uint64_t>(left.st_blocks) * 512;
  }
  if (data_bytes_ <= free_bytes) return;
  throw IoError({.operation = "write", .path = options_.directory, .length_bytes = data_bytes_, .code = ENOSPC},
                fmt::format("the tensors need {} and {} are free: free space, or choose another directory",
                            format_bytes(data_bytes_), format_bytes(free_bytes)));
}

void SafetensorsWriter::next_shard() {
  // Descriptors are few (ulimit -n): one file is open at a time.
  if (!open_.empty()) open_.back()->close();
  const std::size_t index = open_.size();
  const std::string header = encode_header(shards_[index].tensors, options_.metadata, files_[index]);
  open_.push_back(std::make_unique<OpenFile>(files_[index]));
  open_.back()->write(std::as_bytes(std::span(header)));
  left_in_shard_ = shards_[index].data_bytes();
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    while (left_in_shard_ == 0 && open_.size() < shards_.size()) next_shard();
    const std::uint64_t count = std::min<std::uint64_t>(bytes.size(), left_in_shard_);
    HOIST_ASSERT(count > 0, "{} bytes more than the tensors have", bytes.size());
    open_.back()->write(bytes.first(count));
    left_in_shard_ -= count;
    bytes = bytes.subspan(count);
  }
}

void SafetensorsWriter::write_index(const std::string& path) {
  nlohmann::ordered_json index{{"metadata", {{"total_size", data_bytes_}}}, {"weight_map", nlohmann::json::object()}};
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    for (const TensorInfo& tensor : shards_[i].tensors) {
      index["weight_map"].push_back({tensor.name, shard_name(i, shards_.size())});
    }
  }
  const std::string text = index.dump(2) + "\n";
  open_.push_back(std::make_unique<OpenFile>(path));
  open_.back()->write(std::as_bytes(std::span(text)));
}

void SafetensorsWriter::finish() {
  while (left_in_shard_ == 0 && open_.size() < shards_.size()) next_shard();  // of empty tensors
  HOIST_ASSERT(left_in_shard_ == 0, "{} bytes are missing", left_in_shard_);
  if (shards_.size() > 1) write_index(files_.back());
  for (const auto& file : open_) file->sync();
  for (const auto& file : open_) file->give_name();
  lock_.reset();  // from here on, others find the model
  aio::sync_directory(options_.directory);
  finished_ = true;
}

}  // namespace hoist::interchange
