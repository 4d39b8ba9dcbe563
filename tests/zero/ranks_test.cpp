// SPDX-License-Identifier: Apache-2.0
// Several ranks: partitioned state, equal results on every communicator, divergence that is named instead of hanging.
#include <algorithm>
#include <array>
#include <cfenv>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/file_contents.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::ranks_test {
namespace {

class RanksTest : public testing::TestWithParam<int> {};

TEST_P(RanksTest, EveryPlacementGivesTheSameBitsOnEveryRank) {
  const int size = GetParam();
  const auto reference = train_on(size, toy_setup(Placement::pinned, Placement::pinned), ToyShape{}, 5)[0].digests;
  const TempDirectory directory;
  int cell = 0;
  for (const Placement parameters : {Placement::device, Placement::pinned, Placement::nvme}) {
    for (const Placement optimizer : {Placement::device, Placement::pinned, Placement::nvme}) {
      ToySetup setup = toy_setup(parameters, optimizer, directory / ("store" + std::to_string(cell++)));
      if (parameters != Placement::nvme && optimizer != Placement::nvme) setup.engine.store_directory.clear();
      setup.runtime.host_device.chaos_seed = static_cast<std::uint64_t>(cell % 2);
      for (const RankRun& run : train_on(size, setup, ToyShape{}, 5))
        EXPECT_EQ(run.digests, reference) << "cell " << cell;
    }
  }
}

TEST_P(RanksTest, ResumesBitExactly) {
  const int size = GetParam();
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, (directory / "store"));
  const auto reference = train_on(size, toy_setup(Placement::pinned, Placement::pinned), ToyShape{}, 6)[0].digests;
  train_on(size, setup, ToyShape{}, 3);
  on_ranks(size, [&](int, const Runtime::MakeCommunicator& join) {
    ToyModel model(setup, join);
    ASSERT_EQ(model.restore().step, 3u);
    model.losses.assign(reference.losses.begin(), reference.losses.begin() + 3);
    model.train(4, 6);
    EXPECT_EQ(digests_of(model), reference);
  });
}

// An engine's threads inherit the rounding mode of the thread that makes it.
TEST(RanksRounding, TheRoundingModeOfTheProgramIsItsOwn) {
  const TempDirectory directory;
  int run = 0;
  const auto train = [&](UpdateMode mode, MicroBatchOrder order, int rounding) {
    ToySetup setup = toy_setup(Placement::pinned, Placement::nvme, directory / fmt::format("store{}", run++));
    setup.engine.gradient_clipping = mode == UpdateMode::backward ? 0 : 1;
    setup.engine.update_mode = mode;
    setup.engine.micro_batch_order = order;
    setup.engine.micro_batches_max = 3;
    Digests digests;
    on_ranks(3, [&](int rank, const Runtime::MakeCommunicator& join) {
      ToyProgram model(setup, join);
      model.close();
      std::fesetround(rounding);
      model.restore();
      for (std::uint64_t step = 1; step <= 3; ++step) {
        const int passes = order == MicroBatchOrder::vertical ? 1 : 3;
        for (int micro_batch = 0; micro_batch < passes; ++micro_batch)
          model.pass(step, {.micro_batch = micro_batch, .micro_batches = 3});
        model.engine().step();
      }
      std::fesetround(FE_TONEAREST);
      const Digests own = digests_of(model);
      if (rank == 0) digests = own;
    });
    return digests;
  };
  for (const MicroBatchOrder order : {MicroBatchOrder::horizontal, MicroBatchOrder::vertical})
    for (const UpdateMode mode : {UpdateMode::step, UpdateMode::forward, UpdateMode::backward})
      EXPECT_EQ(train(mode, order, FE_TOWARDZERO), train(mode, order, FE_TONEAREST)) << static_cast<int>(mode);
}

