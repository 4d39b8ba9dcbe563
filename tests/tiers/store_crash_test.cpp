// SPDX-License-Identifier: Apache-2.0
// Power is cut, or the process killed, at every operation; what is adopted afterwards is exactly one committed step.
//
// A run performs steps on a drive that stops answering at operation `dies_at`. Then, for a power cut, every write that
// no flush covered is kept, lost or torn by seed. The judge opens what is left with a healthy drive: the commit it
// finds must not be older than the last one that completed, not newer than the last one that was started, and hold
// what was written for it. That the judge notices a missing flush is itself tested: each flush is taken away in turn.
#include <filesystem>
#include <functional>
#include <optional>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/forgetful_backend.hpp>
#include <hoist/tests/support/lost_names.hpp>
#include <hoist/tests/support/observed_backend.hpp>
#include <hoist/tests/tiers/store_harness.hpp>

namespace hoist::tiers::test::store_crash_test {
namespace {

using hoist::test::Fault;
using hoist::test::Faults;
using hoist::test::ForgetfulBackend;
using hoist::test::LostNames;
using hoist::test::ObservedBackend;
using hoist::test::TempDirectory;

// The facts that the judge has to know.
struct History {
  std::optional<std::uint64_t> completed;  // the newest commit that was reported durable
  std::optional<std::uint64_t> started;    // the newest whose commit() was called
  std::map<std::uint64_t, Writers> steps;
};

// On one drive and on two.
class StoreCrashTest : public ::testing::TestWithParam<unsigned> {
 protected:
  // As long as a real program's state may be: a commit is more than one sector.
  static std::string long_state(std::uint64_t step) { return std::to_string(step) + std::string(9000, '.'); }

  std::unique_ptr<aio::DriveQueue> queue(const std::shared_ptr<Faults>& faults, ForgetfulBackend::Drops drops) {
    auto faulty = hoist::test::make_faulty_backend(queue_options(), faults);
    return std::make_unique<aio::DriveQueue>(queue_options(),
                                             std::make_unique<ForgetfulBackend>(std::move(faulty), std::move(drops)));
  }

  // From this operation on, the drive answers nothing but EIO, and does nothing.
  static void die_at(Faults& faults, std::uint64_t operation) {
    faults.clear();
    faults.add({.kind = Fault::Kind::error, .first = operation, .count = Faults::kForever, .code = EIO});
  }

  void take_steps(Store& store, std::uint64_t first, std::uint64_t count, std::uint64_t seed, History& history) {
    for (std::uint64_t step = first; step < first + count; ++step) {
      store.begin_step(step);
      Writers writers = step == 0 ? Writers(options_.records.size(), 0) : history.steps.at(step - 1);
      for (const std::uint32_t record : all_records(options_)) {
        if (step != 0 && random_bits(seed, step * 16 + record) % 4 == 0) continue;
        write_record(store, options_, record, step);
        writers[record] = step;
      }
      history.steps[step] = writers;
      history.started = step;
      store.commit(as_state(long_state(step))).wait();
      history.completed = step;
    }
  }

  // Creates a store and takes steps until the drive dies; returns whether it did.
  bool first_life(const std::shared_ptr<Faults>& faults, std::uint64_t dies_at, std::uint64_t seed, History& history,
                  const ForgetfulBackend::Drops& drops) {
    faults->track_unflushed();
    die_at(*faults, dies_at);
    const auto drive = queue(faults, drops);
    try {
      const auto store = create_store(options_, *drive);
      take_steps(*store, 0, 4, seed, history);
    } catch (const IoError&) {
      return true;
    }
    return false;
  }

  // Resumes and goes on until the drive dies again.
  bool second_life(const std::shared_ptr<Faults>& faults, std::uint64_t dies_at, std::uint64_t seed, History& history,
                   const ForgetfulBackend::Drops& drops) {
    die_at(*faults, dies_at);
    const auto drive = queue(faults, drops);
    try {
      const auto store = open_store(options_, *drive);
      if (store->commits().empty()) return true;
      const std::uint64_t step = store->commits().front().step;
      store->adopt(store->commits().front());
      history.started = history.completed = step;
      take_steps(*store, step + 1, 1, seed + 1, history);
    } catch (const IoError&) {
      return true;
    }
    return false;
  }

  // The fault in the remaining files; empty when all is well.
  std::string judge(const History& history) {
    const auto drive = clean_queue();
    try {
      const auto found = Store::look(options_.directory, 0);
      if (found.commits.empty()) {
        if (history.completed) return "the last commit is gone";
        // Nothing was promised yet, so the place can be used again.
        const auto store = create_store(options_, *drive);
        run_step(*store, options_, 0, all_records(options_));
        return {};
      }
      const auto store = open_store(options_, *drive);
      const std::uint64_t step = store->commits().front().step;
      if (history.completed && step < *history.completed) return "an old commit came back";
      if (!history.started || step > *history.started) return "a commit came out of nothing";
      store->adopt(store->commits().front());
      if (state_of(*store) != long_state(step)) return "the caller state is another step's";
      if (auto problem = difference(*store, options_, history.steps.at(step)); !problem.empty()) return problem;
      run_step(*store, options_, step + 1, all_records(options_));
      return difference(*store, options_, Writers(options_.records.size(), step + 1));
    } catch (const Error& error) {
      return error.what();
    }
  }

