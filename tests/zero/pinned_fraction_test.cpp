// SPDX-License-Identifier: Apache-2.0
// EngineOptions::optimizer_pinned_fraction: which states are in memory, what that costs, and that nothing else changes.
// Bits over placements: placement_test, update_mode_test, named_checkpoint_test, random_program_test; bytes:
// budget_test.
#include <array>
#include <cmath>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/zero/memory/memory_plan.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::pinned_fraction_test {
namespace {

using detail::DeviceAccess;
using detail::MemoryRole;
using detail::PinnedBuffers;
using detail::SubGroup;
using detail::UnitRegions;
using tiers::Region;

// Units of very different sizes, so that rounding shows.
detail::UnitTable uneven_table() {
  Model model;
  std::uint64_t i = 0;
  for (const std::int64_t elements : {40, 900000, 16384, 70001, 9973, 500000, 3, 250000}) {
    const std::string name = "unit" + std::to_string(i++);
    model.add_unit(name, {{.name = name + ".w", .shape = {elements}}});
  }
  return {model, std::vector<optim::StateForm>{{}}, /*world_size=*/1};
}

EngineOptions options_with(double fraction, Placement parameters = Placement::nvme) {
  EngineOptions options;
  options.parameters = parameters;
  options.optimizer = Placement::nvme;
  options.optimizer_pinned_fraction = fraction;
  return options;
}

std::uint64_t state_bytes(const detail::UnitTable& table) {
  std::uint64_t bytes = 0;
  for (const detail::Unit& unit : table.units()) bytes += unit.trainable.region_bytes(Region::state);
  return bytes;
}

TEST(PinnedFraction, IsMetToOneTileAndSpreadOverTheUnits) {
  const detail::UnitTable table = uneven_table();
  const std::uint64_t tile_bytes = tiers::kTileElements * 10;
  for (const double fraction : {0.0, 0.1, 0.25, 0.5, 0.77, 1.0}) {
    const EngineOptions options = options_with(fraction);
    const UnitRegions regions(options, table, DeviceAccess::cpu_and_device);
    std::uint64_t resident = 0, so_far = 0;
    for (std::uint32_t u = 0; u < table.units().size(); ++u) {
      resident += regions.unit(UnitId{u}).region(MemoryRole::state).bytes;
      so_far += table.units()[u].trainable.region_bytes(Region::state);
      const double wanted = fraction * static_cast<double>(so_far);
      EXPECT_LE(static_cast<double>(resident), wanted) << "up to unit " << u;
      EXPECT_GT(static_cast<double>(resident + tile_bytes), wanted) << "up to unit " << u;
    }
    if (fraction == 1.0) {
      EXPECT_EQ(resident, state_bytes(table));
    }
  }
}

TEST(PinnedFraction, SubGroupsCoverEveryTileOnceAndAreOfOneKind) {
  const detail::UnitTable table = uneven_table();
  for (const double fraction : {0.0, 0.3, 0.5, 1.0}) {
    for (const std::uint64_t tiles_max : {1u, 3u, 1000u}) {
      const EngineOptions options = options_with(fraction);
      const UnitRegions regions(options, table, DeviceAccess::cpu_and_device);
      std::vector<std::vector<int>> covered;
      for (const detail::Unit& unit : table.units()) covered.emplace_back(unit.trainable.tiles().size(), 0);
      std::uint32_t last_unit = 0;
      for (const SubGroup& sub_group : regions.sub_groups(tiles_max)) {
        EXPECT_GE(sub_group.unit.index, last_unit) << "a unit's sub-groups are together";
        last_unit = sub_group.unit.index;
        EXPECT_GE(sub_group.tile_count, 1u);
        EXPECT_LE(sub_group.tile_count, tiles_max);
        const std::uint32_t resident = regions.unit(sub_group.unit).state_tiles;
        EXPECT_TRUE(sub_group.first_tile >= resident || sub_group.first_tile + sub_group.tile_count <= resident);
        for (std::uint32_t t = 0; t < sub_group.tile_count; ++t)
          ++covered[sub_group.unit.index][sub_group.first_tile + t];
      }
      for (const auto& unit : covered) EXPECT_THAT(unit, testing::Each(1));
    }
  }
}

// Sums by runs of equal tiles equal sums by tile, for every mixture of segments.
TEST(PinnedFraction, SumsOfRunsAreSumsOfTiles) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(seed);
    const int world_size = static_cast<int>(1 + rng.below(3));
    Model model;
    model.add_group();
    model.add_group();
    std::vector<optim::StateForm> groups(3);
    for (optim::StateForm& group : groups) {
      group.state = optim::kOptimizerStates[rng.below(optim::kOptimizerStates.size())];
      group.moments = std::array{MomentType::fp32, MomentType::bf16, MomentType::fp8}[rng.below(3)];
      group.remainder = rng.below(2) == 0 ? RemainderType::int16 : RemainderType::int8;
    }
    for (std::uint64_t u = 0; u <= rng.below(5); ++u) {
      std::vector<ParameterSpec> specs;
      for (std::uint64_t p = 0; p <= rng.below(4); ++p) {
        const std::uint64_t elements =
            std::array{rng.below(100), rng.below(600'000), 16384 * rng.below(9)}[rng.below(3)];
        specs.push_back({.name = fmt::format("{}.{}", u, p),
                         .shape = {static_cast<std::int64_t>(1 + elements)},
                         .dtype = std::array{DType::bf16, DType::fp16, DType::fp32}[rng.below(3)],
                         .trainable = rng.below(4) != 0,
                         .group = {static_cast<std::uint32_t>(rng.below(3))}});
      }
      model.add_unit("unit" + std::to_string(u), specs);
    }
    const detail::UnitTable table(model, groups, world_size);
    const bool on_nvme = rng.below(2) == 0, device_only = rng.below(2) == 0;
    EngineOptions options =
        options_with(rng.below(3) == 0 ? static_cast<double>(rng.below(2)) : static_cast<double>(rng.below(101)) / 100,
                     on_nvme ? Placement::nvme : Placement::device);
    if (!on_nvme && rng.below(2) == 0) options.optimizer_offload_ratio = 0.5;
    const UnitRegions regions(options, table, device_only ? DeviceAccess::device_only : DeviceAccess::cpu_and_device);
    std::uint64_t bytes = 0, resident_bytes = 0;
    for (std::uint32_t u = 0; u < table.units().size(); ++u) {
      if (regions.unit(UnitId{u}).state_on_device) continue;
      const auto tiles = table.units()[u].trainable.tiles();
      for (const tiers::Tile& tile : tiles) bytes += tile.s_bytes;
      const double most = std::floor(*options.optimizer_pinned_fraction * static_cast<double>(bytes));
      std::uint32_t count = 0;
      while (count < tiles.size() && static_cast<double>(resident_bytes + tiles[count].s_bytes) <= most)
        resident_bytes += tiles[count++].s_bytes;
      EXPECT_EQ(regions.unit(UnitId{u}).state_tiles, count) << "seed " << seed;
    }
    for (const std::uint64_t tiles_max : {1u, 2u, 7u, 1000u}) {
      std::uint64_t most = 0;
      for (const SubGroup& sub_group : regions.sub_groups(tiles_max)) {
        const bool passes = regions.unit(sub_group.unit).device_only;
        std::uint64_t sum = 0;
        for (std::uint32_t t = sub_group.first_tile; t < sub_group.first_tile + sub_group.tile_count; ++t) {
          const tiers::Tile& tile = table.unit(sub_group.unit).trainable.tiles()[t];
          if (on_nvme || passes) sum += tile.w_bytes;
          if (!regions.is_state_resident(sub_group) || passes) sum += tile.s_bytes;
        }
        EXPECT_EQ(regions.buffered_bytes(sub_group).total(), sum) << "seed " << seed;
        most = std::max(most, sum);
      }
      EXPECT_EQ(regions.update_buffer_bytes(tiles_max), most) << "seed " << seed << ", " << tiles_max << " tiles";
    }
  }
}

// Otherwise the drive would be idle during the update of the states in memory.
TEST(PinnedFraction, SubGroupsFromTheDriveAndFromMemoryTakeTurns) {
  const detail::UnitTable table = uneven_table();
  const EngineOptions options = options_with(0.5);
  const UnitRegions regions(options, table, DeviceAccess::cpu_and_device);
  int run = 0, longest = 0;
  bool last = false;
  for (const SubGroup& sub_group : regions.sub_groups(1)) {
    if (sub_group.unit.index != 1) continue;  // the largest, of 55 tiles
    run = regions.is_state_resident(sub_group) == last ? run + 1 : 1;
    last = regions.is_state_resident(sub_group);
    longest = std::max(longest, run);
  }
  EXPECT_LE(longest, 2);
}

TEST(PinnedFraction, CostsItsShareOfThePinnedBudget) {
  const ToyShape shape{.matrices = {1 << 20, 1 << 20}, .norm = 32, .frozen = false, .tied = false};
  const auto least = [&](double fraction) {
    const TempDirectory directory;
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
    setup.engine.optimizer_pinned_fraction = fraction;
    return predict(setup.runtime, setup.engine, describe(shape), 1).pinned.least_bytes;
  };
  const double state = 10.0 * (2 << 20);
  EXPECT_NEAR(static_cast<double>(least(0.5) - least(0)), 0.5 * state, 0.02 * state);
  // With everything in memory the buffers need no room for state.
  EXPECT_LT(static_cast<double>(least(1) - least(0)), state);
}

// Whatever the budget, an engine that chooses the share starts under less.
TEST(PinnedFraction, AShareThatIsChosenAddsNothingToTheLeast) {
  const ToyShape shape{.matrices = {1 << 20, 1 << 20}, .norm = 32, .frozen = false, .tied = false};
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.runtime.device_memory_bytes = 16 * kMiB;
  const auto least = [&] { return predict(setup.runtime, setup.engine, describe(shape), 1).pinned.least_bytes; };
  const std::uint64_t with_none = least();
  setup.engine.optimizer_pinned_fraction.reset();
  setup.engine.parameters_pinned_fraction.reset();
  for (const std::uint64_t budget : {kMiB, 16 * kMiB, kGiB}) {
    setup.runtime.pinned_memory_bytes = budget;
    EXPECT_EQ(least(), with_none) << budget;
  }
  setup.runtime.pinned_memory_bytes = round_up(with_none, kBlockAlignment);
  ToyModel model(setup, shape);
  EXPECT_NO_THROW(model.initialize());
}

TEST(PinnedFraction, TheLargestThatIsNamedFitsBesideTheSameBuffers) {
  const ToyShape shape{.matrices = {1 << 20, 1 << 20}, .norm = 32, .frozen = false, .tied = false};
  for (const Placement parameters : {Placement::nvme, Placement::pinned}) {
    for (const std::uint64_t budget : {24 * kMiB, 32 * kMiB, 128 * kMiB}) {
      const TempDirectory directory;
      ToySetup setup = toy_setup(parameters, Placement::nvme, directory / "store");
      setup.runtime.device_memory_bytes = 16 * kMiB;
      setup.runtime.pinned_memory_bytes = budget;
      setup.engine.sub_group_elements = 100000;
      const Model model = describe(shape);
      const Prediction plain = predict(setup.runtime, setup.engine, model, 1);
      const double largest = largest_pinned_fraction(setup.runtime, setup.engine, model, 1);
      setup.engine.optimizer_pinned_fraction = largest;
      EXPECT_GT(largest, 0);
      if (budget == 128 * kMiB) {
        EXPECT_EQ(largest, 1);
      }
      if (largest < 1) {
        EngineOptions more = setup.engine;
        more.optimizer_pinned_fraction = largest + 0.02;
        const Prediction tight = predict(setup.runtime, more, model, 1);
        EXPECT_TRUE(!tight.pinned.fits() || tight.update_buffer_parameters < plain.update_buffer_parameters ||
                    tight.staging_buffers < plain.staging_buffers || tight.update_buffers < plain.update_buffers)
            << "of " << budget << " bytes " << largest << " was named";
      }
      ToyProgram toy(setup, shape);
      toy.train(1, 2);
      EXPECT_LE(toy.runtime().pinned_budget().peak_bytes(), budget);
    }
  }
}

// A fraction that is left open is found at the start, as `hoist check` would name it: the same peak, the same bytes.
TEST(PinnedFraction, LeftOpenItIsTheLargest) {
  const ToyShape shape{.matrices = {1 << 20, 1 << 20}, .norm = 32, .frozen = false, .tied = false};
  for (const std::uint64_t budget : {24 * kMiB, 32 * kMiB, 128 * kMiB}) {
    const TempDirectory directory;
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
    setup.runtime.device_memory_bytes = 16 * kMiB;
    setup.runtime.pinned_memory_bytes = budget;
    setup.engine.sub_group_elements = 100000;
    setup.engine.reuse_distance_elements = 0;  // every use fetches
    setup.engine.optimizer_pinned_fraction.reset();
    ToyModel model(setup, shape);
    Engine& engine = model.initialize();
    const Prediction open = predict(setup.runtime, setup.engine, model.model(), 1);
    setup.engine.optimizer_pinned_fraction = 0.0;
    EXPECT_EQ(open.pinned_fraction, largest_pinned_fraction(setup.runtime, setup.engine, model.model(), 1));
    EXPECT_GT(open.pinned_fraction, budget == 128 * kMiB ? 0.99 : 0.1);
    EXPECT_LE(model.runtime().pinned_budget().peak_bytes(), budget);

    model.train(1, 2);
    const auto read = static_cast<double>(model.bytes_moved(3, 4)[Link::nvme_read]);
    EXPECT_NEAR(read, 2.0 * static_cast<double>(open.step.nvme_read), 0.02 * read);
    EXPECT_THAT(engine.describe().front(),
                testing::HasSubstr(fmt::format("({:.4g} % of them", 100 * open.pinned_fraction)));
  }
}

// A refused start chose shares for the memory that was free then. The next start chooses its own, as a new process
// does.
TEST(PinnedFraction, LeftOpenItIsFoundAnewAfterARefusedStart) {
  const ToyShape shape{.matrices = {1 << 20, 1 << 20}, .norm = 32, .frozen = false, .tied = false};
  const auto not_a_number = [](ParameterId, std::uint64_t, std::span<float> out) {
    std::ranges::fill(out, std::numeric_limits<float>::quiet_NaN());
  };
  // Everything would fit into 128 MiB of memory; the program takes some of it before the last start.
  const auto hold = [](Runtime& runtime, std::uint64_t bytes) {
    return runtime.pinned_budget().take(bytes, "the program's own");
  };
  for (const Placement parameters : {Placement::nvme, Placement::pinned}) {
    std::vector<std::string> found[2];
    for (const bool refused_before : {false, true}) {
      const TempDirectory directory;
      ToySetup setup = toy_setup(parameters, Placement::nvme, directory / "store");
      setup.runtime.device_memory_bytes = 16 * kMiB;
      setup.runtime.pinned_memory_bytes = 128 * kMiB;
      setup.engine.sub_group_elements = 100000;
      setup.engine.optimizer_pinned_fraction.reset();
      if (parameters == Placement::nvme) setup.engine.parameters_pinned_fraction.reset();
      ToyModel model(setup, shape);
      if (refused_before) {
        EXPECT_THROW(model.initialize(not_a_number), UsageError);  // its fractions were 1
        const auto most = hold(model.runtime(), 127 * kMiB);
        EXPECT_THROW(model.initialize(), BudgetError);
      }
      const auto some = hold(model.runtime(), 100 * kMiB);
      found[refused_before ? 1 : 0] = {model.initialize().describe().front(),
                                       std::to_string(model.runtime().pinned_budget().held_bytes())};
      model.train(1, 2);
    }
    EXPECT_EQ(found[0], found[1]);
    EXPECT_THAT(found[0].front(), testing::HasSubstr("% of them pinned"));
    EXPECT_THAT(found[0].front(), testing::Not(testing::HasSubstr("optimizer states in NVMe (100 %")));
  }
}

// The gradient ring of update mode `backward` takes the rest of the budget. The named fraction must leave it room for
// two gradients.
TEST(PinnedFraction, TheLargestThatIsNamedLeavesTheGradientRingRoomForTwo) {
  const Model model = uniform_model(40 * 10 * tiers::kTileElements, 40);
  const std::uint64_t two_bytes = 2 * 2 * 10 * tiers::kTileElements;
  for (const std::uint64_t budget : {8 * kMiB, 12 * kMiB, 20 * kMiB, 40 * kMiB}) {
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, "/nowhere");
    setup.engine.update_mode = UpdateMode::backward;
    setup.runtime.pinned_memory_bytes = budget;
    const Prediction plain = predict(setup.runtime, setup.engine, model, 1);
    ASSERT_GE(plain.gradient_ring_bytes, two_bytes);
    setup.engine.optimizer_pinned_fraction = largest_pinned_fraction(setup.runtime, setup.engine, model, 1);
    const Prediction named = predict(setup.runtime, setup.engine, model, 1);
    EXPECT_TRUE(named.pinned.fits());
    EXPECT_GE(named.gradient_ring_bytes, two_bytes) << "of " << budget;
    EXPECT_EQ(named.staging_buffers, plain.staging_buffers);
  }
}

