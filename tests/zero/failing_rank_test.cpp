// SPDX-License-Identifier: Apache-2.0
// One rank fails for a reason of its own - its drive, its memory, its program - where the others would wait for it:
// they stop at once with that reason, and what is on the drives afterwards is a step that all ranks have, bit by bit.
#include <atomic>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>

#include <gmock/gmock.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/forwarding_communicator.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::failing_rank_test {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

constexpr std::chrono::minutes kTimeout{10};
constexpr std::chrono::seconds kAtOnce{30};  // more than the 5 s after which an update starts without a request
constexpr std::uint64_t kSteps = 6;
const ToyShape kShape{.matrices = {20000, 30001, 9973}, .norm = 97};

struct Ended {
  std::string error;            // empty: it did not fail
  bool by_others = false;       // a CommError
  std::int64_t committed = -1;  // the newest durable step it was told of
};

// Runs `body` on ranks that learn of each other's errors only through hoist. A rank's engine and runtime are destroyed
// before the exception that ends it is caught.
std::vector<Ended> run_ranks(int size, const ToySetup& setup, const std::function<void(int, ToyModel&)>& body,
                             const std::function<void(int, RuntimeOptions&)>& prepare = {}) {
  comm::ThreadGroup group(size);
  std::vector<Ended> ended(static_cast<std::size_t>(size));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Ended& mine = ended[static_cast<std::size_t>(rank)];
      RuntimeOptions options = setup.runtime;
      options.comm_timeout = kTimeout;
      if (prepare) prepare(rank, options);
      try {
        Runtime runtime(options, [&](const comm::CommunicatorOptions& o) { return group.join(rank, o); });
        ToyModel model(runtime, setup.engine, kShape);
        try {
          body(rank, model);
        } catch (...) {
          mine.committed = static_cast<std::int64_t>(model.engine().committed_step().value_or(0));
          throw;
        }
      } catch (const CommError& error) {
        mine.by_others = true;
        mine.error = error.what();
      } catch (const std::exception& error) {
        mine.error = error.what();
      }
    });
  }
  threads.clear();
  return ended;
}

// Expects that the failure of rank `failed` stopped all other ranks, and that their errors repeat its message.
void expect_told(const std::vector<Ended>& ended, int failed, const testing::Matcher<std::string>& words) {
  for (std::size_t rank = 0; rank < ended.size(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    EXPECT_THAT(ended[rank].error, words);
    if (static_cast<int>(rank) == failed) continue;
    EXPECT_TRUE(ended[rank].by_others);
    EXPECT_THAT(ended[rank].error, HasSubstr("rank " + std::to_string(failed)));
  }
}

// --- the drive ------------------------------------------------------------------------------------------------------

struct DriveCase {
  std::string name;
  aio::Operation operation;
  UpdateMode mode;
  Placement parameters;
};

class FailingDrive : public testing::TestWithParam<std::tuple<DriveCase, int>> {};

// From the third step on, the n-th block of the given kind and all later ones fail. The seed draws n, so the failure
// hits a fetch, an update or a commit.
TEST_P(FailingDrive, StopsAllRanksAtOnceAndLosesNoDurableStep) {
  const auto& drive = std::get<0>(GetParam());
  const int size = std::get<1>(GetParam());
  const std::vector<Digests>& reference = digests_by_step(size, kSteps, kShape);
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const int failing = static_cast<int>(random_bits(seed, 1) % static_cast<std::uint64_t>(size));
    const TempDirectory directory;
    ToySetup setup = toy_setup(drive.parameters, Placement::nvme, directory / "store");
    setup.engine.update_mode = drive.mode;
    setup.runtime.host_device.chaos_seed = seed % 2;
    const auto faults = std::make_shared<Faults>(seed);
    const TimePoint start = Clock::now();
    const auto ended = run_ranks(
        size, setup,
        [&](int rank, ToyModel& model) {
          model.initialize();
          model.train(1, 2);
          if (rank == failing)
            faults->add({.operation = drive.operation, .first = random_bits(seed, 2) % 7, .count = Faults::kForever});
          model.train(3, kSteps);
          model.engine().settle();
        },
        [&](int rank, RuntimeOptions& options) {
          if (rank != failing) return;
          options.make_aio_backend = [&](const aio::DriveQueueOptions& io) { return make_faulty_backend(io, faults); };
        });
    EXPECT_LT(Clock::now() - start, kAtOnce);
    EXPECT_GT(faults->hits(Fault::Kind::error), 0u);
    expect_told(ended, failing, HasSubstr("Input/output error"));

    // Every rank finds one of the steps that were taken, and no step that was reported durable is lost.
    std::int64_t durable = 0;
    for (const Ended& rank : ended) durable = std::max(durable, rank.committed);
    const auto resumed = run_ranks(size, setup, [&](int, ToyModel& model) {
      const std::uint64_t step = model.restore().step;
      EXPECT_GE(static_cast<std::int64_t>(step), durable);
      ASSERT_LE(step, kSteps);
      EXPECT_EQ(digests_of(model), reference[step]) << "step " << step;
    });
    for (const Ended& rank : resumed) EXPECT_EQ(rank.error, "");
  }
}

