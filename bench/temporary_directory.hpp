// SPDX-License-Identifier: Apache-2.0
// bench/temporary_directory.hpp - a directory of a new name for one run: what a killed run left does not stop the next.
#pragma once

#include <cerrno>
#include <filesystem>
#include <string>

#include <stdlib.h>

#include <hoist/core/error.hpp>

namespace hoist::bench {

class TemporaryDirectory {
 public:
  // `parent`/`name`-XXXXXX. Errors: IoError.
  TemporaryDirectory(const std::filesystem::path& parent, const std::string& name)
      : path_((parent / (name + "-XXXXXX")).string()) {
    if (::mkdtemp(path_.data()) == nullptr)
      throw IoError({"mkdtemp", path_, 0, 0, errno}, "name a directory in which this program may make one");
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace hoist::bench
