// SPDX-License-Identifier: Apache-2.0
// aio/detail/polling_probe.hpp - tests polling with one transfer and a time-out.
//
// Asking the kernel is not enough: it makes a polled ring anywhere, but on a drive without poll queues reads then fail
// or, on some kernels, never end. They also never end if a block is larger than one request of the drive: the kernel
// may not split a polled request, and retries for ever.
#pragma once

#include <optional>
#include <string>

#include <hoist/aio/detail/backends.hpp>

namespace hoist::aio::detail {

// The longest time that the construction of a queue waits for a probe.
inline constexpr Nanoseconds kProbeTimeout = std::chrono::seconds(1);

struct PollingQuestion {
  Polling polling = Polling::none;
  std::string directory{};                // on the drive in use; only completion polling needs it
  std::uint64_t block_bytes = 64 * kKiB;  // the largest transfer there will be
};

// Returns nullopt if polling works. A probe that never ends keeps its own thread, buffer and file.
std::optional<Unavailable> probe_polling(const PollingQuestion& question);

}  // namespace hoist::aio::detail