std::vector<DriveCase> drive_cases() {
  std::vector<DriveCase> cases;
  for (const UpdateMode mode : {UpdateMode::step, UpdateMode::forward}) {
    const std::string in = mode == UpdateMode::step ? "Step" : "Forward";
    cases.push_back({"Read" + in, aio::Operation::read, mode, Placement::nvme});
    cases.push_back({"Write" + in, aio::Operation::write, mode, Placement::nvme});
    cases.push_back({"Sync" + in, aio::Operation::sync, mode, Placement::nvme});
    cases.push_back({"ReadOfStates" + in, aio::Operation::read, mode, Placement::pinned});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Operations, FailingDrive,
                         testing::Combine(testing::ValuesIn(drive_cases()), testing::Values(2, 4)),
                         [](const auto& one) {
                           return std::get<0>(one.param).name + "On" + std::to_string(std::get<1>(one.param));
                         });

// --- the program ----------------------------------------------------------------------------------------------------

class FailingProgram : public testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }
  // Trains a step, then calls `fail` on the last rank, and trains on on the others.
  std::vector<Ended> run(const std::function<void(ToyModel&)>& fail, ToySetup setup) {
    const TimePoint start = Clock::now();
    const auto ended = run_ranks(size(), setup, [&](int rank, ToyModel& model) {
      Engine& engine = model.initialize();
      model.train(1, 1);
      if (rank == size() - 1) fail(model);
      model.train(2, kSteps);
      engine.settle();
    });
    EXPECT_LT(Clock::now() - start, kAtOnce);
    return ended;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, FailingProgram, testing::Values(2, 3, 4), testing::PrintToStringParamName());

// No host call fails here. The kernel fails, and the reduction of the gradient that it should make never starts.
TEST_P(FailingProgram, AKernelThatThrowsIsToldInItsWords) {
  for (const bool in_backward : {false, true}) {
    const auto fail = [&](ToyModel& model) {
      (in_backward ? model.in_backward : model.in_forward) = [&](std::size_t unit) {
        if (unit == 1) model.stream().launch("kernel", [] { throw Error("illegal instruction of kernel 7"); });
      };
    };
    const auto ended = run(fail, toy_setup(Placement::pinned, Placement::pinned));
    expect_told(ended, size() - 1, HasSubstr("illegal instruction of kernel 7"));
    for (int rank = 0; rank + 1 < size(); ++rank)
      EXPECT_THAT(ended[static_cast<std::size_t>(rank)].error, HasSubstr("unit"));
  }
}

TEST_P(FailingProgram, ARefusedBudgetThatEndsTheProgramIsTold) {
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.runtime.comm_scratch_bytes = 64 * kKiB;
  setup.runtime.device_memory_bytes = 260 * kKiB;  // two of the three units fit
  const auto hold_everything = [&](ToyModel& model) {
    const PassScope scope = model.engine().begin(Pass::train);
    std::vector<Lease> leases;
    for (std::size_t unit = 0; unit < kShape.matrices.size(); ++unit)
      leases.push_back(model.engine().gather(model.unit(unit), model.stream()));
    FAIL() << "there is room for all units";
  };
  const auto ended = run(hold_everything, setup);
  EXPECT_THAT(ended.back().error, HasSubstr("hoist.device_memory"));
  EXPECT_FALSE(ended.back().by_others);
  expect_told(ended, size() - 1, HasSubstr("hoist.device_memory"));
}

