// SPDX-License-Identifier: Apache-2.0
#include "hostile.hpp"

#include <atomic>

#include <hoist/core/error.hpp>

namespace hoist::test {

namespace {

const ToyShape kShape{.matrices = {9000, 70000, 20000}, .norm = 40};

}  // namespace

ToySetup Hostile::toy(const std::string& store) {
  ToySetup toy = toy_setup(Placement::nvme, Placement::nvme, store);
  toy.engine.lock_timeout = std::chrono::seconds(10);
  return toy;
}

const std::string& Hostile::expected() {
  static const std::string digest = [] {
    Digests d = train_once(toy_setup(Placement::pinned, Placement::pinned), kShape, kSteps);
    return d.master + d.moment1 + d.moment2;
  }();
  return digest;
}

Hostile::Life Hostile::train(const ToySetup& setup, const std::function<void(std::uint64_t)>& between,
                             std::uint64_t last_step) {
  Life life;
  std::atomic<std::int64_t> committed{-1};
  try {
    Runtime runtime(setup.runtime);
    ToyModel model(runtime, setup.engine, kShape);
    std::uint64_t first = 1;
    if (model.find_commit()) {
      first = model.restore().step + 1;
    } else {
      model.initialize();
    }
    committed = static_cast<std::int64_t>(first) - 1;
    between(first - 1);
    for (std::uint64_t step = first; step <= last_step; ++step) {
      model.pass(step);
      model.engine()
          .step({.caller_state = std::as_bytes(std::span(&step, 1))})
          .committed.then([&committed, step](std::exception_ptr error) {
            if (!error) committed = static_cast<std::int64_t>(step);
          });
      between(step);
    }
    model.engine().settle();
    if (last_step == kSteps) {
      const Digests d = state_digests(model);
      EXPECT_EQ(d.master + d.moment1 + d.moment2, expected());
    }
  } catch (const Error& error) {
    life.error = error.what();
  }
  life.committed = committed;
  return life;
}

void Hostile::expect_intact(const ToySetup& setup, std::int64_t committed) {
  {
    Runtime runtime(setup.runtime);
    ToyModel model(runtime, setup.engine, kShape);
    const auto found = model.find_commit();
    ASSERT_TRUE(found);
    EXPECT_GE(static_cast<std::int64_t>(*found), committed);
  }
  EXPECT_EQ(train(setup).error, "");
}

}  // namespace hoist::test
