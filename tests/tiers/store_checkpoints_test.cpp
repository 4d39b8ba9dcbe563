// SPDX-License-Identifier: Apache-2.0
// Named checkpoints: they hold what they held when they were kept, whatever comes after them, a crash at any
// operation included; their space comes back when they go. And steps that go on without a commit between them.
#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>

#include <gmock/gmock.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/message_of.hpp>
#include <hoist/tests/tiers/store_harness.hpp>
#include <hoist/tiers/store_reader.hpp>

namespace hoist::tiers::test::store_checkpoints_test {
namespace {

using hoist::test::Fault;
using hoist::test::Faults;
using hoist::test::TempDirectory;

class StoreCheckpointsTest : public ::testing::Test {
 protected:
  static StoreOptions keeping(const std::string& directory, std::uint32_t checkpoints_max) {
    StoreOptions options = small_model(directory);
    options.checkpoints_max = checkpoints_max;
    return options;
  }

  // Takes steps up to `last`, each rewriting all records, from an open store whose last commit is `first` - 1.
  void take_steps(Store& store, std::uint64_t first, std::uint64_t last) {
    for (std::uint64_t step = first; step <= last; ++step) run_step(store, options_, step, all_records(options_));
  }

  Writers all_by(std::uint64_t step) const { return Writers(options_.records.size(), step); }

  std::vector<std::string> names(const Store& store) {
    std::vector<std::string> names;
    for (const CommitHeader& checkpoint : store.checkpoints()) names.push_back(checkpoint.name);
    return names;
  }

  void expect_checkpoint_holds(const std::string& name, std::uint64_t step) {
    const auto drive = clean_queue();
    const auto store = open_store(options_, *drive);
    const auto all = store->checkpoints();
    const auto listed = std::ranges::find(all, name, &CommitHeader::name);
    ASSERT_NE(listed, all.end()) << name;
    EXPECT_EQ(listed->step, step);
    store->adopt(CommitHeader(*listed));
    EXPECT_EQ(state_of(*store), "state of " + name);
    EXPECT_EQ(difference(*store, options_, all_by(step)), "");
  }