// A refusal that the program catches does not reach the other ranks.
TEST_P(FailingProgram, ARefusalThatTheProgramSurvivesIsNobodysBusiness) {
  const auto refused = [](ToyModel& model) { EXPECT_THROW(model.engine().step(), UsageError); };
  for (const Ended& rank : run(refused, toy_setup(Placement::pinned, Placement::pinned))) EXPECT_EQ(rank.error, "");
}

TEST_P(FailingProgram, OneThatGivesUpIsToldInItsWords) {
  const auto give_up = [](ToyModel& model) {
    model.engine().abandon("there is no more data");
    model.engine().abandon("a second reason");
  };
  const auto ended = run(give_up, toy_setup(Placement::pinned, Placement::pinned));
  expect_told(ended, size() - 1, HasSubstr("its program gave up: there is no more data"));
}

// A data loader fails between two steps or two micro-batches, a loss function before the step.
TEST_P(FailingProgram, AnExceptionBetweenPassesIsToldAtOnce) {
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.engine.micro_batches_max = 2;
  for (const int passes : {0, 1, 2}) {
    SCOPED_TRACE(passes);
    const auto throw_after_passes = [&](ToyModel& model) {
      for (int pass = 0; pass < passes; ++pass) model.pass(2, {.micro_batch = pass, .micro_batches = 2});
      throw Error("there is no more data");
    };
    const TimePoint start = Clock::now();
    const auto ended = run_ranks(size(), setup, [&](int rank, ToyModel& model) {
      model.initialize();
      model.micro_batches = 2;
      model.train(1, 1);
      if (rank == size() - 1) throw_after_passes(model);
      model.train(2, kSteps);
    });
    EXPECT_LT(Clock::now() - start, kAtOnce);
    EXPECT_EQ(ended.back().error, "there is no more data");
    for (int rank = 0; rank + 1 < size(); ++rank)
      EXPECT_THAT(ended[static_cast<std::size_t>(rank)].error, HasSubstr("its program ended the engine"));
  }
}

// All ranks leave a pass and drop their engines alike: the step decided before is carried out and durable.
TEST_P(FailingProgram, AStepThatWasTakenSurvivesAnExceptionOnAllRanks) {
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  const auto ended = run_ranks(size(), setup, [&](int, ToyModel& model) {
    model.initialize();
    model.train(1, 2);
    model.in_forward = [](std::size_t unit) {
      if (unit == 0) throw Error("a batch that no rank can read");
    };
    model.pass(3);
  });
  // The engine of run_ranks ends while its exception is on the way.
  for (const Ended& rank : ended) EXPECT_EQ(rank.error, "a batch that no rank can read");
  const auto resumed = run_ranks(size(), setup, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 2u); });
  for (const Ended& rank : resumed) EXPECT_EQ(rank.error, "");
}

// --- the start ------------------------------------------------------------------------------------------------------

// A communicator that fails to duplicate itself for lack of memory.
class ShortOfMemory final : public ForwardingCommunicator {
 public:
  explicit ShortOfMemory(std::unique_ptr<comm::Communicator> inner) : ForwardingCommunicator(std::move(inner)) {}
  std::unique_ptr<comm::Communicator> duplicate() override { throw Error("no memory for a second channel"); }
};

class FailingStart : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Calls, FailingStart, testing::Bool(),
                         [](const auto& fresh) { return fresh.param ? "Initialize" : "Restore"; });