// Rank 1 comes late to each step, and at least once rank 0 is there on time.
TEST(RanksWait, WhatARankWaitsForOthersIsCounted) {
  constexpr auto kLate = std::chrono::milliseconds(30);
  const ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  on_ranks(2, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToyProgram model(setup, join);
    Nanoseconds longest{0};
    for (std::uint64_t step = 1; step <= 5; ++step) {
      model.pass(step);
      comm::values_of_all(model.runtime().communicator(), rank);  // both have come so far
      const Nanoseconds before = model.runtime().ledger().waited(WaitCause::comm);
      if (rank == 1) std::this_thread::sleep_for(kLate);
      model.engine().step();
      longest = std::max(longest, model.runtime().ledger().waited(WaitCause::comm) - before);
    }
    EXPECT_TRUE(rank == 1 || longest >= kLate / 2) << to_seconds(longest);
  });
}

// As a policy and its reference. Each engine has threads of its own, and their collectives must not mix.
TEST_P(RanksTest, EnginesOfOneRuntimeTakeTurns) {
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.engine.live_elements_max = 150000;  // so that not all stays gathered
  ToyShape other;
  other.seed = 2;
  const auto reference = train_on(GetParam(), setup, ToyShape{}, 6)[0].digests;
  on_ranks(GetParam(), [&](int, const Runtime::MakeCommunicator& join) {
    Runtime runtime(setup.runtime, join);
    ToyModel policy(runtime, setup.engine), frozen(runtime, setup.engine, other);
    policy.initialize();
    frozen.initialize();
    const double expected = frozen.evaluate();
    for (std::uint64_t step = 1; step <= 6; ++step) {
      policy.pass(step);
      EXPECT_EQ(frozen.evaluate(), expected);
      policy.engine().step();
      EXPECT_EQ(frozen.evaluate(), expected);
    }
    EXPECT_EQ(digests_of(policy), reference);
    const PassScope pass = policy.engine().begin(Pass::evaluate);
    EXPECT_THROW(static_cast<void>(frozen.engine().begin(Pass::evaluate)), UsageError);
  });
}

// One rank's manifest is missing, because a copy is still running or forgot it: no call changes anything on any rank,
// and once it is back the run continues.
TEST_P(RanksTest, AManifestThatIsMissingForAMomentCostsNothing) {
  const int size = GetParam();
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, (directory / "store"));
  const auto trained = train_on(size, setup, ToyShape{}, 3)[0].digests;
  namespace fs = std::filesystem;
  const std::string manifest = directory / fmt::format("store/rank-{:05}.manifest", size - 1);
  fs::rename(manifest, directory / "aside");
  const auto contents = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(directory / "store"))
      files[entry.path().string()] = contents_of(entry.path());
    return files;
  };
  const auto before = contents();
  on_ranks(size, [&](int, const Runtime::MakeCommunicator& join) {
    ToyModel model(setup, join);
    EXPECT_THROW(model.initialize(), StoreError);
    EXPECT_THROW(model.restore(), StoreError);
    EXPECT_FALSE(model.find_commit());
  });
  EXPECT_EQ(contents(), before);
  fs::rename(directory / "aside", manifest);
  on_ranks(size, [&](int, const Runtime::MakeCommunicator& join) {
    ToyModel model(setup, join);
    EXPECT_EQ(model.restore().step, 3u);
    model.losses = trained.losses;
    EXPECT_EQ(digests_of(model), trained);
  });
}

// One rank's weights have a value that cannot be trained from, as of a damaged file.
TEST_P(RanksTest, InitialValuesThatAreRefusedLeaveNoStoreBehind) {
  const int size = GetParam();
  for (const std::size_t drives : {1u, 2u}) {
    const TempDirectory directory;
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, (directory / "store"));
    if (drives == 2) setup.engine.stripe_directories = {directory / "second"};
    on_ranks(size, [&](int rank, const Runtime::MakeCommunicator& join) {
      ToyModel model(setup, join);
      const bool last = rank == size - 1;
      EXPECT_THROW(model.initialize([&](ParameterId, std::uint64_t, std::span<float> out) {
        std::ranges::fill(out, last ? std::numeric_limits<float>::quiet_NaN() : 1.0f);
      }),
                   Error);
    });
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory.path()))
      EXPECT_TRUE(entry.is_directory()) << entry.path();
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, RanksTest, testing::Values(2, 3));

