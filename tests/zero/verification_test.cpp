// SPDX-License-Identifier: Apache-2.0
// verify_job finds all damage in the state that a restore would read, reports no false damage while training continues,
// and does not disturb the training.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/clock.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tests/support/damage.hpp>
#include <hoist/zero/checkpoint/verification.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::verification_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::SizeIs;

class VerificationTest : public testing::TestWithParam<Placement> {
 protected:
  VerificationTest() { setup_.engine.keep_steps = 2; }

  std::vector<Verification> verify(const VerifyOptions& options = {}) const {
    return verify_job(std::vector{setup_.engine.store_directory}, options);
  }
  // Every tile of every extent.
  void damage(int rank) const {
    flip_bits(fmt::format("{}/rank-{:05}.data", setup_.engine.store_directory, rank), 11, 4096);
  }

  const TempDirectory directory_;
  ToySetup setup_ = toy_setup(GetParam(), Placement::nvme, directory_ / "store");
};

// Each time a piece has been read, training goes on for three steps, which write over all that the commit consisted of.
TEST_P(VerificationTest, ATrainingThatGoesOnIsNotTakenForDamage) {
  const Digests undisturbed = train_once(toy_setup(Placement::pinned, Placement::pinned), {}, 60);
  std::uint64_t step = 0, pieces = 0;
  ToyProgram training(setup_);
  const auto train = [&](std::uint64_t more) {
    if (step == 60) return;
    training.train(step + 1, step + more);
    step += more;
    training.engine().settle();
  };
  train(3);
  const auto found = verify({.progress = [&](std::uint64_t done, std::uint64_t total) {
    ++pieces;
    EXPECT_LE(done, total);
    train(3);
  }});
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_TRUE(found[0].is_sound()) << found[0].not_done << found[0].damage.size();
  EXPECT_GT(found[0].step, 3u);
  EXPECT_LE(found[0].step, step);
  EXPECT_GE(pieces, 8u);
  while (step < 60) train(3);
  EXPECT_EQ(digests_of(training), undisturbed);
}

// Ranks that commit as fast as they can, for as long as it takes to read their stores twenty times.
TEST_P(VerificationTest, RanksThatTrainAreReadAtAnyMoment) {
  std::atomic<bool> enough{false};
  std::atomic<std::uint64_t> last_step{10'000};
  std::thread reader;
  std::uint64_t newest = 0;
  on_ranks(2, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToyProgram model(setup_, join);
    if (rank == 0) {
      reader = std::thread([&] {
        for (int i = 0; i < 20 || newest < 5; ++i) {
          for (const Verification& found : verify()) {
            EXPECT_TRUE(found.damage.empty()) << found.damage.front().what();
            EXPECT_TRUE(found.not_done.empty() || !found.name.empty()) << found.not_done;
            newest = std::max(newest, found.step);
          }
        }
        enough = true;
      });
    }
    for (std::uint64_t step = 1; step <= last_step; ++step) {
      model.train(step, step);
      if (step % 7 == 0) model.engine().save("one in seven", {}).wait();
      if (rank == 0 && enough) last_step = std::min<std::uint64_t>(last_step, step + 1);  // the other's next, at most
    }
  });
  reader.join();
  EXPECT_GT(newest, 0u);
}

