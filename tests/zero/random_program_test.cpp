// SPDX-License-Identifier: Apache-2.0
// Random programs on random models: passes in any order, abandoned passes, skipped steps, leases that outlive their
// pass, saves, restarts, sessions that resume with another number of ranks. With every setup a program ends in the bits
// of the plainest setup (plain_setup()), and sees the same weights, norms and states on the way. StoredModel reads from
// the store the state in which a session ended.
//
// Drawn as mathematics, once for both setups: units, types, shapes, groups, frozen and tied parameters, replicas; the
// optimizers, how they keep moments and remainders, rounding seeds; clipping, loss scale, schedule and rates; ranks;
// micro-batches and, where there are several, their order; what the program does.
//
// Drawn anew for every session, as the setup: all of EngineOptions and RuntimeOptions except
//  - device_ordinal, device kind `cuda`: need a GPU (tests/platform);
//  - communicator: ranks are threads here; MPI's are in mpi_test.cpp, norm groups in group_commit_test.cpp;
//  - make_aio_backend, aio_answer_timeout, comm_timeout, lock_timeout: what happens when something fails, which is
//    tests/crash and failing_rank_test.cpp;
//  - host_device.poison: always on, since it finds reads of memory that was never written.
// A store stays on the drives it was made on; durability `none` and update mode `backward` are drawn for programs that
// may use them. Budgets are ample, or the smallest that a refusal named.
//
// The test plays seeds from HOIST_TEST_FIRST_SEED (1) on: at least 8, and for at least HOIST_TEST_SECONDS (8).
// HOIST_TEST_SEED=N plays one seed. A failure prints the program and the setup, without the budgets that were found.
#include <cstdlib>
#include <iostream>

#include <gtest/gtest.h>

#include <hoist/core/digest.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

#include "random_player.hpp"
#include "toy_ranks.hpp"

namespace hoist::test::random_program_test {
namespace {

std::optional<std::uint64_t> number_in_environment(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? std::nullopt : std::optional(std::strtoull(text, nullptr, 10));
}

// Budgets are ample at first. A budget that shall be as small as possible starts at zero and is raised to what each
// refusal names.
class SetupWithBudgets {
 public:
  SetupWithBudgets(ToySetup setup, bool least_device, bool least_pinned) : setup_(std::move(setup)) {
    if (least_device) setup_.runtime.device_memory_bytes = setup_.runtime.comm_scratch_bytes + kBlockAlignment;
    if (least_pinned) setup_.runtime.pinned_memory_bytes = kBlockAlignment;
  }
  const ToySetup& setup() const { return setup_; }

  void note(const BudgetError& refusal) {
    const std::lock_guard lock(mutex_);
    std::uint64_t& need = refusal.need.key == "hoist.device_memory" ? device_need_ : pinned_need_;
    need = std::max(need, refusal.need.need_bytes);
  }
  // Raises the budgets to what refusals named. False: none is larger, so another attempt would fail alike.
  bool grow() {
    RuntimeOptions& runtime = setup_.runtime;
    const bool grows = device_need_ > runtime.device_memory_bytes || pinned_need_ > runtime.pinned_memory_bytes;
    runtime.device_memory_bytes = std::max(runtime.device_memory_bytes, device_need_);
    runtime.pinned_memory_bytes = std::max(runtime.pinned_memory_bytes, pinned_need_);
    return grows;
  }

 private:
  ToySetup setup_;
  std::mutex mutex_;
  std::uint64_t device_need_ = 0, pinned_need_ = 0;
};

std::vector<Digests> play(const Program& program, std::size_t session, SetupWithBudgets& budgeted, Journal& journal) {
  const int ranks = program.sessions[session].ranks;
  std::vector<Digests> digests(static_cast<std::size_t>(ranks));
  const auto play_once = [&] {
    on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
      std::optional<Player> player;
      try {
        player.emplace(program, session, budgeted.setup(), journal, join);
      } catch (const BudgetError& refusal) {
        budgeted.note(refusal);
        throw;
      }
      digests[static_cast<std::size_t>(rank)] = player->play();
    });
  };
  while (true) {
    try {
      play_once();
      return digests;
    } catch (const Error&) {
      if (!budgeted.grow()) throw;
    }
  }
}