// The failing call is one after which ranks do not tell each other whether they succeeded.
TEST_P(FailingStart, IsToldToAllRanks) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  if (!GetParam()) train_then(3, setup, kShape, 1, [](int, ToyModel&) {});
  setup.runtime.comm_timeout = std::chrono::seconds(5);
  std::vector<Ended> ended(3);
  on_ranks(3, [&](int rank, const Runtime::MakeCommunicator& join) {
    Ended& mine = ended[static_cast<std::size_t>(rank)];
    Runtime runtime(setup.runtime, [&](const comm::CommunicatorOptions& o) -> std::unique_ptr<comm::Communicator> {
      auto communicator = join(o);
      if (rank == 1) return std::make_unique<ShortOfMemory>(std::move(communicator));
      return communicator;
    });
    ToyModel model(runtime, setup.engine, kShape);
    try {
      GetParam() ? void(model.initialize()) : void(model.restore());
    } catch (const CommError& error) {
      mine.by_others = true;
      mine.error = error.what();
    } catch (const Error& error) {
      mine.error = error.what();
    }
  });
  expect_told(ended, 1, HasSubstr("no memory for a second channel"));
}

// Ranks do exchange this refusal, so all of them may try again.
TEST(FailingStartOfOne, ACallerStateThatOneRankHasNoRoomForIsRefusedByAll) {
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.engine.caller_state_bytes_max = 100;
  setup.runtime.comm_timeout = std::chrono::seconds(5);
  on_ranks(3, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToyModel model(setup, join, kShape);
    const std::vector<std::byte> state(rank == 1 ? 101 : 100);
    try {
      model.initialize(state);
      ADD_FAILURE() << "initialized rank " << rank;
    } catch (const UsageError&) {
      EXPECT_EQ(rank, 1);
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 1"), HasSubstr("101 bytes")));
    }
    model.initialize();
    model.train(1, 2);
  });
}

// --- a caller state that is too long --------------------------------------------------------------------------------

struct LongState {
  const char* name;
  UpdateMode mode;
  std::function<void(ToyModel&, std::span<const std::byte>)>
      call;  // between the steps 1 and 3; takes step 2, or saves it
};
void PrintTo(const LongState& c, std::ostream* out) { *out << c.name; }

void take_second_step(ToyModel& model, std::span<const std::byte> state) {
  model.engine().step({.caller_state = state});
}
void save_second_step(ToyModel& model, std::span<const std::byte> state) { model.engine().save("two", state).wait(); }
void replace_second_step(ToyModel& model, std::span<const std::byte> state) {
  model.engine().replace_state({.masters = model.fill(), .step = 2}, state);
}

class LongCallerState : public testing::TestWithParam<LongState> {
 protected:
  static bool is_step() { return std::string(GetParam().name).starts_with("Step"); }
  static ToySetup setup(const std::string& directory) {
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory);
    setup.engine.caller_state_bytes_max = 100;
    setup.engine.keep_steps = 1;
    setup.engine.update_mode = GetParam().mode;
    setup.engine.gradient_clipping = 0;  // mode backward cannot clip
    setup.runtime.comm_timeout = std::chrono::seconds(20);
    return setup;
  }
  // Up to the third step; where `refused` >= 0, that rank's state is too long at first.
  static Digests train(ToyModel& model, int rank, int refused) {
    model.initialize();
    model.train(1, 1);
    model.pass(2);
    if (!is_step()) model.engine().step();
    if (refused >= 0) {
      const std::vector<std::byte> state(rank == refused ? 101 : 100);
      try {
        GetParam().call(model, state);
        ADD_FAILURE() << "rank " << rank << " was not refused";
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("101 bytes"), HasSubstr("raise hoist.caller_state_max")));
        const std::string who = rank == refused ? "" : "rank " + std::to_string(refused);
        EXPECT_THAT(error.what(), HasSubstr(who));
      }
    }
    GetParam().call(model, std::vector<std::byte>(100));
    model.train(3, 3);
    return digests_of(model);
  }
};

