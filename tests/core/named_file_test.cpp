// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>
#include <string>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/named_file.hpp>
#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/support/other_kinds.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::named_file_test {
namespace {

using test::contents_of;

class ReplaceFile : public ::testing::Test {
 protected:
  test::TempDirectory directory_;
};

TEST_F(ReplaceFile, ReplacesThroughALinkAndLeavesNoDraft) {
  std::ofstream(directory_ / "real") << "old";
  std::filesystem::create_symlink("real", directory_ / "link");
  replace_file(directory_ / "link", "new");
  EXPECT_EQ(contents_of(directory_ / "real"), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(directory_ / "link"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_.path()), {}), 2);
  std::filesystem::create_symlink("not-yet", directory_ / "early");
  replace_file(directory_ / "early", "new");
  EXPECT_TRUE(std::filesystem::is_symlink(directory_ / "early"));
  EXPECT_EQ(contents_of(directory_ / "not-yet"), "new");
}

TEST_F(ReplaceFile, WritesIntoPipesAndDevicesInsteadOfReplacingThem) {
  const test::TestDeadline deadline;
  for (const test::OtherKind& kind : test::kOtherKinds) {
    const std::string path = directory_ / kind.name;
    if (!kind.make(path)) continue;  // devices are root's
    const std::string link = path + ".link";
    std::filesystem::create_symlink(path, link);
    for (const std::string& name : {path, link}) {
      const int reader = kind.type == S_IFIFO ? ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC) : -1;
      if (kind.type == S_IFIFO || kind.type == S_IFCHR)
        EXPECT_NO_THROW(replace_file(name, "new")) << name;
      else
        EXPECT_THROW(replace_file(name, "new"), IoError) << name;
      char text[8] = {};
      if (reader >= 0) {
        EXPECT_EQ(::read(reader, text, sizeof text), 3);
        EXPECT_STREQ(text, "new");
      }
      if (reader >= 0) ::close(reader);
    }
    struct stat info {};
    ASSERT_EQ(::lstat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & S_IFMT, kind.type) << path;
    EXPECT_TRUE(std::filesystem::is_symlink(link));
  }
  EXPECT_THROW(replace_file(directory_ / "pipe", "new"), IoError) << "no reader";
}

TEST_F(ReplaceFile, WritesIntoAPipeThatThisProcessWasGiven) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  std::filesystem::create_symlink("/proc/self/fd/" + std::to_string(ends[1]), directory_ / "link");
  replace_file(directory_ / "link", "new");
  char text[8] = {};
  EXPECT_EQ(::read(ends[0], text, sizeof text), 3);
  EXPECT_STREQ(text, "new");
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_F(ReplaceFile, AFailureLeavesTheOldFile) {
  std::filesystem::create_directory(directory_ / "target");
  std::ofstream(directory_ / "target/inside") << "old";
  EXPECT_THROW(replace_file(directory_ / "target", "new"), IoError);  // a directory cannot be renamed over
  EXPECT_EQ(contents_of(directory_ / "target/inside"), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_.path()), {}), 1);
  EXPECT_THROW(replace_file(directory_ / "missing/file", "new"), IoError);
}

// Its entry could not be flushed, which is found before the file is replaced.
TEST_F(ReplaceFile, ADirectoryThatCannotBeReadIsRefusedAtFirst) {
  const std::string place = directory_ / "place", file = place + "/file";
  std::filesystem::create_directory(place);
  std::ofstream(file) << "old";
  ::chmod(directory_.path().c_str(), 0711);
  ::chmod(place.c_str(), 0333);
  const int user = ::setfsuid(65534);  // root reads every directory
  EXPECT_THROW(check_replaceable(file + "-new", ""), IoError);
  EXPECT_THROW(replace_file(file, "new"), IoError);
  ::setfsuid(static_cast<uid_t>(user));
  ::chmod(place.c_str(), 0700);
  EXPECT_EQ(contents_of(file), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(place), {}), 1);
}

TEST_F(ReplaceFile, TheCheckLeavesNothingAndRefusesWhatCannotBeWritten) {
  std::ofstream(directory_ / "old") << "old";
  for (const char* name : {"old", "new"}) EXPECT_NO_THROW(check_replaceable(directory_ / name, ""));
  EXPECT_EQ(contents_of(directory_ / "old"), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_.path()), {}), 1);
  for (const std::string& path : {directory_ / "missing/file", directory_.path().string(), std::string("/proc/file")})
    EXPECT_THROW(check_replaceable(path, ""), IoError) << path;
}

}  // namespace
}  // namespace hoist::named_file_test
