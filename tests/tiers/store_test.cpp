// SPDX-License-Identifier: Apache-2.0
// A store when nothing goes wrong: steps, resumption, reads between writes, durability none.
#include <array>
#include <atomic>
#include <filesystem>
#include <shared_mutex>
#include <thread>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/tiers/store_harness.hpp>

namespace hoist::tiers::test::store_test {
namespace {

using hoist::test::TempDirectory;

class StoreTest : public ::testing::Test {
 protected:
  StoreTest() : options_(small_model(directory_ / "store")) {}

  std::unique_ptr<Store> create() { return create_store(options_, *queue_); }
  std::unique_ptr<Store> resume() {
    auto store = open_store(options_, *queue_);
    store->adopt(store->commits().front());
    return store;
  }
  Writers writers(std::uint64_t step) const { return Writers(options_.records.size(), step); }

  TempDirectory directory_;
  StoreOptions options_;
  std::unique_ptr<aio::DriveQueue> queue_ = clean_queue();
};

TEST_F(StoreTest, WhatWasWrittenIsRead) {
  const auto store = create();
  run_step(*store, options_, 0, all_records(options_));
  EXPECT_EQ(difference(*store, options_, writers(0)), "");
  run_step(*store, options_, 1, all_records(options_));
  EXPECT_EQ(difference(*store, options_, writers(1)), "");
}

TEST_F(StoreTest, RandomStepsComeBackAfterEveryReopening) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Rng rng(seed);
    options_.directory = directory_ / ("store-" + std::to_string(seed));
    auto store = create();
    run_step(*store, options_, 0, all_records(options_));
    Writers now = writers(0);
    for (std::uint64_t step = 1; step < 12; ++step) {
      std::vector<std::uint32_t> touched;  // possibly none: a skipped step is committed too
      for (const std::uint32_t record : all_records(options_))
        if (rng.below(3) != 0) touched.push_back(record);
      run_step(*store, options_, step, touched);
      for (const std::uint32_t record : touched) now[record] = step;
      if (rng.below(3) == 0) {
        store.reset();
        store = resume();
        ASSERT_EQ(state_of(*store), std::to_string(step));
      }
      ASSERT_EQ(difference(*store, options_, now), "") << "step " << step;
    }
  }
}

TEST_F(StoreTest, CommitsAreListedNewestFirst) {
  auto store = create();
  EXPECT_TRUE(store->commits().empty());
  for (std::uint64_t step = 0; step < 4; ++step) run_step(*store, options_, step, all_records(options_));
  store.reset();
  store = open_store(options_, *queue_);
  ASSERT_EQ(store->commits().size(), 2u);
  EXPECT_EQ(store->commits()[0].step, 3u);
  EXPECT_EQ(store->commits()[0].incarnation, 1u);
  EXPECT_EQ(store->commits()[1].step, 2u);
  EXPECT_TRUE(store->damage().empty());
  const auto found = Store::look(options_.directory, 0);
  EXPECT_TRUE(found.exists);
  ASSERT_EQ(found.commits.size(), 2u);
  EXPECT_EQ(found.commits[0].step, 3u);
}

// Another rank lacks step 3, so all go back to step 2, and the step 3 that this rank had is gone for good.
TEST_F(StoreTest, AnAbandonedStepIsNeverPickedUpAgain) {
  auto store = create();
  for (std::uint64_t step = 0; step < 3; ++step) run_step(*store, options_, step, all_records(options_));
  // Step 3 rewrites one record only, so that step 2 stays readable as after a crash between the two.
  run_step(*store, options_, 3, {1});
  store.reset();
  store = open_store(options_, *queue_);
  store->adopt({2, 1});
  EXPECT_EQ(difference(*store, options_, writers(2)), "");
  store.reset();
  store = open_store(options_, *queue_);
  for (const CommitHeader& commit : store->commits()) EXPECT_EQ(commit.step, 2u);
  EXPECT_EQ(store->commits()[0].incarnation, 2u);
  store->adopt(store->commits()[0]);
  run_step(*store, options_, 3, all_records(options_));
  EXPECT_EQ(difference(*store, options_, writers(3)), "");
}

