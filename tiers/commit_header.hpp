// SPDX-License-Identifier: Apache-2.0
// tiers/commit_header.hpp - identifies a commit.
#pragma once

#include <cstdint>
#include <string>

namespace hoist::tiers {

struct CommitHeader {
  std::uint64_t step = 0;
  std::uint32_t incarnation = 0;        // how often the store had been reopened
  std::uint32_t revision = 0;           // commits of the same step before this one
  std::string name{};                   // of a named checkpoint; empty for the last commits
  std::uint64_t checkpoint_serial = 0;  // of a named checkpoint of this store, counted from 1; 0 for the last commits
  friend bool operator==(const CommitHeader&, const CommitHeader&) = default;
  // Whether two ranks mean the same commit: incarnations are each rank's own.
  bool same_commit(const CommitHeader& other) const {
    return step == other.step && revision == other.revision && name == other.name &&
           checkpoint_serial == other.checkpoint_serial;
  }
};

}  // namespace hoist::tiers