TEST_P(VerificationTest, NamedCheckpointsAreReadToo) {
  ToyProgram training(setup_);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    training.train(step, step);
    if (step < 3) training.engine().save(fmt::format("step {}", step), {}).wait();
  }
  training.engine().settle();
  const auto found = verify();
  ASSERT_THAT(found, SizeIs(3));
  EXPECT_EQ(found[0].name, "");
  for (const std::size_t i : {1u, 2u}) {
    EXPECT_TRUE(found[i].is_sound());
    EXPECT_EQ(found[i].name, fmt::format("step {}", i));
    EXPECT_EQ(found[i].step, i);
    EXPECT_EQ(found[i].bytes, found[0].bytes);
  }
  // One that is removed while it is read is no damage.
  bool replaced = false;
  const auto again = verify({.progress = [&](std::uint64_t, std::uint64_t) {
    if (std::exchange(replaced, true)) return;
    for (std::uint64_t step = 4; step <= 12; ++step) {
      training.train(step, step);
      if (step < 6) training.engine().save(fmt::format("step {}", step), {}).wait();
    }
  }});
  ASSERT_THAT(again, SizeIs(3));
  EXPECT_TRUE(again[0].is_sound());
  for (const std::size_t i : {1u, 2u}) {
    EXPECT_THAT(again[i].damage, SizeIs(0));
    EXPECT_THAT(again[i].not_done, HasSubstr("removed meanwhile"));
    EXPECT_TRUE(again[i].is_sound());
  }
}

TEST_P(VerificationTest, DamageIsFoundInAStoreInUse) {
  ToyProgram training(setup_);
  training.train(1, 2);
  training.engine().settle();
  ASSERT_TRUE(verify()[0].is_sound());
  damage(0);
  const auto found = verify();
  EXPECT_EQ(found[0].not_done, "");
  EXPECT_GE(found[0].damage.size(), 8u);
  for (const CorruptionError& error : found[0].damage) EXPECT_THAT(error.where.path, HasSubstr("rank-00000.data"));
}

TEST_P(VerificationTest, TheRanksWhoseFilesAreHereAreRead) {
  train_then(3, setup_, {}, 2, [](int, ToyModel&) {});
  const auto all = verify();
  EXPECT_TRUE(all[0].is_sound());
  for (const char* name : {"rank-00000.data", "rank-00000.manifest"})
    fs::remove(setup_.engine.store_directory + "/" + name);
  const auto others = verify();
  EXPECT_TRUE(others[0].is_sound()) << others[0].not_done;
  EXPECT_LT(others[0].bytes, all[0].bytes);
  damage(2);
  const auto damaged = verify();
  EXPECT_FALSE(damaged[0].damage.empty());
  for (const CorruptionError& error : damaged[0].damage) EXPECT_THAT(error.where.path, HasSubstr("rank-00002.data"));
}

// A training can begin while its store is being read.
TEST_P(VerificationTest, NobodyWaitsForIt) {
  train_then(1, setup_, {}, 2, [](int, ToyModel&) {});
  setup_.engine.lock_timeout = std::chrono::milliseconds(1);
  bool begun = false;
  const auto found = verify({.progress = [&](std::uint64_t, std::uint64_t) {
    if (std::exchange(begun, true)) return;
    ToyModel training(setup_);
    EXPECT_EQ(training.restore().step, 2u);
    training.train(3, 5);
  }});
  EXPECT_TRUE(begun);
  EXPECT_TRUE(found[0].is_sound()) << found[0].not_done;
}

TEST_P(VerificationTest, KeepsToItsRate) {
  train_then(1, setup_, {.matrices = {9000}, .norm = 40}, 1, [](int, ToyModel&) {});
  const std::uint64_t bytes = verify()[0].bytes;
  const TimePoint begun = Clock::now();
  EXPECT_TRUE(verify({.bytes_per_second = 4 * bytes})[0].is_sound());
  EXPECT_GE(Clock::now() - begun, std::chrono::milliseconds(240));
}

TEST_P(VerificationTest, WhatTheProgressThrowsEndsIt) {
  train_then(1, setup_, {}, 1, [](int, ToyModel&) {});
  struct Enough {};
  EXPECT_THROW(verify({.progress = [](std::uint64_t, std::uint64_t) { throw Enough{}; }}), Enough);
  EXPECT_THROW(verify_job(std::vector<std::string>{directory_ / "nothing"}), StoreError);
}

INSTANTIATE_TEST_SUITE_P(Placements, VerificationTest, testing::Values(Placement::nvme, Placement::pinned),
                         [](const auto& c) { return c.param == Placement::nvme ? "all_on_nvme" : "states_on_nvme"; });

}  // namespace
}  // namespace hoist::test::verification_test
