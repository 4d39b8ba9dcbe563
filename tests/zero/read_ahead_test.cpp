// SPDX-License-Identifier: Apache-2.0
// The engine reads the state that a step updates first while the step's gradients are still being made: as much as the
// update buffers hold, never twice, and never stale.
#include <atomic>
#include <limits>

#include <gtest/gtest.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/tests/support/counting_backend.hpp>
#include <hoist/tests/support/faulty_backend.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::read_ahead_test {
namespace {

constexpr std::uint64_t kElements = 3 << 18;
const ToyShape kShape{.matrices = {1 << 18, 1 << 18, 1 << 18}, .norm = 32, .frozen = false, .tied = false};

struct Where {
  const char* name;
  Placement parameters;
};

class ReadAhead : public testing::TestWithParam<Where> {
 protected:
  std::unique_ptr<ToyModel> opened() {
    ToySetup setup = toy_setup(GetParam().parameters, Placement::nvme, directory_ / "store");
    setup.runtime.pinned_memory_bytes = 128 * kMiB;
    setup.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& options) {
      return std::make_unique<CountingBackend>(make_faulty_backend(options, faults_), aio::Operation::read, read_);
    };
    setup.engine.update_mode = UpdateMode::forward;
    setup.engine.sub_group_elements = 25000;
    setup.engine.update_buffer_count = 4;
    setup.engine.reuse_distance_elements = 0;  // every use of weights fetches them
    return std::make_unique<ToyModel>(setup, kShape);
  }
  std::unique_ptr<ToyModel> run() {
    auto run = opened();
    run->initialize();
    return run;
  }
  static std::unique_ptr<ToyModel> reference() {
    ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
    setup.runtime.pinned_memory_bytes = 128 * kMiB;
    setup.engine.update_mode = UpdateMode::step;
    auto run = std::make_unique<ToyModel>(setup, kShape);
    run->initialize();
    return run;
  }
  bool weights_on_nvme() const { return GetParam().parameters == Placement::nvme; }
  // The most that a pass reads without read-ahead for the update; some of it may have been read before the pass.
  std::uint64_t weights_read_in_a_pass() const { return weights_on_nvme() ? 2 * 2 * (kElements + 25000) : 0; }

  TempDirectory directory_;
  const std::shared_ptr<Faults> faults_ = std::make_shared<Faults>(1);
  std::atomic<std::uint64_t> read_{0};
};
INSTANTIATE_TEST_SUITE_P(Modes, ReadAhead,
                         testing::Values(Where{"state", Placement::pinned}, Where{"weights_too", Placement::nvme}),
                         [](const auto& where) { return std::string(where.param.name); });

TEST_P(ReadAhead, FillsTheBuffersInThePassAndReadsNothingTwice) {
  const auto r = run();
  r->train(1, 3);
  r->engine().settle();  // every buffer is idle
  const std::uint64_t before = read_;
  r->pass(4);
  const std::uint64_t of_buffers = 4 * 16384 * (weights_on_nvme() ? 12 : 10);  // pieces are whole tiles
  EXPECT_LE(read_ - before, of_buffers + weights_read_in_a_pass());
  EXPECT_GE(read_ - before, weights_on_nvme() ? of_buffers + 2 * kElements : of_buffers);
  r->engine().step();
  r->train(5, 6);
  r->engine().settle();
  const std::uint64_t middle = read_;
  r->train(7, 10);
  r->engine().settle();
  const auto all = 4.0 * static_cast<double>(r->engine().formula_bytes().nvme_read);
  EXPECT_NEAR(static_cast<double>(read_ - middle), all, 0.02 * all);
}

TEST_P(ReadAhead, IsKeptForTheNextStepWhenOneIsSkipped) {
  const auto r = run();
  const auto expected = reference();
  r->train(1, 2);
  r->engine().settle();
  r->gradient_scale = std::numeric_limits<float>::infinity();
  r->pass(3);
  EXPECT_FALSE(r->engine().step().applied);
  r->losses.pop_back();
  r->gradient_scale = 1;
  const std::uint64_t before = read_;
  r->pass(3);
  EXPECT_LE(read_ - before, weights_read_in_a_pass());
  r->engine().step();
  r->train(4, 5);
  expected->train(1, 5);
  EXPECT_EQ(digests_of(*r), digests_of(*expected));
}

// Reads ahead that arrive late must not change buffers whose contents are still to be written.
TEST_P(ReadAhead, IsDroppedWhenTheProgramWritesBeforeTheStep) {
  const auto delay = [&](aio::Operation operation, std::chrono::milliseconds by) {
    faults_->clear();
    faults_->add({.kind = Fault::Kind::delay, .operation = operation, .count = Faults::kForever, .delay = by});
  };
  const auto r = run();
  const auto expected = reference();
  for (ToyModel* each : {r.get(), expected.get()}) {
    each->train(1, 2);
    each->engine().settle();
    each->in_forward = [&](std::size_t unit) {
      if (unit == 2) delay(aio::Operation::read, std::chrono::milliseconds(60));
    };
    each->pass(3);
    each->in_forward = [](std::size_t) {};
    delay(aio::Operation::write, std::chrono::milliseconds(120));
    std::vector<float> values(200000);
    for (const State state : {State::master, State::moment2}) {
      each->engine().read(each->matrix(0), state, 1000, values);
      for (float& value : values) value *= 2;
      each->engine().write(each->matrix(0), state, 1000, values);
    }
    faults_->clear();
    each->engine().step();
    each->train(4, 5);
  }
  EXPECT_EQ(digests_of(*r), digests_of(*expected));
}

TEST_P(ReadAhead, GivesWayToUnitsThatAreAskedForFirst) {
  const auto r = run();
  const auto expected = reference();
  for (ToyModel* each : {r.get(), expected.get()}) {
    each->train(1, 3);
    each->engine().settle();
    each->train(4, 4);  // what was read ahead is of unit 0
    const PassScope pass = each->engine().begin(Pass::evaluate);
    for (const std::size_t unit : {2u, 1u}) {
      Lease lease = each->engine().gather(each->unit(unit), each->stream());
      lease.release(each->stream());
    }
  }
  for (ToyModel* each : {r.get(), expected.get()}) each->train(5, 6);
  EXPECT_EQ(digests_of(*r), digests_of(*expected));
}

// The engine may end between the pass and the step: it waits for reads in flight before it frees their memory.
TEST_P(ReadAhead, EndsWithTheEngine) {
  auto r = run();
  r->train(1, 2);
  r->engine().settle();
  r->pass(3);
  r.reset();
  EXPECT_EQ(opened()->restore().step, 2u);
}

}  // namespace
}  // namespace hoist::test::read_ahead_test
