// SPDX-License-Identifier: Apache-2.0
// bench/checksum_twice.hpp - every checksum of a tile computed twice, to see what one costs.
//
// A program linked with this file and the linker's --wrap has it between tile_checksum() and its callers. The second
// computation adds to a step's time as much as the first one costs there; nothing else changes, so one engine can do
// steps of both kinds in turn.
//
// Threading  Any thread; a change counts from the next tile on.
#pragma once

namespace hoist::bench {

void set_checksum_twice(bool on);

}  // namespace hoist::bench
