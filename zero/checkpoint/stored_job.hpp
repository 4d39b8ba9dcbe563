// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/stored_job.hpp - the stores of a job's sharding groups (Runtime::Groups), looked at together.
//
// Each group keeps its slice of the model in a store of its own, and a step counts when all of them have it. One store
// alone cannot say what a restore would continue from, nor how many groups there are: only that two are of one job.
//
// Threading  Pure functions on the file system.
// Errors     Those of look_at_store().
#pragma once

#include <span>
#include <string>
#include <vector>

#include <hoist/zero/checkpoint/stored_model.hpp>

namespace hoist {

struct StoredJob {
  std::vector<StoreSummary> groups{};              // as they were named
  std::vector<tiers::CommitHeader> commits{};      // that all groups have, newest first; abandoned ones if no others
  std::vector<tiers::CommitHeader> checkpoints{};  // likewise, oldest first
  // The stores before these that stay for named checkpoints, newest first; without names that a newer store has. Those
  // that cannot be looked at are left out. If `commits` is empty, also the newest one that has commits.
  std::vector<StoredJob> older{};
  // That one: the groups hold a training that is incomplete or damaged here. Null if there is none.
  const StoredJob* readable_before() const;
};

// Looks at the stores that continue the job, one below each of `directories`. Newer ones that never reached their first
// commit are passed over, as Engine::restore() does; those that hold a training are the job, also incomplete. Errors:
// UsageError when they are not of one job, or not of different groups; StoreError when one of the groups lacks them.
StoredJob look_at_job(std::span<const std::string> directories);

// What the newest stores lack, if a store before them is complete, and how to go on; otherwise empty.
std::string incomplete_text(const StoredJob& job);

// The stores of its groups, those of older ones last.
std::vector<StoreSummary> all_stores(const StoredJob& job);

// Whether two stores are those of two groups of one job.
bool are_of_one_job(const StoreSummary& a, const StoreSummary& b);

}  // namespace hoist