  void start_over() {
    std::filesystem::remove_all(options_.directory);
    for (const std::string& directory : options_.stripe_directories) std::filesystem::remove_all(directory);
  }

  // For each seed, lets the drive of a life die at each of its operations in turn, and at last not at all. A life says
  // whether its drive died.
  using Life = std::function<bool(std::uint64_t seed, std::uint64_t dies_at, History& history)>;
  std::string first_problem(std::uint64_t seeds, const Life& life) {
    for (std::uint64_t seed = 0; seed < seeds; ++seed) {
      bool died = true;
      for (std::uint64_t dies_at = 0; died; ++dies_at, ++runs_) {
        start_over();
        History history;
        died = life(seed, dies_at, history);
        if (const std::string problem = judge(history); !problem.empty())
          return "seed " + std::to_string(seed) + ", dies at operation " + std::to_string(dies_at) + ": " + problem;
      }
    }
    return {};
  }
  std::string first_problem_of_power_cuts(std::uint64_t seeds, const ForgetfulBackend::Drops& drops) {
    return first_problem(seeds, [&](std::uint64_t seed, std::uint64_t dies_at, History& history) {
      const auto faults = std::make_shared<Faults>(seed);
      const bool died = first_life(faults, dies_at, seed, history, drops);
      faults->power_cut(seed * 1000 + dies_at);
      return died;
    });
  }

  std::uint64_t runs_ = 0;
  TempDirectory directory_{hoist::test::scratch_in_memory()};
  StoreOptions options_ = smaller(small_model_on(directory_ / "store", GetParam()));

 private:
  // One block a tile: what matters here is the number of operations, not of bytes.
  static StoreOptions smaller(StoreOptions options) {
    options.caller_state_bytes_max = 10000;
    options.records.erase(options.records.begin());
    options.records[0].layout = RecordLayout(std::vector<RecordSegment>(3, {DType::bf16, true, 32}));
    return options;
  }
};

TEST_P(StoreCrashTest, PowerCutsAtEveryOperation) {
  EXPECT_EQ(first_problem_of_power_cuts(4, {}), "");
  EXPECT_GT(runs_, 100u);
}

TEST_P(StoreCrashTest, KillsAtEveryOperation) {
  const auto life = [&](std::uint64_t seed, std::uint64_t dies_at, History& history) {
    return first_life(std::make_shared<Faults>(seed), dies_at, seed, history, {});
  };
  EXPECT_EQ(first_problem(1, life), "");
}

// Killed, resumed from what was perhaps never flushed, and then the power is cut.
class StoreTwoLivesTest : public StoreCrashTest {
 protected:
  std::string first_problem(std::uint64_t seeds, const ForgetfulBackend::Drops& drops) {
    for (std::uint64_t seed = 0; seed < seeds; ++seed) {
      for (std::uint64_t first_death = 20; first_death < 56; ++first_death) {
        for (std::uint64_t second_death = 3; second_death < 9; ++second_death, ++runs_) {
          start_over();
          const auto faults = std::make_shared<Faults>(seed);
          History history;
          if (!first_life(faults, first_death, seed, history, {})) break;
          second_life(faults, second_death, seed, history, drops);
          faults->power_cut(random_bits(seed, first_death * 64 + second_death));
          if (auto problem = judge(history); !problem.empty())
            return "seed " + std::to_string(seed) + ", deaths at " + std::to_string(first_death) + " and " +
                   std::to_string(second_death) + ": " + problem;
        }
      }
    }
    return {};
  }
};

TEST_P(StoreTwoLivesTest, KilledThenResumedThenCut) {
  EXPECT_EQ(first_problem(2, {}), "");
  EXPECT_GT(runs_, 200u);
}

// An adopted commit is durable before any slot or extent it needs is overwritten. (That one flush also comes before its
// slot is written is checked by the order of operations, below.)
TEST_P(StoreTwoLivesTest, WithoutTheFlushAfterAdoptionDamageIsFound) {
  const auto drops = [](const std::string& path, std::uint64_t nth) { return path.ends_with(".manifest") && nth <= 1; };
  EXPECT_NE(first_problem(20, drops), "");
}

class StoreMutationTest : public StoreCrashTest {
 protected:
  std::string first_problem(const ForgetfulBackend::Drops& drops) { return first_problem_of_power_cuts(20, drops); }
};

TEST_P(StoreMutationTest, WithoutFlushingTheDataDamageIsFound) {
  EXPECT_NE(first_problem([](const std::string& path, std::uint64_t) { return path.ends_with(".data"); }), "");
}

TEST_P(StoreMutationTest, WithoutFlushingTheLastDriveDamageIsFound) {
  if (GetParam() == 1) GTEST_SKIP() << "there is one drive";
  EXPECT_NE(first_problem([](const std::string& path, std::uint64_t) {
              return path.ends_with(".data") && path.find("-drive1") != std::string::npos;
            }),
            "");
}

TEST_P(StoreMutationTest, WithoutFlushingTheManifestDamageIsFound) {
  EXPECT_NE(first_problem([](const std::string& path, std::uint64_t) { return path.ends_with(".manifest"); }), "");
}

// A manifest gets its name only after its superblock was flushed: what has the name is whole.
TEST_P(StoreMutationTest, WithoutFlushingTheSuperblockDamageIsFound) {
  EXPECT_NE(first_problem([](const std::string& path, std::uint64_t) { return path.ends_with(".manifest-new"); }), "");
}

// A power cut also loses names of files, and what was written without the queue.
class StoreNamesTest : public StoreCrashTest {
 protected:
  std::string first_problem(std::uint64_t seeds, const LostNames::Forgets& forgets) {
    const TempDirectory vault(hoist::test::scratch_in_memory());
    return StoreCrashTest::first_problem(seeds, [&](std::uint64_t seed, std::uint64_t dies_at, History& history) {
      const auto faults = std::make_shared<Faults>(seed);
      LostNames names(directory_.path().string(), vault.path().string(), forgets);
      const bool died = first_life(faults, dies_at, seed, history, {});
      faults->power_cut(seed * 1000 + dies_at);
      lost_ += names.power_cut(seed * 1000 + dies_at);
      return died;
    });
  }