// State changed between steps, or saved once more: the same step, committed again.
TEST_F(StoreTest, AStepCommittedAgainIsItsNextRevision) {
  auto store = create();
  run_step(*store, options_, 0, all_records(options_));
  run_step(*store, options_, 1, all_records(options_));
  Writers now = writers(1);
  for (std::uint64_t revision = 1; revision < 4; ++revision) {
    store->begin_step(1);
    write_record(*store, options_, 1, 100 + revision);
    now[1] = 100 + revision;
    store->commit(as_state(std::to_string(revision))).wait();
  }
  store.reset();
  store = open_store(options_, *queue_);
  ASSERT_EQ(store->commits().size(), 2u);
  EXPECT_EQ(store->commits()[0].step, 1u);
  EXPECT_EQ(store->commits()[0].revision, 3u);
  EXPECT_EQ(store->commits()[1].revision, 2u);
  EXPECT_THROW(store->adopt({1, 1, 0}), StoreError);
  store->adopt(store->commits()[0]);
  EXPECT_EQ(state_of(*store), "3");
  EXPECT_EQ(difference(*store, options_, now), "");
  // It goes on counting, and the next step begins anew.
  store->begin_step(1);
  store->commit({}).wait();
  run_step(*store, options_, 2, {});
  store.reset();
  const auto commits = Store::look(options_.directory, 0).commits;
  ASSERT_EQ(commits.size(), 2u);
  EXPECT_EQ(commits[0].step, 2u);
  EXPECT_EQ(commits[0].revision, 0u);
  EXPECT_EQ(commits[1].revision, 4u);
}

TEST_F(StoreTest, AnAbandonedRevisionIsNeverPickedUpAgain) {
  auto store = create();
  run_step(*store, options_, 0, all_records(options_));
  run_step(*store, options_, 0, {1});
  store.reset();
  store = open_store(options_, *queue_);
  store->adopt({0, 1, 0});
  store.reset();
  for (const CommitHeader& commit : Store::look(options_.directory, 0).commits) EXPECT_EQ(commit.revision, 0u);
}

TEST_F(StoreTest, OnlyACommitThatIsThereCanBeAdopted) {
  auto store = create();
  run_step(*store, options_, 0, all_records(options_));
  store.reset();
  store = open_store(options_, *queue_);
  EXPECT_THROW(store->adopt({1, 1}), StoreError);
  EXPECT_THROW(store->adopt({0, 2}), StoreError);
  store->adopt({0, 1});
}

TEST_F(StoreTest, UntouchedRecordsStayWhereTheyAre) {
  auto store = create();
  run_step(*store, options_, 0, all_records(options_));
  const auto before = queue_->stats().written_bytes;
  run_step(*store, options_, 1, {});
  const std::uint64_t manifest_only = queue_->stats().written_bytes - before;
  EXPECT_LE(manifest_only, 8192u);
  EXPECT_EQ(difference(*store, options_, writers(0)), "");
}

TEST_F(StoreTest, AReadAcrossThePartThatWasRewrittenTakesEachTileFromItsPlace) {
  const auto store = create();
  run_step(*store, options_, 0, all_records(options_));
  const RecordLayout& layout = options_.records[0].layout;
  const auto tiles = static_cast<std::uint32_t>(layout.tiles().size());
  ASSERT_EQ(tiles, 3u);
  store->begin_step(1);
  write_tiles(*store, options_, 0, Region::weights, 1, 1, 1);
  // Naming the checksum of a tile does not move it.
  (void)store->checksum(RecordId{0}, Region::weights, 0, Buffer(layout.tiles()[0].w_bytes).span());
  const Buffer buffer(layout.region_bytes(Region::weights));
  store->read(RecordId{0}, Region::weights, 0, tiles, buffer.span(), aio::Priority::foreground).wait();
  store->verify(RecordId{0}, Region::weights, 0, tiles, buffer.span());
  for (std::uint32_t tile = 0; tile < tiles; ++tile) {
    std::vector<std::byte> expected(layout.tiles()[tile].w_bytes);
    fill_tile(0, Region::weights, tile, tile == 1 ? 1 : 0, expected);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), buffer.span().data() + layout.tiles()[tile].w_offset))
        << "tile " << tile;
  }
}

