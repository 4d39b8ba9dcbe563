// SPDX-License-Identifier: Apache-2.0
// From measured rates to weights, and the measurement itself on drives that a test makes slow.
#include <array>
#include <cmath>
#include <csignal>
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <hoist/aio/detail/nameless_file.hpp>
#include <hoist/aio/stripe_layout.hpp>
#include <hoist/aio/stripe_weights.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"

namespace hoist::aio::stripe_weights_test {
namespace {

using std::chrono::milliseconds;
using test::Fault;
using test::Faults;
using testing::ElementsAre;

std::vector<std::uint32_t> weights_of(std::vector<double> rates) { return stripe_weights(rates); }

TEST(StripeWeights, AreTheSmallestNumbersWithinTheTolerance) {
  EXPECT_THAT(weights_of({7e9}), ElementsAre(1));
  EXPECT_THAT(weights_of({3.0e9, 3.1e9}), ElementsAre(1, 1));
  EXPECT_THAT(weights_of({2e9, 1e9}), ElementsAre(2, 1));
  EXPECT_THAT(weights_of({6.5e9, 2.1e9}), ElementsAre(3, 1));
  EXPECT_THAT(weights_of({7e9, 2.1e9}), ElementsAre(7, 2));  // 3 to 1 would be 11 % off
  EXPECT_THAT(weights_of({3e9, 2e9, 1e9}), ElementsAre(3, 2, 1));
  EXPECT_THAT(weights_of({1e9, 0.0}), ElementsAre(16, 1));
  EXPECT_THAT(weights_of({1e9, 1e6}), ElementsAre(16, 1));
}

TEST(StripeWeights, NoDriveGetsMoreThanItsRateSaysBeyondTheTolerance) {
  Rng rng(3);
  for (int round = 0; round < 2000; ++round) {
    std::vector<double> rates(1 + rng.below(6));
    for (double& rate : rates) rate = 1e8 + rng.uniform() * 7e9;
    const auto weights = stripe_weights(rates);
    const auto fastest = static_cast<std::size_t>(std::max_element(rates.begin(), rates.end()) - rates.begin());
    for (std::size_t i = 0; i < rates.size(); ++i) {
      ASSERT_GE(weights[i], 1u);
      ASSERT_LE(weights[i], StripeLayout::kWeightMax);
      ASSERT_LE(weights[i], weights[fastest]);
      const double exact = rates[i] / rates[fastest] * weights[fastest];
      // Half a unit is what rounding costs at the finest scale.
      ASSERT_LE(std::abs(weights[i] - exact), std::max(0.1 * exact, 0.5) + (exact < 1 ? 1.0 : 0.0))
          << "seed 3, round " << round;
    }
  }
}

class Measuring : public testing::Test {
 protected:
  std::shared_ptr<Faults> add_drive(const DriveQueueOptions& options = {.backend = BackendKind::threads,
                                                                        .drain_timeout = milliseconds(50)}) {
    auto faults = std::make_shared<Faults>(1);
    queues_.push_back(std::make_unique<DriveQueue>(options, test::make_faulty_backend(options, faults)));
    directories_.push_back(std::make_unique<test::TempDirectory>());
    drives_.push_back({queues_.back().get(), directories_.back()->path().string()});
    return faults;
  }
  std::vector<std::unique_ptr<test::TempDirectory>> directories_;
  std::vector<std::unique_ptr<DriveQueue>> queues_;
  std::vector<MeasuredDrive> drives_;
};

// The limit of file sizes kills the process while the file gets its space.
TEST_F(Measuring, AKillLeavesNoFile) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  test::TempDirectory directory;
  directory.hold_those_of_children();
  const auto measure_with_a_limit = [&] {
    const rlimit limit{64 * kKiB, 64 * kKiB};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    static_cast<void>(detail::nameless_file(directory.path().string(), kMiB));
  };
  EXPECT_EXIT(measure_with_a_limit(), testing::KilledBySignal(SIGXFSZ), "");
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory.path()))
    EXPECT_TRUE(entry.is_directory()) << entry.path();
}

