// SPDX-License-Identifier: Apache-2.0
// Which stores are made, opened and refused, and what a refusal leaves behind.
#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <utility>
#include <vector>

#include <dlfcn.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/forked.hpp>
#include <hoist/tests/support/full_table.hpp>
#include <hoist/tests/support/other_kinds.hpp>
#include <hoist/tests/tiers/store_open_fixture.hpp>
#include <hoist/tiers/detail/manifest_view.hpp>
#include <hoist/tiers/store_changed_error.hpp>
#include <hoist/tiers/store_format.hpp>
#include <hoist/tiers/store_reader.hpp>

namespace {
std::function<void()> before_the_read;  // at this offset; once
std::int64_t offset_of_the_read = 0;
}  // namespace

// The program's own definition comes before that of the C library.
extern "C" ssize_t pread(int descriptor, void* target, size_t bytes, off_t offset) {
  static auto* const next = reinterpret_cast<decltype(&pread)>(::dlsym(RTLD_NEXT, "pread"));
  if (offset == offset_of_the_read)
    if (const auto act = std::exchange(before_the_read, nullptr)) act();
  return next(descriptor, target, bytes, offset);
}

namespace hoist::tiers::test::store_open_test {
namespace {

using hoist::test::Fault;
using hoist::test::Faults;
using hoist::test::FullTable;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;

TEST_F(StoreOpenTest, FilesBelongToTheirOwnerOnly) {
  const auto store = create();
  const auto mode = [](const std::string& path) {
    struct stat status {};
    EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
    return status.st_mode & 07777;
  };
  EXPECT_EQ(mode(options_.directory), 0700u);
  EXPECT_EQ(mode(directory_ / "a"), 0700u);
  EXPECT_EQ(mode(file("data")), 0600u);
  EXPECT_EQ(mode(file("manifest")), 0600u);
  EXPECT_FALSE(fs::exists(file("manifest-new")));
}

// Every file of a store, and every way of coming near it: nothing waits for whoever would open a pipe's other end.
TEST_F(StoreOpenTest, WhatIsNoFileIsRefusedAndNeverWaitedFor) {
  const hoist::test::TestDeadline deadline;
  options_.lock_timeout = std::chrono::milliseconds(0);
  for (const hoist::test::OtherKind& kind : hoist::test::kOtherKinds) {
    for (const char* ending : {"data", "manifest", "manifest-new", "lock-info", "label", "label-new"}) {
      SCOPED_TRACE(fmt::format("a {} as {}", kind.name, ending));
      const std::string place = file(ending);
      make_committed(2);
      fs::remove(place);
      if (!kind.make(place)) {
        fs::remove_all(options_.directory);
        continue;  // devices are root's
      }
      const bool is_data = place == file("data"), is_manifest = place == file("manifest");
      const auto attempt = [&](const auto& call) -> std::string {
        try {
          call();
        } catch (const Error& error) {
          return error.what();
        }
        return "went well";
      };
      const std::string found = attempt([&] { Store::look(options_.directory, 0); });
      const std::string opened = attempt([&] { open_store(options_, *queue_)->adopt({.step = 2, .incarnation = 1}); });
      const std::string created = attempt([&] { create(); });
      attempt([&] { Store::holder(options_.directory, 0); });
      EXPECT_THAT(created, HasSubstr(options_.directory)) << "a store with a commit was replaced";
      if (is_data || is_manifest) {
        EXPECT_THAT(opened, HasSubstr(place));
        EXPECT_THAT(created, HasSubstr(place));
      } else {
        EXPECT_EQ(opened, "went well");
      }
      EXPECT_EQ(found == "went well", !is_manifest) << found;
      const bool stays = ending != std::string_view("lock-info");
      EXPECT_TRUE(fs::exists(fs::symlink_status(place)) || !stays) << "somebody's";
      fs::remove_all(options_.directory);
    }
  }
}

// A directory that cannot be listed must not be taken for empty, which may be removed.
TEST_F(StoreOpenTest, ADirectoryThatCannotBeListedIsNotTakenForEmpty) {
  make_committed(1);
  const auto before = contents();
  {
    const FullTable full;  // of descriptors
    EXPECT_THROW(Store::ranks_in(options_.directory), IoError);
    const std::array directories{options_.directory};
    EXPECT_THROW(Store::remove(directories, Nanoseconds{0}), IoError);
  }
  EXPECT_EQ(contents(), before);
  EXPECT_THAT(Store::ranks_in(options_.directory), testing::ElementsAre(0));
  EXPECT_THAT(Store::ranks_in(directory_ / "nowhere"), testing::IsEmpty());
  EXPECT_THAT(Store::ranks_in(file("manifest")), testing::IsEmpty());
}

TEST_F(StoreOpenTest, NothingThereIsNotAStore) {
  EXPECT_FALSE(Store::look(options_.directory, 0).exists);
  EXPECT_THAT(refusal_to_open(), HasSubstr("there is no store in"));
  EXPECT_FALSE(fs::exists(directory_ / "a"));
  create();
  EXPECT_FALSE(Store::look(options_.directory, 1).exists);
  EXPECT_TRUE(Store::look(options_.directory, 0).exists);
}

TEST_F(StoreOpenTest, AStoreWithACommitIsNotReplaced) {
  make_committed(4);
  const auto before = contents();
  EXPECT_THAT(
      refusal_to_create(),
      HasSubstr("holds step 4 of this model; continue it (Engine::restore(), hoist-gpt --resume, resume=True in "
                "Python), or remove the directory"));
  options_.identity.layout += "more\n";
  EXPECT_THAT(refusal_to_create(), HasSubstr("holds step 4 of another model; use another directory"));
  EXPECT_EQ(contents(), before);
}

TEST_F(StoreOpenTest, AStoreThatNeverCommittedIsReplaced) {
  {
    const auto store = create();
    store->begin_step(0);
    write_record(*store, options_, 1, 0);
  }
  EXPECT_TRUE(Store::look(options_.directory, 0).exists);
  EXPECT_TRUE(Store::look(options_.directory, 0).commits.empty());
  make_committed(0);
  EXPECT_EQ(Store::look(options_.directory, 0).commits.size(), 1u);
}

TEST_F(StoreOpenTest, AHalfMadeStoreIsReplaced) {
  fs::create_directories(options_.directory);
  std::ofstream(file("data")) << "left over";
  std::ofstream(file("manifest-new")) << "left over";
  EXPECT_FALSE(Store::look(options_.directory, 0).exists);
  make_committed(0);
  EXPECT_FALSE(fs::exists(file("manifest-new")));
}

// Somebody moved the manifest, or has not copied it yet. The data are useless without it, but must not be overwritten.
TEST_F(StoreOpenTest, DataThatLackTheirManifestAreNotOverwritten) {
  make_committed(3);
  fs::rename(file("manifest"), directory_ / "aside");
  const auto before = contents();
  EXPECT_THAT(refusal_to_create(),
              AllOf(HasSubstr(file("data") + " holds data"), HasSubstr("bring the manifest back")));
  EXPECT_THAT(refusal_to_open(), HasSubstr("there is no store"));
  EXPECT_EQ(contents(), before);
  fs::rename(directory_ / "aside", file("manifest"));
  EXPECT_EQ(refusal_to_open(), "not refused");
}

TEST_F(StoreOpenTest, DataThatWereNeverWrittenNeedNoManifest) {
  {
    const auto store = create();
    EXPECT_GT(fs::file_size(file("data")), 0u);
  }
  fs::remove(file("manifest"));
  make_committed(1);
}

// A process was killed while it replaced or removed a store without a commit. The next one starts without help.
TEST_F(StoreOpenTest, AnInterruptedReplacementIsReplaced) {
  make_committed(1);
  fs::rename(file("manifest"), file("manifest-new"));
  make_committed(2);
  EXPECT_FALSE(fs::exists(file("manifest-new")));
}

TEST_F(StoreOpenTest, ADataFileThatIsTooLongIsNotCalledCutOff) {
  make_committed();
  fs::resize_file(file("data"), fs::file_size(file("data")) + 4096);
  EXPECT_THAT(refusal_to_open(), AllOf(HasSubstr("was made longer"), Not(HasSubstr("cut off"))));
}

// The files lie on another file system than the link to their directory.
TEST_F(StoreOpenTest, AFileThatLosesItsNameBehindALinkEndsTheNextCommit) {
  const hoist::test::TempDirectory elsewhere("/dev/shm");
  const std::string behind = elsewhere / "store";
  options_ = small_model(behind);
  make_committed();
  fs::create_directory_symlink(behind, directory_ / "link");
  options_ = small_model(directory_ / "link");
  const auto store = open_store(options_, *queue_);
  store->adopt(store->commits().front());
  for (const char* ending : {"data", "manifest"}) fs::remove(behind + "/rank-00000." + ending);
  EXPECT_THAT(refusal([&] { run_step(*store, options_, 2, all_records(options_)); }),
              HasSubstr("was removed or renamed"));
}

// As shared scratch directories often are: anybody may make a directory there, and nobody may list them.
TEST_F(StoreOpenTest, BelowADirectoryThatCannotBeListed) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer starts no threads in a process that was forked";
#endif
  if (::geteuid() != 0) GTEST_SKIP() << "becomes another user, which needs root";
  const hoist::test::TempDirectory shared("/dev/shm");
  const std::string scratch = shared / "scratch";
  fs::create_directory(scratch);
  ASSERT_EQ(::chmod(shared.path().c_str(), 0711), 0);
  ASSERT_EQ(::chmod(scratch.c_str(), 01733), 0);
  EXPECT_EQ(hoist::test::exit_code_of_fork([&] {
              if (::setresuid(65534, 65534, 65534) != 0) return 1;
              const auto queue = clean_queue();
              const StoreOptions options = small_model(scratch + "/mine/store");
              const auto store = create_store(options, *queue);
              run_step(*store, options, 0, all_records(options));
              return 0;
            }),
            0);
}

TEST_F(StoreOpenTest, ACommitThatWasReplacedSinceItWasListedIsAChangeOfTheStore) {
  make_committed();
  CommitHeader gone = Store::look(options_.directory, 0).commits.front();
  gone.step = 9;
  EXPECT_THROW(StoreReader(options_.directory, 0, options_.records, gone, *queue_), StoreChangedError);
}

// Files of a store that are removed or replaced during training: the next commit fails, instead of being lost.
TEST_F(StoreOpenTest, AFileThatLosesItsNameEndsTheNextCommit) {
  struct Attack {
    const char* sentence;
    std::function<void(const std::string& path)> act;
  };
  const Attack attacks[] = {
      {"was removed or renamed", [](const std::string& path) { fs::remove(path); }},
      {"was removed or renamed", [](const std::string& path) { fs::rename(path, path + ".old"); }},
      {"was removed or renamed",
       [&](const std::string&) { fs::rename(options_.directory, options_.directory + "-moved"); }},
      {"was replaced by another file",
       [](const std::string& path) {
         fs::copy_file(path, path + ".copy");
         fs::rename(path + ".copy", path);
       }},
      {"was cut off", [](const std::string& path) { fs::resize_file(path, fs::file_size(path) - 4096); }},
  };
  for (const Attack& attack : attacks) {
    for (const char* ending : {"data", "manifest"}) {
      SCOPED_TRACE(fmt::format("{}: {}", ending, attack.sentence));
      {
        const auto store = create();
        for (const std::uint64_t step : {0u, 1u}) run_step(*store, options_, step, all_records(options_));
        attack.act(file(ending));  // the end of the data is what was committed last
        EXPECT_THAT(refusal([&] { run_step(*store, options_, 2, all_records(options_)); }),
                    AllOf(HasSubstr("rank-00000."), HasSubstr(attack.sentence)));
      }
      fs::remove_all(directory_ / "a");
    }
  }
}

// A few kilobytes that claim to be terabytes: nothing of that size is read or allocated.
TEST_F(StoreOpenTest, AManifestOfHolesIsRefused) {
  make_committed();
  Superblock superblock = *detail::view_manifest(file("manifest")).superblock;
  superblock.caller_state_bytes_max = std::uint64_t{1} << 40;
  std::vector<std::byte> bytes(superblock.superblock_bytes());
  encode_superblock(superblock, bytes);
  poke(file("manifest"), 0, bytes);
  fs::resize_file(file("manifest"), superblock.manifest_bytes());
  const auto found = Store::look(options_.directory, 0);
  EXPECT_TRUE(found.commits.empty());
  ASSERT_EQ(found.damage.size(), 1u);
  EXPECT_THAT(found.damage[0].text, HasSubstr("are on disk"));
  EXPECT_THAT(refusal_to_create(), HasSubstr("not overwritten"));
}

// While the first slot is read and before the second is, step 2 is committed and step 3 half written over step 1.
TEST_F(StoreOpenTest, ALookBesideATrainingDoesNotMissItsNewestCommit) {
  const auto store = create();
  for (const std::uint64_t step : {0u, 1u}) run_step(*store, options_, step, all_records(options_));
  const Superblock superblock = *detail::view_manifest(file("manifest")).superblock;
  offset_of_the_read = static_cast<std::int64_t>(superblock.slot_offset(1));
  before_the_read = [&] {
    for (const std::uint64_t step : {2u, 3u}) run_step(*store, options_, step, all_records(options_));
    poke(file("manifest"), superblock.slot_offset(1) + 8, std::array{std::byte{1}, std::byte{2}});
  };
  const auto found = Store::look(options_.directory, 0);
  EXPECT_FALSE(before_the_read) << "nobody read the second slot";
  ASSERT_FALSE(found.commits.empty());
  EXPECT_EQ(found.commits.front().step, 2u);
}

// Damages slots of the manifest, or blanks them.
class StoreSlotTest : public StoreOpenTest {
 protected:
  std::uint64_t slot_bytes() const { return (fs::file_size(file("manifest")) - 4096) / 2; }
  void damage(std::uint64_t slot) {
    poke(file("manifest"), 4096 + slot * slot_bytes() + 8, std::array{std::byte{1}, std::byte{2}});
  }
  void blank(std::uint64_t slot) {
    poke(file("manifest"), 4096 + slot * slot_bytes(), std::vector<std::byte>(slot_bytes()));
  }
};

TEST_F(StoreSlotTest, TheFirstCommitIsInBothSlotsAndOutlivesTheDamageOfOne) {
  for (const std::uint64_t slot : {0u, 1u}) {
    make_committed(0);
    EXPECT_EQ(Store::look(options_.directory, 0).commits.size(), 1u);
    damage(slot);
    EXPECT_THAT(refusal_to_create(), HasSubstr("holds step 0 of this model"));
    EXPECT_EQ(reopen_and_compare(options_, {{0, Writers(options_.records.size(), 0)}}), 0u);
    fs::remove_all(options_.directory);
  }
}

TEST_F(StoreSlotTest, AFirstCommitThatWasNeverFinishedIsReplaced) {
  make_committed(0);
  blank(0);  // it is written after the other
  damage(1);
  const auto found = Store::look(options_.directory, 0);
  EXPECT_TRUE(found.commits.empty());
  ASSERT_EQ(found.damage.size(), 1u);
  EXPECT_THAT(found.damage[0].text, HasSubstr("commit slot 1"));
  EXPECT_FALSE(found.damage[0].is_of_checkpoint);
  make_committed(0);
}

TEST_F(StoreSlotTest, CommitsThatCannotBeReadAnyMoreAreNotReplaced) {
  const auto refuses = [&] {
    const auto before = contents();
    EXPECT_THAT(refusal_to_create(), AllOf(HasSubstr("none can be read any more"), HasSubstr("remove it")));
    EXPECT_EQ(contents(), before);
    fs::remove_all(options_.directory);
  };
  for (const std::uint64_t last_step : {0u, 1u}) {
    make_committed(last_step);
    for (const std::uint64_t slot : {0u, 1u}) damage(slot);
    refuses();
  }
  make_committed(0);  // as early programs wrote it: to slot 0 alone
  damage(0);
  blank(1);
  refuses();
}

TEST_F(StoreOpenTest, ADamagedManifestIsNeitherOpenedNorOverwritten) {
  make_committed();
  const auto whole = read_file(file("manifest"));
  const auto damages = {std::uint64_t{0}, std::uint64_t{8}, std::uint64_t{30}, std::uint64_t{56}, std::uint64_t{130}};
  for (const std::uint64_t offset : damages) {
    auto flipped = whole;
    flipped[offset] ^= std::byte{0x10};
    write_file(file("manifest"), flipped);
    const auto found = Store::look(options_.directory, 0);
    EXPECT_TRUE(found.exists) << offset;
    EXPECT_TRUE(found.commits.empty()) << offset;
    EXPECT_EQ(found.damage.size(), 1u) << offset;
    EXPECT_THAT(refusal_to_open(), HasSubstr("cannot be used")) << offset;
    EXPECT_THAT(refusal_to_create(), HasSubstr("not overwritten")) << offset;
  }
  for (const std::uint64_t length : {std::uint64_t{0}, std::uint64_t{100}, std::uint64_t{4096}, whole.size() - 4096}) {
    write_file(file("manifest"), std::span(whole).first(length));
    EXPECT_TRUE(Store::look(options_.directory, 0).exists) << length;
    EXPECT_FALSE(Store::look(options_.directory, 0).damage.empty()) << length;
    EXPECT_NE(refusal_to_open(), "not refused") << length;
    EXPECT_THAT(refusal_to_create(), HasSubstr("not overwritten")) << length;
  }
  write_file(file("manifest"), whole);
  EXPECT_EQ(refusal_to_open(), "not refused");
}

TEST_F(StoreOpenTest, AnotherFormatVersionIsNamed) {
  make_committed();
  poke(file("manifest"), 16, std::array{std::byte{7}});
  EXPECT_THAT(refusal_to_open(), HasSubstr("format version 7, and this program reads version 4"));
  EXPECT_THAT(refusal_to_create(), HasSubstr("format version 7"));
}

TEST_F(StoreOpenTest, ADataFileThatWasCutOffIsRefused) {
  make_committed();
  fs::resize_file(file("data"), fs::file_size(file("data")) - 4096);
  EXPECT_THAT(refusal_to_open(), HasSubstr("was cut off"));
  fs::remove(file("data"));
  EXPECT_THAT(refusal_to_open(), HasSubstr("has lost its data"));
}

TEST_F(StoreOpenTest, AnotherModelIsRefusedWithTheFirstDifference) {
  make_committed();
  const auto before = contents();
  options_.identity.layout = "tok 64x32 bf16\nnorm 48 fp32\nbase 32 bf16 frozen\n";
  EXPECT_THAT(refusal_to_open(),
              HasSubstr("holds another model: line 2: stored: 'norm 32 fp32' / yours: 'norm 48 fp32'; nothing was"));
  options_ = small_model(options_.directory);
  options_.records[1].layout = RecordLayout(std::array{RecordSegment{DType::fp32, true, 32}});
  EXPECT_THAT(refusal_to_open(), HasSubstr("the same parameters in other records"));
  EXPECT_EQ(contents(), before);
}

TEST_F(StoreOpenTest, AnotherWorldIsRefused) {
  make_committed();
  options_.identity.world_size = 4;
  EXPECT_THAT(refusal_to_open(), HasSubstr("was written by 1 rank and cannot be continued by 4: start 1 rank"));
  options_.identity.rank = 2;
  EXPECT_THAT(refusal_to_open(), HasSubstr("rank-00002.manifest does not exist"));
  options_.identity = small_model("").identity;
  options_.caller_state_bytes_max = 5001;
  EXPECT_THAT(refusal_to_open(),
              HasSubstr("room for 5000 bytes of caller state, and 5001 are asked for; ask for 1 less"));
  options_.caller_state_bytes_max = 1;
  EXPECT_EQ(refusal_to_open(), "not refused");
}

TEST_F(StoreOpenTest, AFileOfAnotherRankIsRefused) {
  options_.identity.world_size = 2;
  make_committed();
  fs::rename(file("manifest"), options_.directory + "/rank-00001.manifest");
  fs::rename(file("data"), options_.directory + "/rank-00001.data");
  options_.identity.rank = 1;
  EXPECT_THAT(refusal_to_open(), HasSubstr("was written by rank 0"));
}

TEST_F(StoreOpenTest, RanksShareADirectory) {
  options_.identity.world_size = 2;
  const auto first = create();
  options_.identity.rank = 1;
  const auto second = create();
  EXPECT_NE(first->store_number(), second->store_number());
  EXPECT_NE(first->data_paths().front(), second->data_paths().front());
}

TEST_F(StoreOpenTest, SymbolicLinksAreNotFollowed) {
  make_committed();
  for (const char* ending : {"data", "manifest"}) {
    fs::rename(file(ending), directory_ / "elsewhere");
    fs::create_symlink(directory_ / "elsewhere", file(ending));
    EXPECT_THROW(open_store(options_, *queue_), IoError) << ending;
    EXPECT_THROW(create_store(options_, *queue_), IoError) << ending;
    fs::remove(file(ending));
    fs::rename(directory_ / "elsewhere", file(ending));
  }
  fs::create_directory_symlink(directory_ / "a/b/store", directory_ / "link");
  options_.directory = directory_ / "link";
  EXPECT_THAT(refusal_to_create(), HasSubstr("is a symbolic link"));
}

TEST_F(StoreOpenTest, TooLittleSpaceIsRefusedBeforeAnythingIsMade) {
  options_.caller_state_bytes_max = 1ull << 50;
  try {
    create();
    FAIL() << "a petabyte was reserved";
  } catch (const BudgetError& error) {
    EXPECT_EQ(error.need.tier, "nvme");
    EXPECT_EQ(error.need.need_bytes, Store::cost(options_).disk_bytes);
    EXPECT_LT(error.need.have_bytes, error.need.need_bytes);
    EXPECT_THAT(error.what(), HasSubstr(options_.directory));
  }
  EXPECT_FALSE(fs::exists(directory_ / "a"));
}

TEST_F(StoreOpenTest, TheRemedyFollowsTheCause) {
  const std::string mounted = directory_ / "mounted";
  fs::create_directory(mounted);
  const auto succeeds = [&](const std::string& command) {
    return std::system((command + " " + mounted + " 2>/dev/null").c_str()) == 0;
  };
  if (!succeeds("mount -t tmpfs -o nr_inodes=1 none")) GTEST_SKIP() << "mounts a file system, which needs root";
  options_.directory = mounted + "/store";
  const auto refusal = [&]() -> std::string {
    try {
      create();
    } catch (const IoError& error) {
      return error.what();
    }
    return "it was made";
  };
  const std::string full = refusal();
  EXPECT_TRUE(succeeds("mount -o remount,ro"));
  const std::string read_only = refusal();
  EXPECT_TRUE(succeeds("umount -l"));
  EXPECT_THAT(full, HasSubstr("free space on this drive"));
  EXPECT_THAT(read_only, HasSubstr("is mounted read-only"));
}

TEST_F(StoreOpenTest, WhatFailsHalfWayIsUndone) {
  for (std::uint64_t operation = 0; operation < 2; ++operation) {  // the superblock's write, then its flush
    const auto faults = std::make_shared<Faults>(1);
    faults->add({.kind = Fault::Kind::error, .first = operation, .code = ENOSPC});
    aio::DriveQueue queue(queue_options(), hoist::test::make_faulty_backend(queue_options(), faults));
    EXPECT_THROW(create_store(options_, queue), IoError);
    EXPECT_EQ(faults->hits(Fault::Kind::error), 1u);
    EXPECT_FALSE(fs::exists(directory_ / "a"));
  }
  // A directory that was there stays, with what is in it.
  fs::create_directories(options_.directory);
  std::ofstream(options_.directory + "/notes") << "mine";
  const auto faults = std::make_shared<Faults>(1);
  faults->add({.kind = Fault::Kind::error, .code = EIO});
  aio::DriveQueue queue(queue_options(), hoist::test::make_faulty_backend(queue_options(), faults));
  EXPECT_THROW(create_store(options_, queue), IoError);
  EXPECT_EQ(contents().size(), 1u);
}

TEST_F(StoreOpenTest, AReservationThatFailsIsUndone) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  directory_.hold_those_of_children();
  // In another process: the limit cannot be raised again. 77: it did not fail, or left something.
  const auto create_with_a_limit = [&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{64 * kKiB, 64 * kKiB};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const auto queue = clean_queue();
    try {
      create_store(options_, *queue);
    } catch (const IoError&) {
      ::_exit(fs::exists(directory_ / "a") ? 77 : 0);
    }
    ::_exit(77);
  };
  EXPECT_EXIT(create_with_a_limit(), testing::ExitedWithCode(0), "");
}

