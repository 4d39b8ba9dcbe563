// SPDX-License-Identifier: Apache-2.0
// core/named_file.hpp - the files that a person names on a command line: reads texts, and replaces files atomically, so
// that a reader sees the old file or the new one.
//
// Threading  Any thread.
// Errors     IoError with the remedy.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace hoist {

// Written beside `path`, flushed, then renamed over it; permissions of an existing file are kept, and a symbolic link
// stays one. On failure the old file is unchanged and no other file remains. If only the flush of the directory fails,
// the file has its new text, and the error says so. A pipe, a device, what standard output or error is, and a file that
// is a mount of its own cannot be replaced: they are written to, and may be left incomplete on failure. Errors:
// IoError.
void replace_file(const std::string& path, const std::string& text);
// Refuses what replace_file() would, before there is something to write: makes a file beside `path` and removes it.
// Errors: IoError with `remedy`.
void check_replaceable(const std::string& path, const std::string& remedy);

// Reads a text that a person wrote, of at most kReadBytesMax; refuses drives and data files.
// Errors: IoError, with the remedy.
inline constexpr std::size_t kReadBytesMax = 64u << 20;
std::string read_file(const std::string& path, const std::string& remedy);

// Whether docs/format.md gives this name, followed through symbolic links, to a file of a store; it need not exist.
bool is_file_of_a_store(const std::string& path);

struct OutputPath {
  std::string option;
  std::string path;  // empty: not given; "-": standard output
};
// Errors: UsageError if an output file is an input file or another output file, which may not exist yet, or one of a
// store's files.
void check_outputs_apart(const std::vector<OutputPath>& outputs, const std::vector<std::string>& inputs);
// Errors: UsageError if replace_file() would take the place of a file other than `merged`, whose other keys it keeps;
// `how` says how to name that. Standard output and error are written to, and nothing is lost.
void check_replaces_only(const OutputPath& output, const std::string& merged, const std::string& how);

}  // namespace hoist