TEST(Ranks, OneRankOfThreadsEqualsSelf) {
  const ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  EXPECT_EQ(train_on(1, setup, ToyShape{}, 5)[0].digests, train_once(setup, ToyShape{}, 5));
}

TEST(Ranks, MoreRanksThanElements) {
  const ToyShape tiny{.matrices = {1, 2, 3}, .norm = 1, .tied = false};
  const ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  const TempDirectory directory;
  const auto reference = train_on(4, setup, tiny, 4)[0].digests;
  for (const RankRun& run : train_on(4, toy_setup(Placement::nvme, Placement::nvme, (directory / "store")), tiny, 4)) {
    EXPECT_EQ(run.digests, reference);
  }
}

TEST(Ranks, EachMovesAQuarterOfTheBytes) {
  const ToyShape shape{.matrices = {400000, 400000, 400000}, .norm = 64, .frozen = false, .tied = false};
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, (directory / "one"));
  setup.runtime.device_memory_bytes = 16 * kMiB;
  setup.engine.reuse_distance_elements = 0;
  setup.engine.sub_group_elements = 100000;
  const auto alone = train_on(1, setup, shape, 3);
  setup.engine.store_directory = (directory / "four");
  for (const RankRun& run : train_on(4, setup, shape, 3)) {
    for (const Link link : {Link::nvme_read, Link::nvme_write, Link::host_to_device, Link::device_to_host}) {
      const auto index = static_cast<std::size_t>(link);
      const double quarter = static_cast<double>(alone[0].links[index].bytes) / 4;
      EXPECT_NEAR(static_cast<double>(run.links[index].bytes), quarter, 0.02 * quarter) << link_name(link);
    }
    EXPECT_GT(run.links[static_cast<std::size_t>(Link::wire)].bytes, 0u);
  }
}

// Every rank gathers equal bytes, in another order: it would get half of another unit's weights.
TEST(Ranks, ARankThatTakesAnotherPathIsNamed) {
  const ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  const ToyShape shape{.matrices = {5000, 5000}, .frozen = false, .tied = false};
  EXPECT_THAT(
      [&] {
        on_ranks(2, [&](int rank, const Runtime::MakeCommunicator& join) {
          ToyModel model(setup, join, shape);
          Engine& engine = model.initialize();
          {
            const PassScope scope = engine.begin(Pass::evaluate);
            const std::size_t first = rank == 0 ? 0 : 1;
            for (const std::size_t u : {first, 1 - first})
              engine.gather(model.unit(u), model.stream()).release(model.stream());
          }
          engine.settle();  // no collective call follows
        });
      },
      testing::ThrowsMessage<CommError>(
          testing::AllOf(testing::HasSubstr("the ranks have diverged: rank 1 called all_gather of 'unit1'"),
                         testing::HasSubstr("rank 0 called all_gather of 'unit0'"))));
}

