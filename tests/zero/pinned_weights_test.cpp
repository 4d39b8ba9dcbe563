// SPDX-License-Identifier: Apache-2.0
// EngineOptions::parameters_pinned_fraction: which weights are in memory, what that costs and saves, and that nothing
// else changes. Bits over placements: placement_test, update_mode_test, backward_mode_test, named_checkpoint_test,
// random_program_test; bytes: budget_test.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/zero/memory/memory_plan.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::pinned_weights_test {
namespace {

using detail::DeviceAccess;
using detail::HostPiece;
using detail::MemoryRole;
using detail::UnitRegions;
using tiers::Region;

// Units of very different sizes and types, some of them frozen in part.
detail::UnitTable uneven_table() {
  Model model;
  std::uint64_t i = 0;
  for (const std::int64_t elements : {40, 900000, 16384, 70001, 9973, 500000, 3, 250000}) {
    const std::string name = "unit" + std::to_string(i++);
    model.add_unit(name, {{.name = name + ".w", .shape = {elements}, .trainable = i % 3 != 0},
                          {.name = name + ".n", .shape = {elements / 7 + 1}, .dtype = DType::fp32},
                          {.name = name + ".f", .shape = {elements / 2 + 1}, .trainable = i % 2 != 0}});
  }
  return {model, std::vector<optim::StateForm>{{}}, /*world_size=*/1};
}

EngineOptions options_with(double fraction) {
  EngineOptions options;
  options.parameters = options.optimizer = Placement::nvme;
  options.parameters_pinned_fraction = fraction;
  return options;
}

std::uint64_t elements_of(const tiers::RecordLayout& layout, std::uint32_t tiles) {
  std::uint64_t elements = 0;
  for (const tiers::Tile& tile : layout.tiles().first(tiles)) elements += tile.elements;
  return elements;
}

TEST(PinnedWeights, AreTheirShareSpreadOverTheUnitsAndAtMostSoManyElements) {
  const detail::UnitTable table = uneven_table();
  std::uint64_t all = 0;
  for (const detail::Unit& unit : table.units()) {
    all += elements_of(unit.trainable, static_cast<std::uint32_t>(unit.trainable.tiles().size()));
    all += elements_of(unit.frozen, static_cast<std::uint32_t>(unit.frozen.tiles().size()));
  }
  for (const double fraction : {0.0, 0.1, 0.5, 0.77, 1.0}) {
    for (const std::uint64_t most : {std::uint64_t{0}, std::uint64_t{100'000}, all / 2, all, ~std::uint64_t{0}}) {
      EngineOptions options = options_with(fraction);
      options.parameters_pinned_elements_max = most;
      const UnitRegions regions(options, table, DeviceAccess::cpu_and_device);
      const double limit = std::min(fraction, static_cast<double>(most) / static_cast<double>(all));
      std::uint64_t pinned = 0, so_far = 0, elements = 0;
      for (std::uint32_t u = 0; u < table.units().size(); ++u) {
        const auto& placement = regions.unit(UnitId{u});
        pinned += placement.region(MemoryRole::weights).bytes;
        so_far += table.units()[u].host_bytes();
        elements += elements_of(table.units()[u].trainable, placement.weight_tiles) +
                    elements_of(table.units()[u].frozen, placement.frozen_tiles);
        EXPECT_LE(static_cast<double>(pinned), limit * static_cast<double>(so_far)) << "up to unit " << u;
        if (most == ~std::uint64_t{0}) {
          const double least = limit * static_cast<double>(so_far) - 2 * 4 * tiers::kTileElements;
          EXPECT_GT(static_cast<double>(pinned), least) << "up to unit " << u;
        }
      }
      EXPECT_LE(elements, most);
      if (most >= all / 2 && fraction >= 0.5) {
        EXPECT_GT(elements, all / 2 - all / 20) << fraction << " and " << most;
      }
      if (most >= all && fraction == 1) {
        EXPECT_EQ(elements, all);
      }
    }
  }
}

// In either record, the part in memory and the rest follow each other, and cover the host layout.
TEST(PinnedWeights, PiecesOfAUnitCoverItOnce) {
  const detail::UnitTable table = uneven_table();
  for (const double fraction : {0.0, 0.3, 0.8, 1.0}) {
    const UnitRegions regions(options_with(fraction), table, DeviceAccess::cpu_and_device);
    for (std::uint32_t u = 0; u < table.units().size(); ++u) {
      const auto pieces = regions.host_pieces(UnitId{u});
      std::uint64_t end = 0;
      for (const HostPiece& piece : {pieces.trainable, pieces.stored_trainable, pieces.frozen, pieces.stored_frozen}) {
        EXPECT_EQ(piece.host_offset, end);
        end = piece.host_end();
      }
      EXPECT_EQ(end, table.units()[u].host_bytes());
      const auto& placement = regions.unit(UnitId{u});
      EXPECT_EQ(pieces.frozen.offset, pieces.trainable.bytes);
      EXPECT_EQ(pieces.trainable.bytes + pieces.frozen.bytes, placement.region(MemoryRole::weights).bytes);
      EXPECT_EQ(pieces.stored_frozen.offset, pieces.stored_trainable.bytes);
      EXPECT_EQ(pieces.stored_trainable.bytes + pieces.stored_frozen.bytes,
                placement.region(MemoryRole::stored_weights).bytes);
    }
  }
}

const ToyShape kTwo{.matrices = {1 << 20, 1 << 20}, .norm = 32, .frozen = false, .tied = false};

// Both shares left open: as much as the budget holds, weights first, as `hoist check` would name it.
TEST(PinnedWeights, LeftOpenTheyAreTheMostThatFitBeforeState) {
  for (const std::uint64_t budget : {22 * kMiB, 24 * kMiB, 32 * kMiB, 128 * kMiB}) {
    SCOPED_TRACE(budget);
    const TempDirectory directory;
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
    setup.runtime.device_memory_bytes = 16 * kMiB;
    setup.runtime.pinned_memory_bytes = budget;
    setup.engine.sub_group_elements = 100000;
    setup.engine.reuse_distance_elements = 0;  // every use fetches
    const Prediction plain = predict(setup.runtime, setup.engine, describe(kTwo), 1);
    setup.engine.parameters_pinned_fraction.reset();
    setup.engine.optimizer_pinned_fraction.reset();
    ToyModel model(setup, kTwo);
    Engine& engine = model.initialize();
    const Prediction open = predict(setup.runtime, setup.engine, model.model(), 1);
    EXPECT_EQ(open.parameters_pinned_fraction, largest_pinned_fraction(setup.runtime, setup.engine, model.model(), 1,
                                                                       {}, &EngineOptions::parameters_pinned_fraction));
    EXPECT_EQ(open.pinned_fraction, largest_pinned_fraction(setup.runtime, setup.engine, model.model(), 1));
    EXPECT_GT(open.parameters_pinned_fraction, 0);
    EXPECT_TRUE(open.pinned_fraction == 0 || open.parameters_pinned_fraction == 1);
    EXPECT_EQ(open.update_buffer_parameters, plain.update_buffer_parameters);
    EXPECT_LE(model.runtime().pinned_budget().peak_bytes(), budget);
    EXPECT_EQ(model.runtime().pinned_budget().peak_bytes(), open.pinned.bytes);
    EXPECT_THAT(engine.describe().front(),
                testing::HasSubstr(fmt::format("NVMe ({:.4g} % of them", 100 * open.pinned_weight_share)));

    model.train(1, 2);
    const auto read = static_cast<double>(model.bytes_moved(3, 4)[Link::nvme_read]);
    EXPECT_NEAR(read, 2.0 * static_cast<double>(open.step.nvme_read), 0.02 * read);
  }
}

// With all of them and the state in memory, training reads nothing: commits alone use the drive.
TEST(PinnedWeights, OfWhichNothingIsLeftOnNvmeReadNothing) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::pinned, directory / "store");
  setup.runtime.device_memory_bytes = 2 * kMiB;  // backward fetches again
  setup.engine.parameters_pinned_fraction = 1;
  setup.engine.commit_every = 2;
  ToyProgram model(setup);
  EXPECT_EQ(predict(setup.runtime, setup.engine, model.model(), 1).staging_buffers, 0u);
  model.train(1, 3);
  EXPECT_GT(model.bytes_moved(4, 4)[Link::nvme_write], 0u);
  EXPECT_EQ(model.runtime().ledger().totals(Link::nvme_read).bytes, 0u);
}

// The store is the same whatever was in memory: runs may differ in it, and read what another wrote. Commits are not of
// every step, so that what is in memory is written by some only.
TEST(PinnedWeights, MayChangeFromRunToRunAndWithTheNumberOfRanks) {
  for (const bool resharded : {false, true}) {
    const TempDirectory directory;
    ToySetup plain = toy_setup(Placement::pinned, Placement::pinned);
    plain.engine.gradient_clipping = 0;
    Digests expected;
    train_then(1, plain, {}, 8, [&](int, ToyModel& model) { expected = digests_of(model); });
    std::uint64_t step = 0;
    Digests found;
    for (const double fraction : {0.5, 0.0, 1.0, 0.25}) {
      ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
      setup.engine.gradient_clipping = 0;
      setup.engine.parameters_pinned_fraction = fraction;
      setup.engine.optimizer_pinned_fraction = 1 - fraction;
      setup.engine.commit_every = 2;
      on_ranks(resharded && step % 4 == 0 ? 2 : 1, [&](int rank, const Runtime::MakeCommunicator& join) {
        ToyModel model(setup, join);
        model.equal_gradients = true;
        if (step == 0)
          model.initialize();
        else
          EXPECT_EQ(model.restore().step, step);
        model.train(step + 1, step + 2);
        model.engine().settle();
        const Digests mine = digests_of(model);
        if (rank == 0) found = mine;
      });
      step += 2;
    }
    found.losses = expected.losses;
    EXPECT_EQ(found, expected) << "resharded: " << resharded;
  }
}

// Ranks have shards of their own, and shares of their own budgets.
TEST(PinnedWeights, MayDifferBetweenRanks) {
  const ToySetup plain = toy_setup(Placement::pinned, Placement::pinned);
  const Digests expected = train_on(3, plain, {}, 5)[0].digests;
  const TempDirectory directory;
  std::vector<Digests> found(3);
  on_ranks(3, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
    setup.runtime.host_device.chaos_seed = 31 + static_cast<std::uint64_t>(rank);
    setup.engine.parameters_pinned_fraction = 0.5 * rank;
    ToyProgram model(setup, join);
    model.train(1, 5);
    model.engine().settle();
    found[static_cast<std::size_t>(rank)] = digests_of(model);
  });
  for (const Digests& each : found) EXPECT_EQ(each, expected);
}

