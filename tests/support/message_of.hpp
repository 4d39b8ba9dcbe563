// SPDX-License-Identifier: Apache-2.0
// tests/support/message_of.hpp - what an error says.
#pragma once

#include <string>

#include <hoist/core/error.hpp>

namespace hoist::test {

// What the E says that call() throws; "no error" if it throws nothing.
template <typename E = Error, typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace hoist::test
