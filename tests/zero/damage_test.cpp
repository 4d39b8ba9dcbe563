// SPDX-License-Identifier: Apache-2.0
// P4 for the whole engine: damaged state is reported and never used, and only the run that owns a store can open it.
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/damage.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/log_capture.hpp>
#include <hoist/tiers/detail/manifest_view.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/checkpoint/verification.hpp>

#include "toy_model.hpp"

namespace hoist::test::damage_test {
namespace {

// No step of such a store is committed, so no commit is waited for before a tile is read.
TEST(Damage, AWriteUnderWayIsNotTakenForIt) {
  const TempDirectory directory;
  const Digests expected = train_once(toy_setup(Placement::pinned, Placement::pinned), {}, 3);
  for (const UpdateMode mode : {UpdateMode::step, UpdateMode::forward}) {
    for (const unsigned commit_every : {1u, 2u, 4u}) {
      SCOPED_TRACE(fmt::format("mode {}, commit_every {}", static_cast<int>(mode), commit_every));
      const auto faults = std::make_shared<Faults>(1);
      ToySetup setup = toy_setup(Placement::nvme, Placement::nvme,
                                 directory / fmt::format("{}-{}", static_cast<int>(mode), commit_every));
      setup.engine.durability = tiers::Durability::none;
      setup.engine.commit_every = commit_every;
      setup.engine.update_mode = mode;
      setup.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& io) {
        return make_faulty_backend(io, faults);
      };
      ToyProgram model(setup);
      faults->add({.kind = Fault::Kind::delay,
                   .operation = aio::Operation::write,
                   .count = Faults::kForever,
                   .delay = std::chrono::milliseconds(20)});
      for (const std::uint64_t step : {1u, 2u, 3u}) {
        model.train(step, step);
        Digests found;
        ASSERT_NO_THROW(found = digests_of(model)) << "after step " << step;
        if (step < 3) continue;
        EXPECT_EQ(found, expected);
      }
    }
  }
}

// Every 4 KiB of the data file in turn: either the byte belongs to a dead extent and the run is bit-exact, or the
// damage is reported. Nothing in between.
TEST(Damage, AFlippedBitAnywhereIsReportedOrWithoutEffect) {
  const ToyShape shape{.matrices = {3000, 5000}, .norm = 40};
  const Digests expected = train_once(toy_setup(Placement::pinned, Placement::pinned), shape, 4);
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, (directory / "good"));
  Digests saved;
  {
    ToyProgram model(setup, shape);
    model.train(1, 2);
    saved = digests_of(model);
  }
  const std::string data = (directory / "good") + "/rank-00000.data";
  const std::uint64_t bytes = std::filesystem::file_size(data);
  int reported = 0, harmless = 0;
  for (std::uint64_t offset = 37; offset < bytes; offset += 8192) {
    const std::string copy = (directory / "copy");
    std::filesystem::remove_all(copy);
    std::filesystem::copy((directory / "good"), copy);
    flip_bits(copy + "/rank-00000.data", offset);
    ToySetup damaged = setup;
    damaged.engine.store_directory = copy;
    ToyModel model(damaged, shape);
    try {
      model.restore();
      model.losses = saved.losses;
      model.train(3, 4);
      model.engine().settle();
      EXPECT_EQ(digests_of(model), expected) << "offset " << offset;
      ++harmless;
    } catch (const CorruptionError& error) {
      EXPECT_EQ(error.where.path, copy + "/rank-00000.data");
      EXPECT_FALSE(error.where.unit.empty());
      EXPECT_LE(error.where.offset_bytes, offset);
      ++reported;
    }
  }
  EXPECT_GT(reported, 3);
  EXPECT_GT(harmless, 3);  // the other extent of each record
}

// The commit before a damaged one is used, and a named checkpoint may be gone: the log says so, as the damaged slot is
// written over soon.
TEST(Damage, OfASlotOfTheManifestIsNamedByTheRestore) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "good");
  setup.engine.keep_steps = 1;
  {
    ToyProgram model(setup);
    model.train(1, 1);
    model.engine().save("kept", {}).wait();
    model.train(2, 3);
  }
  setup.engine.store_directory = directory / "copy";
  const std::string manifest = setup.engine.store_directory + "/rank-00000.manifest";
  const auto view = tiers::detail::view_manifest(directory / "good/rank-00000.manifest");
  std::map<std::string, int> named;
  for (std::uint32_t slot = 0; slot < view.slots.size(); ++slot) {
    if (view.slots[slot].state != tiers::SlotCheck::State::valid) continue;
    for (const bool is_damaged : {false, true}) {
      std::filesystem::remove_all(setup.engine.store_directory);
      std::filesystem::copy(directory / "good", setup.engine.store_directory);
      if (is_damaged) flip_bits(manifest, view.superblock->slot_offset(slot));
      const LogCapture log;
      ToyModel model(setup);
      model.restore();
      const std::string kind = slot < tiers::kSlotCount ? "commit" : "named checkpoint";
      EXPECT_EQ(log.count(fmt::format("{} slot {} of {}", kind, slot, manifest)), is_damaged ? 1u : 0u) << log.text();
      if (is_damaged) ++named[kind];
    }
  }
  EXPECT_EQ(named["commit"], 2);
  EXPECT_EQ(named["named checkpoint"], 1);
}

