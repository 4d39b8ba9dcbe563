// SPDX-License-Identifier: Apache-2.0
// aio/quarantine.hpp - keeps memory that the kernel, or a stuck thread, may still write to.
//
// Threading  Any thread.
// Memory     Memory in here is never freed and never touched again. It stays reachable, so that leak checkers do not
//            report it.
#pragma once

namespace hoist::aio {

void quarantine(const void* lost);

// How often queues of this process have given up their drives.
void note_given_up() noexcept;
unsigned drives_given_up() noexcept;
inline bool a_drive_was_given_up() noexcept { return drives_given_up() > 0; }

}  // namespace hoist::aio
