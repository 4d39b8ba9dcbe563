// SPDX-License-Identifier: Apache-2.0
// EngineOptions::optimizer_offload_ratio: which units' states stay in device memory, what that costs and moves, and
// that nothing else changes. Bits over placements and modes: placement_test, update_mode_test, backward_mode_test and
// random_program_test, too; what is held is predicted: prediction_test.
#include <array>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/message_of.hpp>
#include <hoist/zero/memory/unit_regions.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::offload_ratio_test {
namespace {

using detail::UnitRegions;
using optim::OptimizerKind;
using testing::HasSubstr;

constexpr Placement kDevice = Placement::device, kPinned = Placement::pinned, kNvme = Placement::nvme;

ToySetup divided(double ratio, bool host_accessible, Placement optimizer = kPinned, const std::string& directory = "") {
  ToySetup setup = toy_setup(kDevice, optimizer, directory);
  setup.runtime.device_memory_bytes = 16 * kMiB;
  setup.engine.optimizer_offload_ratio = ratio;
  setup.runtime.host_device.host_accessible = host_accessible;
  return setup;
}

// Everything in memory that the CPU updates at once.
ToySetup simplest(const ToySetup& like) {
  ToySetup setup = like;
  setup.runtime.host_device = {};
  setup.engine.parameters = setup.engine.optimizer = kPinned;
  setup.engine.optimizer_offload_ratio = 1;
  setup.engine.update_mode = UpdateMode::step;
  setup.engine.store_directory.clear();
  setup.engine.keep_steps = 0;
  return setup;
}

// --- which units -----------------------------------------------------------------------------------------------------

detail::UnitTable table_of(const std::vector<std::int64_t>& units) {
  Model model;
  for (std::size_t u = 0; u < units.size(); ++u) {
    const std::string name = "unit" + std::to_string(u);
    model.add_unit(name, {{.name = name + ".w", .shape = {units[u]}}});
  }
  return {model, std::vector<optim::StateForm>{{}}, /*world_size=*/1};
}

std::vector<bool> held(const detail::UnitTable& table, double ratio, Placement optimizer = kPinned) {
  EngineOptions options;
  options.optimizer = optimizer;
  options.optimizer_offload_ratio = ratio;
  const UnitRegions regions(options, table, detail::DeviceAccess::cpu_and_device);
  std::vector<bool> units;
  for (std::uint32_t u = 0; u < table.units().size(); ++u) units.push_back(regions.unit(UnitId{u}).state_on_device);
  return units;
}

TEST(OffloadRatio, OfEqualUnitsIsMetToOneByTheFirst) {
  const detail::UnitTable table = table_of(std::vector<std::int64_t>(10, tiers::kTileElements));
  for (const int tenths : {0, 1, 3, 5, 9, 10}) {
    std::vector<bool> wanted(10, false);
    std::fill(wanted.begin(), wanted.begin() + (10 - tenths), true);
    EXPECT_EQ(held(table, tenths / 10.0), wanted) << tenths;
  }
  EXPECT_EQ(held(table, 0.349), std::vector<bool>({1, 1, 1, 1, 1, 1, 0, 0, 0, 0}));
}

TEST(OffloadRatio, TakesWhatFitsAndNeverMore) {
  const detail::UnitTable table = table_of({40, 900000, 16384, 70001, 9973, 500000, 3, 250000});
  const auto elements = [&](std::uint32_t u) { return table.units()[u].segments[0].shard_elements; };
  std::uint64_t all = 0;
  for (std::uint32_t u = 0; u < table.units().size(); ++u) all += elements(u);
  for (const double ratio : {0.05, 0.1, 0.25, 0.5, 0.77, 0.9, 0.99}) {
    const std::vector<bool> units = held(table, ratio);
    std::uint64_t so_far = 0;
    const std::uint64_t most = all - static_cast<std::uint64_t>(ratio * static_cast<double>(all));
    for (std::uint32_t u = 0; u < units.size(); ++u) {
      EXPECT_EQ(units[u], so_far + elements(u) <= most) << "unit " << u << " at " << ratio;
      if (units[u]) so_far += elements(u);
    }
  }
  EXPECT_THAT(held(table, 0), testing::Each(true));
  EXPECT_THAT(held(table, 1), testing::Each(false));
  EXPECT_THAT(held(table, 1, kDevice), testing::Each(true));
}

// --- the same bits ---------------------------------------------------------------------------------------------------

TEST(OffloadRatio, EveryOptimizerGivesTheBitsOfTheCpus) {
  const std::array<std::pair<optim::OptimizerOptions, GroupOptions>, 7> choices{{
      {{.learning_rate = 1e-2}, {.learning_rate = 2e-2, .weight_decay = 0}},
      {{.kind = OptimizerKind::adam, .learning_rate = 1e-2}, {.kind = OptimizerKind::lion}},
      {{.kind = OptimizerKind::adagrad, .learning_rate = 1e-2, .initial_accumulator = 0.5},
       {.moments = MomentType::bf16, .rounding_seed = 3}},
      {{.kind = OptimizerKind::lion, .learning_rate = 1e-3, .moments = MomentType::bf16},
       {.kind = OptimizerKind::adam}},
      {{.kind = OptimizerKind::sgd, .learning_rate = 1e-2, .momentum = 0.9, .nesterov = true},
       {.kind = OptimizerKind::adagrad}},
      {{.kind = OptimizerKind::sgd, .learning_rate = 1e-2}, {.kind = OptimizerKind::sgd, .momentum = 0.9}},
      {{.learning_rate = 1e-2, .moments = MomentType::fp8, .remainder = RemainderType::int8}, {}},
  }};
  const auto compare = [](const optim::OptimizerOptions& matrices, const GroupOptions& vectors, DType dtype) {
    const ToyShape shape{.vectors = vectors, .dtype = dtype};
    ToySetup plain = divided(1, true);
    plain.engine.optimizer_defaults = matrices;
    plain.engine.weights_dtype = dtype;
    if (dtype == DType::fp16) plain.engine.loss_scale = toy_loss_scale();
    const Digests expected = train_once(simplest(plain), shape, 6);
    for (const double ratio : {0.0, 0.5}) {  // of the state, that the CPU updates
      for (const bool host_accessible : {true, false}) {
        if (!host_accessible && matrices.moments == MomentType::fp8) continue;  // refused
        ToySetup setup = plain;
        setup.engine.optimizer_offload_ratio = ratio;
        setup.runtime.host_device.host_accessible = host_accessible;
        EXPECT_EQ(train_once(setup, shape, 6), expected)
            << "optimizer " << static_cast<int>(matrices.kind) << ", " << dtype_name(dtype) << ", ratio " << ratio;
      }
    }
  };
  for (const auto& [matrices, vectors] : choices) {
    compare(matrices, vectors, DType::bf16);
    if (matrices.remainder != RemainderType::int8) compare(matrices, vectors, DType::fp16);
  }
}

struct Several {
  int ranks, micro_batches;
  MicroBatchOrder order;
};

class OffloadRatioOf : public testing::TestWithParam<Several> {};
INSTANTIATE_TEST_SUITE_P(Cells, OffloadRatioOf,
                         testing::Values(Several{1, 1, MicroBatchOrder::horizontal},
                                         Several{3, 1, MicroBatchOrder::horizontal},
                                         Several{1, 3, MicroBatchOrder::horizontal},
                                         Several{2, 2, MicroBatchOrder::horizontal},
                                         Several{2, 2, MicroBatchOrder::vertical}),
                         [](const auto& c) {
                           return "ranks" + std::to_string(c.param.ranks) + "_batches" +
                                  std::to_string(c.param.micro_batches) +
                                  (c.param.order == MicroBatchOrder::vertical ? "_vertical" : "");
                         });

TEST_P(OffloadRatioOf, RanksAndMicroBatchesEndsInTheSameBitsInEveryMode) {
  Digests expected;
  for (const UpdateMode mode : {UpdateMode::step, UpdateMode::forward, UpdateMode::backward}) {
    ToySetup plain = divided(1, true);
    plain.engine.micro_batches_max = static_cast<unsigned>(GetParam().micro_batches);
    plain.engine.micro_batch_order = GetParam().order;
    if (mode == UpdateMode::backward) plain.engine.gradient_clipping = 0;
    if (mode != UpdateMode::forward)  // which ends as mode `step` does
      expected = train_in_micro_batches(GetParam().ranks, simplest(plain), 5);
    for (const double ratio : {0.0, 0.3, 0.7}) {
      for (const bool host_accessible : {true, false}) {
        ToySetup setup = plain;
        setup.engine.update_mode = mode;
        setup.engine.optimizer_offload_ratio = ratio;
        setup.runtime.host_device.host_accessible = host_accessible;
        setup.runtime.host_device.chaos_seed = 41;
        EXPECT_EQ(train_in_micro_batches(GetParam().ranks, setup, 5), expected)
            << "mode " << static_cast<int>(mode) << ", ratio " << ratio << (host_accessible ? "" : ", apart");
      }
    }
  }
}

TEST(OffloadRatio, EveryStageAndGroupsThatGatherAmongThemselvesEndInTheSameBits) {
  const std::vector<RankRun> expected = train_on(4, simplest(divided(1, true)), {}, 5);
  for (const int stage : {0, 2, 3}) {
    for (const int group : {1, 2}) {
      if (group > 1 && stage < 3) continue;  // refused
      for (const bool host_accessible : {true, false}) {
        ToySetup setup = divided(0.4, host_accessible);
        setup.engine.stage = stage;
        setup.engine.secondary_shard_ranks = group;
        setup.runtime.host_device.chaos_seed = 47;
        const std::vector<RankRun> found = train_on(4, setup, {}, 5);
        for (std::size_t rank = 0; rank < found.size(); ++rank)
          EXPECT_EQ(found[rank].digests, expected[rank].digests)
              << "stage " << stage << ", groups of " << group << (host_accessible ? "" : ", apart");
      }
    }
  }
}

// --- going on --------------------------------------------------------------------------------------------------------

// Every part of a run has another ratio, and some another number of ranks.
TEST(OffloadRatio, MayChangeFromRunToRun) {
  struct Part {
    int ranks;
    double ratio;
    bool host_accessible;
    Placement optimizer;
  };
  const std::array<Part, 7> parts{{{1, 1, true, kNvme},
                                   {1, 0.3, false, kNvme},
                                   {1, 0, false, kPinned},
                                   {1, 1, true, kPinned},
                                   {3, 0.5, true, kNvme},
                                   {3, 0.4, false, kPinned},
                                   {1, 0.6, true, kNvme}}};
  for (const unsigned every : {1u, 2u}) {
    const TempDirectory directory;
    Digests before;
    std::uint64_t step = 0;
    for (const Part& part : parts) {
      ToySetup setup = divided(part.ratio, part.host_accessible, part.optimizer, directory / "store");
      setup.engine.commit_every = every;
      setup.runtime.host_device.chaos_seed = 43 + step;
      Digests after, reference;
      on_ranks(part.ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
        ToyModel model(setup, join);
        if (step == 0) {
          model.initialize();
        } else {
          EXPECT_EQ(model.restore().step, step);
          EXPECT_EQ(state_digests(model), before) << "ratio " << part.ratio << ", step " << step;
        }
        model.train(step + 1, step + 3);
        model.engine().save("", {}).wait();
        const Digests mine = state_digests(model);
        if (rank == 0) after = mine;
      });
      step += 3;
      if (part.ranks == 1 && step <= 12) {  // until the number of ranks has changed
        reference = train_once(simplest(setup), {}, step);
        reference.losses.clear();
        EXPECT_EQ(after, reference) << "ratio " << part.ratio << ", step " << step;
      }
      before = after;
    }
  }
}