// Whatever the budget is, no kind of buffer is kept small that it has room for.
TEST(PinnedBuffers, AreAsManyAsTheBudgetHolds) {
  const detail::UnitTable table = uneven_table();
  for (const UpdateMode mode : {UpdateMode::forward, UpdateMode::backward}) {
    EngineOptions options = options_with(0);
    options.update_mode = mode;
    const UnitRegions regions(options, table, DeviceAccess::cpu_and_device);
    const detail::PinnedBufferChooser chooser(options, regions);
    const PinnedBuffers most = chooser.wanted();
    const std::uint64_t least_bytes = chooser.bytes(chooser.choose(0));
    const std::uint64_t most_bytes = chooser.bytes(most);
    ASSERT_LT(least_bytes, most_bytes);
    EXPECT_EQ(chooser.choose(0).update_count, 3u);
    EXPECT_EQ(chooser.choose(0).staging_count, 1u);
    for (std::uint64_t budget = least_bytes; budget < most_bytes; budget += (most_bytes - least_bytes) / 97) {
      const PinnedBuffers chosen = chooser.choose(budget);
      ASSERT_LE(chooser.bytes(chosen), budget);
      const auto could_be = [&](const auto& more) {
        PinnedBuffers larger = chosen;
        more(larger);
        return chooser.bytes(larger) <= budget;
      };
      SCOPED_TRACE("of " + std::to_string(budget) + " bytes");
      if (chosen.update_count < most.update_count) {
        EXPECT_FALSE(could_be([](PinnedBuffers& b) { ++b.update_count; }));
      }
      if (chosen.staging_count < most.staging_count) {
        EXPECT_FALSE(could_be([](PinnedBuffers& b) { ++b.staging_count; }));
      }
      if (chosen.sub_group_tiles < most.sub_group_tiles) {
        EXPECT_FALSE(could_be(
            [&](PinnedBuffers& b) { b.sub_group_tiles = std::min(2 * b.sub_group_tiles, most.sub_group_tiles); }));
      }
      if (chosen.gradient_ring_bytes < most.gradient_ring_bytes) {
        EXPECT_FALSE(could_be([](PinnedBuffers& b) { b.gradient_ring_bytes += kBlockAlignment; }));
      }
    }
    const PinnedBuffers all = chooser.choose(most_bytes);
    EXPECT_EQ(all.update_count, most.update_count);
    EXPECT_EQ(all.staging_count, most.staging_count);
    EXPECT_EQ(all.sub_group_tiles, most.sub_group_tiles);
  }
}