  std::uint64_t lost_ = 0;
};

TEST_P(StoreNamesTest, PowerCutsThatTakeNamesLeaveTheLastCommit) {
  EXPECT_EQ(first_problem(3, {}), "");
  EXPECT_GT(lost_, 10u);
}

// By a process that was killed before its first commit and has not flushed their names.
TEST_P(StoreNamesTest, DirectoriesThatAnotherProcessMadeLastToo) {
  const TempDirectory vault(hoist::test::scratch_in_memory());
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    start_over();
    const auto faults = std::make_shared<Faults>(seed);
    History history;
    {
      LostNames names(directory_.path().string(), vault.path().string());
      ASSERT_EQ(::mkdir(options_.directory.c_str(), 0700), 0);
      for (const std::string& directory : options_.stripe_directories) ASSERT_EQ(::mkdir(directory.c_str(), 0700), 0);
      first_life(faults, Faults::kForever, seed, history, {});
      names.power_cut(seed);
    }
    ASSERT_EQ(judge(history), "") << seed;
  }
}

TEST_P(StoreNamesTest, WithoutFlushingDirectoriesDamageIsFound) {
  EXPECT_NE(first_problem(20, [](const std::string& path) { return std::filesystem::is_directory(path); }), "");
}

TEST_P(StoreNamesTest, WithoutFlushingLabelsDamageIsFound) {
  if (GetParam() == 1) GTEST_SKIP() << "there is one drive, and no label";
  EXPECT_NE(first_problem(20, [](const std::string& path) { return path.find(".label") != std::string::npos; }), "");
}

// The order of operations itself.
TEST_P(StoreCrashTest, OperationsHaveTheirOrder) {
  std::vector<std::string> log;
  const auto record = [&](const aio::Block& block) {
    const char* names[] = {"read ", "write ", "sync "};
    const std::string line = names[static_cast<int>(block.operation)] +
                             std::filesystem::path(block.file->path()).extension().string().substr(1);
    if (log.empty() || log.back() != line) log.push_back(line);
  };
  const auto recorded = [&] {
    return aio::DriveQueue(queue_options(),
                           std::make_unique<ObservedBackend>(aio::make_backend(queue_options()), record));
  };
  {
    aio::DriveQueue drive = recorded();
    const auto store = create_store(options_, drive);
    run_step(*store, options_, 0, all_records(options_));
  }
  EXPECT_EQ(log, (std::vector<std::string>{"write manifest-new", "sync manifest-new", "write data", "sync data",
                                           "write manifest", "sync manifest", "write manifest", "sync manifest"}));
  log.clear();
  {
    aio::DriveQueue drive = recorded();
    const auto store = open_store(options_, drive);
    store->adopt(store->commits().front());
    run_step(*store, options_, 1, all_records(options_));
  }
  EXPECT_EQ(log, (std::vector<std::string>{"read manifest", "sync manifest", "write manifest", "sync manifest",
                                           "write data", "sync data", "write manifest", "sync manifest"}));
}

INSTANTIATE_TEST_SUITE_P(Drives, StoreCrashTest, testing::Values(1u, 2u));
INSTANTIATE_TEST_SUITE_P(Drives, StoreTwoLivesTest, testing::Values(1u, 2u));
INSTANTIATE_TEST_SUITE_P(Drives, StoreMutationTest, testing::Values(1u, 2u));
INSTANTIATE_TEST_SUITE_P(Drives, StoreNamesTest, testing::Values(1u, 2u));

}  // namespace
}  // namespace hoist::tiers::test::store_crash_test
