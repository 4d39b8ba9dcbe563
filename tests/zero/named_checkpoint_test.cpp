// SPDX-License-Identifier: Apache-2.0
// Steps that save() keeps under names, and commits at every N-th step: whatever the placement, going back to a kept or
// committed step and training on ends in the bits of a run that was never interrupted.
#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/aio/file.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tests/support/counting_backend.hpp>
#include <hoist/tests/support/damage.hpp>
#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/support/message_of.hpp>
#include <hoist/tiers/detail/manifest_view.hpp>
#include <hoist/tiers/store_format.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/checkpoint/verification.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::named_checkpoint_test {
namespace {

using testing::HasSubstr;

struct Cell {
  const char* name;
  Placement parameters, optimizer;
  UpdateMode mode;
  int ranks = 1;
  unsigned commit_every = 1;
  double pinned_fraction = 0, pinned_weights = 0;
};

constexpr std::uint64_t kSteps = 11;

std::string bytes_to_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::span<const std::byte> text_to_bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

class NamedCheckpointTest : public testing::TestWithParam<Cell> {
 protected:
  NamedCheckpointTest() {
    setup_.engine.store_directory = directory_ / "store";
    setup_.engine.update_mode = GetParam().mode;
    setup_.engine.keep_steps = 2;
    setup_.engine.optimizer_pinned_fraction = GetParam().pinned_fraction;
    setup_.engine.parameters_pinned_fraction = GetParam().pinned_weights;
    if (on_nvme()) setup_.engine.commit_every = GetParam().commit_every;
  }

  bool on_nvme() const { return GetParam().parameters == Placement::nvme || GetParam().optimizer == Placement::nvme; }

  void on_engines(const std::function<void(int rank, ToyModel&)>& body) {
    on_ranks(GetParam().ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
      ToyModel model(setup_, join);
      body(rank, model);
    });
  }

  TempDirectory directory_;
  const std::vector<Digests>& expected_at_ = digests_by_step(GetParam().ranks, kSteps);
  ToySetup setup_ = toy_setup(GetParam().parameters, GetParam().optimizer);
};

TEST_P(NamedCheckpointTest, GoingBackAndTrainingOnEndsInTheSameBits) {
  on_engines([&](int rank, ToyModel& model) {
    model.initialize();
    std::vector<Completion> saves;
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      model.train(step, step);
      if (step % 3 != 1) continue;  // 1, 4, 7, 10
      const std::string state = "state " + std::to_string(step) + " of rank " + std::to_string(rank);
      saves.push_back(model.engine().save("s" + std::to_string(step), text_to_bytes(state)));
    }
    for (const Completion& save : saves) save.wait();
  });
  for (const std::uint64_t step : {10u, 7u, 7u, 10u}) {
    on_engines([&](int rank, ToyModel& model) {
      const auto kept = model.find_checkpoints();
      ASSERT_EQ(kept.size(), 2u);
      EXPECT_EQ(kept[0].name, "s7");
      EXPECT_EQ(kept[1].step, 10u);
      const RestoreReport report = model.restore({.from = "s" + std::to_string(step)});
      EXPECT_EQ(report.step, step);
      EXPECT_EQ(bytes_to_text(report.caller_state),
                "state " + std::to_string(step) + " of rank " + std::to_string(rank));
      EXPECT_EQ(state_digests(model), expected_at_[step]);
      model.train(step + 1, kSteps);
      EXPECT_EQ(state_digests(model), expected_at_[kSteps]);
    });
  }
}

TEST_P(NamedCheckpointTest, ASaveIsWhatTheStateWasWhenItWasAskedFor) {
  on_engines([&](int, ToyModel& model) {
    model.initialize();
    model.train(1, 4);
    const Completion saved = model.engine().save("four", {});
    model.train(5, 6);  // while the save is running
    saved.wait();
  });
  if (GetParam().ranks == 1) {
    const StoredModel stored(setup_.engine.store_directory, {.from = "four"});
    EXPECT_EQ(stored.step(), 4u);
  }
  on_engines([&](int, ToyModel& model) {
    model.restore({.from = "four"});
    EXPECT_EQ(state_digests(model), expected_at_[4]);
  });
}

