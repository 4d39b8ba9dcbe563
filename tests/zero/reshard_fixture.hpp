// SPDX-License-Identifier: Apache-2.0
// tests/zero/reshard_fixture.hpp - a run that resumes with another number of ranks, and ways to treat the files of its
// stores as a kill, a lost drive or a damaged drive does.
#pragma once

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tiers/detail/manifest_view.hpp>
#include <hoist/tiers/detail/store_files.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

#include "toy_ranks.hpp"

namespace hoist::test {

// Takes a file, or a rank's files, out of a store, as if its drive were not mounted, and brings them back.
class FilesAway {
 public:
  // If one file cannot be moved, the destructor brings back those before it.
  explicit FilesAway(const std::vector<std::string>& files) : FilesAway() {
    for (const std::string& file : files) {
      const std::string aside = aside_ / std::to_string(moved_.size());
      std::filesystem::rename(file, aside);
      moved_.emplace_back(file, aside);
    }
  }
  ~FilesAway() {
    for (const auto& [file, aside] : moved_) {
      std::error_code failed;
      std::filesystem::rename(aside, file, failed);
      EXPECT_FALSE(failed) << file << ": " << failed.message();
    }
  }
  FilesAway(const FilesAway&) = delete;
  FilesAway& operator=(const FilesAway&) = delete;

 private:
  FilesAway() = default;

  TempDirectory aside_;
  std::vector<std::pair<std::string, std::string>> moved_;
};

// `bytes`: at the slot's start; nothing: the whole slot.
inline void zero_slot(const std::string& store, int rank, std::uint32_t slot, std::optional<std::size_t> bytes) {
  const std::string manifest = tiers::detail::StorePaths(store, rank).manifest;
  const tiers::Superblock superblock = *tiers::detail::view_manifest(manifest).superblock;
  std::fstream file(manifest, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(superblock.slot_offset(slot)));
  file << std::string(bytes.value_or(superblock.slot_bytes()), '\0');
}
// Damages a commit slot of a rank's manifest.
inline void damage_slot(const std::string& store, int rank, std::uint32_t slot) { zero_slot(store, rank, slot, 1); }
// Makes it one that was never written.
inline void blank_slot(const std::string& store, int rank, std::uint32_t slot) { zero_slot(store, rank, slot, {}); }

class ReshardTest : public testing::TestWithParam<std::pair<Placement, Placement>> {
 protected:
  using Call = void (*)(ToyModel&);
  static constexpr Call kInitialize = [](ToyModel& model) { model.initialize(); };
  static constexpr Call kRestore = [](ToyModel& model) { model.restore(); };

  ReshardTest() {
    setup_.engine.store_directory = store_;
    setup_.engine.keep_steps = 1;
  }

  bool on_nvme() const { return GetParam().first == Placement::nvme || GetParam().second == Placement::nvme; }
  std::string directory_of(int rank) const { return store_ + (own_drives_ ? std::to_string(rank) : ""); }
  std::vector<detail::StoreDirectory> stores() const { return detail::store_directories(store_); }

  // --- runs

  void on_engines(int ranks, const std::function<void(int rank, ToyModel&)>& body) {
    on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
      EngineOptions engine = setup_.engine;
      engine.store_directory = directory_of(rank);
      Runtime runtime(setup_.runtime, join);
      ToyModel model(runtime, engine);
      body(rank, model);
    });
  }
  // Each rank makes only this call.
  void on_engines(int ranks, Call call) {
    on_engines(ranks, [&](int, ToyModel& model) { call(model); });
  }
  // The call is refused on every rank, with that text.
  void expect_refusal(int ranks, Call call, const testing::Matcher<const std::string&>& text) {
    on_engines(ranks, [&](int, ToyModel& model) {
      EXPECT_THAT([&] { call(model); }, testing::ThrowsMessage<StoreError>(text));
    });
  }

  void begin_with(int ranks, std::uint64_t last_step) {
    on_engines(ranks, [&](int rank, ToyModel& model) {
      model.initialize();
      train_to(rank, model, 0, last_step, before_);
    });
    ranks_before_ = ranks;
  }

  // Two ranks train to `last_step`, and keep step 2 as 'two'.
  void begin_and_keep_two(std::uint64_t last_step) {
    on_engines(2, [&](int rank, ToyModel& model) {
      Engine& engine = model.initialize();
      const std::string state = "rank " + std::to_string(rank);
      model.train(1, 2);
      engine.save("two", std::as_bytes(std::span(state))).wait();
      const Digests mine = state_digests(model);
      if (rank == 0) at_["two"] = mine;
      train_to(rank, model, 2, last_step, before_);
    });
    ranks_before_ = 2;
  }

  // Resumes with so many ranks, expects the state that the last ones left, trains to `last_step` and saves.
  void continue_with(int ranks, std::uint64_t last_step, const std::string& from = "") {
    Digests after;
    on_engines(ranks, [&](int rank, ToyModel& model) {
      const RestoreReport report = model.restore({.from = from});
      EXPECT_EQ(report.world_size, ranks_before_);
      const std::string state(reinterpret_cast<const char*>(report.caller_state.data()), report.caller_state.size());
      EXPECT_EQ(state, "rank " + std::to_string(rank < ranks_before_ ? rank : 0));
      EXPECT_EQ(state_digests(model), from.empty() ? before_ : at_.at(from));
      train_to(rank, model, report.step, last_step, after);
    });
    before_ = after;
    ranks_before_ = ranks;
  }

  void train_to(int rank, ToyModel& model, std::uint64_t step, std::uint64_t last_step, Digests& after) {
    const std::string state = "rank " + std::to_string(rank);
    while (step < last_step) {
      model.pass(++step);
      model.engine().step({.caller_state = std::as_bytes(std::span(state))});
    }
    if (!on_nvme()) model.engine().save("", std::as_bytes(std::span(state))).wait();
    model.engine().settle();
    EXPECT_EQ(model.engine().committed_step(), last_step);
    const Digests mine = state_digests(model);
    if (rank == 0) after = mine;
  }

  // --- files

  // Puts a store back from a copy of it, as a process left it that was killed while it removed the store: it had
  // renamed the manifest of rank 0.
  static void make_half_removed_store(const std::string& copy, const std::string& store) {
    std::filesystem::copy(copy, store);
    std::filesystem::rename(store + "/rank-00000.manifest", store + "/rank-00000.manifest-new");
    EXPECT_TRUE(tiers::Store::is_half_removed(store));
  }

  TempDirectory directory_;
  const std::string store_ = directory_ / "store";
  ToySetup setup_ = toy_setup(GetParam().first, GetParam().second);
  Digests before_;
  std::map<std::string, Digests> at_;
  int ranks_before_ = 0;
  bool own_drives_ = false;  // each rank has a directory that the others do not see
};

// Tests that need state on NVMe. With other placements only the program's saves make commits.
class ReshardOnNvmeTest : public ReshardTest {};

}  // namespace hoist::test
