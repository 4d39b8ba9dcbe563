// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/core/units.hpp>
#include <hoist/measure/scratch_file.hpp>
#include <hoist/tests/aio/small_file_system.hpp>
#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/support/other_kinds.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::measure::scratch_file_test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class ScratchFileTest : public ::testing::Test {
 protected:
  std::string parent() const { return directory_.path().string(); }
  fs::path inside() const { return directory_.path() / ScratchFile::kDirectoryName; }
  static void write(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

  // As kill -9 would leave it: a child that makes the file and disappears without a destructor.
  void leave_behind() const {
    const pid_t child = ::fork();
    if (child == 0) {
      const auto* file = new ScratchFile(parent(), kMiB);
      ::_exit(file->bytes() == kMiB ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_EQ(status, 0);
    ASSERT_TRUE(fs::exists(inside() / ScratchFile::kDataName));
  }

  test::TempDirectory directory_;
};

TEST_F(ScratchFileTest, LeavesNothingBehind) {
  {
    const ScratchFile file(parent(), kMiB);
    EXPECT_EQ(fs::file_size(file.path()), kMiB);
    EXPECT_EQ(fs::status(inside()).permissions(), fs::perms::owner_all);
  }
  EXPECT_TRUE(fs::is_empty(directory_.path()));
}

TEST_F(ScratchFileTest, AKilledRunsFileIsTakenOver) {
  leave_behind();
  { const ScratchFile file(parent(), 2 * kMiB); }
  EXPECT_TRUE(fs::is_empty(directory_.path()));
}

TEST_F(ScratchFileTest, WhatAKilledRunHasLeftCountsAsFree) {
  const aio::SmallFileSystem drive(parent(), "ext4");
  if (!drive.mounted()) GTEST_SKIP() << "only root may mount a small file system";
  const auto free_bytes = [&] { return fs::space(drive.path()).available; };
  const std::uint64_t before = free_bytes();
  fs::create_directory(drive / ScratchFile::kDirectoryName);
  write(drive / ScratchFile::kDirectoryName + "/" + ScratchFile::kDataName, std::string(4 * kMiB, 'x'));
  ASSERT_LT(free_bytes(), before - 3 * kMiB);
  const std::vector<std::string> one{drive.path()};
  EXPECT_THAT([&] { check_scratch_space(one, before); },
              ThrowsMessage<UsageError>(HasSubstr(format_bytes(free_bytes() + 4 * kMiB) + " are free")));
  // In each of several directories, too.
  const std::vector<std::string> two{drive / "a", drive / "b"};
  for (const std::string& directory : two) {
    fs::create_directories(directory + "/" + ScratchFile::kDirectoryName);
    write(directory + "/" + ScratchFile::kDirectoryName + "/" + ScratchFile::kDataName, std::string(2 * kMiB, 'x'));
  }
  EXPECT_THAT([&] { check_scratch_space(two, before); },
              ThrowsMessage<UsageError>(HasSubstr(format_bytes(free_bytes() + 4 * kMiB) + " are free")));
}

TEST_F(ScratchFileTest, WhatAnotherUsersRunHasLeftNamesThatUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root is two users";
  fs::permissions(directory_.path(), fs::perms::all);
  leave_behind();
  EXPECT_EQ(::seteuid(65534), 0);
  EXPECT_THAT([&] { ScratchFile(parent(), kMiB); }, ThrowsMessage<UsageError>(HasSubstr("belongs to root")));
  EXPECT_EQ(::seteuid(0), 0);
}

TEST_F(ScratchFileTest, ARunKilledBeforeItsMarkerWasWholeIsTakenOver) {
  fs::create_directory(inside());
  { const ScratchFile file(parent(), kMiB); }
  EXPECT_TRUE(fs::is_empty(directory_.path()));
  fs::create_directory(inside());
  write(inside() / ScratchFile::kMarkerName, "Scratch sp");
  { const ScratchFile file(parent(), kMiB); }
  EXPECT_TRUE(fs::is_empty(directory_.path()));
}

// While it lives, no file of this process may grow: as under a quota that is used up.
class NoFileGrows {
 public:
  NoFileGrows() {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit none = before_;
    none.rlim_cur = 0;
    ::setrlimit(RLIMIT_FSIZE, &none);
  }
  ~NoFileGrows() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  NoFileGrows(const NoFileGrows&) = delete;
  NoFileGrows& operator=(const NoFileGrows&) = delete;

 private:
  void (*handler_)(int) = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before_{};
};

TEST_F(ScratchFileTest, AMarkerThatCannotBeWrittenIsRemoved) {
  std::string error;
  try {
    const NoFileGrows quota;
    const ScratchFile file(parent(), kMiB);
  } catch (const IoError& thrown) {
    error = thrown.what();
  }
  EXPECT_THAT(error, HasSubstr("write"));
  EXPECT_TRUE(fs::is_empty(directory_.path()));
}

TEST_F(ScratchFileTest, WhatIsNotOursIsRefusedAndLeftAlone) {
  fs::create_directory(inside());
  write(inside() / ScratchFile::kDataName, "precious");
  EXPECT_THAT([&] { ScratchFile(parent(), kMiB); }, ThrowsMessage<UsageError>(HasSubstr("was not made by")));
  EXPECT_EQ(test::contents_of(inside() / ScratchFile::kDataName), "precious");

  write(inside() / ScratchFile::kMarkerName, "somebody else's");
  EXPECT_THAT([&] { ScratchFile(parent(), kMiB); }, ThrowsMessage<UsageError>(HasSubstr("holds something else")));
  EXPECT_EQ(test::contents_of(inside() / ScratchFile::kDataName), "precious");
  EXPECT_EQ(test::contents_of(inside() / ScratchFile::kMarkerName), "somebody else's");
}

TEST_F(ScratchFileTest, AMarkerThatIsNoFileIsRefusedAndNeverWaitedFor) {
  const test::TestDeadline deadline;
  for (const test::OtherKind& kind : test::kOtherKinds) {
    fs::create_directory(inside());
    write(inside() / ScratchFile::kDataName, "precious");
    if (kind.make((inside() / ScratchFile::kMarkerName).string())) {
      EXPECT_THAT([&] { ScratchFile(parent(), kMiB); }, ThrowsMessage<UsageError>(HasSubstr("not a regular file")))
          << kind.name;
    }
    EXPECT_EQ(test::contents_of(inside() / ScratchFile::kDataName), "precious") << kind.name;
    fs::remove_all(inside());
  }
}

TEST_F(ScratchFileTest, LinksAreNotFollowed) {
  const fs::path elsewhere = directory_.path() / "elsewhere";
  fs::create_directory(elsewhere);
  write(elsewhere / ScratchFile::kDataName, "precious");
  fs::create_directory_symlink(elsewhere, inside());
  EXPECT_THROW(ScratchFile(parent(), kMiB), UsageError);
  EXPECT_EQ(test::contents_of(elsewhere / ScratchFile::kDataName), "precious");
}

TEST_F(ScratchFileTest, ForeignFilesAmongOursSurvive) {
  leave_behind();
  write(inside() / "notes", "precious");
  { const ScratchFile file(parent(), kMiB); }
  EXPECT_EQ(test::contents_of(inside() / "notes"), "precious");
  EXPECT_FALSE(fs::exists(inside() / ScratchFile::kDataName));
}

TEST_F(ScratchFileTest, ASecondRunIsRefused) {
  const ScratchFile file(parent(), kMiB);
  EXPECT_THAT([&] { ScratchFile(parent(), kMiB); }, ThrowsMessage<UsageError>(HasSubstr("in use by another")));
  EXPECT_TRUE(fs::exists(file.path()));
}

TEST_F(ScratchFileTest, DirectoriesAreCheckedFirst) {
  const auto refusal = [](const std::string& part) { return ThrowsMessage<UsageError>(HasSubstr(part)); };
  EXPECT_THAT([&] { check_scratch_directory(directory_ / "missing"); }, refusal("No such file"));
  write(directory_.path() / "file", "");
  EXPECT_THAT([&] { check_scratch_directory(directory_ / "file"); }, refusal("is not a directory"));
  const std::vector<std::string> here{parent()};
  EXPECT_THAT([&] { check_scratch_space(here, std::uint64_t{1} << 60); },
              refusal("of which 64.0 MiB stay free; lower --size"));
}

}  // namespace
}  // namespace hoist::measure::scratch_file_test
