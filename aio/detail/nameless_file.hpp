// SPDX-License-Identifier: Apache-2.0
// aio/detail/nameless_file.hpp - a file to measure or probe with, that goes whatever happens to the process.
#pragma once

#include <atomic>
#include <string>

#include <fmt/format.h>
#include <unistd.h>

#include <hoist/aio/file.hpp>

namespace hoist::aio::detail {

// Its name is removed at once: the space is free again when the file is closed. Errors: IoError.
inline File nameless_file(const std::string& directory, std::uint64_t bytes) {
  static std::atomic<unsigned> next{0};
  const std::string path = fmt::format("{}/.hoist-probe-{}-{}", directory, ::getpid(), next.fetch_add(1));
  File file(path, {.mode = OpenMode::create, .reserve_bytes = bytes});
  ::unlink(path.c_str());
  return file;
}

}  // namespace hoist::aio::detail
