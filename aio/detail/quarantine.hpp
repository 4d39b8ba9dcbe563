// SPDX-License-Identifier: Apache-2.0
// aio/detail/quarantine.hpp - where memory goes that the kernel, or a stuck thread, may still write to.
//
// Threading  Any thread.
// Memory     What is kept here is never freed and never touched again. It stays reachable, so that a leak checker tells
//            it apart from a leak by mistake.
#pragma once

namespace hoist::aio::detail {

void quarantine(const void* lost);

// An engine of this process has given its drive up.
void note_given_up() noexcept;
bool a_drive_was_given_up() noexcept;

}  // namespace hoist::aio::detail