// Every rank is told at once, the state is as before, and all may try again.
TEST_P(LongCallerState, OfOneRankIsRefusedByAll) {
  const TempDirectory directory;
  const TimePoint start = Clock::now();
  std::vector<Digests> ends(2);
  for (const int refused : {-1, 1}) {
    const ToySetup used = setup(directory / (refused < 0 ? "undisturbed" : "refused"));
    on_ranks(3, [&](int rank, const Runtime::MakeCommunicator& join) {
      ToyModel model(used, join, kShape);
      const Digests mine = train(model, rank, refused);
      if (rank == 0) ends[refused < 0 ? 0 : 1] = mine;
    });
  }
  EXPECT_EQ(ends[1], ends[0]);
  EXPECT_LT(Clock::now() - start, kAtOnce);
}

TEST_P(LongCallerState, OfOneGroupIsRefusedByTheWholeJob) {
  const TempDirectory directory;
  on_groups({2, 2}, [&](int group, int rank, const Runtime::Groups& groups) {
    const ToySetup used = setup(directory / std::to_string(group));
    ToyModel model(used, groups, kShape);
    train(model, model.runtime().norm_group().rank(), 3);
    EXPECT_EQ(rank, model.runtime().rank());
  });
}

INSTANTIATE_TEST_SUITE_P(Calls, LongCallerState,
                         testing::Values(LongState{"StepInStep", UpdateMode::step, take_second_step},
                                         LongState{"StepInForward", UpdateMode::forward, take_second_step},
                                         LongState{"StepInBackward", UpdateMode::backward, take_second_step},
                                         LongState{"Save", UpdateMode::forward, save_second_step},
                                         LongState{"ReplaceState", UpdateMode::forward, replace_second_step}),
                         [](const auto& one) { return one.param.name; });

// --- groups ---------------------------------------------------------------------------------------------------------

// Two slices of two ranks each, in one norm group.
std::vector<Ended> run_slices(ToySetup setup, const std::function<void(int, Runtime&, ToyModel&)>& body) {
  comm::ThreadGroup all(4), slice0(2), slice1(2);
  std::vector<Ended> ended(4);
  std::vector<std::jthread> threads;
  setup.runtime.comm_timeout = kTimeout;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      const Runtime::Groups groups{
          .sharding = [&](const auto& o) { return (rank / 2 == 0 ? slice0 : slice1).join(rank % 2, o); },
          .norm = [&](const auto& o) { return all.join(rank, o); }};
      try {
        ToyModel model(setup, groups, kShape);
        body(rank, model.runtime(), model);
      } catch (const std::exception& error) {
        ended[static_cast<std::size_t>(rank)].error = error.what();
      }
    });
  }
  threads.clear();
  return ended;
}

// The slice whose ranks are all well waits for the norm of the other slice.
TEST(FailingGroup, TheWholeNormGroupIsTold) {
  const TimePoint start = Clock::now();
  const auto ended =
      run_slices(toy_setup(Placement::pinned, Placement::pinned), [](int rank, Runtime&, ToyModel& model) {
        model.initialize();
        model.train(1, 1);
        if (rank == 3) model.engine().abandon("slice 1 is out of data");
        model.train(2, kSteps);
      });
  EXPECT_LT(Clock::now() - start, kAtOnce);
  for (const Ended& rank : ended) EXPECT_THAT(rank.error, HasSubstr("slice 1 is out of data"));
}

// Every rank learns of it from the norm, so no rank has to abort an operation in which others may still wait.
TEST(FailingGroup, AStepThatCannotBeTakenIsOneDecisionOfTheNormGroup) {
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.engine.update_mode = UpdateMode::backward;
  setup.engine.gradient_clipping = 0;
  const auto ended = run_slices(setup, [](int rank, Runtime& runtime, ToyModel& model) {
    model.initialize();
    model.train(1, 2);
    if (rank == 2) model.gradient_scale = std::numeric_limits<float>::infinity();
    model.pass(3);
    try {
      model.engine().step();
      ADD_FAILURE() << "a step without a number was taken on rank " << rank;
    } catch (const CommError&) {
      throw;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("a gradient is not finite"));
    }
    runtime.communicator().barrier();
    runtime.norm_group().barrier();
  });
  for (const Ended& rank : ended) EXPECT_EQ(rank.error, "");
}

}  // namespace
}  // namespace hoist::test::failing_rank_test
