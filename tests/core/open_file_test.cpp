// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/tests/support/other_kinds.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::open_file_test {
namespace {

using test::kOtherKinds;
using test::OtherKind;
using test::TestDeadline;

struct Pipe {
  Pipe() { EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0); }
  ~Pipe() {
    ::close(ends[0]);
    ::close(ends[1]);
  }
  std::string path(int end) const { return fmt::format("/proc/self/fd/{}", ends[end]); }
  int ends[2];
};

TEST(OpenFile, OtherKindsAreRefusedAtOnceHoweverTheyAreOpened) {
  const TestDeadline deadline;
  const test::TempDirectory directory;
  for (const OtherKind& kind : kOtherKinds) {
    const std::string path = directory / kind.name;
    if (!kind.make(path)) continue;  // devices are root's
    for (const int flags : {O_RDONLY, O_WRONLY, O_RDWR, O_WRONLY | O_CREAT | O_TRUNC, O_RDONLY | O_NOFOLLOW}) {
      EXPECT_EQ(open_regular_file(path, flags, 0600), -1) << kind.name << " " << flags;
      EXPECT_EQ(errno, kind.type == S_IFDIR ? EISDIR : EINVAL) << kind.name << " " << flags;
    }
    EXPECT_EQ(open_input_file(path), -1) << kind.name;
    EXPECT_EQ(errno, kind.type == S_IFDIR ? EISDIR : EINVAL) << kind.name;
  }
  EXPECT_STRNE(open_file_remedy(EINVAL), "");
  EXPECT_STREQ(open_file_remedy(ENOENT), "");
}