// Whoever goes back gives up the newer commits: not for a checkpoint that is not whole.
// As after a save without a name: what the program knew at the save is not lost with the process.
TEST_P(NamedCheckpointTest, ARestoreWithoutANameFindsTheCallerStateOfTheSave) {
  for (const bool writes : {false, true}) {
    std::filesystem::remove_all(setup_.engine.store_directory);
    on_engines([&](int rank, ToyModel& model) {
      model.initialize();
      model.train(1, 4);
      const std::string state = fmt::format("epoch 1 of rank {}", rank);
      const Completion saved = model.engine().save("epoch-1", text_to_bytes(state));
      if (writes) {  // a commit of its own, which has the caller state of the save
        std::vector<float> values(2);
        model.engine().read(model.matrix(2), State::master, 7, values);
        model.engine().write(model.matrix(2), State::master, 7, values);
      }
      model.engine().settle();
      saved.wait();
    });
    on_engines([&](int rank, ToyModel& model) {
      const RestoreReport report = model.restore({});
      EXPECT_EQ(report.step, 4u);
      EXPECT_EQ(bytes_to_text(report.caller_state), fmt::format("epoch 1 of rank {}", rank));
      EXPECT_EQ(state_digests(model), expected_at_[4]);
      model.train(5, kSteps);
      EXPECT_EQ(state_digests(model), expected_at_[kSteps]);
    });
  }
}

TEST_P(NamedCheckpointTest, GoingBackToADamagedOneChangesNothing) {
  on_engines([&](int, ToyModel& model) {
    Engine& engine = model.initialize();
    model.train(1, 2);
    engine.save("kept", {}).wait();
    model.train(3, 6);
    engine.save("", {}).wait();
  });
  const int damaged = GetParam().ranks - 1;  // the part of one rank
  const std::string data = fmt::format("{}/rank-{:05}.data", setup_.engine.store_directory, damaged);
  const auto is_sound = [&](const std::string& name) {
    for (const Verification& found : verify_job(std::vector{setup_.engine.store_directory}))
      if (found.name == name) return found.is_sound();
    return false;
  };
  for (std::uint64_t offset = 37;; offset += 8192) {  // bytes that only the checkpoint holds
    ASSERT_LT(offset, std::filesystem::file_size(data));
    flip_bits(data, offset);
    if (is_sound("") && !is_sound("kept")) break;
    flip_bits(data, offset);
  }
  on_engines([&](int rank, ToyModel& model) {
    const auto go_back = [&] { model.restore({.from = "kept"}); };
    if (rank == damaged)
      EXPECT_THAT(go_back,
                  testing::ThrowsMessage<CorruptionError>(HasSubstr("the run goes on from its newest commit")));
    else
      EXPECT_THAT(go_back, testing::ThrowsMessage<Error>(HasSubstr("corrupt ")));
    EXPECT_EQ(model.restore().step, 6u);  // in the same runtime
    model.train(7, 8);
    EXPECT_EQ(state_digests(model), expected_at_[8]);
  });
}

TEST_P(NamedCheckpointTest, AProgramThatDoesNotAcceptWhatIsFoundChangesNothing) {
  on_engines([&](int, ToyModel& model) {
    Engine& engine = model.initialize();
    model.train(1, 2);
    engine.save("kept", text_to_bytes("kept")).wait();
    model.train(3, 6);
    engine.save("", {}).wait();
  });
  on_engines([&](int, ToyModel& model) {
    const auto refuse = [](const RestoreReport& found) {
      EXPECT_EQ(found.step, 2u);
      throw UsageError("not " + bytes_to_text(found.caller_state));
    };
    EXPECT_THAT([&] { model.restore({.from = "kept", .accept = refuse}); },
                testing::ThrowsMessage<UsageError>(testing::StrEq("not kept")));
  });
  on_engines([&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 6u); });
}