// Nothing is exchanged in a pass over weights that are all there. Its calls are compared before whatever call of all
// ranks comes next, also where the pass was left before its end.
TEST(Ranks, APassOfOtherCallsIsNoticedByTheNextCallOfAllRanks) {
  const ToyShape shape{.matrices = {5000, 5000}, .frozen = false, .tied = false};
  const auto noticed = [&](bool is_left, const std::function<void(ToyModel&)>& next) -> std::string {
    const TempDirectory directory;
    ToySetup setup = toy_setup(Placement::pinned, Placement::pinned, directory / "store");
    try {
      on_ranks(2, [&](int rank, const Runtime::MakeCommunicator& join) {
        ToyModel model(setup, join, shape);
        Engine& engine = model.initialize();
        for (const std::size_t first : {std::size_t{0}, static_cast<std::size_t>(rank)}) {
          const PassScope scope = engine.begin(Pass::evaluate);
          for (const std::size_t u : {first, 1 - first})
            engine.gather(model.unit(u), model.stream()).release(model.stream());
          if (is_left) engine.discard();
        }
        next(model);
      });
    } catch (const CommError& error) {
      return error.what();
    }
    return "nobody noticed";
  };
  std::vector<float> values(10, 0.5f);
  const auto reads = [&](ToyModel& model) {
    std::vector<float> found(10);
    model.engine().read(model.matrix(0), State::master, 0, found);
  };
  const auto writes = [&](ToyModel& model) { model.engine().write(model.matrix(0), State::master, 0, values); };
  const auto saves = [&](ToyModel& model) { model.engine().save("", {}); };
  const auto changes = [&](ToyModel& model) {
    model.engine().change_masters([](ParameterId, std::uint64_t, std::span<float>) {});
  };
  const auto begins = [&](ToyModel& model) { const PassScope scope = model.engine().begin(Pass::evaluate); };
  using Calls = std::vector<std::pair<std::string, std::function<void(ToyModel&)>>>;
  for (const bool is_left : {false, true})
    for (const auto& [call, make] :
         Calls{{"read()", reads}, {"write()", writes}, {"save()", saves}, {"change_masters()", changes}, {"", begins}})
      EXPECT_THAT(noticed(is_left, make),
                  testing::AllOf(testing::HasSubstr("the ranks have diverged: rank 1 is at 'a evaluate pass"),
                                 testing::HasSubstr(call), testing::HasSubstr("rank 1: 'unit 'unit1''")))
          << call << is_left;
}

// The error of a rank that made its engine in another way than the others.
template <typename Bring>
std::string refusal_of(const Bring& bring) {
  const TempDirectory directory;
  try {
    on_ranks(2, [&](int rank, const Runtime::MakeCommunicator& join) {
      ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
      bring(rank, setup, join);
    });
  } catch (const CommError& error) {
    return error.what();
  }
  return "nobody noticed";
}

TEST(Ranks, DifferentModelsAreNoticedAtTheStart) {
  const std::string refusal = refusal_of([](int rank, ToySetup& setup, const Runtime::MakeCommunicator& join) {
    ToyShape shape;
    if (rank == 1) shape.matrices.back() += 64;
    ToyModel(setup, join, shape).initialize();
  });
  EXPECT_THAT(refusal,
              testing::AllOf(testing::HasSubstr("rank 1 is at 'Engine::create(): "), testing::HasSubstr("units")));
}

TEST(Ranks, AParameterInAnotherGroupIsNoticedAtTheStart) {
  const std::string refusal = refusal_of([](int rank, ToySetup& setup, const Runtime::MakeCommunicator& join) {
    Runtime runtime(setup.runtime, join);
    Model model;
    const GroupId slow = model.add_group(GroupOptions{}), fast = model.add_group(GroupOptions{.learning_rate = 1});
    model.add_unit("a", {{.name = "a", .shape = {64}, .group = slow}, {.name = "b", .shape = {64}, .group = fast}});
    model.add_unit("c", {{.name = "c", .shape = {64}, .group = rank == 1 ? fast : slow}});
    Engine::create(runtime, setup.engine, model, [](ParameterId, std::uint64_t, std::span<float>) {});
  });
  EXPECT_THAT(refusal, testing::AllOf(testing::HasSubstr("c | c | parameter group 2"),
                                      testing::HasSubstr("c | c | parameter group 1")));
}

