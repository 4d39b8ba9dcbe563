// SPDX-License-Identifier: Apache-2.0
// aio/detail/polling_probe.hpp - whether polling really works, found out by one transfer with a time-out.
//
// Asking is not enough: a ring that polls for completions can be made anywhere, and on a drive without poll queues its
// reads then fail or, on some kernels, never end.
#pragma once

#include <optional>
#include <string>

#include <hoist/aio/detail/backends.hpp>

namespace hoist::aio::detail {

// Construction of an engine waits no longer than this for a probe.
inline constexpr Nanoseconds kProbeTimeout = std::chrono::seconds(1);

// Nothing when it works. `directory` is on the drive that will be used; only completion polling needs it. A probe that
// never ends keeps its ring, its buffer and its file, out of everybody's reach, for the rest of the process.
std::optional<Unavailable> probe_polling(Polling polling, const std::string& directory);

}  // namespace hoist::aio::detail