TEST(OpenFile, ALinkIsFollowedToItsKindOrRefused) {
  const TestDeadline deadline;
  const test::TempDirectory directory;
  ASSERT_TRUE(kOtherKinds.front().make(directory / "pipe"));
  ASSERT_EQ(::symlink("pipe", (directory / "link").c_str()), 0);
  EXPECT_EQ(open_regular_file(directory / "link", O_RDONLY), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(open_regular_file(directory / "link", O_RDONLY | O_NOFOLLOW), -1);
  EXPECT_EQ(errno, ELOOP);
  EXPECT_EQ(open_input_file(directory / "link"), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST(OpenFile, ARegularFileIsOpenedAsAskedAndWaits) {
  const test::TempDirectory directory;
  EXPECT_EQ(open_regular_file(directory / "file", O_RDWR), -1);
  EXPECT_EQ(errno, ENOENT);
  const int file = open_regular_file(directory / "file", O_RDWR | O_CREAT | O_EXCL, 0640);
  ASSERT_GE(file, 0);
  struct stat info {};
  ASSERT_EQ(::fstat(file, &info), 0);
  EXPECT_EQ(info.st_mode & 0137U, 0U) << "no more than was asked for";
  EXPECT_EQ(::fcntl(file, F_GETFL) & (O_NONBLOCK | O_ACCMODE), O_RDWR)
      << "io_uring fails reads of files that may not wait";
  EXPECT_EQ(::fcntl(file, F_GETFD), FD_CLOEXEC);
  EXPECT_EQ(::write(file, "text", 4), 4);
  ::close(file);
  EXPECT_EQ(open_regular_file(directory / "file", O_RDWR | O_CREAT | O_EXCL, 0640), -1);
  EXPECT_EQ(errno, EEXIST);
  const int input = open_input_file(directory / "file");
  ASSERT_GE(input, 0);
  char text[8] = {};
  EXPECT_EQ(::read(input, text, sizeof text), 4);
  ::close(input);
}

TEST(OpenFile, APipeThatThisProcessWasGivenIsReadToItsEnd) {
  const TestDeadline deadline;
  Pipe pipe;
  ASSERT_EQ(::write(pipe.ends[1], "{}", 2), 2);
  const int input = open_input_file(pipe.path(0));
  ASSERT_GE(input, 0);
  EXPECT_EQ(::fcntl(input, F_GETFL) & O_NONBLOCK, 0) << "its writer may be slow";
  char text[8] = {};
  EXPECT_EQ(::read(input, text, sizeof text), 2);
  ::close(pipe.ends[1]);
  EXPECT_EQ(::read(input, text, sizeof text), 0);
  ::close(input);
  pipe.ends[1] = -1;
  EXPECT_EQ(open_regular_file(pipe.path(0), O_RDONLY), -1) << "no place for a store";
  EXPECT_EQ(errno, EINVAL);
}

TEST(OpenFile, OutputGoesToFilesAndToPipesThatAreRead) {
  const TestDeadline deadline;
  const test::TempDirectory directory;
  for (const OutputMode mode : {OutputMode::replace, OutputMode::append, OutputMode::append}) {
    std::FILE* file = open_output_file(directory / "file", mode);
    ASSERT_NE(file, nullptr);
    std::fputs("a", file);
    std::fclose(file);
  }
  std::string text;
  std::ifstream(directory / "file") >> text;
  EXPECT_EQ(text, "aaa");

  ASSERT_TRUE(kOtherKinds.front().make(directory / "pipe"));
  for (const OutputMode mode : {OutputMode::replace, OutputMode::append}) {
    EXPECT_EQ(open_output_file(directory / "pipe", mode), nullptr);
    EXPECT_EQ(errno, ENXIO);
    EXPECT_STRNE(open_file_remedy(errno), "");
  }
  const int reader = ::open((directory / "pipe").c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  std::FILE* file = open_output_file(directory / "pipe", OutputMode::replace);
  ASSERT_NE(file, nullptr);
  EXPECT_EQ(::fcntl(fileno(file), F_GETFL) & O_NONBLOCK, 0) << "its reader may be slow";
  std::fputs("b", file);
  std::fclose(file);
  char byte = 0;
  EXPECT_EQ(::read(reader, &byte, 1), 1);
  ::close(reader);
}

TEST(OpenFile, PlainPathsKeepWhatLinksDecide) {
  const std::pair<const char*, const char*> paths[] = {
      {"/a/./b//", "/a/b"}, {"./a", "a"}, {"a/../b", "a/../b"}, {"/a/..", "/a/.."}, {"/", "/"},
      {"//", "/"},          {".", "."},   {"./", "."},          {"..", ".."},       {"", ""}};
  for (const auto& [path, plain] : paths) EXPECT_EQ(plain_path(path), plain) << path;
}

TEST(OpenFile, PlacesThatAreNotThereYetAreTheSameByTheirNames) {
  EXPECT_TRUE(is_same_place("/nowhere/a/./b//", "/nowhere/a/b"));
  EXPECT_FALSE(is_same_place("/nowhere/a", "/nowhere/b"));
}

TEST(OpenFile, ARelativeNameWithoutAWorkingDirectoryIsAnIoError) {
  const std::filesystem::path before = std::filesystem::current_path();
  {
    const test::TempDirectory directory;
    std::filesystem::current_path(directory / "");
    EXPECT_EQ(absolute_path("a"), (std::filesystem::current_path() / "a").string());
  }
  EXPECT_EQ(absolute_path("/a"), "/a");
  EXPECT_THROW(absolute_path("a"), IoError);
  std::filesystem::current_path(before);
}

// A second C++ library in the process has categories of its own.
TEST(OpenFile, TellsAnAbsentNameByTheNumberAlone) {
  struct Other final : std::error_category {
    const char* name() const noexcept override { return "other"; }
    std::string message(int) const override { return ""; }
  };
  static const Other other;
  EXPECT_NE(std::error_code(ENOENT, other), std::errc::no_such_file_or_directory);
  EXPECT_TRUE(is_absent({ENOENT, other}));
  EXPECT_TRUE(is_absent({ENOTDIR, std::generic_category()}));
  EXPECT_FALSE(is_absent({EACCES, other}));
  EXPECT_FALSE(is_absent({}));
}

}  // namespace
}  // namespace hoist::open_file_test
