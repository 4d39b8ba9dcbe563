// SPDX-License-Identifier: Apache-2.0
// P2: budgets are hard, and a refusal names a value that works. P5: bytes are what the formula says.
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>

#include "toy_model.hpp"

namespace hoist::test::budget_test {
namespace {

const ToyShape kShape{.matrices = {150000, 250000, 200000, 150000}, .norm = 64, .tied = false};

ToySetup setup_with(std::uint64_t device, std::uint64_t pinned, const std::string& directory) {
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory);
  setup.runtime.device_memory_bytes = device;
  setup.runtime.pinned_memory_bytes = pinned;
  return setup;
}

// The need that the refusal of these budgets names; nullopt when the run trains.
std::optional<BudgetError::Need> refusal(std::uint64_t device, std::uint64_t pinned) {
  const TempDirectory directory;
  const ToySetup setup = setup_with(device, pinned, (directory / "store"));
  ToyModel model(setup, kShape);
  try {
    model.initialize();
  } catch (const BudgetError& error) {
    EXPECT_FALSE(std::filesystem::exists((directory / "store"))) << "a refused run left a store behind";
    return error.need;
  }
  model.train(1, 2);
  EXPECT_LE(model.runtime().device_budget().peak_bytes(), device);
  EXPECT_LE(model.runtime().pinned_budget().peak_bytes(), pinned);
  return {};
}

TEST(Budgets, TheNamedSmallestValueWorksAndLessDoesNot) {
  const auto device = refusal(64 * kKiB, 64 * kMiB);
  ASSERT_TRUE(device);
  EXPECT_EQ(device->key, "hoist.device_memory");
  EXPECT_EQ(device->have_bytes, 64 * kKiB);
  EXPECT_FALSE(refusal(device->need_bytes, 64 * kMiB));
  EXPECT_TRUE(refusal(device->need_bytes - kBlockAlignment, 64 * kMiB));

  const auto pinned = refusal(64 * kMiB, 64 * kKiB);
  ASSERT_TRUE(pinned);
  EXPECT_EQ(pinned->key, "hoist.pinned_memory");
  EXPECT_NE(pinned->detail.find("hoist.caller_state_max"), std::string::npos) << pinned->detail;
  EXPECT_FALSE(refusal(64 * kMiB, pinned->need_bytes));
  EXPECT_TRUE(refusal(64 * kMiB, pinned->need_bytes - kBlockAlignment));

  EXPECT_FALSE(refusal(device->need_bytes, pinned->need_bytes));
}

TEST(Budgets, AnArenaThatIsSmallerThanTheBudgetNamesItsOwnSmallestSize) {
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.runtime.device_memory_bytes = 64 * kMiB;
  setup.runtime.device_arena_bytes = 64 * kKiB;
  const auto need = [&]() -> std::optional<BudgetError::Need> {
    ToyModel model(setup, kShape);
    try {
      model.initialize();
    } catch (const BudgetError& error) {
      return error.need;
    }
    return {};
  };
  const auto refused = need();
  ASSERT_TRUE(refused);
  EXPECT_TRUE(refused->key.starts_with("RuntimeOptions::device_arena_bytes")) << refused->key;
  EXPECT_EQ(refused->have_bytes, 64 * kKiB);
  EXPECT_LT(refused->need_bytes, 16 * kMiB);
  setup.runtime.device_arena_bytes = refused->need_bytes;
  EXPECT_FALSE(need());
  setup.runtime.device_arena_bytes -= kBlockAlignment;
  EXPECT_TRUE(need());
}

TEST(Budgets, ALeaseTooManyNamesTheKeyAndTheHolders) {
  const TempDirectory directory;
  const auto need = refusal(64 * kKiB, 64 * kMiB);
  ASSERT_TRUE(need);
  const ToySetup setup = setup_with(need->need_bytes, 64 * kMiB, (directory / "store"));
  ToyModel model(setup, kShape);
  Engine& engine = model.initialize();
  {
    const PassScope scope = engine.begin(Pass::evaluate);
    const Lease held = engine.gather(model.unit(0), model.stream());
    try {
      (void)engine.gather(model.unit(1), model.stream());
      ADD_FAILURE() << "two units do not fit";
    } catch (const BudgetError& error) {
      EXPECT_EQ(error.need.key, "hoist.device_memory");
      EXPECT_NE(error.need.detail.find("unit0"), std::string::npos) << error.what();
    }
  }
  model.train(1, 1);  // the refusal did no harm
}

TEST(Budgets, ALeaseTooManyInARoomyDeviceNamesTheKeyThatKeepsItSmall) {
  const auto lease_three = [](std::uint64_t live_elements_max) -> std::optional<BudgetError::Need> {
    const TempDirectory directory;
    ToySetup setup = setup_with(64 * kMiB, 64 * kMiB, (directory / "store"));
    setup.engine.live_elements_max = live_elements_max;
    ToyModel model(setup, kShape);
    Engine& engine = model.initialize();
    const PassScope scope = engine.begin(Pass::evaluate);
    try {  // there is always memory for two
      const Lease first = engine.gather(model.unit(0), model.stream());
      const Lease second = engine.gather(model.unit(1), model.stream());
      const Lease third = engine.gather(model.unit(2), model.stream());
      return {};
    } catch (const BudgetError& error) {
      return error.need;
    }
  };
  const auto need = lease_three(1);
  ASSERT_TRUE(need);
  const std::string raise = "zero_optimization.stage3_max_live_parameters to ";
  ASSERT_THAT(need->key, testing::StartsWith(raise));
  const std::uint64_t elements = std::stoull(need->key.substr(raise.size()));
  EXPECT_LT(elements, need->need_bytes / 2 + 2) << "weights have 16 bits";
  EXPECT_FALSE(lease_three(elements));
}

TEST(Budgets, ALaterEngineIsToldWhatEarlierOnesHoldAndThatTheyMayTakeMore) {
  ToySetup setup = setup_with(64 * kMiB, 4 * kMiB, "");
  setup.engine.optimizer_pinned_fraction = setup.engine.parameters_pinned_fraction = std::nullopt;
  std::uint64_t held_bytes = 0;
  const auto refused = [&]() -> std::optional<BudgetError::Need> {
    const TempDirectory directory;
    setup.engine.store_directory = directory / "one";
    EngineOptions second = setup.engine;
    second.store_directory = directory / "two";
    Runtime runtime(setup.runtime);
    ToyModel earlier(runtime, setup.engine, kShape), later(runtime, second, kShape);
    earlier.initialize();
    held_bytes = runtime.pinned_budget().held_bytes();
    try {
      later.initialize();
      return {};
    } catch (const BudgetError& error) {
      return error.need;
    }
  };
  const auto need = refused();
  ASSERT_TRUE(need);
  EXPECT_THAT(need->detail, testing::HasSubstr(fmt::format(", beside {} that engines and buffers made earlier hold",
                                                           format_bytes(held_bytes))));
  EXPECT_THAT(need->detail, testing::HasSubstr("limit those by hoist.parameters_pinned_fraction and"));
  setup.runtime.pinned_memory_bytes = need->need_bytes;
  const std::uint64_t own_bytes = need->need_bytes - held_bytes;
  EXPECT_TRUE(refused()) << "the earlier engine took the rest of this, too";
  EXPECT_FALSE(refusal(64 * kMiB, own_bytes)) << "a runtime of its own";
}

// One gather brings a unit and all it is tied to: a device too small for that is refused at the start, not in a pass.
TEST(Budgets, TheSmallestDeviceHoldsWhatIsTied) {
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.runtime.device_memory_bytes = 64 * kKiB;
  const auto run = [&] {
    ToyProgram model(setup);
    model.train(1, 2);
  };
  try {
    run();
    FAIL() << "64 KiB sufficed";
  } catch (const BudgetError& error) {
    setup.runtime.device_memory_bytes = error.need.need_bytes;
  }
  run();
}

struct ProcessIo {
  std::uint64_t read = 0, written = 0;
};
ProcessIo process_io() {
  std::ifstream file("/proc/self/io");
  ProcessIo io;
  std::string key;
  std::uint64_t value = 0;
  while (file >> key >> value) {
    if (key == "read_bytes:") io.read = value;
    if (key == "write_bytes:") io.written = value;
  }
  return io;
}

struct ByteCase {
  const char* name;
  Placement parameters;
  tiers::Durability durability;
  UpdateMode mode;
  double read_per_parameter, written_per_parameter;
  double pinned_fraction = 0, pinned_weights = 0;
  bool spills = false;  // all gradients
  int micro_batches = 1;
  MicroBatchOrder order = MicroBatchOrder::horizontal;
};
class ByteTest : public testing::TestWithParam<ByteCase> {};

TEST_P(ByteTest, MatchTheFormulaAndTheKernelsAccounting) {
  const ByteCase& c = GetParam();
  const ToyShape shape{.matrices = {1 << 18, 1 << 18, 1 << 18}, .norm = 32, .frozen = false, .tied = false};
  const TempDirectory directory;
  ToySetup setup = toy_setup(c.parameters, Placement::nvme, (directory / "store"));
  setup.runtime.pinned_memory_bytes = 128 * kMiB;
  setup.engine.durability = c.durability;
  setup.engine.update_mode = c.mode;
  if (c.mode == UpdateMode::backward) setup.engine.gradient_clipping = 0;
  setup.engine.reuse_distance_elements = 0;  // every use fetches, as the formula assumes
  setup.engine.sub_group_elements = 50000;
  setup.engine.optimizer_pinned_fraction = c.pinned_fraction;
  setup.engine.parameters_pinned_fraction = c.pinned_weights;
  setup.engine.gradient_spill_units = c.spills ? 99 : 0;
  setup.engine.micro_batches_max = static_cast<unsigned>(c.micro_batches);
  setup.engine.micro_batch_order = c.order;
  ToyModel model(setup, shape);
  model.micro_batches = c.micro_batches;
  model.vertical = c.order == MicroBatchOrder::vertical;
  Engine& engine = model.initialize();
  model.train(1, 2);
  engine.settle();
  const ProcessIo before = process_io();
  const std::uint64_t read_before = model.runtime().ledger().totals(Link::nvme_read).bytes;
  const std::uint64_t written_before = model.runtime().ledger().totals(Link::nvme_write).bytes;
  // Read-ahead for the next pass may be counted before or after this point; over so many steps that does not matter.
  constexpr std::uint64_t kSteps = 8;
  model.train(3, 2 + kSteps);
  engine.settle();
  const ProcessIo after = process_io();
  const double parameters = static_cast<double>(model.model().parameter_count() * kSteps);
  const double read = static_cast<double>(model.runtime().ledger().totals(Link::nvme_read).bytes - read_before);
  const double written = static_cast<double>(model.runtime().ledger().totals(Link::nvme_write).bytes - written_before);
  EXPECT_NEAR(read / parameters, c.read_per_parameter, 0.02 * c.read_per_parameter);
  EXPECT_NEAR(written / parameters, c.written_per_parameter, 0.02 * c.written_per_parameter);
  EXPECT_NEAR(read, static_cast<double>(engine.formula_bytes().nvme_read * kSteps), 0.02 * read);
  EXPECT_NEAR(written, static_cast<double>(engine.formula_bytes().nvme_write * kSteps), 0.02 * written);
  if ((read > 0 && after.read == before.read) || (written > 0 && after.written == before.written))
    GTEST_SKIP() << "the kernel does not account this file system's direct I/O to the process";
  EXPECT_NEAR(static_cast<double>(after.read - before.read), read, 0.02 * read);
  EXPECT_NEAR(static_cast<double>(after.written - before.written), written, 0.02 * written);
}

INSTANTIATE_TEST_SUITE_P(
    Placements, ByteTest,
    testing::Values(
        ByteCase{"everything_on_nvme", Placement::nvme, tiers::Durability::step, UpdateMode::step, 16, 12},
        ByteCase{"everything_on_nvme_forward", Placement::nvme, tiers::Durability::step, UpdateMode::forward, 14, 12},
        ByteCase{"weights_in_memory", Placement::pinned, tiers::Durability::step, UpdateMode::step, 10, 12},
        ByteCase{"weights_in_memory_forward", Placement::pinned, tiers::Durability::step, UpdateMode::forward, 10, 12},
        ByteCase{"weights_in_memory_not_durable", Placement::pinned, tiers::Durability::none, UpdateMode::forward, 10,
                 10},
        ByteCase{"everything_on_nvme_backward", Placement::nvme, tiers::Durability::step, UpdateMode::backward, 16, 12},
        ByteCase{"everything_not_durable_backward", Placement::nvme, tiers::Durability::none, UpdateMode::backward, 16,
                 12},
        ByteCase{"weights_in_memory_backward", Placement::pinned, tiers::Durability::step, UpdateMode::backward, 10,
                 12},
        ByteCase{"weights_in_memory_not_durable_backward", Placement::pinned, tiers::Durability::none,
                 UpdateMode::backward, 10, 10}),
    [](const auto& c) { return std::string(c.param.name); });

// With a fraction f of the optimizer's states in memory, their reads shrink by f; without commits, so do their writes.
std::vector<ByteCase> fractions() {
  std::vector<ByteCase> cases;
  for (const double f : {0.25, 0.5, 1.0}) {
    const double state = 10 * (1 - f);
    cases.push_back(
        {"everything_durable", Placement::nvme, tiers::Durability::step, UpdateMode::forward, 4 + state, 12, f});
    cases.push_back({"everything_not_durable", Placement::nvme, tiers::Durability::none, UpdateMode::forward, 4 + state,
                     2 + state, f});
    cases.push_back({"state_durable", Placement::pinned, tiers::Durability::step, UpdateMode::forward, state, 12, f});
    cases.push_back(
        {"state_not_durable", Placement::pinned, tiers::Durability::none, UpdateMode::step, state, state, f});
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(PinnedFractions, ByteTest, testing::ValuesIn(fractions()), [](const auto& c) {
  return std::string(c.param.name) + "_" + std::to_string(static_cast<int>(100 * c.param.pinned_fraction));
});

// With a fraction w of the weights in memory, all their reads shrink by w; without commits, so do their writes.
std::vector<ByteCase> weight_fractions() {
  std::vector<ByteCase> cases;
  constexpr auto kStep = tiers::Durability::step, kNone = tiers::Durability::none;
  for (const double w : {0.25, 1.0}) {
    const double weights = 2 * (1 - w);
    cases.push_back({"durable", Placement::nvme, kStep, UpdateMode::forward, 2 * weights + 10, 12, 0, w});
    cases.push_back({"step", Placement::nvme, kStep, UpdateMode::step, 3 * weights + 10, 12, 0, w});
    cases.push_back({"backward", Placement::nvme, kStep, UpdateMode::backward, 3 * weights + 10, 12, 0, w});
    cases.push_back({"not_durable", Placement::nvme, kNone, UpdateMode::forward, 2 * weights + 5, weights + 5, 0.5, w});
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(PinnedWeights, ByteTest, testing::ValuesIn(weight_fractions()), [](const auto& c) {
  return std::string(c.param.name) + "_" + std::to_string(static_cast<int>(100 * c.param.pinned_weights));
});

// A spilled gradient is written and read once. fp32 sums are written and read once for each micro-batch: the first
// micro-batch does not read them, but the update does.
std::vector<ByteCase> spills() {
  constexpr auto kStep = tiers::Durability::step, kNone = tiers::Durability::none;
  constexpr auto kVertical = MicroBatchOrder::vertical;
  return {{"everything", Placement::nvme, kStep, UpdateMode::forward, 14 + 2, 12 + 2, 0, 0, true},
          {"step", Placement::nvme, kStep, UpdateMode::step, 16 + 2, 12 + 2, 0, 0, true},
          {"not_durable", Placement::pinned, kNone, UpdateMode::forward, 10 + 2, 10 + 2, 0, 0, true},
          {"horizontal", Placement::pinned, kStep, UpdateMode::forward, 10 + 3 * 4, 12 + 3 * 4, 0, 0, true, 3},
          {"vertical", Placement::pinned, kStep, UpdateMode::forward, 10 + 2, 12 + 2, 0, 0, true, 3, kVertical}};
}
INSTANTIATE_TEST_SUITE_P(Spills, ByteTest, testing::ValuesIn(spills()),
                         [](const auto& c) { return std::string(c.param.name); });

// Between commits a save writes what lives in memory; the writes end under the next pass.
TEST(SaveBytes, OfASaveBetweenCommitsAreNoStepsBytes) {
  struct Written {
    std::uint64_t in_steps = 0, apart = 0;
  };
  const auto train = [](Placement parameters, UpdateMode mode, const std::optional<std::string>& name) {
    const TempDirectory directory;
    ToySetup setup = toy_setup(parameters, Placement::nvme, directory / "store");
    setup.runtime.pinned_memory_bytes = 64 * kMiB;
    setup.engine.update_mode = mode;
    setup.engine.gradient_clipping = 0;
    setup.engine.optimizer_pinned_fraction = 0.5;
    setup.engine.commit_every = 100;
    setup.engine.keep_steps = 1;
    ToyModel model(setup, kShape);
    Engine& engine = model.initialize();
    model.train(1, 2);
    engine.settle();
    const Ledger& ledger = model.runtime().ledger();
    const auto totals = [&] {
      return Written{ledger.totals(Link::nvme_write).bytes,
                     ledger.totals(Link::nvme_write, Ledger::Account::outside_steps).bytes};
    };
    const Written before = totals();
    for (std::uint64_t step = 3; step <= 5; ++step) {
      model.train(step, step);
      if (name && step < 5) engine.save(*name, {});
    }
    engine.settle();
    return Written{totals().in_steps - before.in_steps, totals().apart - before.apart};
  };
  for (const Placement parameters : {Placement::pinned, Placement::nvme}) {
    for (const UpdateMode mode : {UpdateMode::step, UpdateMode::forward, UpdateMode::backward}) {
      const Written without = train(parameters, mode, std::nullopt);
      EXPECT_GT(without.in_steps, 0u);
      for (const std::string name : {"", "kept"}) {
        SCOPED_TRACE("mode " + std::to_string(static_cast<int>(mode)) + ", name '" + name + "'");
        const Written with = train(parameters, mode, name);
        const auto bytes = static_cast<double>(without.in_steps);
        EXPECT_NEAR(static_cast<double>(with.in_steps), bytes, 0.01 * bytes) << "beside the manifests' bytes";
        EXPECT_GT(with.apart, without.apart);
      }
    }
  }
}

}  // namespace
}  // namespace hoist::test::budget_test
