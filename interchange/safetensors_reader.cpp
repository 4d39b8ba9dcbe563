// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/units.hpp>
#include <hoist/interchange/safetensors_reader.hpp>

namespace hoist::interchange {

namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t kIndexBytesMax = 32 * kMiB;  // four times that of 90,000 tensors

std::uint64_t file_bytes_of(int descriptor, const std::string& path) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) {
    throw IoError({.operation = "fstat", .path = path, .code = errno});
  }
  return static_cast<std::uint64_t>(status.st_size);
}

int open_for_reading(const std::string& path) {
  const int descriptor = open_regular_file(path, O_RDONLY);
  if (descriptor >= 0) return descriptor;
  const int code = errno;
  if (code == EINVAL || code == EISDIR) throw SafetensorsError(path, "this is not a regular file");
  throw IoError({.operation = "open", .path = path, .code = code}, code == ENOENT ? "check the path" : "");
}

}  // namespace

// --- one file --------------------------------------------------------------------------------------------------------

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)) {
  descriptor_ = open_for_reading(path_);
  try {
    const std::uint64_t file_bytes = file_bytes_of(descriptor_, path_);
    std::array<std::byte, kHeaderLengthBytes> first{};
    if (file_bytes >= first.size()) read_at(0, first);
    const std::uint64_t length = header_length(first, file_bytes, path_);
    std::string json(length, '\0');
    read_at(kHeaderLengthBytes, std::as_writable_bytes(std::span(json)));
    data_offset_bytes_ = kHeaderLengthBytes + length;
    header_ = parse_header(json, file_bytes - data_offset_bytes_, path_);
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() { ::close(descriptor_); }

void SafetensorsFile::read(const TensorInfo& tensor, std::uint64_t first_byte, std::span<std::byte> target) const {
  HOIST_ASSERT(first_byte <= tensor.bytes() && target.size() <= tensor.bytes() - first_byte, "{} bytes at {} of {}",
               target.size(), first_byte, tensor.bytes());
  read_at(data_offset_bytes_ + tensor.begin_bytes + first_byte, target);
}

void SafetensorsFile::read_at(std::uint64_t offset_bytes, std::span<std::byte> target) const {
  while (!target.empty()) {
    const ssize_t count = ::pread(descriptor_, target.data(), target.size(), static_cast<off_t>(offset_bytes));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      throw IoError({.operation = "read",
                     .path = path_,
                     .offset_bytes = offset_bytes,
                     .length_bytes = target.size(),
                     .code = count < 0 ? errno : 0},
                    count < 0 ? "check the drive that holds it" : "the file became shorter while it was read");
    }
    target = target.subspan(static_cast<std::size_t>(count));
    offset_bytes += static_cast<std::uint64_t>(count);
  }
}

// --- a model ---------------------------------------------------------------------------------------------------------

namespace {

constexpr std::string_view kFileName = "model.safetensors";
constexpr std::string_view kFileSuffix = ".safetensors";
constexpr std::string_view kIndexSuffix = ".safetensors.index.json";

// The file of a directory that defines the model. Transformers, too, takes model.safetensors before an index, which may
// be left from an older model.
std::string find_entry(const std::string& directory) {
  std::vector<std::string> indices, files;
  std::error_code failed;
  for (fs::directory_iterator entry(directory, failed), end; !failed && entry != end; entry.increment(failed)) {
    const std::string path = entry->path().string();
    if (entry->path().filename() == kFileName) return path;
    if (path.ends_with(kIndexSuffix)) indices.push_back(path);
    if (path.ends_with(kFileSuffix)) files.push_back(path);
  }
  if (failed) {
    throw IoError({.operation = "read", .path = directory, .code = failed.value()});
  }
  if (indices.size() == 1) return indices.front();
  if (indices.empty() && files.size() == 1) return files.front();
  if (indices.empty() && files.empty()) throw SafetensorsError(directory, "there is no .safetensors file in it");
  throw SafetensorsError(directory, fmt::format("there are {} {} files in it; name one of them",
                                                indices.empty() ? files.size() : indices.size(),
                                                indices.empty() ? kFileSuffix : kIndexSuffix));
}

nlohmann::json read_index(const std::string& path) {
  std::string text;
  if (const int code = read_and_close(open_for_reading(path), kIndexBytesMax, text); code == EFBIG)
    throw SafetensorsError(path, fmt::format("more than {} bytes are too many for an index", kIndexBytesMax));
  else if (code != 0)
    throw IoError({.operation = "read", .path = path, .code = code});
  // Only "weight_map" is read, whose entries are texts. What lies deeper is dropped while it is parsed, and a text that
  // nests further than any writer's is refused: both would take many times its length.
  const auto is_kept = [&](int depth, nlohmann::json::parse_event_t, const nlohmann::json&) {
    constexpr int kDepthMax = 16;
    if (depth > kDepthMax) throw SafetensorsError(path, "the index is nested too deeply");
    return depth <= 2;
  };
  auto index = nlohmann::json::parse(text, is_kept, /*allow_exceptions=*/false);
  // The parser treats a zero byte as the end.
  if (index.is_discarded() || text.find('\0') != std::string::npos)
    throw SafetensorsError(path, "the index is not JSON");
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    throw SafetensorsError(path, "the index has no \"weight_map\"");
  }
  return index;
}

}  // namespace

SafetensorsModel::SafetensorsModel(const std::string& path) {
  std::error_code ignored;
  const std::string entry = fs::is_directory(path, ignored) ? find_entry(path) : path;
  if (entry.ends_with(".json")) {
    add_index(entry);
  } else {
    add_file(entry);
    const SafetensorsFile& file = *files_.front();
    for (const TensorInfo& tensor : file.header().tensors) tensors_.emplace(tensor.name, Tensor{&file, &tensor});
  }
}

void SafetensorsModel::add_file(const std::string& path) { files_.push_back(std::make_unique<SafetensorsFile>(path)); }

void SafetensorsModel::add_index(const std::string& path) {
  const nlohmann::json index = read_index(path);
  std::map<std::string, std::set<std::string>> names_of;  // by file
  for (const auto& [name, file] : index["weight_map"].items()) {
    const std::string file_name = file.is_string() ? file.get<std::string>() : std::string();
    // The index may come from anywhere, so it may only name files beside itself.
    if (file_name.empty() || file_name.find_first_of(std::string_view("/\0", 2)) != std::string::npos ||
        file_name == "." || file_name == "..") {
      throw SafetensorsError(path, fmt::format("\"{}\" is mapped to {}, which is not a file name", name,
                                               file.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)));
    }
    names_of[file_name].insert(name);
  }
  if (names_of.empty()) throw SafetensorsError(path, "the index names no tensor");
  for (const auto& [file_name, names] : names_of) {
    add_file((fs::path(path).parent_path() / file_name).string());
    const SafetensorsFile& file = *files_.back();
    std::size_t found = 0;
    for (const TensorInfo& tensor : file.header().tensors) {
      if (!names.contains(tensor.name)) continue;
      tensors_.emplace(tensor.name, Tensor{&file, &tensor});
      ++found;
    }
    if (found == names.size()) continue;
    for (const std::string& name : names) {
      if (!tensors_.contains(name))
        throw SafetensorsError(file.path(), fmt::format("the index expects tensor '{}' in it, which it lacks", name));
    }
  }
}

const SafetensorsModel::Tensor* SafetensorsModel::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

}  // namespace hoist::interchange