// With named checkpoints, the report also says which of them do not hold the damaged bytes; a run that resumes from one
// of these ends in the right bits. Frozen weights are written only once, so every checkpoint holds them.
TEST(Damage, IsReportedWithTheNamedCheckpointsThatItLeavesAlone) {
  constexpr std::uint64_t kSteps = 6;
  const ToyShape shape{.matrices = {3000, 5000}, .norm = 40};
  Digests expected = train_once(toy_setup(Placement::pinned, Placement::pinned), shape, kSteps);
  expected.losses.clear();
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "good");
  setup.engine.keep_steps = 2;
  const auto with_engine = [&](const auto& body) {
    ToyModel model(setup, shape);
    body(model);
  };
  with_engine([&](ToyModel& model) {
    Engine& engine = model.initialize();
    for (std::uint64_t step = 1; step < kSteps; ++step) {
      model.train(step, step);
      if (step == 2 || step == 4) engine.save(fmt::format("kept {}", step), {}).wait();
    }
    engine.settle();
  });
  setup.engine.store_directory = directory / "copy";
  const std::string data = setup.engine.store_directory + "/rank-00000.data";
  const auto ends_as_expected = [&](ToyModel& model, std::uint64_t step) {
    model.train(step + 1, kSteps);
    EXPECT_EQ(state_digests(model), expected);
  };
  int harmless = 0, gone_back = 0, in_all = 0;
  const std::uint64_t bytes = std::filesystem::file_size(directory / "good/rank-00000.data");
  for (std::uint64_t offset = 37; offset < bytes; offset += 8192) {
    SCOPED_TRACE(fmt::format("offset {}", offset));
    std::filesystem::remove_all(directory / "copy");
    std::filesystem::copy(directory / "good", directory / "copy");
    flip_bits(data, offset);
    std::vector<std::uint64_t> whole, damaged;
    for (const Verification& found : verify_job(std::vector{setup.engine.store_directory})) {
      ASSERT_EQ(found.not_done, "");
      if (!found.name.empty()) (found.is_sound() ? whole : damaged).push_back(found.step);
    }
    std::string report;
    with_engine([&](ToyModel& model) {
      try {
        ends_as_expected(model, model.restore().step);
      } catch (const CorruptionError& error) {
        report = error.what();
      }
    });
    const auto shown = [](std::uint64_t step) { return fmt::format("'kept {0}' (step {0})", step); };
    if (report.empty()) {
      ++harmless;
      continue;
    }
    for (const std::uint64_t step : whole) EXPECT_NE(report.find(shown(step)), std::string::npos) << report;
    for (const std::uint64_t step : damaged) EXPECT_EQ(report.find(shown(step)), std::string::npos) << report;
    if (whole.empty()) {
      EXPECT_NE(report.find("none of them is whole"), std::string::npos) << report;
      ++in_all;
      continue;
    }
    with_engine([&](ToyModel& model) {
      ends_as_expected(model, model.restore({.from = fmt::format("kept {}", whole.front())}).step);
    });
    ++gone_back;
  }
  EXPECT_GT(harmless, 3);
  EXPECT_GT(gone_back, 3);
  EXPECT_GT(in_all, 0);
}

TEST(Ownership, AnotherModelIsRefusedAndNothingOverwritten) {
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, (directory / "store"));
  std::string digest;
  {
    ToyProgram model(setup);
    model.train(1, 2);
    digest = state_digest(model.engine(), State::master);
  }
  {
    ToyModel model(setup, {.matrices = {40000, 70002, 16384, 9973}});
    EXPECT_THAT([&] { model.restore(); }, testing::ThrowsMessage<StoreError>(testing::HasSubstr("70002")));
  }
  {
    ToyModel model(setup);
    EXPECT_THROW(model.initialize(), StoreError);
  }
  ToyModel model(setup);
  EXPECT_EQ(model.restore().step, 2u);
  EXPECT_EQ(state_digest(model.engine(), State::master), digest);
}

TEST(Ownership, AStoreInUseIsRefused) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, (directory / "store"));
  setup.engine.lock_timeout = std::chrono::milliseconds(100);
  ToyProgram model(setup);
  ToySetup small = setup;
  ToyModel other(small);
  EXPECT_THROW(other.restore(), StoreError);
  model.train(1, 2);
}

TEST(Ownership, UnwritablePathAndMissingStoreAreErrors) {
  for (const char* directory : {"/proc/nowhere/store", "/dev/null/store"}) {
    const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory);
    ToyModel model(setup);
    EXPECT_FALSE(model.find_commit());
    EXPECT_THROW(model.restore(), StoreError);
    EXPECT_THROW(model.initialize(), Error) << directory;
  }
}

}  // namespace
}  // namespace hoist::test::damage_test