bool is_stored(const Program& program, const ParameterSpec& spec, State state) {
  if (state == State::master) return true;
  const optim::OptimizerState kept = optim::state_of(program.groups[spec.group.index]);
  return spec.trainable && (state == State::moment1 ? optim::has_moment1(kept) : optim::has_moment2(kept));
}

// Tools find the bits of state_digest() in the store.
std::string stored_digest(StoredModel& stored, const Program& program, State state) {
  Digest digest;
  std::vector<float> values;
  std::size_t parameter = 0;
  for (const UnitPlan& unit : program.units) {
    for (const ParameterSpec& spec : unit.parameters) {
      values.resize(TensorView{.shape = spec.shape}.element_count());
      if (is_stored(program, spec, state)) {
        stored.read(parameter, state, 0, values);
        digest.update(std::as_bytes(std::span(values)));
      }
      ++parameter;
    }
  }
  return digest.hex();
}

void compare_store(const Program& program, const std::string& directory, const Snapshot& end) {
  StoredModel stored(directory);
  EXPECT_EQ(stored.step(), end.step);
  EXPECT_EQ(stored.world_size(), end.ranks);
  EXPECT_EQ(stored_digest(stored, program, State::master), end.state.master);
  EXPECT_EQ(stored_digest(stored, program, State::moment1), end.state.moment1);
  EXPECT_EQ(stored_digest(stored, program, State::moment2), end.state.moment2);
}

void compare(std::uint64_t seed) {
  const Program program = random_program(seed);
  const TempDirectory directory;
  Journal expected_journal, journal;
  for (std::size_t session = 0; session < program.sessions.size(); ++session) {
    SetupWithBudgets plain(plain_setup(program, directory.path().string()), false, false);
    const std::uint64_t tight = random_bits(seed ^ 0x716847u, session) % 8;
    SetupWithBudgets drawn(random_setup(program, seed, session, directory.path().string()), tight % 2 == 0,
                           tight % 3 == 0);
    const std::vector<Digests> expected = play(program, session, plain, expected_journal);
    if (testing::Test::HasFailure()) return;
    const std::vector<Digests> found = play(program, session, drawn, journal);
    for (std::size_t rank = 0; rank < found.size(); ++rank) EXPECT_EQ(found[rank], expected[rank]) << "rank " << rank;
    if (program.has_several_sessions()) compare_store(program, drawn.setup().engine.store_directory, journal.last);
    if (testing::Test::HasFailure()) return;
  }
}

void explain(std::uint64_t seed) {
  const Program program = random_program(seed);
  std::cout << "seed " << seed << "; HOIST_TEST_SEED=" << seed << " plays it alone\n" << describe(program);
  for (std::size_t s = 0; s < program.sessions.size(); ++s)
    std::cout << "session " << s << ": " << describe(random_setup(program, seed, s, "DIRECTORY")) << '\n';
}

// Ranks are threads, and a failure on them does not show this thread's SCOPED_TRACE. So the seed is printed here.
void compare_reporting(std::uint64_t seed) {
  try {
    compare(seed);
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  if (testing::Test::HasFailure()) explain(seed);
}

TEST(RandomProgram, EndsInTheSameBitsEverywhere) {
  if (const auto seed = number_in_environment("HOIST_TEST_SEED")) return compare_reporting(*seed);
  const auto seconds = number_in_environment("HOIST_TEST_SECONDS");
  const std::uint64_t first = number_in_environment("HOIST_TEST_FIRST_SEED").value_or(1);
  const TimePoint end = Clock::now() + std::chrono::seconds(seconds.value_or(8));
  std::uint64_t seed = first;
  for (; (seed < first + 8 || Clock::now() < end) && !HasFailure(); ++seed) {
    if (seconds) std::cout << "seed " << seed << std::endl;  // should it never end
    compare_reporting(seed);
  }
  RecordProperty("programs", std::to_string(seed - first));
}

}  // namespace
}  // namespace hoist::test::random_program_test
