// SPDX-License-Identifier: Apache-2.0
// tests/config/samples.hpp - the sample configurations of this folder.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace hoist::test {

inline std::filesystem::path data_directory() {
  return std::filesystem::path(HOIST_SOURCE_DIR) / "tests" / "config" / "data";
}

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The .json files of "accept" or "refuse", sorted.
inline std::vector<std::filesystem::path> sample_files(const std::string& kind) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(data_directory() / kind)) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace hoist::test
