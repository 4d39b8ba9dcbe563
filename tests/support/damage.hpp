// SPDX-License-Identifier: Apache-2.0
// tests/support/damage.hpp - wrong bytes in a file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

namespace hoist::test {

// Flips a bit of the byte at `first`, and of those `stride` bytes apart from it up to the end of the file.
inline void flip_bits(const std::string& path, std::uint64_t first, std::uint64_t stride = 1ull << 40) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const std::uint64_t bytes = std::filesystem::file_size(path);
  for (std::uint64_t at = first; at < bytes; at += stride) {
    file.seekg(static_cast<std::streamoff>(at));
    const char changed = static_cast<char>(file.get() ^ 0x10);
    file.seekp(static_cast<std::streamoff>(at)).put(changed);
  }
  file.flush();
  EXPECT_TRUE(file.good()) << path;
}

}  // namespace hoist::test
