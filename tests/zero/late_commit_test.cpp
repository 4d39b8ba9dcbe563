// SPDX-License-Identifier: Apache-2.0
// Writes of state that stays in memory come last on a drive, behind reads and writes that the step itself waits for.
// However late they are, nothing overwrites that state before they are done.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/tests/support/observed_backend.hpp>

#include "toy_model.hpp"

namespace hoist::test::late_commit_test {
namespace {

// A drive that starts no write while it is closed.
class Gate {
 public:
  void close() {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
};

std::function<std::unique_ptr<aio::Backend>(const aio::DriveQueueOptions&)> observing(
    const ObservedBackend::Observer& on_submit) {
  return [=](const aio::DriveQueueOptions& options) {
    return std::make_unique<ObservedBackend>(aio::make_backend(options), on_submit);
  };
}

class LateCommit : public testing::TestWithParam<UpdateMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, LateCommit,
                         testing::Values(UpdateMode::step, UpdateMode::forward, UpdateMode::backward),
                         [](const auto& mode) {
                           if (mode.param == UpdateMode::step) return "step";
                           return mode.param == UpdateMode::forward ? "forward" : "backward";
                         });

TEST_P(LateCommit, HoldsUpTheNextStepAndHasItsOwnStepsBits) {
  const TempDirectory directory;
  Gate gate;
  const auto setup_of = [](Placement optimizer, const std::string& store) {
    ToySetup setup = toy_setup(Placement::pinned, optimizer, store);
    setup.engine.gradient_clipping = 0;  // mode backward cannot clip
    return setup;
  };
  ToySetup setup = setup_of(Placement::nvme, directory / "store");
  setup.engine.update_mode = GetParam();
  setup.engine.optimizer_pinned_fraction = 1;  // a step reads nothing and waits for no buffer
  setup.engine.keep_steps = 1;
  setup.runtime.make_aio_backend = observing([&](const aio::Block& block) {
    if (block.operation == aio::Operation::write) gate.pass();
  });
  ToyProgram training(setup);
  training.pass(1);
  gate.close();
  const StepReport first = training.engine().step();
  const Completion kept = training.engine().save("first", {});
  std::jthread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_FALSE(first.committed.done());
    gate.open();
  });
  training.pass(2);
  training.engine().step();
  EXPECT_TRUE(first.committed.done()) << "the next step began before";
  opener.join();
  kept.wait();
  training.engine().settle();
  const Digests second = digests_of(training);

  training.close();
  EXPECT_EQ(training.restore({.from = "first"}).step, 1u);
  Digests expected = train_once(setup_of(Placement::pinned, ""), {}, 1), found = digests_of(training);
  expected.losses = found.losses;  // those of both passes
  EXPECT_EQ(found, expected);
  EXPECT_NE(found.master, second.master) << "the second step changed nothing";
}

// On a drive that is slower than the update, with state half in memory, few of the writes from memory are ahead of the
// last read. With equal priorities nearly all would be.
TEST(LateCommit, LetsTheStepsOwnReadsGoFirst) {
  const TempDirectory directory;
  struct Transfer {
    bool is_read;
    const std::byte* memory;
  };
  std::vector<Transfer> transfers;  // in the order in which the drive gets them; made on its thread
  std::atomic<bool> recording = false;
  ToySetup setup = toy_setup(Placement::pinned, Placement::nvme, directory / "store");
  setup.runtime.device_memory_bytes = 16 * kMiB;
  setup.runtime.pinned_memory_bytes = 128 * kMiB;
  setup.runtime.aio_queue_depth = 1;
  setup.runtime.make_aio_backend = observing([&](const aio::Block& block) {
    if (!recording || block.operation == aio::Operation::sync) return;
    transfers.push_back({block.operation == aio::Operation::read, block.data});
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // many times an update's time, on any machine
  });
  setup.engine.update_mode = UpdateMode::step;
  setup.engine.optimizer_pinned_fraction = 0.5;
  setup.engine.sub_group_elements = 100000;
  setup.engine.update_buffer_count = 4;
  ToyProgram training(setup, {.matrices = {1 << 20, 1 << 20, 1 << 20}, .norm = 32, .frozen = false, .tied = false});
  training.pass(1);
  recording = true;
  training.engine().step();
  training.engine().settle();
  recording = false;

  std::set<const std::byte*> buffers;
  std::size_t last_read = 0;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    if (!transfers[i].is_read) continue;
    buffers.insert(transfers[i].memory);
    last_read = i;
  }
  std::size_t from_memory = 0, ahead = 0;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    if (transfers[i].is_read || buffers.contains(transfers[i].memory)) continue;
    ++from_memory;
    if (i < last_read) ++ahead;
  }
  EXPECT_GE(buffers.size(), 4u);
  ASSERT_GE(from_memory, 30u);
  EXPECT_LT(ahead, from_memory / 2) << "of " << from_memory;
}

// A named checkpoint is made after the step's commit, and the next step waits for both.
TEST(LateCheckpoint, IsInTheAccountOfTheStepThatWaitsForIt) {
  constexpr auto kFlush = std::chrono::milliseconds(300);
  std::atomic<std::int64_t> first_flush{0};  // the clock's nanoseconds at its begin; 0: none has begun
  TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.engine.update_mode = UpdateMode::step;
  setup.engine.keep_steps = 2;
  setup.runtime.make_aio_backend = observing([&](const aio::Block& block) {
    if (block.operation != aio::Operation::sync || !block.file->path().ends_with(".manifest")) return;
    std::int64_t none = 0;
    first_flush.compare_exchange_strong(none, Clock::now().time_since_epoch().count());
    std::this_thread::sleep_for(kFlush);
  });
  ToyProgram training(setup);
  training.pass(1);
  first_flush = 0;
  training.engine().step();
  training.engine().save("kept", {});
  training.pass(2);
  const Ledger& ledger = training.runtime().ledger();
  const Nanoseconds counted_before = ledger.waited(WaitCause::nvme);
  const TimePoint begin = Clock::now();
  training.engine().step();
  // Less half a flush: for the part of step() that waits for something else, or computes.
  const Nanoseconds both_end = Nanoseconds(first_flush) + 2 * kFlush - kFlush / 2;
  EXPECT_GE(ledger.waited(WaitCause::nvme) - counted_before, both_end - begin.time_since_epoch());
}

TEST(LateCommit, IsAWaitOfSettle) {
  constexpr auto kFlush = std::chrono::milliseconds(200);
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.runtime.make_aio_backend = observing([&](const aio::Block& block) {
    if (block.operation == aio::Operation::sync && block.file->path().ends_with(".manifest"))
      std::this_thread::sleep_for(kFlush);
  });
  ToyProgram model(setup);
  model.train(1, 1);
  const Nanoseconds before = model.runtime().ledger().waited(WaitCause::nvme);
  const TimePoint begin = Clock::now();
  model.engine().settle();
  const Nanoseconds took = Clock::now() - begin;
  EXPECT_GE(model.runtime().ledger().waited(WaitCause::nvme) - before, took / 2);
}

}  // namespace
}  // namespace hoist::test::late_commit_test