TEST(OffloadRatio, NamedCheckpointsHoldBothParts) {
  for (const Placement optimizer : {kPinned, kNvme}) {
    for (const bool host_accessible : {true, false}) {
      const TempDirectory directory;
      ToySetup setup = divided(0.5, host_accessible, optimizer, directory / "store");
      setup.engine.keep_steps = 1;
      const auto reference = [&](std::uint64_t steps) {
        Digests digests = train_once(simplest(setup), {}, steps);
        digests.losses.clear();
        return digests;
      };
      {
        ToyProgram model(setup);
        model.train(1, 3);
        const Completion saved = model.engine().save("middle", {});
        model.train(4, 5);  // while the save is running
        saved.wait();
      }
      ToyModel model(setup);
      EXPECT_EQ(model.restore({.from = "middle"}).step, 3u);
      model.train(4, 6);
      EXPECT_EQ(state_digests(model), reference(6)) << (host_accessible ? "" : "apart");
    }
  }
}

TEST(OffloadRatio, StateIsReadAndWrittenWhereverItIs) {
  const std::vector<float> values{1.5f, -2.25f, 0.0078125f, 3.0f};
  for (const bool host_accessible : {true, false}) {
    const ToySetup setup = divided(0.4, host_accessible);  // unit 0 on the device, unit 1 in memory
    ToyProgram there(setup), here(simplest(setup));
    for (ToyProgram* p : {&there, &here}) {
      p->train(1, 2);
      for (const std::size_t unit : {0u, 1u}) {
        p->engine().write(p->matrix(unit), State::master, 16'382, values);
        p->engine().write(p->matrix(unit), State::moment2, 32'766, std::span(values).subspan(2));
      }
      p->train(3, 4);
      p->pass(5);
    }
    for (const std::size_t unit : {0u, 1u, 2u}) {
      for (const State state : {State::master, State::moment1, State::moment2, State::gradient}) {
        EXPECT_EQ(there.read(there.matrix(unit), state, 100, 16'000), here.read(here.matrix(unit), state, 100, 16'000))
            << "unit " << unit << ", state " << static_cast<int>(state);
      }
    }
  }
}

// --- what moves and what is held -------------------------------------------------------------------------------------

// Eight equal units, of which `on_device` have their state there.
constexpr std::uint64_t kElements = 2 * tiers::kTileElements;
const ToyShape kEqual{
    .matrices = std::vector<std::int64_t>(8, kElements), .norm = tiers::kTileElements, .frozen = false, .tied = false};
constexpr std::uint64_t kUnitBytes = 2 * kElements + 4 * tiers::kTileElements;  // of weights, or of gradients

TEST(OffloadRatio, WhatIsOnTheDeviceCrossesNoLink) {
  for (const UpdateMode mode : {UpdateMode::step, UpdateMode::forward, UpdateMode::backward}) {
    for (const std::uint64_t on_device : {0u, 3u, 8u}) {
      for (const bool host_accessible : {true, false}) {
        ToySetup setup = divided(1 - static_cast<double>(on_device) / 8, host_accessible);
        setup.engine.update_mode = mode;
        if (mode == UpdateMode::backward) setup.engine.gradient_clipping = 0;
        ToyProgram model(setup, kEqual);
        model.train(1, 1);
        model.evaluate();
        const auto bytes = [&](Link link) { return model.runtime().ledger().totals(link).bytes; };
        const std::uint64_t up = bytes(Link::host_to_device), down = bytes(Link::device_to_host);
        model.train(2, 4);
        model.evaluate();
        // Where the CPU does not look: a sum of 8 bytes of each unit's two segments, and the word that says whether
        // all can be committed.
        const std::uint64_t findings = host_accessible || on_device == 0 ? 0 : 8 * 2 * on_device + 4;
        EXPECT_EQ(bytes(Link::host_to_device) - up, 3 * (8 - on_device) * kUnitBytes);
        EXPECT_EQ(bytes(Link::device_to_host) - down, 3 * ((8 - on_device) * kUnitBytes + findings));
        EXPECT_EQ(model.engine().formula_bytes().host_to_device, (8 - on_device) * kUnitBytes);
        EXPECT_EQ(model.engine().formula_bytes().device_to_host, (8 - on_device) * kUnitBytes);
      }
    }
  }
}

TEST(OffloadRatio, OnNvmeTheDevicesPartIsWrittenWithCommitsOnly) {
  constexpr std::uint64_t kStateBytes = 10 * kElements + 8 * tiers::kTileElements;
  for (const unsigned every : {1u, 3u}) {
    for (const bool host_accessible : {true, false}) {
      const TempDirectory directory;
      ToySetup setup = divided(0.5, host_accessible, kNvme, directory / "store");
      setup.engine.commit_every = every;
      ToyProgram model(setup, kEqual);
      model.train(1, 3);
      const MovedBytes moved = model.bytes_moved(4, 9);
      const std::uint64_t commits = 6 / every;
      const auto expect_written = [&](std::uint64_t wanted) {  // beside the manifests, of a block each
        EXPECT_GE(moved[Link::nvme_write], wanted);
        EXPECT_LE(moved[Link::nvme_write], wanted + 6 + commits * kBlockAlignment);
      };
      EXPECT_EQ(moved[Link::nvme_read], 6 * 4 * kStateBytes);
      expect_written(6 * 4 * kStateBytes + commits * (4 * kStateBytes + 8 * kUnitBytes));
      const std::uint64_t brought_down = host_accessible ? 0 : commits * 4 * (kStateBytes + kUnitBytes);
      const std::uint64_t findings = host_accessible ? 0 : 6 * (8 * 8 + 4);
      EXPECT_EQ(moved[Link::device_to_host], 6 * 4 * kUnitBytes + brought_down + findings);
      const StepBytes formula = model.engine().formula_bytes();
      EXPECT_EQ(6 * formula.nvme_read, 6 * 4 * kStateBytes);
      EXPECT_EQ(6 * formula.device_to_host, 6 * 4 * kUnitBytes + brought_down);
      expect_written(6 * formula.nvme_write);
    }
  }
}

// A refusal names the budget that is enough, and the ratio that is.
TEST(OffloadRatio, ThatDoesNotFitIsRefusedWithTheOneThatDoes) {
  for (const bool host_accessible : {true, false}) {
    ToySetup setup = divided(0, host_accessible);
    const auto run = [&](const ToySetup& s) {
      ToyModel model(s, kEqual);
      const Prediction predicted = predict(s.runtime, s.engine, model.model(), 1);
      model.initialize();
      model.train(1, 2);
      EXPECT_EQ(model.runtime().device_budget().held_bytes(), predicted.device.bytes);
      EXPECT_EQ(model.runtime().pinned_budget().peak_bytes(), predicted.pinned.bytes);
      EXPECT_NEAR(predicted.device_state_share, 1 - s.engine.optimizer_offload_ratio, 0.125);
    };
    run(setup);
    setup.runtime.device_memory_bytes = 4 * kMiB;
    std::uint64_t need_bytes = 0;
    std::string text;
    try {
      run(setup);
      FAIL() << "4 MiB sufficed";
    } catch (const BudgetError& error) {
      EXPECT_EQ(error.need.key, "hoist.device_memory");
      need_bytes = error.need.need_bytes;
      text = error.what();
    }
    ToyModel model(setup, kEqual);
    const Prediction predicted = predict(setup.runtime, setup.engine, model.model(), 1);
    ASSERT_TRUE(predicted.fitting_offload_ratio);
    const double ratio = *predicted.fitting_offload_ratio;
    EXPECT_GT(ratio, 0);
    EXPECT_LT(ratio, 1);
    char named[64];
    std::snprintf(named, sizeof named, "offload_optimizer.ratio %.2f", ratio);
    EXPECT_THAT(text, HasSubstr(named));
    ToySetup enough = setup;
    enough.runtime.device_memory_bytes = need_bytes;
    run(enough);
    enough = setup;
    enough.engine.optimizer_offload_ratio = ratio - 0.01;
    EXPECT_THROW(run(enough), BudgetError);
    enough.engine.optimizer_offload_ratio = ratio;
    run(enough);
  }
}

TEST(OffloadRatio, FreesPinnedMemory) {
  const auto pinned = [&](double ratio) {
    const ToySetup setup = divided(ratio, true);
    return predict(setup.runtime, setup.engine, describe(kEqual), 1).pinned.bytes;
  };
  EXPECT_EQ(pinned(0), 0u);
  EXPECT_LT(pinned(0.5), pinned(1));
}

// --- what is refused -------------------------------------------------------------------------------------------------

std::string refusal_of(const ToySetup& setup) {
  return message_of<ConfigError>([&] { ToyModel(setup).initialize(); });
}

TEST(OffloadRatio, IsRefusedWhereItMeansNothing) {
  for (const double ratio : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_THAT(refusal_of(divided(ratio, true)), HasSubstr("offload_optimizer.ratio"));
  const TempDirectory directory;
  for (const Placement parameters : {kPinned, kNvme}) {
    ToySetup setup = divided(0.5, false, kPinned, directory / "store");
    setup.engine.parameters = parameters;
    EXPECT_THAT(refusal_of(setup), HasSubstr("offload_optimizer.ratio"));
    setup.engine.optimizer_offload_ratio = 1;
    EXPECT_EQ(refusal_of(setup), "no error");
  }
  ToySetup eight_bits = divided(0.5, false);
  eight_bits.engine.optimizer_defaults.moments = MomentType::fp8;
  EXPECT_THAT(refusal_of(eight_bits), HasSubstr("ratio 1"));
  eight_bits.engine.optimizer_offload_ratio = 1;
  EXPECT_EQ(refusal_of(eight_bits), "no error");
}

TEST(OffloadRatio, IsSaidWithWhatCameOfIt) {
  const ToySetup setup = divided(0.3, true);
  ToyModel model(setup, kEqual);
  EXPECT_THAT(model.initialize().describe().front(), HasSubstr("62.5 % in device memory"));
}

}  // namespace
}  // namespace hoist::test::offload_ratio_test
