// SPDX-License-Identifier: Apache-2.0
// aio/backend_kind.hpp - the methods of moving blocks to and from a drive, for options.
#pragma once

#include <cstdint>

namespace hoist::aio {

// automatic: io_uring, or `threads` if the system forbids it (logged once, with the remedy).
// io_uring:  an Error if it is not available.
// threads:   a pool of threads that call pread and pwrite: the same results for more CPU time.
// null:      every transfer succeeds at once and no data is moved: measures only hoist's own overhead.
// NVMe passthrough is not supported: it needs /dev/ng* and root, and bypasses the file system, so its data would not be
// a file.
enum class BackendKind : std::uint8_t { automatic, io_uring, threads, null };

}  // namespace hoist::aio
