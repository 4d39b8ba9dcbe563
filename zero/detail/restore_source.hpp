// SPDX-License-Identifier: Apache-2.0
// zero/detail/restore_source.hpp - a store that all ranks can continue from, and its commits, as ranks name them to
// each other.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include <hoist/zero/detail/engine_impl.hpp>

namespace hoist {

// What two ranks mean by the same commit.
struct Engine::Impl::CommonCommit {
  std::uint64_t step = 0;
  std::uint64_t revision = 0;
  std::uint64_t run = 0;          // equal for the stores that ranks made together
  std::uint64_t kept_serial = 0;  // of steps kept under a name
  std::uint64_t name_digest = 0;
  friend auto operator<=>(const CommonCommit&, const CommonCommit&) = default;
  bool is(const tiers::CommitHeader& header) const {
    return step == header.step && revision == header.revision && kept_serial == header.kept_serial;
  }
};

// A store, and what of it all ranks can continue from.
struct Engine::Impl::Source {
  detail::StoreDirectory place;
  int world_size = 0;                        // of this sharding group's; 0: no manifest can be read
  std::vector<CommonCommit> commits;         // newest first
  std::vector<tiers::CommitHeader> headers;  // of those, in no order, as this rank sees them
  // Of the whole job, however its groups differ:
  bool same_ranks = false;    // every group has as many ranks as made its store
  bool has_room = false;      // likewise, for the steps that are to be kept
  bool came_further = false;  // some rank holds more than the commit that a new store begins with
  // With several groups, newer places that came to nothing: no commit is all of theirs, and nobody went on from one.
  std::vector<std::uint64_t> passed_over;
};

namespace detail {

// Whether a restore has gone on from one of these: each begins a new incarnation.
inline bool was_resumed(std::span<const tiers::CommitHeader> commits) {
  return std::ranges::any_of(commits, [](const tiers::CommitHeader& commit) { return commit.incarnation > 1; });
}

}  // namespace detail
}  // namespace hoist
