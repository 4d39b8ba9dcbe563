// SPDX-License-Identifier: Apache-2.0
// Runs of toy models that have a mirror.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/remembered.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>

#include "toy_ranks.hpp"

namespace hoist::test {

inline std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

// A placement and an update mode.
struct MirrorCell {
  const char* name;
  Placement parameters, optimizer;
  UpdateMode mode = UpdateMode::automatic;
};

// A run with a mirror, in its cell; and what an undisturbed one comes to.
class MirrorRun : public testing::TestWithParam<MirrorCell> {
 protected:
  MirrorRun() {
    setup_.engine.store_directory = directory_ / "store";
    setup_.engine.update_mode = GetParam().mode;
    setup_.engine.mirror = {.directory = directory_ / "mirror", .every = 0};
    setup_.engine.gradient_clipping = 0;
  }

  bool on_nvme() const { return GetParam().parameters == Placement::nvme || GetParam().optimizer == Placement::nvme; }
  std::string drive_of_mirror(int rank) const { return setup_.engine.mirror.directory + std::to_string(rank); }
  // Directories of one rank alone, so that each has drives of its own.
  ToySetup of_rank(int rank) const {
    ToySetup setup = setup_;
    if (own_mirrors_) setup.engine.mirror.directory = drive_of_mirror(rank) + "/copies";
    if (!own_drives_) return setup;
    setup.engine.store_directory += std::to_string(rank);
    for (std::string& further : setup.engine.stripe_directories) further += std::to_string(rank);
    return setup;
  }

  void on_engines(int ranks, const std::function<void(int rank, ToyModel&)>& body) {
    on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
      ToySetup setup = of_rank(rank);
      if (faults_ && rank_of_faults_.value_or(rank) == rank)
        setup.runtime.make_aio_backend = [&](const auto& io) { return make_faulty_backend(io, faults_); };
      ToyModel model(setup, join);
      model.equal_gradients = true;
      body(rank, model);
    });
  }

  static void take_step(ToyModel& model, std::uint64_t step) {
    model.pass(step);
    const std::string state = "step " + std::to_string(step);
    model.engine().step({.caller_state = bytes_of(state)});
  }

  // Trains from scratch, and leaves the last step in the mirror.
  void train_and_mirror(int ranks, std::uint64_t steps) {
    on_engines(ranks, [&](int, ToyModel& model) {
      model.initialize();
      for (std::uint64_t step = 1; step <= steps; ++step) take_step(model, step);
      const std::string state = "step " + std::to_string(steps);
      model.engine().save("", bytes_of(state), {.mirror = true}).wait();
      EXPECT_EQ(model.engine().mirror().step, steps);
    });
  }

  // Trains, loses all stores, goes on from the mirror and copies `step`: a first copy in a new store. The older one has
  // been removed.
  void leave_a_first_copy_in_a_new_store(int ranks, std::uint64_t step) {
    train_and_mirror(ranks, step - 1);
    lose_stores(ranks);
    on_engines(ranks, [&](int, ToyModel& model) {
      EXPECT_EQ(model.restore().step, step - 1);
      take_step(model, step);
      model.engine().save("", bytes_of("step " + std::to_string(step)), {.mirror = true}).wait();
    });
    for (int rank = 0; rank < ranks; ++rank) {
      const auto stores = stores_in(of_rank(rank).engine.mirror.directory);
      ASSERT_EQ(stores.size(), 1u);
      EXPECT_EQ(stores[0].order, 1u);
    }
  }
  void lose_stores(int ranks) {
    for (int rank = 0; rank < ranks; ++rank) std::filesystem::remove_all(of_rank(rank).engine.store_directory);
  }

  // The digests after each step of an undisturbed run, by step. They are equal for 1, 2 and 4 ranks.
  static const std::map<std::uint64_t, Digests>& undisturbed(std::uint64_t steps) {
    static std::map<std::uint64_t, std::map<std::uint64_t, Digests>> made;
    return remembered(made, steps, [&] {
      ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
      setup.engine.gradient_clipping = 0;
      setup.engine.update_mode = UpdateMode::step;
      ToyModel training(setup);
      training.equal_gradients = true;
      training.initialize();
      std::map<std::uint64_t, Digests> states;
      for (std::uint64_t step = 1; step <= steps; ++step) {
        take_step(training, step);
        states[step] = state_digests(training);
      }
      return states;
    });
  }

  // Removes the store, as if its drives were lost: the run resumes from the mirror, in the state of an undisturbed run.
  // Removes both at the end.
  void expect_restored(int ranks, const testing::Matcher<std::uint64_t>& step,
                       const std::map<std::uint64_t, Digests>& states) {
    std::filesystem::remove_all(setup_.engine.store_directory);
    on_engines(ranks, [&](int, ToyModel& model) {
      const RestoreReport report = model.restore();
      EXPECT_THAT(report.step, step);
      EXPECT_EQ(state_digests(model), states.at(report.step));
    });
    std::filesystem::remove_all(setup_.engine.store_directory);
    std::filesystem::remove_all(setup_.engine.mirror.directory);
  }

  std::vector<detail::StoreDirectory> stores_in(const std::string& directory) const {
    return detail::store_directories(directory);
  }

  TempDirectory directory_;
  ToySetup setup_ = toy_setup(GetParam().parameters, GetParam().optimizer);
  bool own_drives_ = false, own_mirrors_ = false;
  std::shared_ptr<Faults> faults_;     // of the engines of on_engines()
  std::optional<int> rank_of_faults_;  // or of every rank
};

inline const auto kMirrorCells =
    testing::Values(MirrorCell{"nvme", Placement::nvme, Placement::nvme, UpdateMode::forward},
                    MirrorCell{"nvme_states", Placement::pinned, Placement::nvme, UpdateMode::backward},
                    MirrorCell{"memory", Placement::pinned, Placement::pinned});

}  // namespace hoist::test
