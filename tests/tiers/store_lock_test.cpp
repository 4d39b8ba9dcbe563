// SPDX-License-Identifier: Apache-2.0
// Who has a store when several processes or threads want it, and until when.
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/tiers/store_open_fixture.hpp>
#include <hoist/tiers/detail/store_files.hpp>

namespace {
int lock_error = 0;
}  // namespace

// The program's own definition comes before that of the C library.
extern "C" int flock(int descriptor, int operation) noexcept {
  static auto* const next = reinterpret_cast<decltype(&flock)>(::dlsym(RTLD_NEXT, "flock"));
  if (lock_error == 0) return next(descriptor, operation);
  errno = lock_error;
  return -1;
}

namespace hoist::tiers::test::store_lock_test {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

using StoreLockTest = StoreOpenTest;

// While one lives, flock() fails.
class FailingLocks {
 public:
  explicit FailingLocks(int error) { lock_error = error; }
  ~FailingLocks() { lock_error = 0; }
  FailingLocks(const FailingLocks&) = delete;
  FailingLocks& operator=(const FailingLocks&) = delete;
};

TEST_F(StoreLockTest, OneAtATime) {
  const auto store = create();
  run_step(*store, options_, 0, all_records(options_));
  const std::string holder = "in use by process " + std::to_string(::getpid()) + " on ";
  EXPECT_THAT(refusal_to_open(), HasSubstr(holder));
  EXPECT_THAT(refusal_to_create(), HasSubstr(holder));
  EXPECT_EQ(Store::look(options_.directory, 0).commits.size(), 1u);
  EXPECT_EQ(difference(*store, options_, Writers(options_.records.size(), 0)), "");
}

pid_t forked_sleeper() {
  const pid_t child = ::fork();
  if (child != 0) return child;
  for (;;) ::pause();
}

void end(pid_t child) {
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

// As the data loaders of a program do.
TEST_F(StoreLockTest, AForkedChildDoesNotKeepAStoreThatWasClosed) {
  make_committed();
  auto store = open_store(options_, *queue_);
  const pid_t child = forked_sleeper();
  ASSERT_GT(child, 0);
  store.reset();
  EXPECT_EQ(refusal_to_open(), "not refused");
  end(child);
}

TEST_F(StoreLockTest, ALockThatOutlivesItsProcessIsExplained) {
  const auto store = create();
  const pid_t dead = forked_sleeper();
  ASSERT_GT(dead, 0);
  end(dead);
  const detail::StorePaths paths(options_.directory, 0);
  const std::string text = hoist::test::contents_of(paths.lock_info);
  ASSERT_THAT(text, HasSubstr(" on "));
  std::ofstream(paths.lock_info) << "process " << dead << text.substr(text.find(" on "));
  EXPECT_THAT(refusal_to_open(), HasSubstr("in use by process " + std::to_string(dead) + " on "));
  EXPECT_THAT(refusal_to_open(), HasSubstr(", which has ended, but left a process that it had forked"));
  run_step(*store, options_, 0, all_records(options_));
}

// Readers leave no name: the one that a killed trainer left is not theirs.
TEST_F(StoreLockTest, AReaderIsNotTakenForTheLastTrainer) {
  options_.lock_timeout = std::chrono::milliseconds(0);
  make_committed();
  const auto reader = detail::open_shared(detail::StorePaths(options_.directory, 0), {});
  EXPECT_THAT(refusal_to_open(), HasSubstr("is being read, by `hoist export`"));
}

TEST_F(StoreLockTest, AFileSystemWithoutLocksIsNotTakenForAStoreInUse) {
  make_committed();
  const detail::StorePaths paths(options_.directory, 0);
  const FailingLocks failing(EOPNOTSUPP);
  EXPECT_EQ(Store::holder(options_.directory, 0), std::nullopt);
  try {
    detail::open_shared(paths, {});
    ADD_FAILURE() << "opened without a lock";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), HasSubstr("must support locks; copy the store to a local one"));
  }
}

TEST_F(StoreLockTest, AStoreBeingFilledIsNotReplaced) {
  const auto store = create();
  EXPECT_THAT(refusal_to_create(), AllOf(HasSubstr("in use by process"), HasSubstr("which is this process")));
  run_step(*store, options_, 0, all_records(options_));
}

// The lock holds from the first look at the directory on: two processes that start at once never both find it empty.
TEST_F(StoreLockTest, AStoreBeingMadeIsNotReplaced) {
  {
    detail::Creation first(detail::StorePaths(options_.directory, 0));
    first.claim({});
    EXPECT_THAT(refusal_to_create(), HasSubstr("is in use by"));
    EXPECT_THAT(refusal_to_open(), HasSubstr("is in use by"));
    EXPECT_TRUE(fs::exists(file("data"))) << "the loser has removed the winner's file";
    options_.identity.rank = 1;
    options_.identity.world_size = 2;
    EXPECT_NO_THROW(create()) << "another rank's files are not touched";
    options_.identity = {.layout = options_.identity.layout, .rank = 0, .world_size = 1};
  }
  EXPECT_FALSE(fs::exists(file("data"))) << "it came to nothing";
  make_committed(0);
}

// Its lock is that of one file: were the file replaced, somebody could hold the lock of the old one.
TEST_F(StoreLockTest, AReplacedStoreKeepsItsDataFile) {
  { const auto store = create(); }
  struct stat before {
  }, after{};
  ASSERT_EQ(::stat(file("data").c_str(), &before), 0);
  { const auto store = create(); }
  ASSERT_EQ(::stat(file("data").c_str(), &after), 0);
  EXPECT_EQ(before.st_ino, after.st_ino);
}

