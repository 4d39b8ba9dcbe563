// SPDX-License-Identifier: Apache-2.0
// Gradients on NVMe between backward and update: the same bits, within budgets that hold no gradients, verified; what
// fails with them says where. The bytes are in budget_test.cpp, more placements in placement_test.cpp.
#include <algorithm>
#include <filesystem>
#include <span>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/message_of.hpp>
#include <hoist/tiers/scratch.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::gradient_spill_test {
namespace {

constexpr std::uint32_t kAll = 99;  // units
const ToyShape kPlain{.matrices = {300'000, 500'000, 400'000, 300'000}, .frozen = false, .tied = false};

// --- budgets

// A restore that makes a new store is laid out before it is decided what is spilled.
TEST(Spill, ARestoreIntoANewStoreNeedsNoMoreThanWithAllSpilled) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  {
    ToyProgram program(setup, kPlain);
    program.train(1, 2);
  }
  const auto restore = [&](std::optional<std::uint32_t> spilled, std::uint64_t budget) -> std::uint64_t {
    ToySetup tight = setup;
    tight.engine.keep_steps = 1;  // the store has no room for it
    tight.engine.gradient_spill_units = spilled;
    tight.runtime.pinned_memory_bytes = budget;
    try {
      ToyModel program(tight, kPlain);
      EXPECT_EQ(program.restore().step, 2u);
      program.train(3, 3);
    } catch (const BudgetError& error) {
      return error.need.need_bytes;
    }
    return 0;
  };
  ToySetup all = setup;
  all.engine.keep_steps = 1;
  all.engine.gradient_spill_units = kAll;
  const std::uint64_t least = predict(all.runtime, all.engine, describe(kPlain), 1).pinned.least_bytes;
  const std::uint64_t needed = restore(kAll, round_up(least, kBlockAlignment));
  ASSERT_GT(needed, least);
  EXPECT_EQ(restore(std::nullopt, needed), 0u);
}

// --- what is read

