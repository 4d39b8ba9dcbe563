// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/device_arena.hpp>

namespace hoist::tiers::device_arena_test {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kArenaBytes = 256 * kKiB;

struct Machine {
  explicit Machine(std::uint64_t bytes = kArenaBytes)
      : device(platform::Device::create({.memory_bytes = bytes})),
        budget("device", "hoist.device_budget", bytes),
        arena(*device, budget) {}
  std::unique_ptr<platform::Device> device;
  Budget budget;
  DeviceArena arena;
};

TEST(DeviceArena, GivesAlignedPiecesAndBooksThem) {
  Machine m;
  const DeviceBlock a = m.arena.allocate(1, "a");
  const DeviceBlock b = m.arena.allocate(DeviceArena::kAlignment + 1, "b");
  EXPECT_EQ(a.bytes().size(), 1u);
  EXPECT_EQ(b.bytes().size(), DeviceArena::kAlignment + 1);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data()) % DeviceArena::kAlignment, 0u);
  EXPECT_EQ(m.budget.held_bytes(), 3 * DeviceArena::kAlignment);
  EXPECT_EQ(m.arena.largest_hole_bytes(), kArenaBytes - 3 * DeviceArena::kAlignment);
  const DeviceBlock none = m.arena.allocate(0, "none");
  EXPECT_EQ(none.data(), nullptr);
}

TEST(DeviceArena, ReleasedPiecesArePoisonedAndJoin) {
  Machine m;
  DeviceBlock a = m.arena.allocate(4096, "a");
  DeviceBlock b = m.arena.allocate(4096, "b");
  DeviceBlock c = m.arena.allocate(4096, "c");
  std::byte* b_data = b.data();
  std::memset(b_data, 0, 4096);
  b = {};
  {
    const DeviceBlock again = m.arena.allocate(4096, "again");
    EXPECT_EQ(again.data(), b_data);  // first fit
    float value = 0;
    std::memcpy(&value, again.data() + 2048, sizeof value);
    EXPECT_TRUE(std::isnan(value));
  }
  a = {};
  c = {};
  EXPECT_EQ(m.arena.largest_hole_bytes(), kArenaBytes);
  EXPECT_EQ(m.budget.held_bytes(), 0u);
  EXPECT_EQ(m.budget.peak_bytes(), 3u * 4096);
}

TEST(DeviceArena, BlocksMove) {
  Machine m;
  DeviceBlock a = m.arena.allocate(100, "a");
  std::byte* data = a.data();
  DeviceBlock b(std::move(a));
  EXPECT_EQ(a.data(), nullptr);  // NOLINT(bugprone-use-after-move): a moved-from block is empty
  EXPECT_EQ(b.data(), data);
  b = m.arena.allocate(300, "b");
  EXPECT_EQ(m.budget.held_bytes(), round_up(300, DeviceArena::kAlignment));
}

// Fills an arena to fragments, asks for too much, and tries the budget that the refusal names, and one page less.
TEST(DeviceArena, RefusalNamesTheSmallestArenaThatWorks) {
  constexpr std::uint64_t kWanted = 20 * 4096;
  const auto attempt = [&](std::uint64_t arena_bytes) -> std::optional<BudgetError> {
    Machine m(arena_bytes);
    std::vector<DeviceBlock> blocks;
    for (int i = 0; i < 14; ++i) blocks.push_back(m.arena.allocate(4096, "block"));
    for (std::size_t i = 0; i < 14; i += 2) blocks[i] = {};  // holes of one page
    try {
      static_cast<void>(m.arena.allocate(kWanted, "layer 3"));
      return std::nullopt;
    } catch (const BudgetError& error) {
      return error;
    }
  };
  const auto refused = attempt(16 * 4096);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->need.tier, "device");
  EXPECT_EQ(refused->need.have_bytes, 16u * 4096);
  EXPECT_EQ(refused->need.key, "hoist.device_budget");
  EXPECT_THAT(refused->what(), HasSubstr("layer 3"));
  EXPECT_FALSE(attempt(refused->need.need_bytes).has_value()) << "the named budget does not work";
  EXPECT_TRUE(attempt(refused->need.need_bytes - 4096).has_value()) << "a smaller budget works, too";
}