  TempDirectory directory_;
  StoreOptions options_ = keeping(directory_ / "store", 2);
};

TEST_F(StoreCheckpointsTest, NamedCheckpointsHoldTheirRecordsWhileTrainingGoesOn) {
  {
    const auto drive = clean_queue();
    const auto store = create_store(options_, *drive);
    take_steps(*store, 0, 3);
    store->add_checkpoint("three", as_state("state of three")).wait();
    take_steps(*store, 4, 9);
    store->add_checkpoint("nine", as_state("state of nine"));
    take_steps(*store, 10, 20);
    EXPECT_EQ(names(*store), (std::vector<std::string>{"three", "nine"}));
    EXPECT_EQ(difference(*store, options_, all_by(20)), "");
  }
  EXPECT_EQ(Store::look(options_.directory, 0).checkpoints.size(), 2u);
  expect_checkpoint_holds("nine", 9);
  expect_checkpoint_holds("three", 3);
  expect_checkpoint_holds("nine", 9);  // going back to an earlier one leaves the later one
}

TEST_F(StoreCheckpointsTest, TheOldestGoesWhenThereIsNoRoom) {
  const auto drive = clean_queue();
  const auto store = create_store(options_, *drive);
  take_steps(*store, 0, 0);
  for (std::uint64_t step = 1; step < 12; ++step) {
    run_step(*store, options_, step, all_records(options_));
    store->add_checkpoint("step " + std::to_string(step), {}).wait();
  }
  EXPECT_EQ(names(*store), (std::vector<std::string>{"step 10", "step 11"}));
}

TEST_F(StoreCheckpointsTest, TheSameNameIsReplacedAndNoOtherGoes) {
  {
    const auto drive = clean_queue();
    const auto store = create_store(options_, *drive);
    take_steps(*store, 0, 2);
    store->add_checkpoint("best", as_state("of an earlier one")).wait();
    take_steps(*store, 3, 4);
    store->add_checkpoint("other", as_state("state of other")).wait();
    take_steps(*store, 5, 6);
    store->add_checkpoint("best", as_state("state of best")).wait();
    take_steps(*store, 7, 8);
    EXPECT_EQ(names(*store), (std::vector<std::string>{"other", "best"}));
  }
  expect_checkpoint_holds("best", 6);
  expect_checkpoint_holds("other", 4);
}

TEST_F(StoreCheckpointsTest, RecordsThatDoNotChangeAreSharedByAllTheirHolders) {
  Writers writers = all_by(0);
  std::map<std::string, Writers> checkpoints;
  {
    const auto drive = clean_queue();
    const auto store = create_store(options_, *drive);
    run_step(*store, options_, 0, all_records(options_));
    Rng rng(7);
    for (std::uint64_t step = 1; step < 60; ++step) {
      std::vector<std::uint32_t> some;
      for (const std::uint32_t record : all_records(options_)) {
        if (rng.below(3) != 0) continue;
        some.push_back(record);
        writers[record] = step;
      }
      run_step(*store, options_, step, some);
      if (rng.below(3) == 0) {
        const std::string name = "name " + std::to_string(rng.below(4));
        store->add_checkpoint(name, as_state("state of " + name)).wait();
        checkpoints[name] = writers;
      }
      if (rng.below(10) == 0 && !store->checkpoints().empty())
        store->remove_checkpoint(store->checkpoints().front().checkpoint_serial);
      ASSERT_EQ(difference(*store, options_, writers), "") << "step " << step;
      ASSERT_LE(store->checkpoints().size(), 2u);
    }
  }
  const auto left = Store::look(options_.directory, 0).checkpoints;
  ASSERT_FALSE(left.empty());
  for (const CommitHeader& header : left) {
    const auto drive = clean_queue();
    const auto store = open_store(options_, *drive);
    store->adopt(header);
    EXPECT_EQ(state_of(*store), "state of " + header.name);
    EXPECT_EQ(difference(*store, options_, checkpoints.at(header.name)), "") << header.name;
  }
}

TEST_F(StoreCheckpointsTest, ForgottenSpaceIsUsedAgain) {
  const auto drive = clean_queue();
  const auto store = create_store(options_, *drive);
  take_steps(*store, 0, 1);
  store->add_checkpoint("a", {}).wait();
  store->remove_checkpoint(store->checkpoints().front().checkpoint_serial);
  EXPECT_TRUE(store->checkpoints().empty());
  take_steps(*store, 2, 6);
  store->add_checkpoint("b", {}).wait();
  take_steps(*store, 7, 9);
  store->add_checkpoint("c", {}).wait();
  take_steps(*store, 10, 12);
  EXPECT_EQ(names(*store), (std::vector<std::string>{"b", "c"}));
}

TEST_F(StoreCheckpointsTest, AfterAFailedRemovalTheStoreIsOver) {
  const auto faults = std::make_shared<Faults>(1);
  aio::DriveQueue drive(queue_options(), hoist::test::make_faulty_backend(queue_options(), faults));
  const auto store = create_store(options_, drive);
  take_steps(*store, 0, 1);
  store->add_checkpoint("a", {}).wait();
  faults->add({.kind = Fault::Kind::error, .operation = aio::Operation::sync});  // once
  EXPECT_THROW(store->remove_checkpoint(store->checkpoints().front().checkpoint_serial), IoError);
  EXPECT_THROW(store->begin_step(2), IoError) << "a flush is never tried again";
}

TEST_F(StoreCheckpointsTest, ReadersFindACheckpointByItsHeader) {
  {
    const auto drive = clean_queue();
    const auto store = create_store(options_, *drive);
    take_steps(*store, 0, 2);
    store->add_checkpoint("two", as_state("state of two")).wait();
    take_steps(*store, 3, 8);
  }
  const auto drive = clean_queue();
  const CommitHeader kept = Store::look(options_.directory, 0).checkpoints.at(0);
  StoreReader reader(options_.directory, 0, options_.records, kept, *drive);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(reader.caller_state().data()), reader.caller_state().size()),
            "state of two");
  const RecordLayout& layout = options_.records[0].layout;
  const Buffer bytes(layout.region_bytes(Region::weights));
  const auto tiles = static_cast<std::uint32_t>(layout.tiles().size());
  reader.read(RecordId{0}, Region::weights, 0, tiles, bytes.span());
  const Buffer expected(layout.tiles()[0].bytes(Region::weights));
  fill_tile(0, Region::weights, 0, 2, expected.span());
  EXPECT_TRUE(std::ranges::equal(expected.span(), bytes.span().first(expected.span().size())));
}

