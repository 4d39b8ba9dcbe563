// SPDX-License-Identifier: Apache-2.0
// platform/detail/first_touch.hpp - faults fresh memory in, on many threads, once.
//
// The kernel clears every page that is touched first, which is most of the cost of large memory. Threads take chunks in
// turn, so that a processor that is busy with something else holds up no other. A value is written to each chunk while
// it is still in a cache.
//
// Threading  Blocks its caller. The threads end before it returns.
// Errors     Returns an errno.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <hoist/core/clock.hpp>
#include <hoist/platform/host_memory.hpp>

namespace hoist::platform::detail {

struct FirstTouch {
  // Processors, OS numbers: at most one thread for each, which may run on any of them. Empty: all that the process may
  // use.
  std::vector<int> cpus{};
  std::optional<std::byte> value{};                  // written to every byte; empty: memory stays zero
  std::string what{};                                // "pinned memory": named in the log
  Nanoseconds line_after = std::chrono::seconds(1);  // how soon the log says how far it is
};

// Pre: whole pages of `kind`. Returns 0, or the errno of a shortage.
int touch_first(std::span<std::byte> bytes, PageKind kind, const FirstTouch& how);

// The processors of these NUMA nodes that the calling thread may use; if there are none, all that it may use.
std::vector<int> usable_processors(const std::vector<int>& nodes);

}  // namespace hoist::platform::detail