// A process that is killed after a save, before the checkpoint that it replaces is removed, leaves one more than there
// is room for. The run goes on in the same store.
TEST_P(NamedCheckpointTest, ASaveThatWasKilledLeavesTheStoreInPlace) {
  setup_.engine.keep_steps = 1;
  const auto manifest_of = [&](int rank) {
    return fmt::format("{}/rank-{:05}.manifest", setup_.engine.store_directory, rank);
  };
  std::vector<std::string> before(static_cast<std::size_t>(GetParam().ranks));
  on_engines([&](int rank, ToyModel& model) {
    Engine& engine = model.initialize();
    model.train(1, 2);
    engine.save("one", {}).wait();
    before[static_cast<std::size_t>(rank)] = contents_of(manifest_of(rank));
    model.train(3, 4);
    engine.save("two", {}).wait();
  });
  for (int rank = 0; rank < GetParam().ranks; ++rank) {
    const tiers::Superblock superblock = *tiers::detail::view_superblock(manifest_of(rank)).superblock;
    std::string now = contents_of(manifest_of(rank));
    const std::string& then = before[static_cast<std::size_t>(rank)];
    int put_back = 0;
    for (std::uint32_t slot = tiers::kSlotCount; slot < superblock.slot_count(); ++slot) {
      const auto image = [&](const std::string& manifest) {
        return std::as_bytes(std::span(manifest)).subspan(superblock.slot_offset(slot), superblock.slot_bytes());
      };
      using State = tiers::SlotCheck::State;
      if (tiers::check_slot(image(now), superblock).state == State::valid) continue;
      if (tiers::check_slot(image(then), superblock).state != State::valid) continue;
      now.replace(superblock.slot_offset(slot), superblock.slot_bytes(), then, superblock.slot_offset(slot),
                  superblock.slot_bytes());
      ++put_back;
    }
    ASSERT_EQ(put_back, 1);
    std::ofstream(manifest_of(rank), std::ios::binary) << now;
  }
  on_engines([&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 4u);
    EXPECT_EQ(state_digests(model), expected_at_[4]);
    const auto kept = model.find_checkpoints();
    ASSERT_EQ(kept.size(), 1u);
    EXPECT_EQ(kept[0].name, "two");
  });
  EXPECT_EQ(detail::store_directories(setup_.engine.store_directory).size(), 1u);
}

TEST_P(NamedCheckpointTest, UnknownAndImpossibleNamesAreRefused) {
  on_engines([&](int, ToyModel& model) {
    Engine& engine = model.initialize();
    model.train(1, 2);
    EXPECT_THROW(engine.save(std::string(48, 'x'), {}), UsageError);
    EXPECT_THROW(engine.save("tab\t", {}), UsageError);
    engine.save("two", {}).wait();
    model.train(3, 3);
  });
  on_engines([&](int, ToyModel& model) {
    EXPECT_THAT(
        [&] { model.restore({.from = "three"}); },
        testing::ThrowsMessage<StoreError>(HasSubstr("has no named checkpoint 'three'; it has 'two' (step 2)")));
    model.restore({.from = "two"});  // nothing is left of the refused one
    model.train(3, 3);
  });
}

// A run that ends without saving comes back at its last commit.
TEST_P(NamedCheckpointTest, WithoutASaveTheLastCommitCounts) {
  if (!on_nvme()) GTEST_SKIP() << "without NVMe only saves are commits";
  on_engines([&](int, ToyModel& model) {
    model.initialize(text_to_bytes("begin"));
    Engine& engine = model.engine();
    model.train(1, 8);
    engine.settle();
    const std::uint64_t committed = 8 - 8 % GetParam().commit_every;
    EXPECT_EQ(engine.committed_step(), committed);
  });
  on_engines([&](int, ToyModel& model) {
    const std::uint64_t step = model.restore().step;
    EXPECT_EQ(step, 8 - 8 % GetParam().commit_every);
    model.train(step + 1, kSteps);
    EXPECT_EQ(state_digests(model), expected_at_[kSteps]);
  });
}

