// SPDX-License-Identifier: Apache-2.0
// tests/support/remembered.hpp - references that many tests compare with, each made once in a process.
#pragma once

#include <map>
#include <type_traits>

namespace hoist::test {

// What make() returned when `key` was asked for the first time.
template <typename Key, typename Value, typename Make>
const Value& remembered(std::map<Key, Value>& values, const std::type_identity_t<Key>& key, const Make& make) {
  const auto found = values.find(key);
  return found != values.end() ? found->second : values.emplace(key, make()).first->second;
}

}  // namespace hoist::test
