// SPDX-License-Identifier: Apache-2.0
// core/standard_descriptors.hpp - protects programs that were started with closed standard descriptors.
//
// Some daemons start programs with `program >&- 2>&-`. The next file that is opened then becomes standard output, and
// printed text goes into it: into a store, or a configuration.
#pragma once

namespace hoist {

// Call at the beginning of main(): opens those of the descriptors 0, 1 and 2 that are closed. Printing to standard
// output then still fails; standard error is discarded.
void occupy_standard_descriptors() noexcept;

// Moves a file away from a standard descriptor: returns another descriptor for the same file and closes the standard
// one. Returns -1 with errno set if none is left.
int beyond_standard_descriptors(int descriptor) noexcept;

}  // namespace hoist
