// SPDX-License-Identifier: Apache-2.0
// interchange/safetensors_writer.hpp - writes tensors as Hugging Face's tools expect them: one file, or shards and an
// index.
//
// An export that does not reach finish() leaves no file that looks complete. Files have the suffix ".partial" until all
// of them are on disk. The index, without which loaders do not find the shards, gets its name last.
//
// Threading  One thread.
// Memory     The headers. Data passes through.
// Errors     SafetensorsError for a directory that already holds a model; IoError with path and errno, ENOSPC before
//            the first byte if the file system is too small.
// Main path  constructor -> write, until every tensor is complete -> finish.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <hoist/core/units.hpp>
#include <hoist/interchange/safetensors.hpp>

namespace hoist::interchange {

struct TensorSpec {
  std::string name;
  TensorType type = TensorType::f32;
  std::vector<std::uint64_t> shape;
};

struct SafetensorsWriterOptions {
  std::string directory;  // created if it does not exist
  // A shard ends before the tensor that would make its data longer than this; a longer tensor has a shard of its own.
  std::uint64_t shard_bytes_max = 5'000'000'000;
  Metadata metadata{{"format", "pt"}};  // Hugging Face's loader requires it
};

// The tensors of one file, in order, each with the position of its bytes in the file's data.
struct Shard {
  std::vector<TensorInfo> tensors;
  std::uint64_t data_bytes() const { return tensors.empty() ? 0 : tensors.back().end_bytes; }
};
// Pure. Errors: UsageError for a tensor too large to count, or one that would not begin at a multiple of its element
// (put wider types first).
std::vector<Shard> plan_shards(std::span<const TensorSpec> tensors, std::uint64_t shard_bytes_max);

class SafetensorsWriter {
 public:
  SafetensorsWriter(SafetensorsWriterOptions options, std::span<const TensorSpec> tensors);
  // Removes unfinished files.
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // The next bytes of the tensors, in the order they were given.
  void write(std::span<const std::byte> bytes);
  // Everything has been written: makes it durable and gives the files their names, the index last.
  void finish();

  std::uint64_t data_bytes() const { return data_bytes_; }  // of all tensors
  // The final paths, after finish(); the index is last.
  const std::vector<std::string>& files() const { return files_; }

 private:
  // Locks the file export.lock, which is in the directory only while an export writes there.
  class Lock;
  class OpenFile;
  // Removes the directory if this writer made it and it is empty.
  struct MadeDirectory {
    std::string path;  // empty: it was there before
    ~MadeDirectory();
  };
  void check_directory() const;
  void check_space() const;
  void next_shard();
  void write_index(const std::string& path);

  const SafetensorsWriterOptions options_;
  std::vector<Shard> shards_;
  std::vector<std::string> files_;
  MadeDirectory made_directory_;
  std::unique_ptr<Lock> lock_;
  std::vector<std::unique_ptr<OpenFile>> open_;
  std::uint64_t data_bytes_ = 0;
  std::uint64_t left_in_shard_ = 0;
  bool finished_ = false;
};

}  // namespace hoist::interchange
