// SPDX-License-Identifier: Apache-2.0
// tests/crash/disturbance.hpp - what people, copies and other programs do to a store between two lives of a training,
// or to its process.
//
// Threading  One thread.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <hoist/core/rng.hpp>

namespace hoist::test {

enum class Disturbance : std::uint8_t {
  // Concern one file, or all files of one rank:
  missing,  // they have another name for a while
  foreign,  // they are those of another run of the same model
  longer,   // something was written after their end
  older,    // they are copies from an earlier moment; or all files of the store are
  // Concern all files:
  clocks,  // they seem to be from the past and the future, as of hosts whose clocks differ
  // While the process runs:
  forks,    // it forks a child, which uses the engine, in vain, and exits
  signals,  // it is interrupted by signals that mean nothing to it, thousands of times a second
  second,   // another one is started at the same time
};
inline constexpr std::size_t kDisturbanceCount = 8;
const char* name_of(Disturbance disturbance);
inline bool is_of_files(Disturbance disturbance) { return disturbance <= Disturbance::older; }

// The contents of all files below a directory, by relative path. The text about the lock's holder is left out, since
// nothing depends on it.
using Files = std::map<std::string, std::string>;
Files files_below(const std::string& directory);

// Applies a disturbance to the files of a store.
class DisturbedFiles {
 public:
  // `foreign`: the files of another run; `older`: earlier files of this run.
  DisturbedFiles(Disturbance disturbance, const std::string& store, const Files& foreign, const Files& older, Rng& rng);
  // Puts the disturbed files back and leaves all others as they are now. After `older`, it restores all files:
  // ranks may have gone back to the step that the older files showed.
  void undo() const;
  // Names the disturbance in messages.
  const std::string& text() const { return text_; }

 private:
  void write(const std::string& path, const std::optional<std::string>& content);

  const std::string store_;
  std::map<std::string, std::optional<std::string>> before_;  // nothing: there was no such file
  std::string text_;
};

}  // namespace hoist::test