TEST(Ranks, DifferentBeginningsAreNoticed) {
  const std::string refusal = refusal_of([](int rank, ToySetup& setup, const Runtime::MakeCommunicator& join) {
    ToyModel model(setup, join);
    if (rank == 0)
      model.initialize();
    else
      model.restore();
  });
  EXPECT_THAT(refusal, testing::AllOf(testing::HasSubstr("rank 1 is at 'Engine::restore()'"),
                                      testing::HasSubstr("rank 0 at 'Engine::create()'")));
}

// As where one rank alone is started with --resume.
TEST(Ranks, OneThatLooksForACommitAloneIsNamed) {
  const auto named = [](const auto& look, const std::string& call) {
    const std::string refusal = refusal_of([&](int rank, ToySetup& setup, const Runtime::MakeCommunicator& join) {
      ToyModel model(setup, join);
      if (rank == 1) look(model.runtime(), setup.engine);
      model.initialize();
    });
    EXPECT_THAT(refusal, testing::AllOf(testing::HasSubstr("the ranks have diverged: rank 1 is at '" + call),
                                        testing::HasSubstr("rank 0 at 'Engine::create()'")));
  };
  named([](Runtime& runtime, const EngineOptions& o) { Engine::find_commit(runtime, o); }, "Engine::find_commit()");
  named([](Runtime& runtime, const EngineOptions& o) { Engine::find_checkpoints(runtime, o); },
        "Engine::find_checkpoints()");
}

TEST(Ranks, DifferentOrdersOfWorkAreNoticedAtTheStart) {
  const auto with = [](const auto& change) {
    return refusal_of([&](int rank, ToySetup& setup, const Runtime::MakeCommunicator& join) {
      if (rank == 1) change(setup.engine);
      ToyProgram model(setup, join);
    });
  };
  const auto says = [](const char* one, const char* other) {
    return testing::AllOf(testing::HasSubstr(one), testing::HasSubstr(other), testing::HasSubstr("rank 1 is at"));
  };
  EXPECT_THAT(with([](EngineOptions& options) { options.update_mode = UpdateMode::step; }),
              says("hoist.update_mode = step", "hoist.update_mode = forward"));
  EXPECT_THAT(with([](EngineOptions& options) { options.parameters = Placement::pinned; }),
              says("offload_param.device = cpu", "offload_param.device = nvme"));
  EXPECT_THAT(with([](EngineOptions& options) { options.optimizer = Placement::pinned; }),
              says("offload_optimizer.device = cpu", "offload_optimizer.device = nvme"));
  EXPECT_THAT(with([](EngineOptions& options) { options.optimizer_offload_ratio = 0.5; }),
              says("offload_optimizer.ratio = 0.5", "offload_optimizer.ratio = 1"));
  EXPECT_THAT(with([](EngineOptions& options) { options.commit_every = 3; }), says("every 3 steps", "every 1 step"));
  EXPECT_THAT(with([](EngineOptions& options) { options.loss_scale.scale = 8; }),
              says("fp16.loss_scale = 8", "fp16.loss_scale = 1"));
  EXPECT_THAT(with([](EngineOptions& options) { options.loss_scale.window = 10; }), "nobody noticed");
  EXPECT_THAT(with([](EngineOptions& options) { options.loss_scale.dynamic = true; }), testing::HasSubstr("dynamic"));
  EXPECT_THAT(with([](EngineOptions& options) { options.optimizer_defaults.initial_accumulator = 0.5; }),
              testing::HasSubstr("initial_accumulator_value = 0.5"));
  const std::vector<std::pair<const char*, void (*)(EngineOptions&)>> others{
      {"keep_steps", [](EngineOptions& o) { o.keep_steps = 2; }},
      {"gradient_accumulation_steps", [](EngineOptions& o) { o.micro_batches_max = 2; }},
      {"micro_batch_order", [](EngineOptions& o) { o.micro_batch_order = MicroBatchOrder::vertical; }},
      {"stage3_prefetch_bucket_size", [](EngineOptions& o) { o.prefetch_elements = 7; }},
      {"stage3_max_live_parameters", [](EngineOptions& o) { o.live_elements_max = 7; }},
      {"stage3_max_reuse_distance", [](EngineOptions& o) { o.reuse_distance_elements = 7; }},
      {"stage3_param_persistence_threshold", [](EngineOptions& o) { o.persistence_elements = 7; }},
      {"zero_hpz_partition_size", [](EngineOptions& o) { o.secondary_shard_ranks = 2; }},
      {"durability", [](EngineOptions& o) { o.durability = tiers::Durability::none; }}};
  for (const auto& [key, change] : others) EXPECT_THAT(with(change), testing::HasSubstr(key));
  // Each rank may use its own memory and drives as it wants.
  EXPECT_EQ(with([](EngineOptions& o) {
              o.optimizer_pinned_fraction = 0.5;
              o.parameters_pinned_fraction = 0.3;
              o.parameters_pinned_elements_max = 50000;
              o.sub_group_elements = 20000;
              o.update_buffer_count = 5;
              o.staging_buffer_count = 2;
              o.lock_timeout = std::chrono::seconds(3);
              o.caller_state_bytes_max = 4096;
            }),
            "nobody noticed");
  EXPECT_EQ(with([](EngineOptions&) {}), "nobody noticed");
}

