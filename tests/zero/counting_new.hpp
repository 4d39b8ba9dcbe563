// SPDX-License-Identifier: Apache-2.0
// tests/zero/counting_new.hpp - how often this program has called operator new, on all threads. Its source replaces
// operator new and operator delete of the whole program.
#pragma once

#include <cstdint>

namespace hoist::test {

std::uint64_t allocation_count();

}  // namespace hoist::test
