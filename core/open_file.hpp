// SPDX-License-Identifier: Apache-2.0
// core/open_file.hpp - opening a file by its name, without waiting for whatever else may have that name.
//
// The open() of a named pipe waits until somebody opens its other end, that of a terminal or another device does
// something: a file of the wrong kind in a store's directory would hang a program that only wants to look.
//
// Threading  Any thread.
// Errors     -1 with errno set, as open() itself. open_file_remedy() explains what only these functions
//            give.
#pragma once

#include <cstdio>
#include <string>

#include <sys/types.h>

namespace hoist {

// Opens (or makes, with O_CREAT) a regular file. Other kinds are left alone: EISDIR, and EINVAL for pipes, sockets and
// devices. `flags` as for open(); O_CLOEXEC is always added.
int open_regular_file(const std::string& path, int flags, mode_t mode = 0) noexcept;

// For reading what a person named: a regular file, or a pipe that this process was given with its other end open, which
// is what /dev/stdin and a shell's <(...) are.
int open_input_file(const std::string& path) noexcept;

enum class OutputMode { replace, append };
// For writing where a person said: anything that can be written to. A named pipe that nobody reads is ENXIO. Null with
// errno set, where the others return -1.
std::FILE* open_output_file(const std::string& path, OutputMode mode) noexcept;

// What to do about an error that only these functions give; "" for others.
const char* open_file_remedy(int code) noexcept;

}  // namespace hoist
