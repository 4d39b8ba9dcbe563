// SPDX-License-Identifier: Apache-2.0
// measure/scratch_file.hpp - a file for measuring a drive: made by hoist, written in full, removed afterwards.
//
// It is in its own directory, `hoist-bench-io`, beside a marker file that names its maker and is locked while a run
// uses it. The next run therefore recognises and removes the files of a killed run. A directory of that name with
// anything that hoist did not make is refused and never changed.
//
// Threading  Constant after construction, except for the file it opens.
// Errors     UsageError if the directory cannot be used; IoError for failures in it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <hoist/aio/file.hpp>
#include <hoist/measure/interruption.hpp>

namespace hoist::measure {

// Refuses a path that is not a directory, or not writable. Errors: UsageError.
void check_scratch_directory(const std::string& directory);
// Refuses directories of one file system that has too little space for `bytes` in each. Errors: UsageError.
void check_scratch_space(std::span<const std::string> directories, std::uint64_t bytes);

class ScratchFile {
 public:
  static constexpr const char* kDirectoryName = "hoist-bench-io";
  static constexpr const char* kMarkerName = "MADE-BY-HOIST-BENCH";
  static constexpr const char* kDataName = "data";

  // Makes the directory and the empty file with its space reserved. fill_files() (measure/fill.hpp) writes
  // it: call that before reading.
  ScratchFile(const std::string& directory, std::uint64_t bytes);
  // Removes both. The log names files that cannot be removed.
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  const std::string& directory() const { return parent_; }  // as the operator gave it
  const std::string& path() const { return data_path_; }
  std::uint64_t bytes() const { return bytes_; }
  const aio::File& file() const { return *file_; }

 private:
  class Marker;

  std::string parent_;
  std::string directory_;
  std::string data_path_;
  std::uint64_t bytes_;
  std::unique_ptr<Marker> marker_;
  std::unique_ptr<aio::File> file_;
};

}  // namespace hoist::measure