// Rounding up must not make nothing of it.
TEST(DeviceArena, MoreThanAnyNumberIsRefused) {
  Machine m;
  for (const std::uint64_t bytes : {~std::uint64_t{0}, ~std::uint64_t{0} - 4094, std::uint64_t{1} << 63})
    EXPECT_THROW((void)m.arena.allocate(bytes, "too much"), BudgetError) << bytes;
  EXPECT_EQ(m.arena.largest_hole_bytes(), kArenaBytes);
}

TEST(DeviceArena, ASmallerBudgetBinds) {
  const auto device = platform::Device::create({.memory_bytes = kArenaBytes});
  Budget budget("device", "key", 4096);
  DeviceArena arena(*device, budget);
  const DeviceBlock a = arena.allocate(4096, "a");
  EXPECT_THROW(static_cast<void>(arena.allocate(1, "b")), BudgetError);
  EXPECT_EQ(arena.largest_hole_bytes(), kArenaBytes - 4096);
}

struct Alive {
  DeviceBlock block;
  std::byte mark;
};

bool intact(const Alive& alive) {
  const auto bytes = alive.block.bytes();
  return std::all_of(bytes.begin(), bytes.end(), [&](std::byte b) { return b == alive.mark; });
}

// Every block is filled with its own mark: two that overlap would overwrite each other.
TEST(DeviceArena, RandomUseNeverOverlapsAndEndsWithOneHole) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Machine m;
    Rng rng(seed);
    std::vector<Alive> alive;
    int refused = 0;
    for (int step = 0; step < 1500; ++step) {
      if (alive.empty() || rng.below(100) < 55) {
        const std::uint64_t bytes = 1 + rng.below(rng.below(10) == 0 ? 60'000 : 5'000);
        const std::uint64_t hole = m.arena.largest_hole_bytes();
        try {
          Alive next{m.arena.allocate(bytes, "random"), static_cast<std::byte>(rng.below(256))};
          ASSERT_GE(hole, bytes) << "seed " << seed << " step " << step;
          std::memset(next.block.data(), static_cast<int>(next.mark), bytes);
          alive.push_back(std::move(next));
        } catch (const BudgetError&) {
          ASSERT_LT(hole, round_up(bytes, DeviceArena::kAlignment)) << "seed " << seed << " step " << step;
          ++refused;
        }
      } else {
        const std::size_t victim = rng.below(alive.size());
        ASSERT_TRUE(intact(alive[victim])) << "seed " << seed << " step " << step;
        std::swap(alive[victim], alive.back());
        alive.pop_back();
      }
    }
    EXPECT_GT(refused, 0) << "seed " << seed << ": the arena was never full, the test is too easy";
    for (const Alive& block : alive) ASSERT_TRUE(intact(block)) << "seed " << seed;
    alive.clear();
    EXPECT_EQ(m.arena.largest_hole_bytes(), kArenaBytes) << "seed " << seed;
    EXPECT_EQ(m.budget.held_bytes(), 0u) << "seed " << seed;
  }
}

TEST(DeviceArena, ThreadsShareIt) {
  Machine m;
  std::vector<std::jthread> threads;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&m, seed] {
      Rng rng(seed);
      for (int i = 0; i < 500; ++i) {
        // Four pieces of at most a sixteenth of the arena leave a hole that suffices, wherever they lie.
        Alive block{m.arena.allocate(1 + rng.below(kArenaBytes / 16), "piece"), static_cast<std::byte>(seed)};
        std::memset(block.block.data(), static_cast<int>(seed), block.block.bytes().size());
        ASSERT_TRUE(intact(block)) << "seed " << seed;
      }
    });
  }
  threads.clear();
  EXPECT_EQ(m.arena.largest_hole_bytes(), kArenaBytes);
}

TEST(DeviceArenaDeathTest, ABlockMustNotOutliveItsArena) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        DeviceBlock block;
        Machine m;
        block = m.arena.allocate(10, "orphan");
      },
      "outlive their arena");
}

}  // namespace
}  // namespace hoist::tiers::device_arena_test