TEST_F(StoreTest, APartlyRewrittenRecordIsNotCommitted) {
  const auto store = create();
  store->begin_step(0);
  for (const std::uint32_t record : {0u, 1u, 4u}) write_record(*store, options_, record, 0);
  try {
    store->commit({});
    FAIL() << "a record that was never written was committed";
  } catch (const StoreError& error) {
    EXPECT_STREQ(error.what(), "step 0 cannot be committed: unit 'layer 1' was never written");
  }
  write_record(*store, options_, 2, 0);
  store->commit(as_state("0")).wait();
  store->begin_step(1);
  write_tiles(*store, options_, 0, Region::weights, 0, 3, 1);
  write_tiles(*store, options_, 0, Region::state, 0, 2, 1);
  try {
    store->commit({});
    FAIL() << "half a record was committed";
  } catch (const StoreError& error) {
    EXPECT_STREQ(error.what(),
                 "step 1 cannot be committed: unit 'embedding' was rewritten in part: tile 2 of its optimizer state is "
                 "missing, 1 tiles in all");
  }
  write_tiles(*store, options_, 0, Region::state, 2, 1, 1);
  store->commit({}).wait();
  Writers expected = writers(0);
  expected[0] = 1;
  EXPECT_EQ(difference(*store, options_, expected), "");
}

TEST_F(StoreTest, CallerStateHasALimit) {
  auto store = create();
  store->begin_step(0);
  for (const std::uint32_t record : all_records(options_)) write_record(*store, options_, record, 0);
  EXPECT_THROW(store->commit(as_state(std::string(5001, 'x'))), UsageError);
  store->commit(as_state(std::string(5000, 'x'))).wait();
  run_step(*store, options_, 1, {});  // a shorter one after a longer one
  store.reset();
  store = open_store(options_, *queue_);
  ASSERT_EQ(store->commits().size(), 2u);
  store->adopt(store->commits()[1]);
  EXPECT_EQ(state_of(*store), std::string(5000, 'x'));
  store.reset();
  EXPECT_EQ(state_of(*resume()), std::string(5000, 'x'));
}

TEST_F(StoreTest, TheNextStepBeginsAfterAllAgreed) {
  const auto store = create();
  run_step(*store, options_, 0, all_records(options_));
  store->begin_step(1);
  write_record(*store, options_, 1, 1);
  std::atomic<bool> may_agree{false}, agreed{false};
  const Completion committed = store->commit({}, [&](const std::exception_ptr&) {
    while (!may_agree) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    agreed = true;
  });
  EXPECT_FALSE(committed.wait_for(std::chrono::milliseconds(20)));
  std::thread releaser([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    may_agree = true;
  });
  store->begin_step(2);
  EXPECT_TRUE(agreed);
  releaser.join();
}

TEST_F(StoreTest, ClosingFinishesTheCommitThatWasStarted) {
  auto store = create();
  run_step(*store, options_, 0, all_records(options_));
  store->begin_step(1);
  for (const std::uint32_t record : all_records(options_)) write_record(*store, options_, record, 1);
  const Completion committed = store->commit(as_state("1"));
  store.reset();
  EXPECT_TRUE(committed.done());
  EXPECT_EQ(reopen_and_compare(options_, {{1, writers(1)}}), 1u);
}

