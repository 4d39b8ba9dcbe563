// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/processors.hpp>
#include <hoist/optim_cpu/norm.hpp>
#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/tests/support/forked.hpp>

#include "tiles.hpp"

namespace hoist::optim::test::update_pool_test {
namespace {

using namespace std::chrono_literals;

TEST(UpdatePool, EveryItemOnceWhateverTheWidth) {
  for (const unsigned threads : {1u, 2u, 3u, 4u, 70u}) {
    UpdatePool pool({.threads = threads});
    EXPECT_EQ(pool.threads(), threads);
    for (const std::size_t count : {0u, 1u, 2u, 5u, 64u, 1000u}) {
      std::vector<std::atomic<int>> seen(count);
      pool.run(count, [&](std::size_t i) { seen[i].fetch_add(1); });
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(seen[i].load(), 1) << threads << " threads, item " << i;
    }
  }
}

TEST(UpdatePool, ZeroThreadsMeansWhatTheProcessMayUse) {
  EXPECT_EQ(UpdatePool().threads(), current_processors().size());
}

TEST(UpdatePool, WritesOfItemsAreVisibleAfterRun) {
  UpdatePool pool({.threads = 4});
  std::vector<std::size_t> squares(500);  // plain memory: the thread sanitizer watches the hand-overs
  for (std::size_t round = 0; round < 20; ++round) {
    pool.run(squares.size(), [&](std::size_t i) { squares[i] += i * i; });
    for (std::size_t i = 0; i < squares.size(); ++i) ASSERT_EQ(squares[i], (round + 1) * i * i);
  }
}

// Both items wait for each other, so they finish only when two threads really run.
bool runs_two_at_once(UpdatePool& pool) {
  std::atomic<int> inside{0};
  std::atomic<bool> met{false};
  pool.run(2, [&](std::size_t) {
    inside.fetch_add(1);
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    while (inside.load() < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    if (inside.load() == 2) met = true;
  });
  return met;
}

TEST(UpdatePool, HasItsThreadsEvenWhenTheHostIsBoundToOneProcessor) {
  // As under OMP_PROC_BIND, before oneTBB has looked at the process.
  const auto all = current_processors();
  ASSERT_TRUE(bind_current_thread({all.front()}));
  EXPECT_EQ(UpdatePool().threads(), 1u);
  UpdatePool pool({.threads = 4, .processors = all});
  EXPECT_TRUE(runs_two_at_once(pool));
  // The workers may use every processor; the host's thread is still bound.
  std::mutex mutex;
  std::set<std::vector<int>> worker_sets;
  const auto host = std::this_thread::get_id();
  for (int round = 0; round < 50 && worker_sets.empty(); ++round) {
    pool.run(64, [&](std::size_t) {
      std::this_thread::sleep_for(200us);
      if (std::this_thread::get_id() == host) return;
      const std::scoped_lock lock(mutex);
      worker_sets.insert(current_processors());
    });
  }
  EXPECT_THAT(worker_sets, ::testing::ElementsAre(all));
  EXPECT_EQ(current_processors(), Processors{all.front()});
  ASSERT_TRUE(bind_current_thread(all));
}

bool blocks_sigterm(const std::filesystem::path& task) {
  std::ifstream status(task / "status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("SigBlk:")) return (std::stoull(line.substr(7), nullptr, 16) >> (SIGTERM - 1) & 1) != 0;
  return true;  // it has ended
}

// oneTBB also starts workers when its limit of threads changes: a pool wider than the machine begins or ends while the
// workers of an earlier run are still wanted.
TEST(UpdatePool, LeavesTheProgramsSignalsToItsOwnThreads) {
  for (unsigned round = 0; round < 20; ++round) {
    UpdatePool pool({.threads = 2 + round % 3});
    pool.run(64, [](std::size_t) { std::this_thread::sleep_for(20us); });
    UpdatePool({.threads = 70});
  }
  int workers = 0, open_to_signals = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(::getpid())) continue;
    ++workers;
    open_to_signals += blocks_sigterm(task.path()) ? 0 : 1;
  }
  EXPECT_GT(workers, 0);
  EXPECT_EQ(open_to_signals, 0);
  EXPECT_FALSE(blocks_sigterm("/proc/thread-self"));
}

TEST(UpdatePool, ExceptionsReachTheCaller) {
  for (const unsigned threads : {1u, 2u, 4u}) {
    UpdatePool pool({.threads = threads});
    std::atomic<int> begun{0};
    try {
      pool.run(10000, [&](std::size_t i) {
        begun.fetch_add(1);
        if (i == 17) throw std::out_of_range("item 17");
      });
      FAIL() << "no exception with " << threads << " threads";
    } catch (const std::out_of_range& error) {
      EXPECT_STREQ(error.what(), "item 17");
    }
    std::atomic<int> after{0};
    pool.run(100, [&](std::size_t) { after.fetch_add(1); });
    EXPECT_EQ(after.load(), 100) << "the pool does not work after an exception";
  }
}

TEST(UpdatePool, SeveralCallersAtOnce) {
  for (const unsigned threads : {1u, 2u}) {
    UpdatePool pool({.threads = threads});
    std::vector<std::thread> callers;
    std::atomic<int> sum{0};
    for (int caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&, caller] {
        for (int round = 0; round < 50; ++round) {
          if (round % 10 == caller) {
            EXPECT_THROW(pool.run(8, [](std::size_t) { throw std::runtime_error("x"); }), std::runtime_error);
          }
          pool.run(8, [&](std::size_t) { sum.fetch_add(1); });
        }
      });
    }
    for (auto& caller : callers) caller.join();
    EXPECT_EQ(sum.load(), 4 * 50 * 8);
  }
}