// Runs `call` on four threads at the same moment, each with a drive queue of its own.
template <typename Call>
void on_four_threads(const Call& call) {
  std::atomic<int> ready{0};
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const auto queue = clean_queue();
      ++ready;
      while (ready < 4) std::this_thread::yield();
      call(*queue);
    });
  }
}

// A directory that vanishes between making and using it, as a loser's does, is made again.
TEST_F(StoreLockTest, ManyStartAtOnceAndOneGetsIt) {
  options_.lock_timeout = std::chrono::milliseconds(1);
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> made{0}, refused{0}, failed{0};
    on_four_threads([&](auto& queue) {
      try {
        const auto store = create_store(options_, queue);
        ++made;
        while (made + refused + failed < 4) std::this_thread::yield();  // none comes after another
      } catch (const StoreError&) {
        ++refused;
      } catch (const IoError&) {
        ++failed;
      }
    });
    EXPECT_EQ(made, 1);
    EXPECT_EQ(refused, 3);
    EXPECT_EQ(failed, 0);
    fs::remove_all(options_.directory);
  }
}

// /proc is a directory, and says of a new file that its directory does not exist.
TEST_F(StoreLockTest, ADirectoryThatTakesNoFilesIsNotInUse) {
  options_.directory = "/proc";
  options_.lock_timeout = std::chrono::milliseconds(1);
  try {
    create_store(options_, *queue_);
    FAIL() << "there is a store in /proc";
  } catch (const IoError& error) {
    EXPECT_EQ(error.where.code, ENOENT);
    EXPECT_THAT(error.what(), HasSubstr("/proc/rank-00000.data"));
  }
}

// The one that gets it commits, and ends while the others still wait for it: they find a store that is not theirs.
TEST_F(StoreLockTest, ManyStartAtOnceAndTheFirstOnesCommitStays) {
  options_.lock_timeout = std::chrono::seconds(10);
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> made{0};
    on_four_threads([&](auto& queue) {
      try {
        const auto store = create_store(options_, queue);
        run_step(*store, options_, 0, all_records(options_));
        ++made;
      } catch (const StoreError& error) {
        EXPECT_THAT(error.what(), HasSubstr("holds step 0"));
      }
    });
    EXPECT_EQ(made, 1);
    EXPECT_NO_THROW(open_store(options_, *queue_));
    fs::remove_all(options_.directory);
  }
}

// Removing the directory, the other remedy, would end what the other process has trained.
TEST_F(StoreLockTest, OneThatWaitedWhileAnotherTrainedIsToldSo) {
  options_.lock_timeout = std::chrono::seconds(10);
  const std::string waited = "since this one looked";
  std::string refusal;
  for (int pause = 300; refusal.find(waited) == std::string::npos && pause < 20'000; pause *= 2) {
    fs::remove_all(options_.directory);
    auto first = create();
    std::thread waits([&] { refusal = refusal_to_create(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(pause));  // until it has looked, as a rule
    run_step(*first, options_, 0, all_records(options_));
    first.reset();
    waits.join();
  }
  EXPECT_THAT(refusal, testing::AllOf(HasSubstr("holds step 0 of this model; another process has trained here since "
                                                "this one looked: start again, with resume"),
                                      testing::Not(HasSubstr("remove"))));
}

TEST_F(StoreLockTest, IsRemovedOnlyWhenNobodyHasIt) {
  const std::array directories{options_.directory};
  make_committed(2);
  const auto before = contents();
  {
    const auto store = open_store(options_, *queue_);
    EXPECT_FALSE(Store::remove(directories, {}));
  }
  EXPECT_EQ(contents(), before);
  // Names that no rank gives its files are somebody's copies and notes.
  const std::array mine{"notes", "rank-00000-backup.data", "rank-0.manifest", "rank-00000.old.label", "rank-.data"};
  for (const char* name : mine) std::ofstream(options_.directory + "/" + name) << "mine";
  std::ofstream(options_.directory + "/rank-00000.label-new") << "what a crash leaves of a drive's label";
  std::ofstream(options_.directory + "/rank-00000.scratch") << "what a crash leaves of spilled gradients";
  EXPECT_TRUE(Store::remove(directories, {}));
  EXPECT_EQ(contents().size(), mine.size());
  EXPECT_TRUE(Store::remove(directories, {})) << "nothing is nobody's";
}

// Its holder ends by removing it, and another process makes a store of the same name before remove() has the lock.
TEST_F(StoreLockTest, RemovingDoesNotTakeTheStoreThatCameAfterTheOneItWaitedFor) {
  const std::array directories{options_.directory};
  make_committed(2);
  auto first = open_store(options_, *queue_);
  std::optional<bool> removed;
  std::thread remover([&] { removed = Store::remove(directories, std::chrono::milliseconds(500)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it waits for the first store's lock, mostly
  const std::string other = options_.directory + "-other";
  fs::rename(options_.directory, other);  // the files keep their locks
  make_committed(5);
  const auto second = open_store(options_, *queue_);
  first.reset();
  remover.join();
  EXPECT_EQ(removed, false);
  const auto commits = Store::look(options_.directory, 0).commits;
  ASSERT_FALSE(commits.empty());
  EXPECT_EQ(commits.front().step, 5u);
}

}  // namespace
}  // namespace hoist::tiers::test::store_lock_test