// Of the unit that the next pass needs first, all state is in memory and the gradient is on NVMe: it takes a buffer,
// and none of those that were read ahead.
TEST(Spill, WhatIsReadAheadIsReadOnce) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::device, Placement::nvme, directory / "store");
  setup.engine.gradient_spill_units = kAll;
  setup.engine.optimizer_pinned_fraction = 0.1;
  setup.engine.sub_group_elements = 64 * 1024;
  setup.engine.update_buffer_count = 8;
  Model model;
  for (int unit = 0; unit < 5; ++unit)
    model.add_unit(fmt::format("unit{}", unit), {{.name = fmt::format("weight{}", unit), .shape = {200'000}}});
  const UnitId first = model.add_unit("small", {{.name = "small.weight", .shape = {100}}});
  Runtime runtime(setup.runtime);
  Engine engine = Engine::create(runtime, setup.engine, model, [](ParameterId, std::uint64_t, std::span<float> out) {
    std::ranges::fill(out, 1.0f);
  });
  const auto stream = runtime.device().create_stream("compute");
  const auto read_in = [&](int steps) {
    const std::uint64_t before = runtime.ledger().totals(Link::nvme_read).bytes;
    for (int step = 0; step < steps; ++step) {
      {
        const auto pass = engine.begin(Pass::train);
        for (std::uint32_t unit = first.index + 1; unit-- > 0;) engine.gather(UnitId{unit}, *stream).release(*stream);
        for (std::uint32_t unit = first.index + 1; unit-- > 0;) {
          engine.gather(UnitId{unit}, *stream).release(*stream);
          engine.gradients(UnitId{unit}, *stream);
          engine.finish(UnitId{unit}, *stream);
        }
        stream->synchronize();
      }
      engine.step();
    }
    engine.settle();
    return runtime.ledger().totals(Link::nvme_read).bytes - before;
  };
  read_in(2);
  const auto read = static_cast<double>(read_in(6));
  EXPECT_NEAR(read, 6.0 * static_cast<double>(engine.formula_bytes().nvme_read), 0.02 * read);
}

// --- the same bits

struct Order {
  const char* name;
  unsigned micro_batches;
  MicroBatchOrder order = MicroBatchOrder::horizontal;
};

class SpillIn : public testing::TestWithParam<Order> {
 protected:
  ToySetup setup(Placement parameters, Placement optimizer, const std::string& directory = "") const {
    ToySetup setup = toy_setup(parameters, optimizer, directory);
    setup.engine.micro_batches_max = GetParam().micro_batches;
    setup.engine.micro_batch_order = GetParam().order;
    return setup;
  }
};
INSTANTIATE_TEST_SUITE_P(Orders, SpillIn,
                         testing::Values(Order{"one", 1}, Order{"three_horizontal", 3},
                                         Order{"three_vertical", 3, MicroBatchOrder::vertical}),
                         [](const auto& order) { return std::string(order.param.name); });

TEST_P(SpillIn, EveryModeRankAndDriveHasTheSameBits) {
  for (const int ranks : {1, 2}) {
    ToySetup simplest = setup(Placement::pinned, Placement::pinned);
    simplest.engine.update_mode = UpdateMode::step;
    const Digests expected = train_in_micro_batches(ranks, simplest, 4);
    const TempDirectory directory;
    ToySetup spilling = setup(Placement::nvme, Placement::nvme, directory / "store");
    spilling.runtime.host_device.chaos_seed = 31;
    spilling.engine.update_mode = ranks == 1 ? UpdateMode::step : UpdateMode::forward;
    spilling.engine.gradient_spill_units = ranks == 1 ? kAll : 2;
    if (ranks == 2) spilling.engine.stripe_directories = {directory / "second"};
    EXPECT_EQ(train_in_micro_batches(ranks, spilling, 4), expected) << ranks << " ranks";
  }
}

// Dropped gradients may still be on their way to the place of the next ones when those are there, and sums on their way
// back when the next gradients are: on a drive that does some of its work late.
TEST_P(SpillIn, DroppedGradientsLeaveNothingBehind) {
  const TempDirectory directory;
  const auto late = std::make_shared<Faults>(33);
  const auto delay = [&](aio::Operation operation) {
    late->add({.kind = Fault::Kind::delay,
               .operation = operation,
               .count = Faults::kForever,
               .delay = std::chrono::milliseconds(40)});
  };
  const auto run = [&](const ToySetup& setup, std::chrono::milliseconds before_step) {
    ToyProgram program(setup);
    const int count = static_cast<int>(GetParam().micro_batches);
    for (std::uint64_t step = 1; step <= 4; ++step) {
      delay(aio::Operation::write);
      // Every second time with the first unit's gradient alone: the next pass then begins with that unit.
      program.in_backward = [&](std::size_t) {
        std::this_thread::sleep_for(before_step / 6);  // until it is written
        if (step % 2 == 0) throw std::runtime_error("the program's own");
      };
      try {
        program.pass(100 + step);
        program.engine().discard();
      } catch (const std::runtime_error&) {
      }
      late->clear();
      if (step % 2 == 1) delay(aio::Operation::read);
      program.micro_batches = count;
      program.vertical = count > 1 && GetParam().order == MicroBatchOrder::vertical;
      program.in_backward = [&](std::size_t unit) {
        if (unit == 0) std::this_thread::sleep_for(before_step);  // the update reads what came last
      };
      program.train(step, step);
      program.vertical = false;
    }
    return digests_of(program);
  };
  ToySetup spilling = setup(Placement::nvme, Placement::nvme, directory / "store");
  spilling.engine.gradient_spill_units = kAll;
  spilling.runtime.host_device.chaos_seed = 32;
  spilling.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& io) { return make_faulty_backend(io, late); };
  EXPECT_EQ(run(spilling, std::chrono::milliseconds(60)),
            run(setup(Placement::pinned, Placement::pinned), std::chrono::milliseconds(0)));
}

TEST_P(SpillIn, GradientsAreReadBack) {
  const TempDirectory directory;
  const int count = static_cast<int>(GetParam().micro_batches);
  const bool vertical = GetParam().order == MicroBatchOrder::vertical;
  double norm = 0;
  const auto gradients = [&](const ToySetup& setup) {
    ToyProgram program(setup);
    std::vector<std::vector<float>> found;
    if (vertical) {
      program.vertical = true;
      program.pass(1, {.micro_batches = count});
    }
    for (int i = 0; i < count && !vertical; ++i) program.pass(1, {.micro_batch = i, .micro_batches = count});
    for (std::uint32_t p = 0; p < program.engine().model().parameters().size(); ++p) {
      const ParameterSpec& spec = program.engine().model().parameters()[p];
      const auto elements = static_cast<std::size_t>(spec.shape[0]);
      if (!spec.trainable) continue;
      // Across tiles, and from the middle of one.
      for (const std::size_t first : {std::size_t{0}, elements / 3})
        found.push_back(program.read(ParameterId{p}, State::gradient, first, elements - first));
    }
    norm = program.engine().gradient_norm();
    return found;
  };
  ToySetup spilling = setup(Placement::pinned, Placement::nvme, directory / "store");
  spilling.engine.gradient_spill_units = kAll;
  const auto found = gradients(spilling);
  const double found_norm = norm;
  EXPECT_EQ(found, gradients(setup(Placement::pinned, Placement::pinned)));
  EXPECT_EQ(found_norm, norm);
}

// --- budgets

ToySetup of_size(std::uint64_t pinned_bytes, const std::string& directory) {
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory);
  setup.runtime.pinned_memory_bytes = pinned_bytes;
  setup.engine.gradient_spill_units = std::nullopt;
  return setup;
}

std::uint64_t file_bytes(const std::string& directory) {
  std::uint64_t bytes = 0;
  for (const char* ending : {".data", ".manifest"})
    bytes += std::filesystem::file_size(directory + "/rank-00000" + ending);
  return bytes;
}

// The pinned memory for every gradient and the buffers that keep the drive busy: all but some staging buffers.
std::uint64_t bytes_without_spill(const Prediction& ample) {
  return ample.pinned.bytes - (ample.staging_buffers - 2) * ample.staging_buffer_bytes;
}

TEST(GradientSpill, TrainsWithinBudgetsThatHoldNoGradients) {
  const Model model = describe(kPlain);
  const ToySetup ample = of_size(64 * kMiB, "unused");
  const Prediction most = predict(ample.runtime, ample.engine, model, 1);
  EXPECT_EQ(most.spilled_units, 0u) << "everything fits";
  ToySetup without = ample;
  without.engine.gradient_spill_units = 0;
  const std::uint64_t needed = predict(without.runtime, without.engine, model, 1).pinned.least_bytes;
  ASSERT_LT(most.pinned.least_bytes, needed);

  std::uint32_t spilled_before = 0;
  const std::uint64_t begins = bytes_without_spill(most) - kBlockAlignment;
  ASSERT_GT(begins, needed);
  for (const std::uint64_t budget : {begins, needed - kBlockAlignment, most.pinned.least_bytes}) {
    const TempDirectory directory;
    const ToySetup setup = of_size(budget, directory / "store");
    const Prediction predicted = predict(setup.runtime, setup.engine, model, 1);
    EXPECT_TRUE(predicted.fits()) << budget;
    EXPECT_GT(predicted.spilled_units, 0u);
    EXPECT_GE(predicted.spilled_units, spilled_before) << "a smaller budget holds no more of them";
    spilled_before = predicted.spilled_units;
    ToyProgram program(setup, kPlain);
    program.train(1, 3);
    program.engine().settle();
    EXPECT_LE(program.runtime().pinned_budget().peak_bytes(), budget);
    EXPECT_EQ(program.runtime().pinned_budget().peak_bytes(), predicted.pinned.bytes);
    EXPECT_EQ(file_bytes(directory / "store") + predicted.scratch_bytes, predicted.nvme_bytes);
    const StepBytes real = program.engine().formula_bytes();
    EXPECT_EQ(predicted.step.nvme_read, real.nvme_read);
    EXPECT_EQ(predicted.step.nvme_write, real.nvme_write);
    ToySetup resident = setup;
    resident.engine.store_directory = directory / "other";
    resident.runtime.pinned_memory_bytes = 64 * kMiB;
    ToyProgram other(resident, kPlain);
    other.train(1, 3);
    EXPECT_EQ(digests_of(program), digests_of(other));
  }
  EXPECT_EQ(spilled_before, kPlain.matrices.size()) << "nothing else could give way";

  const TempDirectory directory;
  ToyModel refused(of_size(most.pinned.least_bytes - kBlockAlignment, directory / "store"), kPlain);
  try {
    refused.initialize();
    FAIL() << "less than the least sufficed";
  } catch (const BudgetError& error) {
    EXPECT_EQ(error.need.key, "hoist.pinned_memory");
    EXPECT_EQ(error.need.need_bytes, round_up(most.pinned.least_bytes, kBlockAlignment));
  }
}

TEST(GradientSpill, LeavesRoomForTheBuffersAskedFor) {
  const Model model = describe(kPlain);
  ToySetup setup = of_size(64 * kMiB, "unused");
  const Prediction ample = predict(setup.runtime, setup.engine, model, 1);
  setup.runtime.pinned_memory_bytes = bytes_without_spill(ample);
  EXPECT_EQ(predict(setup.runtime, setup.engine, model, 1).spilled_units, 0u);
  setup.runtime.pinned_memory_bytes -= kBlockAlignment;
  const Prediction tight = predict(setup.runtime, setup.engine, model, 1);
  EXPECT_GT(tight.spilled_units, 0u);
  EXPECT_EQ(tight.update_buffers, ample.update_buffers);
  EXPECT_EQ(tight.update_buffer_parameters, ample.update_buffer_parameters);
  EXPECT_GE(tight.staging_buffers, 2u);
}

// --- refusals

std::string refusal_of(const ToySetup& setup) {
  return message_of<ConfigError>([&] { check(setup.engine, setup.runtime, 1); });
}

TEST(GradientSpill, IsRefusedWhereThereIsNothingToSpillOrNoPlaceForIt) {
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned, "store");
  setup.engine.gradient_spill_units = std::nullopt;
  EXPECT_THAT(refusal_of(setup), testing::HasSubstr("hoist.gradient_spill: gradients go to NVMe only beside"));
  setup = toy_setup(Placement::nvme, Placement::nvme, "store");
  setup.engine.gradient_spill_units = 1;
  EXPECT_EQ(refusal_of(setup), "no error");
  setup.engine.gradient_clipping = 0;
  setup.engine.update_mode = UpdateMode::backward;
  EXPECT_THAT(refusal_of(setup), testing::HasSubstr("hoist.gradient_spill: update mode \"backward\""));
}