TEST(UpdatePool, MayBeCalledFromItsOwnItems) {
  UpdatePool pool({.threads = 2});
  std::atomic<int> sum{0};
  pool.run(4, [&](std::size_t) { pool.run(5, [&](std::size_t) { sum.fetch_add(1); }); });
  EXPECT_EQ(sum.load(), 20);
}

TEST(UpdatePool, ProcessorsThatNobodyHasAreRefused) { EXPECT_THROW(UpdatePool({.processors = {16383}}), UsageError); }

TEST(UpdatePool, ACallerMayJoinItsWorkers) {
  const auto all = current_processors();
  const UpdatePool bound({.threads = 1, .processors = {all.back()}}), anywhere({.threads = 1});
  Processors before, after;
  std::thread([&] {
    anywhere.bind_caller();
    before = current_processors();
    bound.bind_caller();
    after = current_processors();
  }).join();
  EXPECT_EQ(before, all);
  EXPECT_EQ(after, Processors{all.back()});
}

// The whole update, tiled over the pool: thread count never changes a bit.
TEST(UpdatePool, ThreadCountNeverChangesTheResult) {
  constexpr std::size_t kCount = 100003, kTile = 4096;
  const auto train = [&](unsigned threads) {
    Rng rng(11);
    Tile tile(kCount, DType::bf16);
    fill_ordinary(tile, rng);
    UpdatePool pool({.threads = threads});
    for (std::uint64_t step = 1; step <= 5; ++step) {
      const UpdateCoefficients c(OptimizerOptions{}, step, 1.0);
      std::atomic<bool> committable{true};
      pool.run((kCount + kTile - 1) / kTile, [&](std::size_t k) {
        SplitTile part = tile.split();
        const std::size_t first = k * kTile;
        part.weight += first;
        part.remainder += first;
        part.moment1 = tile.moment1.data() + first;
        part.moment2 = tile.moment2.data() + first;
        part.gradient = static_cast<const std::byte*>(part.gradient) + 2 * first;
        part.count = std::min(kTile, kCount - first);
        if (!update_tile(c, part)) committable = false;
      });
      EXPECT_TRUE(committable);
      new_gradients(tile, rng);
    }
    return tile;
  };
  const Tile expected = train(1);
  for (const unsigned threads : {2u, 4u}) EXPECT_TRUE(train(threads).same_state(expected)) << threads << " threads";
}

// A handler like that of oneTBB's allocator, which may wait for ever in a forked process.
TEST(UpdatePool, AForkedProcessEndsWithoutTheExitHandlersOfBefore) {
  static const pid_t owner = ::getpid();
  std::atexit([] {
    if (::getpid() != owner) ::_exit(4);
  });
  const UpdatePool pool({.threads = 2});
  EXPECT_EQ(hoist::test::exit_code_of_fork([]() -> int { std::exit(3); }), 3);
  const auto with_own_handler = []() -> int {
    std::atexit([] { ::_exit(5); });
    std::exit(3);
  };
  EXPECT_EQ(hoist::test::exit_code_of_fork(with_own_handler), 5);
}

}  // namespace
}  // namespace hoist::optim::test::update_pool_test
