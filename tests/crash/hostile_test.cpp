// SPDX-License-Identifier: Apache-2.0
// File systems that fill up, fail or vanish under a training, drives that stop answering, and two processes that want
// one store: an error that says what happened, the last commit intact, and never a hang.
//
// The file systems are real ones in files, which needs the right to mount; without it these tests are skipped.
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
#include <hoist/tests/zero/toy_model.hpp>

namespace hoist::test {
namespace {

constexpr std::uint64_t kSteps = 40;
const ToyShape kShape{.matrices = {9000, 70000, 20000}, .norm = 40};

bool run(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

// An ext4 in a sparse file on a tmpfs that is too small for it: space that was promised and is not there, as on a thin
// volume.
class ThinVolume {
 public:
  ThinVolume(const TempDirectory& directory, const char* real_size)
      : backing_(directory / "backing"), mount_(directory / "mounted") {
    std::filesystem::create_directories(backing_);
    std::filesystem::create_directories(mount_);
    backed_ = run(fmt::format("mount -t tmpfs -o size={} hoist-test {}", real_size, backing_));
    mounted_ = backed_ && run(fmt::format("truncate -s 64M {}/image", backing_)) &&
               run(fmt::format("mkfs.ext4 -q -F -m 0 -E nodiscard {}/image", backing_)) && mount();
  }
  ~ThinVolume() {
    unmount();
    if (backed_) run(fmt::format("umount {0} || umount -l {0}", backing_));
  }
  ThinVolume(const ThinVolume&) = delete;
  ThinVolume& operator=(const ThinVolume&) = delete;

  bool mounted() const { return mounted_; }
  const std::string& path() const { return mount_; }
  std::string store() const { return mount_ + "/store"; }
  bool grow(const char* real_size) const {
    return run(fmt::format("mount -o remount,size={} {}", real_size, backing_));
  }
  bool mount() { return mounted_ = run(fmt::format("mount -o loop,errors=remount-ro {}/image {}", backing_, mount_)); }
  void unmount() {
    if (mounted_) run(fmt::format("umount {0} || umount -l {0}", mount_));
    mounted_ = false;
  }
  bool detach() {
    mounted_ = false;
    return run(fmt::format("umount -l {}", mount_));
  }
  // The device behind the mount, as /sys/fs/ext4 names it.
  std::string device_name() const {
    std::ifstream mounts("/proc/mounts");
    for (std::string device, place, rest; mounts >> device >> place && std::getline(mounts, rest);) {
      if (place == mount_) return device.substr(device.rfind('/') + 1);
    }
    return {};
  }

 private:
  const std::string backing_, mount_;
  bool backed_ = false, mounted_ = false;
};

class Hostile : public testing::Test {
 protected:
  static ToySetup toy(const std::string& store) {
    ToySetup toy = toy_setup(Placement::nvme, Placement::nvme, store);
    toy.engine.lock_timeout = std::chrono::seconds(10);
    return toy;
  }

  static std::string expected() {
    static const std::string digest = [] {
      Digests d = train_once(toy_setup(Placement::pinned, Placement::pinned), kShape, kSteps);
      return d.master + d.moment1 + d.moment2;
    }();
    return digest;
  }

  struct Life {
    std::string error;            // what ended it; empty: it trained to the end
    std::int64_t committed = -1;  // the newest that was reported durable
  };
  // Trains to the last step from what is there; `between` is called after each step, and before the first.
  static Life train(
      const ToySetup& setup, const std::function<void(std::uint64_t)>& between = [](std::uint64_t) {}) {
    Life life;
    std::atomic<std::int64_t> committed{-1};
    try {
      Runtime runtime(setup.runtime);
      Engine engine(runtime, setup.engine);
      ToyModel model(engine, kShape);
      std::uint64_t first = 1;
      if (engine.find_commit()) {
        first = engine.restore().step + 1;
      } else {
        engine.initialize(model.fill());
      }
      committed = static_cast<std::int64_t>(first) - 1;
      between(first - 1);
      for (std::uint64_t step = first; step <= kSteps; ++step) {
        model.pass(step);
        engine.step({.caller_state = std::as_bytes(std::span(&step, 1))})
            .committed.then([&committed, step](std::exception_ptr error) {
              if (!error) committed = static_cast<std::int64_t>(step);
            });
        between(step);
      }
      engine.settle();
      model.losses.clear();
      const Digests d = digests_of(engine, model);
      EXPECT_EQ(d.master + d.moment1 + d.moment2, expected());
    } catch (const Error& error) {
      life.error = error.what();
    }
    life.committed = committed;
    return life;
  }

  // What was durable is there, and training on from it ends in the right bits.
  static void expect_intact(const ToySetup& setup, std::int64_t committed) {
    {
      Runtime runtime(setup.runtime);
      Engine engine(runtime, setup.engine);
      ToyModel model(engine, kShape);
      const auto found = engine.find_commit();
      ASSERT_TRUE(found);
      EXPECT_GE(static_cast<std::int64_t>(*found), committed);
    }
    EXPECT_EQ(train(setup).error, "");
  }

  const TempDirectory directory_;
};

#define HOIST_NEEDS_MOUNTED(volume) \
  if (!(volume).mounted()) GTEST_SKIP() << "no file system can be mounted here (needs root, mkfs.ext4, loop devices)"

TEST_F(Hostile, AThinVolumeThatFillsUpLeavesTheLastCommit) {
  ThinVolume volume(directory_, "2m");
  HOIST_NEEDS_MOUNTED(volume);
  const ToySetup setup = toy(volume.store());
  const Life life = train(setup);
  ASSERT_NE(life.error, "") << "the volume was large enough";
  RecordProperty("error", life.error);
  EXPECT_NE(life.error.find(volume.path()), std::string::npos) << life.error;
  volume.unmount();
  ASSERT_TRUE(volume.grow("64m"));
  ASSERT_TRUE(volume.mount());
  if (life.committed >= 0) {
    expect_intact(setup, life.committed);
  } else {
    EXPECT_EQ(train(setup).error, "");
  }
}

// Not before the store was made, but in the middle of a training.
TEST_F(Hostile, AThinVolumeThatFillsUpLaterLeavesTheLastCommit) {
  ThinVolume volume(directory_, "64m");
  HOIST_NEEDS_MOUNTED(volume);
  const ToySetup setup = toy(volume.store());
  // Only the first extents have been written when it happens: step 0 is complete, and step 1 finds no room.
  const Life life = train(setup, [&](std::uint64_t step) {
    if (step != 0) return;
    std::ofstream filler(directory_ / "backing/filler", std::ios::binary);
    const std::vector<char> bytes(1 << 20, 'x');
    while (filler.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush()) {
    }
  });
  ASSERT_NE(life.error, "");
  EXPECT_GE(life.committed, 0);
  EXPECT_NE(life.error.find(volume.path()), std::string::npos) << life.error;
  volume.unmount();
  std::filesystem::remove(directory_ / "backing/filler");
  ASSERT_TRUE(volume.mount());
  expect_intact(setup, life.committed);
}

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

// What ext4 does when it finds itself damaged.
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
Nanoseconds configured_answer_timeout() {
  return Config::parse(R"({"hoist": {"io_answer_timeout_seconds": 0.4}})", "test.json").runtime.aio_answer_timeout;
}

// From some transfer on, the drive takes what it is given and says nothing. Wherever in the first steps that is.
TEST_F(Hostile, ADriveThatStopsAnsweringIsAnErrorAndNoHang) {
  ToySetup setup = toy(directory_ / "store");
  setup.runtime.aio_backend = aio::BackendKind::threads;
  const auto counted = [&](const std::shared_ptr<Faults>& faults) {
    ToySetup silent = setup;
    silent.runtime.aio_answer_timeout = configured_answer_timeout();
    silent.runtime.make_aio_backend = [faults](const aio::EngineOptions& options) {
      return make_faulty_backend(options, faults);
    };
    return silent;
  };
  bool silenced = true;
  std::uint64_t lives = 0;
  for (std::uint64_t from = 3; silenced && lives < 12; from += 7, ++lives) {
    SCOPED_TRACE(fmt::format("silent from transfer {}", from));
    std::filesystem::remove_all(directory_ / "store");
    const auto faults = std::make_shared<Faults>(0);
    faults->add({.kind = Fault::Kind::delay, .first = from, .count = Faults::kForever, .delay = std::chrono::hours(9)});
    const TimePoint begin = Clock::now();
    const Life life = train(counted(faults));
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
    silenced = faults->hits(Fault::Kind::delay) > 0;
    ASSERT_TRUE(silenced);
    EXPECT_NE(life.error.find("did not answer"), std::string::npos) << life.error;
    if (life.committed >= 0) expect_intact(setup, life.committed);
  }
}

// Notes where each manifest that is written lies in memory.
class ManifestMemory final : public aio::Backend {
 public:
  struct Seen {
    const std::byte* data = nullptr;
    std::vector<std::byte> bytes;
  };
  ManifestMemory(std::unique_ptr<aio::Backend> inner, Seen& last) : inner_(std::move(inner)), last_(last) {}
  std::string description() const override { return inner_->description(); }
  void submit(aio::Block& block) override {
    if (block.operation == aio::Operation::write && block.file->path().ends_with(".manifest"))
      last_ = {block.data, {block.data, block.data + block.length_bytes}};
    inner_->submit(block);
  }
  std::size_t reap(std::span<aio::Block*> done, Nanoseconds timeout) override { return inner_->reap(done, timeout); }
  void wake_up() override { inner_->wake_up(); }

 private:
  const std::unique_ptr<aio::Backend> inner_;
  Seen& last_;
};

// A manifest's write is the one that is never answered: its memory is neither given back nor used again.
TEST_F(Hostile, WhatASilentDriveMayStillReadIsNotFreed) {
  ToySetup setup = toy(directory_ / "store");
  setup.runtime.aio_backend = aio::BackendKind::threads;
  ToySetup silent = setup;
  const auto faults = std::make_shared<Faults>(0);
  ManifestMemory::Seen last;
  silent.runtime.aio_answer_timeout = configured_answer_timeout();
  silent.runtime.make_aio_backend = [&](const aio::EngineOptions& options) {
    return std::make_unique<ManifestMemory>(make_faulty_backend(options, faults), last);
  };
  const Life life = train(silent, [&](std::uint64_t step) {
    if (step == 5)
      faults->add({.kind = Fault::Kind::delay,
                   .operation = aio::Operation::write,
                   .path_contains = ".manifest",
                   .count = Faults::kForever,
                   .delay = std::chrono::hours(9)});
  });
  EXPECT_NE(life.error.find("did not answer"), std::string::npos) << life.error;
  ASSERT_GT(faults->hits(Fault::Kind::delay), 0u);
  ASSERT_NE(last.data, nullptr);
  std::vector<std::unique_ptr<aio::TransferMemory>> others;  // for which freed memory would be good
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
      Engine engine(runtime, setup.engine);
      ToyModel model(engine, shape);
      std::uint64_t first = 1;
      if (engine.find_commit()) {
        first = engine.restore().step + 1;
      } else {
        engine.initialize(model.fill());
      }
      if (++shared.owners > 1) shared.both = true;
      const std::uint64_t last = std::min(first + kStepsEach - 1, last_step);
      model.train(first, last);
      engine.settle();
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
  // What the last ones left is what a single process would have.
  Runtime runtime(setup.runtime);
  setup.engine.lock_timeout = std::chrono::seconds(10);
  Engine engine(runtime, setup.engine);
  ToyModel model(engine, shape);
  EXPECT_EQ(engine.restore().step, steps);
  Digests mine = digests_of(engine, model);
  Digests alone = train_once(toy_setup(Placement::pinned, Placement::pinned), shape, steps);
  mine.losses.clear();
  alone.losses.clear();
  EXPECT_EQ(mine, alone);
}

}  // namespace
}  // namespace hoist::test