// A rank with less memory on its device gathers fewer units at once, and then all do: in another order the ranks would
// wait for each other, or take one unit for another.
TEST(Ranks, WithMoreDeviceMemoryDoAsTheOneWithLeast) {
  ToyShape shape{.matrices = {}, .frozen = false, .tied = false};
  for (int i = 0; i < 6; ++i) shape.matrices.push_back(40000);
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.engine.persistence_elements = 0;
  setup.engine.prefetch_elements = 200000;
  const Digests reference = train_on(3, setup, shape, 4)[0].digests;
  std::vector<std::uint64_t> gather_bytes(3);
  std::vector<Digests> digests(3);
  on_ranks(3, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToySetup own = setup;
    own.runtime.comm_scratch_bytes = 256 * kKiB;
    own.runtime.device_memory_bytes = rank == 1 ? 640 * kKiB : 16 * kMiB;
    ToyModel model(own, join, shape);
    gather_bytes[static_cast<std::size_t>(rank)] = predict(own.runtime, own.engine, model.model(), 3).gather_bytes;
    model.initialize();
    model.train(1, 4);
    model.engine().settle();
    digests[static_cast<std::size_t>(rank)] = digests_of(model);
  });
  ASSERT_LT(gather_bytes[1], gather_bytes[0]);
  for (const Digests& each : digests) EXPECT_EQ(each, reference);
}

