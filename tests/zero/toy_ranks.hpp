// SPDX-License-Identifier: Apache-2.0
// tests/zero/toy_ranks.hpp - the toy model on several ranks that are threads of this process.
#pragma once

#include <functional>
#include <vector>

#include <hoist/comm/communicator.hpp>

#include "toy_model.hpp"

namespace hoist::test {

// Runs body(rank, join) on `size` threads; the first error of any rank is rethrown.
void on_ranks(int size, const std::function<void(int, const Runtime::MakeCommunicator&)>& body);

// Several sharding groups in one norm group, as in a tensor-parallel job: runs body(group, rank, groups) for every rank
// of every group, and rethrows the first error. Ranks of the norm group count groups first: 0 and 1 are two groups'
// rank 0. One group alone has no norm group beside it.
void on_groups(const std::vector<int>& sizes, const std::function<void(int, int, const Runtime::Groups&)>& body);

// Trains on `size` ranks from scratch and settles, then calls after(rank, model) on each.
void train_then(int size, const ToySetup& setup, const ToyShape& shape, std::uint64_t steps,
                const std::function<void(int, ToyModel&)>& after);

struct RankRun {
  Digests digests;
  std::vector<Ledger::LinkTotals> links;
};

// Trains on `size` ranks and returns what each saw.
std::vector<RankRun> train_on(int size, const ToySetup& setup, const ToyShape& shape, std::uint64_t steps);

// Rank 0's state (digests without losses) after each step of an undisturbed training on `size` ranks, all of it in
// pinned memory; the first is of the state that it begins with. Made once for shapes with the same matrices.
const std::vector<Digests>& digests_by_step(int size, std::uint64_t steps, const ToyShape& shape = {});

// Trains on `size` ranks, each step of as many micro-batches as the setup's engine is made for, in its
// order. Returns what rank 0 ends in.
Digests train_in_micro_batches(int size, const ToySetup& setup, std::uint64_t steps, const ToyShape& shape = {});

}  // namespace hoist::test
