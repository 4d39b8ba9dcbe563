// SPDX-License-Identifier: Apache-2.0
// File systems that fail or vanish under a training, drives that stop answering, and two processes that want one
// store: an error that says what happened, the last commit intact, and never a hang. (Space: space_test.cpp.)
//
// The file systems are real ones in files, which needs the right to mount; without it these tests are skipped.
#include "hostile.hpp"

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/aio/file.hpp>
#include <hoist/aio/transfer_memory.hpp>
#include <hoist/config/config.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/observed_backend.hpp>

#include "volumes.hpp"

namespace hoist::test::hostile_test {
namespace {

// As after `umount -f` of a network drive, or when a controller is gone: every operation fails from one moment on.
TEST_F(Hostile, AFileSystemThatIsShutDownLeavesTheLastCommit) {
  ThinVolume volume(directory_, "64m");
  HOIST_NEEDS_MOUNTED(volume);
  const ToySetup setup = toy(volume.store());
  const Life life = train(setup, [&](std::uint64_t step) {
    if (step != 7) return;
    constexpr unsigned long kShutdown = _IOR('X', 125, std::uint32_t);  // EXT4_IOC_SHUTDOWN
    std::uint32_t without_flushing_the_log = 2;
    const int file = ::open(volume.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ASSERT_EQ(::ioctl(file, kShutdown, &without_flushing_the_log), 0) << std::strerror(errno);
    ::close(file);
  });
  ASSERT_NE(life.error, "");
  EXPECT_GE(life.committed, 5);
  EXPECT_NE(life.error.find(volume.path()), std::string::npos) << life.error;
  volume.unmount();
  ASSERT_TRUE(volume.mount());
  expect_intact(setup, life.committed);
}

// As ext4 does when it finds itself damaged.
TEST_F(Hostile, AFileSystemThatBecomesReadOnlyLeavesTheLastCommit) {
  ThinVolume volume(directory_, "64m");
  HOIST_NEEDS_MOUNTED(volume);
  const ToySetup setup = toy(volume.store());
  bool triggered = false;
  const Life life = train(setup, [&](std::uint64_t step) {
    if (step != 7) return;
    std::ofstream trigger(fmt::format("/sys/fs/ext4/{}/trigger_fs_error", volume.device_name()));
    triggered = static_cast<bool>((trigger << "1").flush());
  });
  if (!triggered) GTEST_SKIP() << "this kernel has no trigger_fs_error";
  ASSERT_NE(life.error, "") << "a read-only file system took the commits";
  EXPECT_GE(life.committed, 5);
  EXPECT_NE(life.error.find(volume.path()), std::string::npos) << life.error;
  volume.unmount();
  ASSERT_TRUE(volume.mount());
  expect_intact(setup, life.committed);
}

// The name is gone, the files are still open: training goes on, and nothing of it is lost.
TEST_F(Hostile, AMountThatVanishesLosesNothing) {
  ThinVolume volume(directory_, "64m");
  HOIST_NEEDS_MOUNTED(volume);
  const ToySetup setup = toy(volume.store());
  const Life life = train(setup, [&](std::uint64_t step) {
    if (step == 7) {
      ASSERT_TRUE(volume.detach());
    }
  });
  EXPECT_EQ(life.error, "");
  EXPECT_EQ(life.committed, static_cast<std::int64_t>(kSteps));
  ASSERT_TRUE(volume.mount());
  expect_intact(setup, life.committed);
}

// As a program's configuration says it.
Nanoseconds configured_answer_timeout(double seconds) {
  return Config::parse(fmt::format(R"({{"hoist": {{"io_answer_timeout_seconds": {}}}}})", seconds), "test.json")
      .runtime.aio_answer_timeout;
}

// `train` trains over a drive that its faults silence. The machine's own drive may take longer than the time-out too,
// and end the training before that: then once more from nothing, with a longer time-out.
template <typename Train>
void until_silenced(const Train& train) {
  for (const double seconds : {0.4, 2.0, 10.0}) {
    const auto faults = std::make_shared<Faults>(0);
    const auto life = train(configured_answer_timeout(seconds), faults);
    const bool silenced = faults->hits(Fault::Kind::delay) > 0;
    if (!silenced && seconds < 10) continue;
    ASSERT_TRUE(silenced);
    EXPECT_NE(life.error.find("did not answer"), std::string::npos) << life.error;
    return;
  }
}

// From some transfer on, the drive takes what it is given and says nothing. Wherever in the first steps that is.
TEST_F(Hostile, ADriveThatStopsAnsweringIsAnErrorAndNoHang) {
  ToySetup setup = toy(directory_ / "store");
  setup.runtime.aio_backend = aio::BackendKind::threads;
  for (std::uint64_t from = 3; from < 87 && !HasFatalFailure(); from += 7) {
    SCOPED_TRACE(fmt::format("silent from transfer {}", from));
    Life life;
    until_silenced([&](Nanoseconds timeout, const std::shared_ptr<Faults>& faults) {
      std::filesystem::remove_all(directory_ / "store");
      faults->add(
          {.kind = Fault::Kind::delay, .first = from, .count = Faults::kForever, .delay = std::chrono::hours(9)});
      ToySetup silent = setup;
      silent.runtime.aio_answer_timeout = timeout;
      silent.runtime.make_aio_backend = [faults](const aio::DriveQueueOptions& options) {
        return make_faulty_backend(options, faults);
      };
      const TimePoint begin = Clock::now();
      life = train(silent);
      EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20) + timeout);
      return life;
    });
    if (life.committed >= 0) expect_intact(setup, life.committed);
  }
}

// The drive never answers the write of a manifest. The memory of that write must be neither freed nor reused.
TEST_F(Hostile, WhatASilentDriveMayStillReadIsNotFreed) {
  ToySetup setup = toy(directory_ / "store");
  setup.runtime.aio_backend = aio::BackendKind::threads;
  struct {
    const std::byte* data = nullptr;
    std::vector<std::byte> bytes;
  } last;  // the last manifest that was written: where it lay in memory, and what it was
  const auto note_manifest = [&](const aio::Block& block) {
    if (block.operation != aio::Operation::write || !block.file->path().ends_with(".manifest")) return;
    last = {block.data, {block.data, block.data + block.length_bytes}};
  };
  Life life;
  until_silenced([&](Nanoseconds timeout, const std::shared_ptr<Faults>& faults) {
    std::filesystem::remove_all(directory_ / "store");
    ToySetup silent = setup;
    silent.runtime.aio_answer_timeout = timeout;
    silent.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& options) {
      return std::make_unique<ObservedBackend>(make_faulty_backend(options, faults), note_manifest);
    };
    life = train(silent, [&](std::uint64_t step) {
      if (step == 5)
        faults->add({.kind = Fault::Kind::delay,
                     .operation = aio::Operation::write,
                     .path_contains = ".manifest",
                     .count = Faults::kForever,
                     .delay = std::chrono::hours(9)});
    });
    return life;
  });
  ASSERT_NE(last.data, nullptr);
  std::vector<std::unique_ptr<aio::TransferMemory>> others;  // allocations that could reuse freed memory
  for (int i = 0; i < 64; ++i) {
    others.push_back(std::make_unique<aio::TransferMemory>(last.bytes.size()));
    std::memset(others.back()->span().data(), 0xFF, last.bytes.size());
  }
  EXPECT_TRUE(std::equal(last.bytes.begin(), last.bytes.end(), last.data)) << "the manifest's memory was used again";
  expect_intact(setup, life.committed);
}