// Each rank steps its own shard: settings that differ would mix two trainings in one model without a word.
TEST(Ranks, DifferentSettingsAreNoticedAtTheStep) {
  bool abandons_evaluation = false;
  // `before_step`: what rank 2 calls between its second pass and step().
  const auto trained = [&](const auto& change_setup, const auto& change_engine,
                           const std::function<void(Engine&)>& before_step = nullptr) -> std::string {
    try {
      on_ranks(3, [&](int rank, const Runtime::MakeCommunicator& join) {
        ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
        if (rank == 2) change_setup(setup);
        ToyProgram model(setup, join);
        model.train(1, 2);
        if (rank == 2) change_engine(model.engine());
        model.pass(3);
        if (abandons_evaluation) {
          const PassScope left = model.engine().begin(Pass::evaluate);
          model.engine().discard();
        }
        if (rank == 2 && before_step) before_step(model.engine());
        model.engine().step();
      });
    } catch (const CommError& error) {
      return error.what();
    }
    return "nobody noticed";
  };
  const auto no_setup = [](ToySetup&) {};
  const auto no_engine = [](Engine&) {};
  EXPECT_THAT(trained(no_setup, [](Engine& engine) { engine.set_learning_rate(GroupId{}, 0.125); }),
              testing::AllOf(testing::HasSubstr("rank 2 is at"), testing::HasSubstr("learning rate 0.125")));
  EXPECT_THAT(trained([](ToySetup& setup) { setup.engine.gradient_clipping = 0.25; }, no_engine),
              testing::AllOf(testing::HasSubstr("rank 2 is at"), testing::HasSubstr("clipping 0.25")));
  const auto asks_for_the_norm = [](Engine& engine) { engine.gradient_norm(); };
  EXPECT_THAT(trained(no_setup, no_engine, asks_for_the_norm), testing::HasSubstr("gradient_norm()"));
  EXPECT_THAT(trained(no_setup, no_engine, [](Engine& engine) { engine.step({.gradient_norm_max = 0.125}); }),
              testing::HasSubstr("clipping 0.125"));
  EXPECT_THAT(trained([](ToySetup& setup) { setup.engine.optimizer_defaults.weight_decay = 0.5; }, no_engine),
              testing::AllOf(testing::HasSubstr("the ranks have diverged: rank 2"),
                             testing::HasSubstr(": rank 2: 'group 0:"), testing::HasSubstr("weight decay 0.5")));
  abandons_evaluation = true;
  EXPECT_THAT(trained(no_setup, [](Engine& engine) { engine.set_learning_rate(GroupId{}, 0.125); }),
              testing::HasSubstr("learning rate 0.125"));
  EXPECT_EQ(trained(no_setup, no_engine), "nobody noticed");
}

// The parts of two parameters would be taken for one, and those of two lists of values as well.
TEST(Ranks, DifferentReadsAndWritesAreNoticed) {
  const auto made = [](const std::function<void(int, ToyModel&)>& call) -> std::string {
    try {
      on_ranks(2, [&](int rank, const Runtime::MakeCommunicator& join) {
        ToyProgram model(toy_setup(Placement::pinned, Placement::pinned), join);
        call(rank, model);
      });
    } catch (const CommError& error) {
      return error.what();
    }
    return "nobody noticed";
  };
  std::vector<float> values(10, 0.5f);
  EXPECT_THAT(made([&](int rank, ToyModel& model) {
                std::vector<float> found(10);
                model.engine().read(model.matrix(static_cast<std::size_t>(rank)), State::master, 0, found);
              }),
              testing::AllOf(testing::HasSubstr("read() of master [0, 10) of 'unit0.matrix'"),
                             testing::HasSubstr("read() of master [0, 10) of 'unit1.matrix'")));
  EXPECT_THAT(made([&](int rank, ToyModel& model) {
                model.engine().write(model.matrix(0), State::master, 0,
                                     std::vector(10, 0.5f + static_cast<float>(rank)));
              }),
              testing::HasSubstr("write() of master [0, 10), values"));
  EXPECT_EQ(made([&](int, ToyModel& model) { model.engine().write(model.matrix(0), State::master, 0, values); }),
            "nobody noticed");
  const auto write_two = [&](ToyModel& model, std::span<const float> of_second) {
    const std::array units{model.unit(0), model.unit(1)};
    model.engine().write(units, [&](UnitId unit) {
      const bool is_second = unit == model.unit(1);
      return std::vector{StateChange{.parameter = model.matrix(is_second ? 1 : 0),
                                     .values = is_second ? of_second : std::span<const float>(values)}};
    });
    std::vector<float> found(10);
    model.engine().read(model.matrix(1), State::master, 0, found);
    EXPECT_EQ(found, values);
  };
  const std::vector<float> others(10, 1.5f);
  EXPECT_THAT(made([&](int rank, ToyModel& model) { write_two(model, rank == 0 ? values : others); }),
              testing::HasSubstr("write() of 2 ranges"));
  EXPECT_EQ(made([&](int, ToyModel& model) { write_two(model, values); }), "nobody noticed");
}

}  // namespace
}  // namespace hoist::test::ranks_test