// Values of both places in one call, trainable and frozen.
TEST(PinnedWeights, ReadsAndWritesCrossTheBoundary) {
  const TempDirectory directory;
  const ToyShape shape{.matrices = {400000, 300000}, .norm = 5, .tied = false};
  std::vector<float> values[2];
  for (const double fraction : {0.0, 0.4}) {
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / std::to_string(fraction));
    setup.engine.parameters_pinned_fraction = fraction;
    ToyModel model(setup, shape);
    Engine& engine = model.initialize();
    model.train(1, 2);
    std::vector<float>& all = values[fraction > 0 ? 1 : 0];
    for (const ParameterSpec& spec : model.model().parameters()) {
      const ParameterId id = model.model().parameter(spec.name);
      std::vector<float> masters(element_count(spec) - 1);
      engine.read(id, State::master, 1, masters);
      for (float& master : masters) master = -master;
      engine.write(id, State::master, 1, masters);
    }
    model.train(3, 3);
    for (const ParameterSpec& spec : model.model().parameters()) {
      std::vector<float> masters(element_count(spec));
      engine.read(model.model().parameter(spec.name), State::master, 0, masters);
      all.insert(all.end(), masters.begin(), masters.end());
    }
  }
  EXPECT_EQ(values[0], values[1]);
}

}  // namespace
}  // namespace hoist::test::pinned_weights_test
