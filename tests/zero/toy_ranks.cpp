// SPDX-License-Identifier: Apache-2.0
#include "toy_ranks.hpp"

#include <exception>
#include <thread>

namespace hoist::test {

void on_ranks(int size, const std::function<void(int, const Runtime::MakeCommunicator&)>& body) {
  comm::ThreadGroup group(size);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank, [&group, rank](const comm::CommunicatorOptions& options) { return group.join(rank, options); });
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
        group.abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

void train_then(int size, const ToySetup& setup, const ToyShape& shape, std::uint64_t steps,
                const std::function<void(int, Engine&, const ToyModel&)>& after) {
  on_ranks(size, [&](int rank, const Runtime::MakeCommunicator& join) {
    Runtime runtime(setup.runtime, join);
    Engine engine(runtime, setup.engine);
    ToyModel model(engine, shape);
    engine.initialize(model.fill());
    model.train(1, steps);
    engine.settle();
    after(rank, engine, model);
  });
}

std::vector<RankRun> train_on(int size, const ToySetup& setup, const ToyShape& shape, std::uint64_t steps) {
  std::vector<RankRun> runs(static_cast<std::size_t>(size));
  train_then(size, setup, shape, steps, [&](int rank, Engine& engine, const ToyModel& model) {
    RankRun& run = runs[static_cast<std::size_t>(rank)];
    for (std::size_t link = 0; link < kLinkCount; ++link)
      run.links.push_back(engine.runtime().ledger().totals(static_cast<Link>(link)));
    run.digests = digests_of(engine, model);
  });
  return runs;
}

}  // namespace hoist::test