// Two processes start at once, with luck in the same microsecond: one has the store, the other is refused or comes
// after it. 1000 times with HOIST_CRASH_RACES.
TEST_F(Hostile, TwoProcessesRacingForAStoreTakeTurns) {
  const char* const wanted = std::getenv("HOIST_CRASH_RACES");
  const std::uint64_t races = wanted == nullptr ? 50 : std::strtoull(wanted, nullptr, 10);
  constexpr std::uint64_t kStepsEach = 2;
  const ToyShape shape{.matrices = {3000}, .norm = 40};
  ToySetup setup = toy(directory_ / "store");
  setup.engine.lock_timeout = std::chrono::milliseconds(1);

  struct Shared {
    std::atomic<int> ready{0}, owners{0};
    std::atomic<bool> both{false};
    std::array<std::atomic<std::uint64_t>, 2> steps{};  // that each took in this race
    std::array<std::atomic<bool>, 2> refused{};
  };
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);

  const auto contend = [&](Shared& shared, std::size_t me, std::uint64_t last_step) {
    ++shared.ready;
    while (shared.ready < 2) {
    }
    try {
      Runtime runtime(setup.runtime);
      ToyModel model(runtime, setup.engine, shape);
      std::uint64_t first = 1;
      if (model.find_commit()) {
        first = model.restore().step + 1;
      } else {
        model.initialize();
      }
      if (++shared.owners > 1) shared.both = true;
      const std::uint64_t last = std::min(first + kStepsEach - 1, last_step);
      model.train(first, last);
      model.engine().settle();
      shared.steps[me] = last + 1 - first;
      --shared.owners;  // before the lock is let go
    } catch (const StoreError&) {
      shared.refused[me] = true;
    } catch (const std::exception& error) {
      fmt::print(stderr, "process {} of the race: {}\n", me, error.what());
      ::_exit(1);
    }
    ::_exit(0);
  };

  std::uint64_t refusals = 0, steps = 0;
  // On a busy machine it can take more of them until two processes meet.
  for (std::uint64_t race = 0; race < races || (refusals == 0 && race < 40 * races); ++race) {
    SCOPED_TRACE(fmt::format("race {}", race));
    if (race % 10 == 0) {  // also for making it
      std::filesystem::remove_all(directory_ / "store");
      steps = 0;
    }
    auto& shared = *new (memory) Shared;
    std::array<pid_t, 2> children{};
    for (std::size_t me = 0; me < 2; ++me) {
      children[me] = ::fork();
      ASSERT_GE(children[me], 0);
      if (children[me] == 0) contend(shared, me, ~std::uint64_t{0} >> 1);
    }
    for (const pid_t child : children) {
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
    }
    EXPECT_FALSE(shared.both) << "both had the store at once";
    ASSERT_FALSE(shared.refused[0] && shared.refused[1]) << "neither got it";
    refusals += std::uint64_t{shared.refused[0]} + std::uint64_t{shared.refused[1]};
    steps += shared.steps[0] + shared.steps[1];
  }
  ::munmap(memory, sizeof(Shared));
  EXPECT_GT(refusals, 0u) << "they never met";
  // The last ones leave the same state as a single process.
  Runtime runtime(setup.runtime);
  setup.engine.lock_timeout = std::chrono::seconds(10);
  ToyModel model(runtime, setup.engine, shape);
  EXPECT_EQ(model.restore().step, steps);
  Digests alone = train_once(toy_setup(Placement::pinned, Placement::pinned), shape, steps);
  alone.losses.clear();
  EXPECT_EQ(state_digests(model), alone);
}

}  // namespace
}  // namespace hoist::test::hostile_test