TEST_F(StoreCheckpointsTest, NamesThatCannotBeAreRefusedAndNothingHappens) {
  const auto drive = clean_queue();
  const auto store = create_store(options_, *drive);
  take_steps(*store, 0, 0);
  for (const std::string& name : {std::string(), std::string(48, 'x'), std::string("line\nbreak")})
    EXPECT_THROW(store->add_checkpoint(name, {}), UsageError) << name;
  EXPECT_THROW(store->add_checkpoint("name", std::vector<std::byte>(options_.caller_state_bytes_max + 1)), UsageError);
  store->add_checkpoint(std::string(47, 'x'), {}).wait();
  EXPECT_EQ(names(*store), std::vector<std::string>{std::string(47, 'x')});
}

TEST_F(StoreCheckpointsTest, AskingForMoreRoomThanTheStoreHasIsRefused) {
  {
    const auto drive = clean_queue();
    const auto store = create_store(options_, *drive);
    take_steps(*store, 0, 1);
    store->add_checkpoint("one", as_state("state of one")).wait();
  }
  const auto drive = clean_queue();
  const auto refusal = [&](const StoreOptions& options) {
    return hoist::test::message_of<StoreError>([&] { open_store(options, *drive); });
  };
  const char* const places = "has 2 places for named checkpoints and a mirror's commit, and 3 are asked for";
  EXPECT_THAT(refusal(keeping(options_.directory, 3)), testing::HasSubstr(places));
  StoreOptions mirrored = keeping(options_.directory, 2);
  mirrored.held_commits_max = 1;
  EXPECT_THAT(refusal(mirrored), testing::HasSubstr(places));
  const auto store = open_store(keeping(options_.directory, 0), *drive);  // fewer is none of its concern
  EXPECT_EQ(store->checkpoints_max(), 2u);
  EXPECT_EQ(names(*store), std::vector<std::string>{"one"});
}

TEST_F(StoreCheckpointsTest, ADamagedCheckpointSlotIsReportedAndTheRestIsUsed) {
  std::uint64_t slot_at = 0;
  {
    const auto drive = clean_queue();
    const auto store = create_store(options_, *drive);
    take_steps(*store, 0, 1);
    store->add_checkpoint("one", as_state("state of one")).wait();
    take_steps(*store, 2, 3);
    store->add_checkpoint("three", as_state("state of three")).wait();
  }
  const std::string manifest = options_.directory + "/rank-00000.manifest";
  const auto bytes = read_file(manifest);
  const std::string name = "one";
  const auto found = std::search(bytes.begin(), bytes.end(), as_state(name).begin(), as_state(name).end());
  slot_at = static_cast<std::uint64_t>(found - bytes.begin());
  const std::byte wrong{'X'};
  poke(manifest, slot_at, {&wrong, 1});
  const auto look = Store::look(options_.directory, 0);
  ASSERT_EQ(look.checkpoints.size(), 1u);
  ASSERT_EQ(look.damage.size(), 1u);
  EXPECT_NE(look.damage[0].text.find("named checkpoint slot"), std::string::npos) << look.damage[0].text;
  EXPECT_TRUE(look.damage[0].is_of_checkpoint);
  expect_checkpoint_holds("three", 3);
}

// --- power cuts at every operation -----------------------------------------------------------------------------------

// The facts that the judge has to know.
struct History {
  std::optional<std::uint64_t> completed, started;   // commits
  std::map<std::string, std::uint64_t> checkpoints;  // durable ones that nothing has replaced since
  std::map<std::string, std::uint64_t> keeping;      // begun, perhaps there
  std::vector<std::string> perhaps_gone;             // replaced by one that is being kept
};

class StoreCheckpointsCrashTest : public StoreCheckpointsTest {
 protected:
  // Keeps every second step; returns whether the drive died.
  bool live(const std::shared_ptr<Faults>& faults, std::uint64_t dies_at, History& history) {
    faults->track_unflushed();
    faults->add({.kind = Fault::Kind::error, .first = dies_at, .count = Faults::kForever, .code = EIO});
    aio::DriveQueue drive(queue_options(), hoist::test::make_faulty_backend(queue_options(), faults));
    try {
      const auto store = create_store(options_, drive);
      for (std::uint64_t step = 0; step < 7; ++step) {
        history.started = step;
        run_step(*store, options_, step, all_records(options_));
        history.completed = step;
        if (step % 2 == 1) keep(*store, step, history);
      }
    } catch (const IoError&) {
      return true;
    }
    return false;
  }