TEST_P(NamedCheckpointTest, WritesBetweenCommitsCommitWhatWasTrained) {
  if (!on_nvme()) GTEST_SKIP() << "without NVMe only saves are commits";
  Digests written;
  on_engines([&](int rank, ToyModel& model) {
    Engine& engine = model.initialize();
    model.train(1, 5);
    engine.write(model.matrix(2), State::master, 7, std::vector<float>{1.5f, -2.25f});
    EXPECT_EQ(engine.committed_step(), 5u);
    Digests mine = digests_of(model);
    if (rank == 0) written = mine;
    model.train(6, 6);
  });
  on_engines([&](int, ToyModel& model) {
    const RestoreReport report = model.restore();
    // The state that the program gave to that step, not to the last one that was due to be committed.
    std::uint64_t state = 0;
    ASSERT_EQ(report.caller_state.size(), sizeof state);
    std::memcpy(&state, report.caller_state.data(), sizeof state);
    EXPECT_EQ(state, report.step);
    if (report.step != 5) return;  // step 6 was a commit
    Digests found = digests_of(model);
    found.losses = written.losses;
    EXPECT_EQ(found, written);
  });
}

TEST_P(NamedCheckpointTest, ASecondSaveOfTheSameStateMovesNoData) {
  if (on_nvme()) GTEST_SKIP() << "there a step's own commit is kept";
  std::atomic<std::uint64_t> written{0};
  setup_.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& options) {
    return std::make_unique<CountingBackend>(aio::make_backend(options), aio::Operation::write, written);
  };
  on_engines([&](int, ToyModel& model) {
    Engine& engine = model.initialize();
    const auto bytes_of = [&](const std::function<void()>& call) {
      engine.runtime().communicator().barrier();
      const std::uint64_t before = written;
      engine.runtime().communicator().barrier();
      call();
      engine.runtime().communicator().barrier();
      return written - before;
    };
    const auto save = [&](const char* name, const std::string& state) {
      return bytes_of([&] { engine.save(name, text_to_bytes(state)).wait(); });
    };
    model.train(1, 4);
    EXPECT_GT(save("four", "first"), 0u);
    EXPECT_EQ(save("four again", "second"), 0u);
    model.train(5, 5);
    EXPECT_GT(save("", "third"), 0u);
    std::array<float, 3> values{0.5f, 0.25f, 0.125f};
    engine.write(model.matrix(0), State::master, 0, values);
    EXPECT_GT(save("", "fourth"), 0u);
  });
  on_engines([&](int, ToyModel& model) {
    EXPECT_EQ(bytes_to_text(model.restore({.from = "four again"}).caller_state), "second");
    EXPECT_EQ(state_digests(model), expected_at_[4]);
  });
}

TEST_P(NamedCheckpointTest, AnUnnamedSaveCommitsAndKeepsNothing) {
  on_engines([&](int, ToyModel& model) {
    Engine& engine = model.initialize();
    model.train(1, 4);
    engine.save("", text_to_bytes("now")).wait();
    EXPECT_EQ(engine.committed_step(), 4u);
  });
  on_engines([&](int, ToyModel& model) {
    EXPECT_TRUE(model.find_checkpoints().empty());
    const RestoreReport report = model.restore();
    EXPECT_EQ(report.step, 4u);
    EXPECT_EQ(bytes_to_text(report.caller_state), "now");
    EXPECT_EQ(state_digests(model), expected_at_[4]);
  });
}

