// SPDX-License-Identifier: Apache-2.0
// core/standard_descriptors.hpp - programs that were started with standard descriptors closed.
//
// `program >&- 2>&-` is how some daemons start things. The next file that is opened then takes the place of standard
// output, and what is printed goes into it: into a store, or a configuration.
#pragma once

namespace hoist {

// For the beginning of main(): opens what is closed of descriptors 0, 1 and 2. Printing to standard output then fails,
// as it would have; standard error goes nowhere.
void occupy_standard_descriptors() noexcept;

// For a file that is not for printing: the same file at another descriptor when this is a standard one, which is
// closed. Returns -1 with errno set when there is none left.
int beyond_standard_descriptors(int descriptor) noexcept;

}  // namespace hoist
