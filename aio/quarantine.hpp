// SPDX-License-Identifier: Apache-2.0
// aio/quarantine.hpp - keeps memory that the kernel, or a stuck thread, may still write to.
//
// Threading  Any thread.
// Memory     Memory in here is never freed and never touched again. It stays reachable, so that leak checkers do not
//            report it.
#pragma once

namespace hoist::aio {

void quarantine(const void* lost);

// Whether a queue of this process has given up its drive.
void note_given_up() noexcept;
bool a_drive_was_given_up() noexcept;

}  // namespace hoist::aio