  void keep(Store& store, std::uint64_t step, History& history) {
    const std::string name = "k" + std::to_string(step);
    history.keeping = {{name, step}};
    if (history.checkpoints.size() == 2) history.perhaps_gone = {history.checkpoints.begin()->first};
    store.add_checkpoint(name, as_state("state of " + name)).wait();
    for (const std::string& gone : history.perhaps_gone) history.checkpoints.erase(gone);
    history.perhaps_gone.clear();
    history.checkpoints[name] = step;
    history.keeping.clear();
  }

  std::string judge(const History& history) {
    const auto found = Store::look(options_.directory, 0);
    if (history.completed && (found.commits.empty() || found.commits.front().step < *history.completed))
      return "the last commit is gone";
    for (const auto& [name, step] : history.checkpoints) {
      const bool perhaps_gone = std::ranges::find(history.perhaps_gone, name) != history.perhaps_gone.end();
      const auto listed = std::ranges::find(found.checkpoints, name, &CommitHeader::name);
      if (listed == found.checkpoints.end() && !perhaps_gone) return name + " is gone";
      if (listed != found.checkpoints.end() && listed->step != step) return name + " is another step";
    }
    for (const CommitHeader& checkpoint : found.checkpoints)
      if (!history.checkpoints.contains(checkpoint.name) && !history.keeping.contains(checkpoint.name))
        return checkpoint.name + " was not kept";
    // Newest commit first, and what is kept after it; then training goes on and nothing of what is kept changes.
    try {
      if (!found.commits.empty()) {
        const auto drive = clean_queue();
        const auto store = open_store(options_, *drive);
        store->adopt(CommitHeader(store->commits().front()));
        const std::uint64_t step = store->commits().front().step;
        if (auto problem = difference(*store, options_, all_by(step)); !problem.empty()) return problem;
        while (store->checkpoints().size() > options_.checkpoints_max)
          store->remove_checkpoint(store->checkpoints().front().checkpoint_serial);
        for (std::uint64_t next = step + 1; next < step + 4; ++next)
          run_step(*store, options_, next, all_records(options_));
      }
      for (const CommitHeader& checkpoint : Store::look(options_.directory, 0).checkpoints) {
        const auto drive = clean_queue();
        const auto store = open_store(options_, *drive);
        store->adopt(checkpoint);
        if (state_of(*store) != "state of " + checkpoint.name) return checkpoint.name + " has another one's state";
        if (auto problem = difference(*store, options_, all_by(checkpoint.step)); !problem.empty()) return problem;
      }
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  }

  StoreCheckpointsCrashTest() {
    options_.records.erase(options_.records.begin());
    options_.records[0].layout = RecordLayout(std::vector<RecordSegment>(2, {DType::bf16, true, 32}));
    options_.directory = memory_ / "store";
  }

  TempDirectory memory_{hoist::test::scratch_in_memory()};
};

TEST_F(StoreCheckpointsCrashTest, PowerCutsAtEveryOperation) {
  std::uint64_t runs = 0;
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    bool died = true;
    for (std::uint64_t dies_at = 0; died; ++dies_at, ++runs) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << ", dies at operation " << dies_at);
      std::filesystem::remove_all(options_.directory);
      const auto faults = std::make_shared<Faults>(seed);
      History history;
      died = live(faults, dies_at, history);
      faults->power_cut(seed * 1000 + dies_at);
      ASSERT_EQ(judge(history), "");
    }
  }
  EXPECT_GT(runs, 200u);
}

// --- steps without a commit between them -----------------------------------------------------------------------------

TEST_F(StoreCheckpointsTest, StepsWithoutACommitBetweenThemAreCommittedTogether) {
  {
    const auto drive = clean_queue();
    const auto store = create_store(options_, *drive);
    run_step(*store, options_, 0, all_records(options_));
    for (std::uint64_t step = 1; step <= 5; ++step) {
      store->begin_step(step);
      for (const std::uint32_t record : all_records(options_)) write_record(*store, options_, record, step);
      EXPECT_EQ(difference(*store, options_, all_by(step)), "") << "step " << step;
    }
    store->commit(as_state("5")).wait();
    store->begin_step(6);
    for (const std::uint32_t record : all_records(options_)) write_record(*store, options_, record, 6);
    store->begin_step(7);  // and never committed
    for (const std::uint32_t record : all_records(options_)) write_record(*store, options_, record, 7);
  }
  EXPECT_EQ(reopen_and_compare(options_, {{5, all_by(5)}}), 5u);
}

}  // namespace
}  // namespace hoist::tiers::test::store_checkpoints_test