constexpr Cell kCells[] = {
    {"nvme_nvme_forward", Placement::nvme, Placement::nvme, UpdateMode::forward},
    {"nvme_nvme_step", Placement::nvme, Placement::nvme, UpdateMode::step},
    {"nvme_nvme_forward_3_ranks", Placement::nvme, Placement::nvme, UpdateMode::forward, 3},
    {"nvme_nvme_forward_every_3", Placement::nvme, Placement::nvme, UpdateMode::forward, 1, 3},
    {"pinned_nvme_forward", Placement::pinned, Placement::nvme, UpdateMode::forward},
    {"pinned_nvme_forward_every_2", Placement::pinned, Placement::nvme, UpdateMode::forward, 1, 2},
    {"pinned_nvme_step_every_5_2_ranks", Placement::pinned, Placement::nvme, UpdateMode::step, 2, 5},
    {"nvme_half_forward", Placement::nvme, Placement::nvme, UpdateMode::forward, 1, 1, 0.5},
    {"nvme_half_forward_every_3", Placement::nvme, Placement::nvme, UpdateMode::forward, 1, 3, 0.5},
    {"pinned_half_step_every_2_2_ranks", Placement::pinned, Placement::nvme, UpdateMode::step, 2, 2, 0.5},
    {"nvme_half_of_both_forward_every_3", Placement::nvme, Placement::nvme, UpdateMode::forward, 1, 3, 0.4, 0.6},
    {"nvme_pinned_forward_every_3", Placement::nvme, Placement::pinned, UpdateMode::forward, 1, 3},
    {"device_nvme_step_every_4", Placement::device, Placement::nvme, UpdateMode::step, 1, 4},
    {"pinned_pinned_forward", Placement::pinned, Placement::pinned, UpdateMode::forward},
    {"pinned_pinned_step_2_ranks", Placement::pinned, Placement::pinned, UpdateMode::step, 2},
    {"device_device", Placement::device, Placement::device, UpdateMode::step},
};
INSTANTIATE_TEST_SUITE_P(Cells, NamedCheckpointTest, testing::ValuesIn(kCells),
                         [](const auto& cell) { return std::string(cell.param.name); });

// State in memory is written with each commit only, and the formula says so.
TEST(CommitEvery, BytesAreThoseOfTheFormula) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::pinned, Placement::nvme, directory / "store");
  setup.engine.commit_every = 4;
  setup.engine.update_mode = UpdateMode::step;
  ToyProgram model(setup, {.matrices = {400000, 300000}, .frozen = false, .tied = false});
  const auto before = model.runtime().ledger().totals(Link::nvme_write).bytes;
  constexpr std::uint64_t kEight = 8;  // two commits
  model.train(1, kEight);
  model.engine().settle();
  const double moved = static_cast<double>(model.runtime().ledger().totals(Link::nvme_write).bytes - before);
  const double formula = static_cast<double>(kEight * model.engine().formula_bytes().nvme_write);
  EXPECT_NEAR(moved / formula, 1.0, 0.02);
  // 10 bytes a parameter at each step, 2 more at every fourth.
  EXPECT_NEAR(formula / kEight / static_cast<double>(model.model().parameter_count()), 10.5, 0.1);
}

TEST(CommitEvery, ImpossibleOptionsAreRefused) {
  const TempDirectory directory;
  const auto refusal = [&](const std::function<void(EngineOptions&)>& change) {
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
    change(setup.engine);
    return message_of<ConfigError>([&] { ToyModel(setup).initialize(); });
  };
  EXPECT_THAT(refusal([](EngineOptions& o) { o.commit_every = 0; }), HasSubstr("hoist.durability"));
  EXPECT_THAT(refusal([](EngineOptions& o) { o.keep_steps = 65; }), HasSubstr("at most 64"));
  EXPECT_THAT(refusal([](EngineOptions& o) {
                o.keep_steps = 1;
                o.durability = tiers::Durability::none;
              }),
              HasSubstr("keeps no checkpoints"));
}

}  // namespace
}  // namespace hoist::test::named_checkpoint_test
