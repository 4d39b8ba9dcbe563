// SPDX-License-Identifier: Apache-2.0
// measure/scratch_file.hpp - a file to measure a drive with: made by us, written in full, removed afterwards.
//
// It lies in a directory of its own, `hoist-bench-io`, beside a marker file that says who made it and that is locked
// while a run uses it. What a killed run left behind is therefore recognised, and removed, by the next run; a directory
// of that name that we did not make is refused, and nothing in it is ever touched.
//
// Threading  Constant after construction, but for the file it opens.
// Errors     InputError when the directory cannot be used; IoError for everything that goes wrong in it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <hoist/aio/file.hpp>
#include <hoist/core/error.hpp>
#include <hoist/measure/interruption.hpp>

namespace hoist::measure {

// What the operator asked for cannot be done: says what there is, what is needed and what to change.
class InputError : public Error {
 public:
  using Error::Error;
};

// Refuses what could not hold `bytes`: no directory, not writable, too little space. Several paths may lie on one file
// system, so the caller says how much of `bytes` it needs there in all. Errors: InputError.
void check_scratch_directory(const std::string& directory, std::uint64_t bytes);

class ScratchFile {
 public:
  static constexpr const char* kDirectoryName = "hoist-bench-io";
  static constexpr const char* kMarkerName = "MADE-BY-HOIST-BENCH";
  static constexpr const char* kDataName = "data";

  // Makes the directory and the empty file with its space reserved. Call fill() before reading.
  ScratchFile(const std::string& directory, std::uint64_t bytes);
  // Removes both. What cannot be removed is named in the log.
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
