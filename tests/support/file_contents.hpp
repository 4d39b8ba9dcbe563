// SPDX-License-Identifier: Apache-2.0
// tests/support/file_contents.hpp - all that a file holds.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

namespace hoist::test {

// Read in one piece: byte by byte, the thread sanitizer needs seconds for a store. Empty for a file that is not there.
inline std::string contents_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return {};
  std::string contents(static_cast<std::size_t>(file.tellg()), '\0');
  file.seekg(0);
  file.read(contents.data(), static_cast<std::streamsize>(contents.size()));
  return contents;
}

}  // namespace hoist::test
