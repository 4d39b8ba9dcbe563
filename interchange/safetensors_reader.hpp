// SPDX-License-Identifier: Apache-2.0
// interchange/safetensors_reader.hpp - reads tensors of one safetensors file, or of a model in several files.
//
// Threading  Constant after opening; any thread reads.
// Memory     The headers only. Tensors are read in slices, into the caller's memory.
// Errors     SafetensorsError for a file's content, IoError if the system cannot read it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <hoist/interchange/safetensors.hpp>

namespace hoist::interchange {

class SafetensorsFile {
 public:
  // Follows links, because model caches use them.
  explicit SafetensorsFile(std::string path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const SafetensorsHeader& header() const { return header_; }
  // Reads target.size() bytes of `tensor`, one of this file's, from its byte `first_byte` on.
  void read(const TensorInfo& tensor, std::uint64_t first_byte, std::span<std::byte> target) const;

 private:
  void read_at(std::uint64_t offset_bytes, std::span<std::byte> target) const;
  std::string path_;
  int descriptor_ = -1;
  std::uint64_t data_offset_bytes_ = 0;
  SafetensorsHeader header_;
};

// A model as Hugging Face's tools save it: one file, or shards named by an index ("model.safetensors.index.json").
class SafetensorsModel {
 public:
  struct Tensor {
    const SafetensorsFile* file = nullptr;
    const TensorInfo* info = nullptr;
    void read(std::uint64_t first_byte, std::span<std::byte> target) const { file->read(*info, first_byte, target); }
  };

  // `path` is a .safetensors file, an index, or a directory. In a directory it opens model.safetensors, or else the
  // index, or else the only .safetensors file. Every shard's header is read and compared with the index.
  explicit SafetensorsModel(const std::string& path);

  const Tensor* find(std::string_view name) const;
  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }
  // Metadata of the first file.
  const Metadata& metadata() const { return files_.front()->header().metadata; }

 private:
  void add_file(const std::string& path);
  void add_index(const std::string& path);
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Tensor, std::less<>> tensors_;
};

}  // namespace hoist::interchange
