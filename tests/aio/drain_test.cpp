// SPDX-License-Identifier: Apache-2.0
// Destruction of an engine while transfers are under way, up to drives that never answer.
#include <future>

#include <gtest/gtest.h>

#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"

namespace hoist::aio {
namespace {

using std::chrono::milliseconds;
using test::Fault;
using test::Faults;

constexpr std::uint64_t kBlock = 64 * kKiB;

class Drain : public testing::TestWithParam<BackendKind> {
 protected:
  Drain()
      : file_(directory_ / "file", {.mode = OpenMode::create, .reserve_bytes = 16 * kBlock}), memory_(16 * kBlock) {}

  EngineOptions options(Nanoseconds drain_timeout) const {
    return {.backend = GetParam(), .block_bytes = kBlock, .queue_depth = 2, .drain_timeout = drain_timeout};
  }

  test::TempDirectory directory_;
  File file_;
  AlignedBuffer memory_;
  std::shared_ptr<Faults> faults_ = std::make_shared<Faults>(3);
};

TEST_P(Drain, ASlowDriveIsWaitedForAsLongAsItAnswers) {
  // 12 blocks, two at a time, 100 ms each: 600 ms in all, more than the time-out, but never so long without an answer.
  faults_->add({.kind = Fault::Kind::delay, .count = Faults::kForever, .delay = milliseconds(100)});
  Completion transfer;
  {
    const EngineOptions engine_options = options(milliseconds(500));
    Engine engine(engine_options, test::make_faulty_backend(engine_options, faults_));
    transfer = engine.write(file_, 0, memory_.part(0, 12 * kBlock), Priority::background);
  }
  ASSERT_TRUE(transfer.done());
  EXPECT_EQ(transfer.error(), nullptr);
}

TEST_P(Drain, ADriveThatNeverAnswersFailsItsTransfersAndLeaksWhatItMayWriteTo) {
  faults_->add(
      {.kind = Fault::Kind::delay, .path_contains = "file", .count = Faults::kForever, .delay = std::chrono::hours(9)});
  std::vector<Completion> pending;
  const TimePoint start = Clock::now();
  {
    const EngineOptions engine_options = options(milliseconds(50));
    Engine engine(engine_options, test::make_faulty_backend(engine_options, faults_));
    pending.push_back(engine.write(file_, 0, memory_.part(0, 4 * kBlock), Priority::background));  // partly in flight
    pending.push_back(
        engine.read(file_, 0, memory_.part(8 * kBlock, kBlock), Priority::foreground));  // queued or in flight
    pending.push_back(engine.sync(file_));
  }
  EXPECT_GE(Clock::now() - start, milliseconds(50));
  for (const Completion& completion : pending) {
    const auto error = io_error_of(completion);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ETIMEDOUT);
    EXPECT_EQ(error->path, file_.path());
  }
}

TEST_P(Drain, WhatAContinuationStartsDuringTheDrainIsFinishedToo) {
  faults_->add({.kind = Fault::Kind::delay, .delay = milliseconds(20)});
  Completion second;
  {
    const EngineOptions engine_options = options(std::chrono::seconds(10));
    Engine engine(engine_options, test::make_faulty_backend(engine_options, faults_));
    engine.write(file_, 0, memory_.part(0, kBlock), Priority::background).then([&](std::exception_ptr) {
      second = engine.write(file_, kBlock, memory_.part(0, kBlock), Priority::background);
    });
  }
  EXPECT_TRUE(second.done());
  EXPECT_EQ(second.error(), nullptr);
  EXPECT_EQ(faults_->blocks(Operation::write), 2u);
}

TEST_P(Drain, ARetryThatIsDueIsFinished) {
  faults_->add({.kind = Fault::Kind::error, .count = 6, .code = EAGAIN});
  Completion transfer;
  {
    const EngineOptions engine_options = options(std::chrono::seconds(10));
    Engine engine(engine_options, test::make_faulty_backend(engine_options, faults_));
    transfer = engine.write(file_, 0, memory_.part(0, kBlock), Priority::background);
  }
  ASSERT_TRUE(transfer.done());
  EXPECT_EQ(transfer.error(), nullptr);
}

// An I/O thread that is itself stuck, here in a continuation, is left behind; the destructor still returns.
TEST_P(Drain, AStuckThreadIsLeftBehind) {
  auto stuck = std::make_shared<std::promise<void>>();
  auto entered = std::make_shared<std::promise<void>>();
  {
    Engine engine(options(milliseconds(20)));
    engine.write(file_, 0, memory_.part(0, kBlock), Priority::background).then([stuck, entered](std::exception_ptr) {
      entered->set_value();
      stuck->get_future().wait();
    });
    entered->get_future().wait();
  }
  stuck->set_value();  // let it end before the process does
}

INSTANTIATE_TEST_SUITE_P(Backends, Drain, testing::Values(BackendKind::automatic, BackendKind::threads),
                         [](const auto& way) { return way.param == BackendKind::threads ? "threads" : "automatic"; });

}  // namespace
}  // namespace hoist::aio
