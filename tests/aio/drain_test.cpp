// SPDX-License-Identifier: Apache-2.0
// Destruction of a queue while transfers are under way, up to drives that never answer.
#include <future>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <hoist/aio/given_up.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"
#include "small_file_system.hpp"

namespace hoist::aio::drain_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::Fault;
using test::Faults;

constexpr std::uint64_t kBlock = 64 * kKiB;

class DrainOf {
 protected:
  explicit DrainOf(BackendKind kind)
      : kind_(kind),
        file_(directory_ / "file", {.mode = OpenMode::create, .reserve_bytes = 16 * kBlock}),
        memory_(16 * kBlock) {}

  DriveQueueOptions options(Nanoseconds drain_timeout) const {
    return {.backend = kind_, .block_bytes = kBlock, .queue_depth = 2, .drain_timeout = drain_timeout};
  }

  const BackendKind kind_;

  test::TempDirectory directory_;
  File file_;
  AlignedBuffer memory_;
  std::shared_ptr<Faults> faults_ = std::make_shared<Faults>(3);
};

class Drain : public DrainOf, public testing::TestWithParam<BackendKind> {
 protected:
  Drain() : DrainOf(GetParam()) {}
};

class DrainOfNull : public DrainOf, public testing::Test {
 protected:
  DrainOfNull() : DrainOf(BackendKind::null) {}
};

TEST_P(Drain, ASlowDriveIsWaitedForAsLongAsItAnswers) {
  // 12 blocks, two at a time, 100 ms each: 600 ms in all, more than the time-out, but never so long without an answer.
  faults_->add({.kind = Fault::Kind::delay, .count = Faults::kForever, .delay = milliseconds(100)});
  Completion transfer;
  {
    const DriveQueueOptions queue_options = options(milliseconds(500));
    DriveQueue queue(queue_options, test::make_faulty_backend(queue_options, faults_));
    transfer = queue.write(file_, 0, memory_.part(0, 12 * kBlock), Priority::background);
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
    const DriveQueueOptions queue_options = options(milliseconds(50));
    DriveQueue queue(queue_options, test::make_faulty_backend(queue_options, faults_));
    pending.push_back(queue.write(file_, 0, memory_.part(0, 4 * kBlock), Priority::background));  // partly in flight
    pending.push_back(
        queue.read(file_, 0, memory_.part(8 * kBlock, kBlock), Priority::foreground));  // queued or in flight
    pending.push_back(queue.sync(file_));
  }
  EXPECT_GE(Clock::now() - start, milliseconds(50));
  for (const Completion& completion : pending) {
    const auto error = io_error_of(completion);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ETIMEDOUT);
    EXPECT_EQ(error->path, file_.path());
  }
}

// The drive goes silent in the middle of the queue's life: pending transfers fail, and so does every later one.
TEST_P(Drain, ADriveThatStopsAnsweringIsGivenUp) {
  faults_->add({.kind = Fault::Kind::delay,
                .path_contains = "file",
                .first = 3,
                .count = Faults::kForever,
                .delay = std::chrono::hours(9)});
  DriveQueueOptions queue_options = options(milliseconds(50));
  queue_options.answer_timeout = milliseconds(300);
  const TimePoint start = Clock::now();
  {
    DriveQueue queue(queue_options, test::make_faulty_backend(queue_options, faults_));
    queue.write(file_, 0, memory_.part(0, 3 * kBlock), Priority::background).wait();
    EXPECT_FALSE(queue.gave_up());
    const Completion stuck = queue.write(file_, 0, memory_.part(0, 4 * kBlock), Priority::background);
    const Completion behind = queue.read(file_, 0, memory_.part(8 * kBlock, 8 * kBlock), Priority::background);
    for (const Completion& completion : {stuck, behind}) {
      const auto error = io_error_of(completion);
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code, ETIMEDOUT);
    }
    EXPECT_GE(Clock::now() - start, milliseconds(300));
    EXPECT_TRUE(queue.gave_up());
    EXPECT_EQ(io_error_of(queue.sync(file_))->code, ETIMEDOUT);
  }
  EXPECT_LT(Clock::now() - start, seconds(20));
}