TEST_F(StoreOpenTest, APathThroughAFileIsRefused) {
  std::ofstream(directory_ / "a") << "a file";
  EXPECT_THAT([&] { create(); }, testing::ThrowsMessage<IoError>(HasSubstr("the store's path must be a directory")));
  EXPECT_FALSE(Store::look(options_.directory, 0).exists);
  EXPECT_THAT(refusal_to_open(), HasSubstr("there is no store"));
  options_.identity.rank = 1;
  EXPECT_THROW(create(), UsageError);
  options_.directory.clear();
  EXPECT_THROW(create(), UsageError);
}

// Forged: the two-slot protocol itself never leaves this behind, but should it ever lie there, the newer incarnation
// wins although its step is older, and the abandoned step cannot even be asked for.
TEST_F(StoreOpenTest, AnOlderIncarnationsLaterStepIsNotListed) {
  make_committed(6);  // step 6 in slot 0, step 5 in slot 1
  auto manifest = read_file(file("manifest"));
  std::string problem;
  const auto superblock = decode_superblock(std::span(manifest).first(4096), problem);
  ASSERT_TRUE(superblock) << problem;
  const auto slot = std::span(manifest).subspan(superblock->slot_offset(1), superblock->slot_bytes());
  ASSERT_EQ(check_slot(slot, *superblock).header.step, 5u);
  SlotImage(slot, *superblock).seal({{.step = 5, .incarnation = 2}, 1});
  write_file(file("manifest"), manifest);
  const auto found = Store::look(options_.directory, 0);
  ASSERT_EQ(found.commits.size(), 1u);
  EXPECT_EQ(found.commits[0].step, 5u);
  EXPECT_EQ(found.commits[0].incarnation, 2u);
}

}  // namespace
}  // namespace hoist::tiers::test::store_open_test
