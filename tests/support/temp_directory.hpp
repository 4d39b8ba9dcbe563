// SPDX-License-Identifier: Apache-2.0
// tests/support/temp_directory.hpp - a fresh directory, removed with everything in it.
//
// Below the working directory of the test, which ctest puts into the build tree: a temporary directory of the system
// may be memory, where O_DIRECT means nothing.
#pragma once

#include <filesystem>
#include <string>

namespace hoist::test {

class TempDirectory {
 public:
  TempDirectory();
  explicit TempDirectory(const std::filesystem::path& parent);
  ~TempDirectory();
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  // Processes that are started from here on make theirs inside this one, until it goes: a death test's child runs its
  // fixture anew and dies without removing anything.
  void hold_those_of_children();

  const std::filesystem::path& path() const { return path_; }
  // The path of something inside.
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
  bool holds_those_of_children_ = false;
};

// Where a TempDirectory of a test belongs that models power cuts or damage, so that a real drive adds nothing but time:
// memory, on which the flushes of hundreds of runs cost nothing, or the working directory where the system has none.
std::filesystem::path scratch_in_memory();

}  // namespace hoist::test