// The caller must see ETIMEDOUT, because the drive may still write to its memory. The log has the error before it.
TEST_P(Drain, TheErrorOfABlockIsLoggedIfTheDriveIsGivenUpBeforeTheTransferEnds) {
  faults_->add({.path_contains = "file"});
  faults_->add({.kind = Fault::Kind::delay,
                .path_contains = "file",
                .first = 1,
                .count = Faults::kForever,
                .delay = std::chrono::hours(9)});
  DriveQueueOptions queue_options = options(milliseconds(50));
  queue_options.answer_timeout = milliseconds(300);
  const LogCapture log;
  DriveQueue queue(queue_options, test::make_faulty_backend(queue_options, faults_));
  const auto error = io_error_of(queue.write(file_, 0, memory_.part(0, 2 * kBlock), Priority::background));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, ETIMEDOUT);
  EXPECT_EQ(log.count("Input/output error"), 1u) << log.text();
}

// An idle drive does not count as one that does not answer.
TEST_P(Drain, AnIdleDriveIsNotGivenUp) {
  DriveQueueOptions queue_options = options(milliseconds(500));
  queue_options.answer_timeout = seconds(1);  // as long as a busy drive may take for a block
  DriveQueue queue(queue_options, make_backend(queue_options));
  for (int i = 0; i < 2; ++i) {
    queue.write(file_, 0, memory_.part(0, kBlock), Priority::background).wait();
    std::this_thread::sleep_for(milliseconds(1200));
  }
  queue.write(file_, 0, memory_.part(0, kBlock), Priority::background).wait();
  EXPECT_FALSE(queue.gave_up());
}

// Simulates a process that is stopped (as by Ctrl-Z) while it waits: one reap() returns late and without blocks. The
// next reap() returns the blocks that the drive finished meanwhile.
class StoppedBackend final : public Backend {
 public:
  StoppedBackend(std::unique_ptr<Backend> inner, Nanoseconds stopped) : inner_(std::move(inner)), stopped_(stopped) {}
  std::string description() const override { return inner_->description(); }
  void submit(Block& block) override {
    inner_->submit(block);
    submitted_ = true;
  }
  std::size_t reap(std::span<Block*> done, Nanoseconds timeout) override {
    if (!submitted_ || std::exchange(was_stopped_, true)) return inner_->reap(done, timeout);
    std::this_thread::sleep_for(stopped_);
    return 0;
  }
  void wake_up() override { inner_->wake_up(); }

 private:
  const std::unique_ptr<Backend> inner_;
  const Nanoseconds stopped_;
  bool submitted_ = false;
  bool was_stopped_ = false;
};

// A drive that answers at once: a real one that is busy may itself take longer than these time-outs.
TEST_F(DrainOfNull, AProcessThatWasStoppedDoesNotBlameTheDrive) {
  DriveQueueOptions queue_options = options(milliseconds(200));
  queue_options.answer_timeout = milliseconds(200);
  const auto stopped = [&] { return std::make_unique<StoppedBackend>(make_backend(queue_options), milliseconds(600)); };
  {
    DriveQueue queue(queue_options, stopped());
    EXPECT_FALSE(io_error_of(queue.write(file_, 0, memory_.part(0, kBlock), Priority::background)));
    EXPECT_FALSE(queue.gave_up());
  }
  Completion transfer;
  queue_options.answer_timeout = std::chrono::minutes(1);
  {
    DriveQueue queue(queue_options, stopped());
    transfer = queue.write(file_, 0, memory_.part(0, kBlock), Priority::background);
  }
  EXPECT_FALSE(io_error_of(transfer)) << "at its end";
}