TEST_F(Measuring, ASlowerDriveGetsLess) {
  add_drive();
  // 300 ms: far more than a busy machine adds to the other drive's transfers.
  add_drive()->add({.kind = Fault::Kind::delay, .count = Faults::kForever, .delay = milliseconds(300)});
  const StripeMeasurement measured =
      measure_weights(drives_, {.time_limit = milliseconds(600), .file_bytes = 8 * kMiB});
  EXPECT_GT(measured.bytes_per_second[0], measured.bytes_per_second[1]);
  EXPECT_GT(measured.weights[0], measured.weights[1]);
}

TEST_F(Measuring, LeavesNothingBehind) {
  add_drive();
  static_cast<void>(measure_weights(drives_, {.time_limit = milliseconds(60), .file_bytes = 8 * kMiB}));
  EXPECT_TRUE(std::filesystem::is_empty(directories_[0]->path()));
}

// How far into the file writes and reads came.
struct Reach {
  std::uint64_t written_bytes = 0;
  std::uint64_t read_bytes = 0;
};

class ReachBackend final : public Backend {
 public:
  ReachBackend(std::unique_ptr<Backend> inner, Reach& reach) : inner_(std::move(inner)), reach_(reach) {}
  std::string description() const override { return "reach"; }
  void submit(Block& block) override {
    std::uint64_t& bytes = block.operation == Operation::read ? reach_.read_bytes : reach_.written_bytes;
    bytes = std::max(bytes, block.offset_bytes + block.length_bytes);
    inner_->submit(block);
  }
  std::size_t reap(std::span<Block*> done, Nanoseconds timeout) override { return inner_->reap(done, timeout); }
  void wake_up() override { inner_->wake_up(); }

 private:
  const std::unique_ptr<Backend> inner_;
  Reach& reach_;  // the queue's I/O thread alone, until the queue has gone
};

TEST_F(Measuring, ReadsOnlyWhatItWrote) {
  const test::TempDirectory directory;
  const auto faults = std::make_shared<Faults>(1);
  faults->add({.kind = Fault::Kind::delay,
               .operation = Operation::write,
               .count = Faults::kForever,
               .delay = milliseconds(30)});  // too slow to fill the file in time
  Reach reach;
  {
    const DriveQueueOptions options{.backend = BackendKind::threads};
    DriveQueue queue(options, std::make_unique<ReachBackend>(test::make_faulty_backend(options, faults), reach));
    const std::array drives{MeasuredDrive{&queue, directory.path().string()}};
    static_cast<void>(measure_weights(drives, {.time_limit = milliseconds(90), .file_bytes = 512 * kMiB}));
  }
  EXPECT_GT(reach.read_bytes, 0u);
  EXPECT_LT(reach.written_bytes, 512 * kMiB);
  EXPECT_LE(reach.read_bytes, reach.written_bytes);
}

TEST_F(Measuring, ADriveThatFailsIsNamed) {
  add_drive();
  add_drive()->add({.kind = Fault::Kind::error, .operation = Operation::write, .first = 3, .code = EIO});
  try {
    static_cast<void>(measure_weights(drives_, {.time_limit = milliseconds(60), .file_bytes = 8 * kMiB}));
    FAIL() << "a failed drive was given a weight";
  } catch (const IoError& error) {
    EXPECT_EQ(error.where.code, EIO);
    EXPECT_THAT(error.where.path, testing::StartsWith(drives_[1].directory));
  }
  EXPECT_TRUE(std::filesystem::is_empty(directories_[1]->path()));
}

TEST_F(Measuring, ADriveThatNeverAnswersIsGivenUpWhenItsQueueSays) {
  add_drive({.backend = BackendKind::threads, .drain_timeout = milliseconds(50), .answer_timeout = milliseconds(80)})
      ->add({.kind = Fault::Kind::delay, .count = Faults::kForever, .delay = std::chrono::hours(9)});
  try {
    static_cast<void>(measure_weights(drives_, {.time_limit = milliseconds(60), .file_bytes = 8 * kMiB}));
    FAIL() << "a drive that never answered was given a weight";
  } catch (const IoError& error) {
    EXPECT_EQ(error.where.code, ETIMEDOUT);
  }
}

TEST_F(Measuring, ImpossibleQuestionsAreRefused) {
  EXPECT_THROW(static_cast<void>(measure_weights({})), UsageError);
  add_drive();
  EXPECT_THROW(static_cast<void>(measure_weights(drives_, {.file_bytes = 1000})), UsageError);
}

}  // namespace
}  // namespace hoist::aio::stripe_weights_test
