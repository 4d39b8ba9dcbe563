// SPDX-License-Identifier: Apache-2.0
// aio/detail/polling_probe.hpp - whether polling really works, found out by one transfer with a time-out.
//
// Asking is not enough: a ring that polls for completions can be made anywhere, and on a drive without poll queues its
// reads then fail or, on some kernels, never end. Nor do they end when a block is larger than one request of the drive:
// the kernel may not split a polled one, and tries for ever.
#pragma once

#include <optional>
#include <string>

#include <hoist/aio/detail/backends.hpp>

namespace hoist::aio::detail {

// Construction of an engine waits no longer than this for a probe.
inline constexpr Nanoseconds kProbeTimeout = std::chrono::seconds(1);

struct PollingQuestion {
  Polling polling = Polling::none;
  std::string directory{};                // on the drive that will be used; only completion polling needs it
  std::uint64_t block_bytes = 64 * kKiB;  // the largest transfer there will be
};

// Nothing when it works. A probe that never ends keeps its thread, its buffer and its file, out of everybody's reach.
std::optional<Unavailable> probe_polling(const PollingQuestion& question);

}  // namespace hoist::aio::detail