// Readers verify whatever they get while steps go by under them; a record is locked only while its tiles are written.
TEST_F(StoreTest, ReadsGoOnWhileStepsAreWrittenAndCommitted) {
  const auto store = create();
  run_step(*store, options_, 0, all_records(options_));
  std::array<std::shared_mutex, 5> locks;
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> reads{0};
  std::vector<std::thread> readers;
  for (std::uint64_t reader = 0; reader < 2; ++reader) {
    readers.emplace_back([&, reader] {
      Rng rng(reader);
      while (!stop) {
        const auto record = static_cast<std::uint32_t>(rng.below(options_.records.size()));
        const Region region = rng.below(2) == 0 ? Region::weights : Region::state;
        const RecordLayout& layout = options_.records[record].layout;
        const auto tiles = static_cast<std::uint32_t>(layout.tiles().size());
        const Buffer buffer(layout.region_bytes(region));
        const std::shared_lock lock(locks[record]);
        store->read(RecordId{record}, region, 0, tiles, buffer.span(), aio::Priority::foreground).wait();
        EXPECT_NO_THROW(store->verify(RecordId{record}, region, 0, tiles, buffer.span()));
        ++reads;
      }
    });
  }
  std::uint64_t step = 1;
  for (; step < 30 || reads < 50; ++step) {
    store->begin_step(step);
    for (const std::uint32_t record : all_records(options_)) {
      const auto tiles = static_cast<std::uint32_t>(options_.records[record].layout.tiles().size());
      for (std::uint32_t tile = 0; tile < tiles; ++tile) {
        const std::unique_lock lock(locks[record]);
        write_tiles(*store, options_, record, Region::weights, tile, 1, step);
        write_tiles(*store, options_, record, Region::state, tile, 1, step);
      }
    }
    store->commit({});
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  store->begin_step(step);
  EXPECT_EQ(difference(*store, options_, writers(step - 1)), "");
}

TEST_F(StoreTest, WithoutDurabilityRecordsAreRewrittenInPlace) {
  options_.durability = Durability::none;
  auto store = create();
  store->begin_step(0);
  for (const std::uint32_t record : all_records(options_)) write_record(*store, options_, record, 0);
  store->commit({}, [](const std::exception_ptr&) { FAIL() << "nothing is agreed on"; }).wait();
  const auto data_bytes = std::filesystem::file_size(store->data_paths().front());
  std::uint64_t expected_bytes = 0;
  for (const StoreRecord& record : options_.records) expected_bytes += record.layout.bytes();
  EXPECT_EQ(data_bytes, expected_bytes);
  store->begin_step(1);
  // Parts may be rewritten alone: weights in memory, state on the drive.
  write_tiles(*store, options_, 0, Region::state, 0, 3, 1);
  store->commit({}).wait();
  const RecordLayout& layout = options_.records[0].layout;
  const Buffer buffer(layout.region_bytes(Region::state));
  store->read(RecordId{0}, Region::state, 0, 3, buffer.span(), aio::Priority::foreground).wait();
  store->verify(RecordId{0}, Region::state, 0, 3, buffer.span());
  std::vector<std::byte> expected(layout.tiles()[0].s_bytes);
  fill_tile(0, Region::state, 0, 1, expected);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), buffer.span().begin()));
  store.reset();
  const auto found = Store::look(options_.directory, 0);
  EXPECT_TRUE(found.exists);
  EXPECT_TRUE(found.commits.empty());
  EXPECT_TRUE(found.damage.empty());
  EXPECT_THROW(open_store(options_, *queue_), StoreError);
  options_.durability = Durability::step;
  EXPECT_THROW(open_store(options_, *queue_), StoreError);
  store = create();
  run_step(*store, options_, 0, all_records(options_));
  EXPECT_EQ(difference(*store, options_, writers(0)), "");
}

TEST_F(StoreTest, CostIsWhatTheFilesTake) {
  struct Case {
    const char* name;
    Durability durability;
    std::uint32_t checkpoints_max, copies;
  };
  std::uint64_t record_bytes = 0;
  for (const StoreRecord& record : options_.records) record_bytes += record.layout.bytes();
  for (const Case& c : {Case{"step", Durability::step, 0, 2}, Case{"kept", Durability::step, 3, 5},
                        Case{"none", Durability::none, 0, 1}}) {
    options_.durability = c.durability;
    options_.checkpoints_max = c.checkpoints_max;
    options_.directory = directory_ / c.name;
    const Store::Cost cost = Store::cost(options_);
    EXPECT_GE(cost.disk_bytes, c.copies * record_bytes);
    EXPECT_LT(cost.disk_bytes, c.copies * record_bytes + 64 * kKiB) << "and a manifest";
    const auto store = create();
    std::uint64_t disk_bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(options_.directory))
      if (entry.path().extension() != ".lock-info") disk_bytes += entry.file_size();
    EXPECT_EQ(cost.disk_bytes, disk_bytes);
    EXPECT_GT(cost.memory_bytes, 0u);
    EXPECT_LT(cost.memory_bytes, 64 * kKiB);
  }
}

using StoreDeathTest = StoreTest;

TEST_F(StoreDeathTest, MisuseIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  directory_.hold_those_of_children();
  const auto store = create();
  const Buffer buffer(64 * kKiB);
  EXPECT_DEATH(store->read(RecordId{1}, Region::weights, 0, 1, buffer.span().first(4096), aio::Priority::foreground),
               "read before it is written");
  EXPECT_DEATH(store->read(RecordId{1}, Region::weights, 0, 2, buffer.span(), aio::Priority::foreground),
               "of 1 in unit layer 0");
  EXPECT_DEATH((void)store->checksum(RecordId{1}, Region::weights, 0, buffer.span().first(4096)), "outside a step");
  EXPECT_DEATH(store->commit({}), "no step is under way");
  run_step(*store, options_, 5, all_records(options_));
  EXPECT_DEATH(store->begin_step(4), "begins after step 5 was committed");
  store->begin_step(6);
  EXPECT_DEATH(store->begin_step(5), "inside step 6");
}

}  // namespace
}  // namespace hoist::tiers::test::store_test