TEST(GradientSpill, AFileSystemThatIsTooSmallIsRefusedWithWhatItLacks) {
  const TempDirectory directory;
  aio::DriveQueue queue({});
  aio::DriveQueue* const engine = &queue;
  try {
    const tiers::Scratch scratch({.paths = {directory / "rank-00000.scratch"}, .bytes = std::uint64_t{1} << 52},
                                 {&engine, 1});
    FAIL() << "four petabytes were found";
  } catch (const BudgetError& error) {
    EXPECT_EQ(error.need.tier, "nvme");
    EXPECT_EQ(error.need.need_bytes, std::uint64_t{1} << 52);
    EXPECT_LT(error.need.have_bytes, error.need.need_bytes);
    EXPECT_THAT(error.what(), testing::HasSubstr("hoist.pinned_memory"));
    EXPECT_THAT(error.what(), testing::HasSubstr(directory.path().string()));
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

// --- what goes wrong

class FaultySpill : public testing::TestWithParam<UpdateMode> {
 protected:
  // Trains on until something fails, with `fault` on the scratch file from step 2 on.
  template <typename Failure>
  Failure failure(Fault fault, unsigned micro_batches = 1) {
    fault.path_contains = ".scratch";
    const auto faults = std::make_shared<Faults>(7);
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory_ / "store");
    setup.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& io) { return make_faulty_backend(io, faults); };
    setup.engine.gradient_spill_units = kAll;
    setup.engine.update_mode = GetParam();
    setup.engine.micro_batches_max = micro_batches;
    ToyModel program(setup);
    program.micro_batches = static_cast<int>(micro_batches);
    program.initialize();
    program.train(1, 1);
    program.engine().settle();
    faults->add(fault);
    try {
      program.train(2, 3);
      program.engine().settle();
    } catch (const Failure& error) {
      EXPECT_GT(faults->hits(fault.kind), 0u);
      EXPECT_EQ(program.engine().committed_step(), 1u);
      return error;
    }
    throw std::logic_error("nothing failed");
  }
  // The last commit, of step 1, is intact: gradients are no part of it.
  void expect_restored() {
    const Digests expected = train_once(toy_setup(Placement::pinned, Placement::pinned), {}, 3);
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory_ / "store");
    setup.engine.gradient_spill_units = kAll;
    ToyModel program(setup);
    EXPECT_EQ(program.restore().step, 1u);
    program.train(2, 3);
    Digests found = digests_of(program);
    found.losses = expected.losses;
    EXPECT_EQ(found, expected);
  }
  const TempDirectory directory_;
};
INSTANTIATE_TEST_SUITE_P(Modes, FaultySpill, testing::Values(UpdateMode::step, UpdateMode::forward),
                         [](const auto& mode) { return mode.param == UpdateMode::step ? "step" : "forward"; });

