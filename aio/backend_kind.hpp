// SPDX-License-Identifier: Apache-2.0
// aio/backend_kind.hpp - the ways in which blocks get to and from a drive, for options.
#pragma once

#include <cstdint>

namespace hoist::aio {

// automatic: io_uring, or `threads` where the system forbids it (said once in the log, with the remedy).
// io_uring:  an Error when it cannot be had.
// null:      every transfer succeeds at once and no data is moved: measures our own overhead, nothing else.
// NVMe passthrough is not among them: it needs /dev/ng* and root, and addresses blocks under the file system's feet, so
// that nothing it wrote would be a file.
enum class BackendKind : std::uint8_t { automatic, io_uring, threads, null };

}  // namespace hoist::aio