// The store is the same whatever was in memory: runs may differ in it, and read what another wrote.
TEST(PinnedFraction, ReadsAndWritesCrossTheBoundary) {
  const TempDirectory directory;
  const ToyShape shape{.matrices = {400000}, .norm = 5, .frozen = false, .tied = false};
  std::vector<float> values[2];
  for (const double fraction : {0.0, 0.4}) {
    ToySetup setup = toy_setup(Placement::pinned, Placement::nvme, directory / std::to_string(fraction));
    setup.engine.optimizer_pinned_fraction = fraction;
    ToyModel model(setup, shape);
    Engine& engine = model.initialize();
    model.train(1, 2);
    std::vector<float> moments(300001);
    engine.read(model.matrix(0), State::moment1, 7, moments);
    for (float& moment : moments) moment = -moment;
    engine.write(model.matrix(0), State::moment1, 7, moments);
    model.train(3, 3);
    engine.read(model.matrix(0), State::moment1, 7, moments);
    values[fraction > 0 ? 1 : 0] = moments;
  }
  EXPECT_EQ(values[0], values[1]);
}

TEST(PinnedFraction, OutOfRangeIsRefused) {
  for (const double fraction : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
    setup.engine.optimizer_pinned_fraction = fraction;
    EXPECT_THAT([&] { ToyModel(setup).initialize(); },
                testing::ThrowsMessage<ConfigError>(testing::HasSubstr("hoist.optimizer_pinned_fraction")));
  }
}

}  // namespace
}  // namespace hoist::test::pinned_fraction_test
