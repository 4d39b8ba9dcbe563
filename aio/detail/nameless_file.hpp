// SPDX-License-Identifier: Apache-2.0
// aio/detail/nameless_file.hpp - a file for measuring or probing that disappears with the process.
#pragma once

#include <random>
#include <string>

#include <fmt/format.h>
#include <unistd.h>

#include <hoist/aio/file.hpp>

namespace hoist::aio::detail {

// Its name is removed before it has any space, so that closing the file, or a kill at any moment, frees all of its
// space.
// Errors: IoError.
inline File nameless_file(const std::string& directory, std::uint64_t bytes) {
  std::random_device random;  // processes in different containers may have the same process id
  const std::string path = fmt::format("{}/.hoist-probe-{}-{:08x}{:08x}", directory, ::getpid(), random(), random());
  File file(path, {.mode = OpenMode::create});
  ::unlink(path.c_str());
  file.start_over(bytes);
  return file;
}

}  // namespace hoist::aio::detail