TEST_P(Drain, WhatAContinuationStartsDuringTheDrainIsFinishedToo) {
  faults_->add({.kind = Fault::Kind::delay, .delay = milliseconds(20)});
  Completion second;
  {
    const DriveQueueOptions queue_options = options(seconds(10));
    DriveQueue queue(queue_options, test::make_faulty_backend(queue_options, faults_));
    queue.write(file_, 0, memory_.part(0, kBlock), Priority::background).then([&](std::exception_ptr) {
      second = queue.write(file_, kBlock, memory_.part(0, kBlock), Priority::background);
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
    const DriveQueueOptions queue_options = options(seconds(10));
    DriveQueue queue(queue_options, test::make_faulty_backend(queue_options, faults_));
    transfer = queue.write(file_, 0, memory_.part(0, kBlock), Priority::background);
  }
  ASSERT_TRUE(transfer.done());
  EXPECT_EQ(transfer.error(), nullptr);
}

// A file system that does not write until it is thawed: the kernel itself holds the transfer. Thawed in any case after
// a while, lest a process that waits for it can never be ended.
class Freeze {
 public:
  static constexpr Nanoseconds kLimit = seconds(20);

  explicit Freeze(const std::string& path)
      : descriptor_(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)),
        frozen_(::ioctl(descriptor_, FIFREEZE, 0) == 0),
        watchdog_([this, over = over_.get_future()] {
          static_cast<void>(over.wait_for(kLimit));
          ::ioctl(descriptor_, FITHAW, 0);
        }) {}
  ~Freeze() {
    thaw();
    ::close(descriptor_);
  }
  Freeze(const Freeze&) = delete;
  Freeze& operator=(const Freeze&) = delete;
  bool frozen() const { return frozen_; }
  void thaw() {
    if (!watchdog_.joinable()) return;
    over_.set_value();
    watchdog_.join();
  }

 private:
  const int descriptor_;
  const bool frozen_;
  std::promise<void> over_;
  std::thread watchdog_;
};

TEST_P(Drain, WhatTheKernelHoldsMayStillBeUsedByItAfterTheQueueHasGone) {
  const SmallFileSystem drive(directory_.path().string(), "ext4");
  if (!drive.mounted()) GTEST_SKIP() << "a loop device cannot be mounted here (needs root)";
  // As its owner has to: given up for good when the queue says ETIMEDOUT.
  auto* const memory = new AlignedBuffer(4 * kBlock);
  leave_unfreed(memory);
  {
    const File file(drive / "file", {.mode = OpenMode::create, .reserve_bytes = 4 * kBlock});
    fill_pattern(memory->span(), 1);
    std::vector<Completion> pending;
    Freeze freeze(drive.path());
    const TimePoint start = Clock::now();
    if (!freeze.frozen()) GTEST_SKIP() << "a file system cannot be frozen here (needs root)";
    {
      DriveQueue queue(options(milliseconds(100)));
      for (std::uint64_t i = 0; i < 4; ++i)  // two in flight, two queued
        pending.push_back(queue.write(file, i * kBlock, memory->part(i * kBlock, kBlock), Priority::background));
    }
    for (const Completion& completion : pending) {
      const auto error = io_error_of(completion);
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code, ETIMEDOUT);
    }
    EXPECT_LT(Clock::now() - start, Freeze::kLimit) << "destruction waited for the kernel beyond its time-out";
    freeze.thaw();
    // What the kernel had, it writes now, from the same memory; what was only queued is never started.
    AlignedBuffer back(4 * kBlock);
    const TimePoint deadline = Clock::now() + seconds(10);
    do {
      std::this_thread::sleep_for(milliseconds(5));
      ASSERT_EQ(::pread(file.descriptor(), back.data(), 4 * kBlock, 0), static_cast<ssize_t>(4 * kBlock));
    } while (!same_bytes(back.part(0, 2 * kBlock), memory->part(0, 2 * kBlock)) && Clock::now() < deadline);
    EXPECT_TRUE(same_bytes(back.part(0, 2 * kBlock), memory->part(0, 2 * kBlock)));
    EXPECT_FALSE(same_bytes(back.part(2 * kBlock, kBlock), memory->part(2 * kBlock, kBlock)));
    EXPECT_FALSE(same_bytes(back.part(3 * kBlock, kBlock), memory->part(3 * kBlock, kBlock)));
  }
}

// An I/O thread that is itself stuck, here in a continuation, is left behind; the destructor still returns.
TEST_P(Drain, AStuckThreadIsLeftBehind) {
  auto stuck = std::make_shared<std::promise<void>>();
  {
    DriveQueue queue(options(milliseconds(20)));
    // A continuation attached to a write that has already ended runs here and not on the I/O thread: then another is
    // made.
    for (bool on_io_thread = false; !on_io_thread;) {
      const auto entered = std::make_shared<std::promise<bool>>();
      queue.write(file_, 0, memory_.part(0, kBlock), Priority::background)
          .then([entered, stuck, here = std::this_thread::get_id()](std::exception_ptr) {
            const bool elsewhere = std::this_thread::get_id() != here;
            entered->set_value(elsewhere);
            if (elsewhere) stuck->get_future().wait();
          });
      on_io_thread = entered->get_future().get();
    }
  }
  EXPECT_TRUE(a_drive_was_given_up()) << "what it may still write to is not freed";
  stuck->set_value();  // let it end before the process does
}

INSTANTIATE_TEST_SUITE_P(Backends, Drain, testing::Values(BackendKind::automatic, BackendKind::threads),
                         [](const auto& way) { return way.param == BackendKind::threads ? "threads" : "automatic"; });

}  // namespace
}  // namespace hoist::aio::drain_test
