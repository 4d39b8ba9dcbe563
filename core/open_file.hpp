// SPDX-License-Identifier: Apache-2.0
// core/open_file.hpp - opens a file by name without waiting if the name is a pipe or a device; compares names.
//
// open() of a named pipe waits until another process opens its other end, and open() of a terminal or another device
// has side effects. A file of the wrong kind in a store's directory would hang a program that only reads.
//
// Threading  Any thread.
// Errors     -1 with errno set, as open() itself. open_file_remedy() explains the errors that only these functions
//            return. absolute_path() throws.
#pragma once

#include <cstddef>
#include <cstdio>
#include <span>
#include <string>
#include <system_error>

#include <sys/types.h>

namespace hoist {

// Closes a descriptor, which may be -1.
struct Descriptor {
  explicit Descriptor(int value) : number(value) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  const int number;
};

// Opens (or creates, with O_CREAT) a regular file. Refuses other kinds: EISDIR, and EINVAL for pipes, sockets and
// devices. `flags` as for open(); O_CLOEXEC is always added.
int open_regular_file(const std::string& path, int flags, mode_t mode = 0) noexcept;

// For reading a file that a person named: a regular file, or a pipe that this process received with its other end open,
// such as /dev/stdin and a shell's <(...).
int open_input_file(const std::string& path) noexcept;
// Reads `descriptor` to its end and closes it. Returns 0 or the errno: EFBIG for more than `bytes_max` bytes.
int read_and_close(int descriptor, std::size_t bytes_max, std::string& text);

// Writes all of `bytes`. Returns 0 or the errno.
int write_all(int descriptor, std::span<const std::byte> bytes) noexcept;

enum class OutputMode { replace, append };
// For writing to a file that a person named: anything writable. A named pipe without a reader is ENXIO. Returns null
// with errno set.
std::FILE* open_output_file(const std::string& path, OutputMode mode) noexcept;

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

// The remedy for an error that only these functions return; "" for other errors.
const char* open_file_remedy(int code) noexcept;

// `path` without "." and needless slashes. It keeps "..", which behind a link leads out of the link's target.
std::string plain_path(const std::string& path);

// `path` from the root on, for use after the program has changed its directory. Errors: IoError if the working
// directory is gone.
std::string absolute_path(const std::string& path);

// Whether two names mean one place, now or once it is made: links, mounts and relative names are followed. False where
// that cannot be known.
bool is_same_place(const std::string& one, const std::string& other) noexcept;

// Whether std::filesystem failed because the name is not there. Compares the number alone: PyTorch before 2.8 brings a
// std::filesystem of its own into the process, whose errors are of another category than those of std::errc.
bool is_absent(const std::error_code& failure) noexcept;

}  // namespace hoist
