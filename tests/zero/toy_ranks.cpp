// SPDX-License-Identifier: Apache-2.0
#include "toy_ranks.hpp"

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <thread>
#include <tuple>

#include <spdlog/spdlog.h>

#include <hoist/tests/support/remembered.hpp>

namespace hoist::test {

namespace {

void on_threads(std::size_t count, const std::function<void(std::size_t)>& body) {
  // Makes spdlog's default logger here, on one thread: the thread sanitizer does not see that spdlog guards it.
  spdlog::default_logger_raw();
  std::vector<std::exception_ptr> errors(count);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        body(i);
      } catch (const std::exception&) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace

void on_ranks(int size, const std::function<void(int, const Runtime::MakeCommunicator&)>& body) {
  comm::ThreadGroup group(size);
  on_threads(static_cast<std::size_t>(size), [&](std::size_t i) {
    const int rank = static_cast<int>(i);
    try {
      body(rank, [&group, rank](const comm::CommunicatorOptions& options) { return group.join(rank, options); });
    } catch (const std::exception& error) {
      group.abort(error.what());
      throw;
    }
  });
}

void on_groups(const std::vector<int>& sizes, const std::function<void(int, int, const Runtime::Groups&)>& body) {
  struct Member {
    int group = 0;
    int rank = 0;
  };
  std::vector<Member> members;
  std::vector<std::unique_ptr<comm::ThreadGroup>> groups;
  for (const int size : sizes) groups.push_back(std::make_unique<comm::ThreadGroup>(size));
  for (int rank = 0; rank < *std::ranges::max_element(sizes); ++rank) {
    for (int group = 0; group < static_cast<int>(sizes.size()); ++group)
      if (rank < sizes[static_cast<std::size_t>(group)]) members.push_back({group, rank});
  }
  comm::ThreadGroup job(static_cast<int>(members.size()));
  on_threads(members.size(), [&](std::size_t i) {
    const auto [group, rank] = members[i];
    comm::ThreadGroup& sharding = *groups[static_cast<std::size_t>(group)];
    try {
      Runtime::Groups joins;
      joins.sharding = [&sharding, rank = rank](const auto& options) { return sharding.join(rank, options); };
      if (sizes.size() > 1)
        joins.norm = [&job, i](const auto& options) { return job.join(static_cast<int>(i), options); };
      body(group, rank, joins);
    } catch (const std::exception& error) {
      sharding.abort(error.what());
      job.abort(error.what());
      throw;
    }
  });
}

void train_then(int size, const ToySetup& setup, const ToyShape& shape, std::uint64_t steps,
                const std::function<void(int, ToyModel&)>& after) {
  on_ranks(size, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToyProgram model(setup, join, shape);
    model.train(1, steps);
    model.engine().settle();
    after(rank, model);
  });
}

std::vector<RankRun> train_on(int size, const ToySetup& setup, const ToyShape& shape, std::uint64_t steps) {
  std::vector<RankRun> runs(static_cast<std::size_t>(size));
  train_then(size, setup, shape, steps, [&](int rank, ToyModel& model) {
    RankRun& run = runs[static_cast<std::size_t>(rank)];
    for (std::size_t link = 0; link < kLinkCount; ++link)
      run.links.push_back(model.engine().runtime().ledger().totals(static_cast<Link>(link)));
    run.digests = digests_of(model);
  });
  return runs;
}

const std::vector<Digests>& digests_by_step(int size, std::uint64_t steps, const ToyShape& shape) {
  static std::map<std::tuple<int, std::uint64_t, std::vector<std::int64_t>>, std::vector<Digests>> made;
  return remembered(made, {size, steps, shape.matrices}, [&] {
    std::vector<Digests> all;
    const ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
    on_ranks(size, [&](int rank, const Runtime::MakeCommunicator& join) {
      ToyProgram model(setup, join, shape);
      for (std::uint64_t step = 0; step <= steps; ++step) {
        if (step > 0) model.train(step, step);
        const Digests digests = state_digests(model);
        if (rank == 0) all.push_back(digests);
      }
    });
    return all;
  });
}

Digests train_in_micro_batches(int size, const ToySetup& setup, std::uint64_t steps, const ToyShape& shape) {
  Digests digests;
  on_ranks(size, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToyModel model(setup, join, shape);
    model.micro_batches = static_cast<int>(setup.engine.micro_batches_max);
    model.vertical = setup.engine.micro_batch_order == MicroBatchOrder::vertical && model.micro_batches > 1;
    model.initialize();
    model.train(1, steps);
    const Digests mine = digests_of(model);
    if (rank == 0) digests = mine;
  });
  return digests;
}

}  // namespace hoist::test
