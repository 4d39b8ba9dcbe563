// SPDX-License-Identifier: Apache-2.0
// cli/replace_file.hpp - replaces a file atomically: a reader sees the old file or the new one.
#pragma once

#include <cstddef>
#include <string>

namespace hoist::cli {

// Written beside `path`, flushed, then renamed over it; permissions of an existing file are kept, and a symbolic link
// stays one. On failure the old file is unchanged and no other file remains. A pipe, a device, what standard output or
// error is, and a file that is a mount of its own cannot be replaced: they are written to, and may be left incomplete
// on failure. Errors: IoError.
void replace_file(const std::string& path, const std::string& text);
// Refuses what replace_file() would, before there is something to write. Errors: IoError with `remedy`.
void check_replaceable(const std::string& path, const std::string& remedy);

// Reads a text that a person wrote, of at most kReadBytesMax; refuses drives and data files.
// Errors: IoError, with the remedy.
inline constexpr std::size_t kReadBytesMax = 64u << 20;
std::string read_file(const std::string& path, const std::string& remedy);

}  // namespace hoist::cli
