// SPDX-License-Identifier: Apache-2.0
// aio/given_up.hpp - how often queues of this process have given up their drives.
//
// The kernel, or a stuck thread, may then still write to memory that they were given: it is left unfreed
// (core/owning_process.hpp).
//
// Threading  Any thread.
#pragma once

#include <atomic>

namespace hoist::aio {

namespace detail {
inline std::atomic<unsigned> given_up{0};
}  // namespace detail

inline void note_given_up() noexcept { detail::given_up.fetch_add(1, std::memory_order_relaxed); }
inline unsigned drives_given_up() noexcept { return detail::given_up.load(std::memory_order_relaxed); }
inline bool a_drive_was_given_up() noexcept { return drives_given_up() > 0; }

}  // namespace hoist::aio