void expect_named(const CorruptionError& error) {
  EXPECT_EQ(error.where.region, "gradient");
  EXPECT_THAT(error.where.unit, testing::StartsWith("unit"));
  EXPECT_THAT(error.where.path, testing::EndsWith("/store/rank-00000.scratch"));
  EXPECT_EQ(error.where.offset_bytes % kBlockAlignment, 0u);
  EXPECT_THAT(error.what(), testing::HasSubstr("corrupt gradient of unit"));
  EXPECT_THAT(error.what(), testing::HasSubstr("continue from the last one"));
}

TEST_P(FaultySpill, AFlippedBitIsNotUsed) {
  expect_named(failure<CorruptionError>({.kind = Fault::Kind::bit_flip, .operation = aio::Operation::read}));
  expect_restored();
}

TEST_P(FaultySpill, ALostWriteIsNotUsed) {
  expect_named(failure<CorruptionError>({.kind = Fault::Kind::dropped_write, .operation = aio::Operation::write}));
  expect_restored();
}

TEST_P(FaultySpill, AFlippedBitOfSumsIsNotUsed) {
  expect_named(failure<CorruptionError>({.kind = Fault::Kind::bit_flip, .operation = aio::Operation::read}, 3));
}

TEST_P(FaultySpill, AnErrorOfTheDriveIsReported) {
  for (const aio::Operation operation : {aio::Operation::write, aio::Operation::read}) {
    const IoError error =
        failure<IoError>({.kind = Fault::Kind::error, .operation = operation, .count = Faults::kForever, .code = EIO});
    EXPECT_EQ(error.where.code, EIO);
    EXPECT_THAT(error.where.path, testing::EndsWith(".scratch"));
    expect_restored();
    std::filesystem::remove_all(directory_ / "store");
  }
}

}  // namespace
}  // namespace hoist::test::gradient_spill_test
