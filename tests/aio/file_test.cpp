// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/aio/file.hpp>
#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"
#include "small_file_system.hpp"

namespace hoist::aio::file_test {
namespace {

using std::chrono::milliseconds;

class FileTest : public testing::Test {
 protected:
  test::TempDirectory directory_;
};

// A program that was started with standard output closed prints into whatever is opened next.
TEST_F(FileTest, IsNeverAStandardDescriptor) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(STDOUT_FILENO);
    const File file(directory_ / "data", {.mode = OpenMode::create, .reserve_bytes = 4096});
    const bool printed = ::write(STDOUT_FILENO, "into the file", 13) == 13;
    ::_exit(file.descriptor() > STDERR_FILENO && !printed ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(FileTest, CreateReservesBlocksForTheOwnerAlone) {
  const File file(directory_ / "new", {.mode = OpenMode::create, .reserve_bytes = 8 * kMiB});
  EXPECT_EQ(file.size_bytes(), 8 * kMiB);
  struct stat info {};
  ASSERT_EQ(::stat(file.path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
  EXPECT_EQ(info.st_size, static_cast<off_t>(8 * kMiB));
  EXPECT_GE(static_cast<std::uint64_t>(info.st_blocks) * 512, 8 * kMiB) << "the space must be allocated, not promised";
}

TEST_F(FileTest, NothingCanBeReserved) {
  File file(directory_ / "new", {.mode = OpenMode::create, .reserve_bytes = 4096});
  file.start_over(0);
  EXPECT_EQ(file.size_bytes(), 0u);
  EXPECT_EQ(std::filesystem::file_size(file.path()), 0u);
}

TEST_F(FileTest, CreateRefusesWhatIsThereAndLeavesIt) {
  std::ofstream(directory_ / "there") << "precious";
  const auto error = io_error_thrown_by([&] { File(directory_ / "there", {.mode = OpenMode::create}); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, EEXIST);
  EXPECT_EQ(error->path, directory_ / "there");
  EXPECT_EQ(std::filesystem::file_size(directory_ / "there"), 8u);
}

TEST_F(FileTest, OpenOrCreateLeavesWhatIsThere) {
  EXPECT_EQ(File(directory_ / "new", {.mode = OpenMode::open_or_create}).size_bytes(), 0u);
  std::ofstream(directory_ / "there") << "precious";
  EXPECT_EQ(File(directory_ / "there", {.mode = OpenMode::open_or_create}).size_bytes(), 8u);
}

TEST_F(FileTest, StartingOverDropsTheContentAndKeepsTheLock) {
  std::ofstream(directory_ / "there") << "old";
  File file(directory_ / "there", {});
  ASSERT_TRUE(file.lock(milliseconds(0)));
  file.start_over(64 * kKiB);
  EXPECT_EQ(file.size_bytes(), 64 * kKiB);
  EXPECT_EQ(hoist::test::contents_of(directory_ / "there"), std::string(64 * kKiB, '\0'));
  EXPECT_FALSE(File(directory_ / "there", {}).lock(milliseconds(0)));
}

TEST_F(FileTest, OpeningReportsPathAndErrno) {
  const auto missing = io_error_thrown_by([&] { File(directory_ / "missing", {}); });
  ASSERT_TRUE(missing);
  EXPECT_EQ(missing->code, ENOENT);
  EXPECT_EQ(missing->operation, "open");
  EXPECT_EQ(missing->path, directory_ / "missing");
  const auto directory = io_error_thrown_by([&] { File(directory_.path().string(), {.mode = OpenMode::read_only}); });
  ASSERT_TRUE(directory);
  EXPECT_EQ(directory->code, EISDIR);
}

TEST_F(FileTest, SymbolicLinksAreRefusedInEveryMode) {
  std::ofstream(directory_ / "target") << "precious";
  std::filesystem::create_symlink("target", directory_.path() / "link");
  std::filesystem::create_symlink("nowhere", directory_.path() / "dangling");
  for (const OpenMode mode : {OpenMode::read_only, OpenMode::read_write}) {
    const auto error = io_error_thrown_by([&] { File(directory_ / "link", {.mode = mode}); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ELOOP);
  }
  const auto error = io_error_thrown_by([&] { File(directory_ / "dangling", {.mode = OpenMode::create}); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, EEXIST);
  EXPECT_FALSE(std::filesystem::exists(directory_ / "nowhere")) << "a link was followed";
}

TEST_F(FileTest, ImpossibleOptionsAreRefused) {
  static_cast<void>(File(directory_ / "file", {.mode = OpenMode::create}));
  EXPECT_THROW(File(directory_ / "file", {.mode = OpenMode::read_only, .reserve_bytes = 4096}), UsageError);
  EXPECT_THROW(File(directory_ / "other", {.mode = OpenMode::create, .reserve_bytes = 1000}), UsageError);
  EXPECT_FALSE(std::filesystem::exists(directory_ / "other"));
}

TEST_F(FileTest, DirectIsSetAndCanBeDeclined) {
  const File direct(directory_ / "direct", {.mode = OpenMode::create});
  EXPECT_EQ((::fcntl(direct.descriptor(), F_GETFL) & O_DIRECT) != 0, direct.is_direct());
  const File buffered(directory_ / "buffered", {.mode = OpenMode::create, .direct = false});
  EXPECT_FALSE(buffered.is_direct());
  EXPECT_EQ(::fcntl(buffered.descriptor(), F_GETFL) & O_DIRECT, 0);
}

TEST(FileDeath, OnAMemoryFileSystemWhatIsMeasuredIsSaidOnce) {
  std::error_code ignored;
  if (!std::filesystem::is_directory("/dev/shm", ignored)) GTEST_SKIP() << "there is no /dev/shm";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        bool direct = false;
        const LogCapture log;
        {
          const test::TempDirectory directory("/dev/shm");
          for (const char* name : {"a", "b", "c"}) {
            const File file(directory / name, {.mode = OpenMode::create});
            direct = direct || file.is_direct();
          }
          const File declined(directory / "d", {.mode = OpenMode::create, .direct = false});
        }
        exit_if(!direct && log.count("memory and no drive") == 1, log);
      },
      testing::ExitedWithCode(0), "");
}

TEST(FilePath, NvmePassthroughIsRefusedByName) {
  // A character device of that name is made where this is allowed; what it leads to does not matter, it is not opened
  // for transfers.
  const std::string path = "/dev/ng-hoist-test-" + std::to_string(::getpid());
  if (::mknod(path.c_str(), S_IFCHR | S_IRUSR | S_IWUSR, ::makedev(1, 3)) != 0)
    GTEST_SKIP() << "a device node cannot be made here (needs root)";
  try {
    const File file(path, {});
    ADD_FAILURE() << "it was opened";
  } catch (const IoError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("NVMe passthrough is not supported"));
  }
  ::unlink(path.c_str());
}

TEST_F(FileTest, MovingKeepsTheDescriptorOpen) {
  File first(directory_ / "moved", {.mode = OpenMode::create});
  const int descriptor = first.descriptor();
  const std::uint64_t id = first.id();
  const File second(std::move(first));
  EXPECT_EQ(second.descriptor(), descriptor);
  EXPECT_EQ(second.id(), id);
  EXPECT_NE(::fcntl(descriptor, F_GETFD), -1);
}

TEST_F(FileTest, AnObserverIsToldOnceBeforeTheDescriptorGoes) {
  struct Observer : FileObserver {
    void closing(std::uint64_t file_id) noexcept override {
      ++calls;
      id = file_id;
      was_open = ::fcntl(descriptor, F_GETFD) != -1;
    }
    int calls = 0;
    int descriptor = -1;
    std::uint64_t id = 0;
    bool was_open = false;
  };
  const auto observer = std::make_shared<Observer>();
  std::uint64_t id = 0;
  {
    const File file(directory_ / "observed", {.mode = OpenMode::create});
    observer->descriptor = file.descriptor();
    id = file.id();
    file.observe(observer);
    file.observe(std::make_shared<Observer>());  // gone before the file is closed
  }
  EXPECT_EQ(observer->calls, 1);
  EXPECT_EQ(observer->id, id);
  EXPECT_TRUE(observer->was_open);
}

TEST_F(FileTest, OneOwnerHoldsTheLock) {
  File first(directory_ / "locked", {.mode = OpenMode::create});
  ASSERT_TRUE(first.lock(Nanoseconds::zero()));
  File second(directory_ / "locked", {});
  const TimePoint start = Clock::now();
  EXPECT_FALSE(second.lock(milliseconds(30)));
  EXPECT_GE(Clock::now() - start, milliseconds(30));
  EXPECT_TRUE(first.lock(Nanoseconds::zero())) << "taking it again is no conflict with oneself";
}

TEST_F(FileTest, TheLockIsHadOnceItsOwnerCloses) {
  auto first = std::make_unique<File>(directory_ / "locked", FileOptions{.mode = OpenMode::create});
  ASSERT_TRUE(first->lock(Nanoseconds::zero()));
  File second(directory_ / "locked", {});
  std::thread closer([&] {
    std::this_thread::sleep_for(milliseconds(20));
    first.reset();
  });
  EXPECT_TRUE(second.lock(std::chrono::seconds(10)));
  closer.join();
}

bool is_had_once_it_was_let_go_of(const std::filesystem::path& path) {
  auto first = std::make_unique<File>(path, FileOptions{.mode = OpenMode::create});
  if (!first->lock(Nanoseconds::zero())) return false;
  const pid_t child = ::fork();
  if (child == 0) {
    for (;;) ::pause();
  }
  File second(path, {});
  const bool was_held = !second.lock(milliseconds(20));
  first->unlock();
  first.reset();
  const bool is_had = second.lock(Nanoseconds::zero());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  return was_held && is_had;
}

// A data loader that the program forked has the owner's descriptors, and outlives it. In a process of its own: in this
// one another test may have given up a drive, after which locks are kept.
TEST_F(FileTest, AForkedChildHasTheLockUntilItIsLetGoOf) {
  const LogCapture log;
  EXPECT_EXIT(exit_if(is_had_once_it_was_let_go_of(directory_ / "locked"), log), testing::ExitedWithCode(0), "");
}

TEST_F(FileTest, AnotherProcessHoldsTheLockUntilItDies) {
  static_cast<void>(File(directory_ / "locked", {.mode = OpenMode::create}));
  std::array<int, 2> ready{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    File file(directory_ / "locked", {});
    const char locked = file.lock(Nanoseconds::zero()) ? 'y' : 'n';
    static_cast<void>(::write(ready[1], &locked, 1) == 1);
    for (;;) ::pause();
  }
  char locked = 'n';
  ASSERT_EQ(::read(ready[0], &locked, 1), 1);
  EXPECT_EQ(locked, 'y');
  File file(directory_ / "locked", {});
  EXPECT_FALSE(file.lock(milliseconds(20)));
  ::kill(child, SIGKILL);
  EXPECT_TRUE(file.lock(std::chrono::seconds(10)));
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(FileTest, ADirectoryIsFlushed) {
  sync_directory(directory_.path().string());
  const auto error = io_error_thrown_by([&] { sync_directory(directory_ / "missing"); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, ENOENT);
}

TEST_F(FileTest, ALimitOfFileSizesIsNamed) {
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit before {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const struct rlimit limit { kMiB, before.rlim_max };
  ::setrlimit(RLIMIT_FSIZE, &limit);
  std::string refusal;
  try {
    File(directory_ / "big", {.mode = OpenMode::create, .reserve_bytes = 2 * kMiB});
  } catch (const IoError& error) {
    refusal = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(refusal.find("ulimit -f"), std::string::npos) << refusal;
}

// ext4 reserves with fallocate; ext2 has none, so the space is taken by writing zeros.
class Reserve : public FileTest, public testing::WithParamInterface<const char*> {};

TEST_P(Reserve, WithoutSpaceFailsAndLeavesNothing) {
  const SmallFileSystem small(directory_.path().string(), GetParam());
  if (!small.mounted()) GTEST_SKIP() << "a loop device cannot be mounted here (needs root)";
  const auto error =
      io_error_thrown_by([&] { File(small / "big", {.mode = OpenMode::create, .reserve_bytes = kGiB}); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, ENOSPC);
  EXPECT_EQ(error->length_bytes, kGiB);
  EXPECT_FALSE(std::filesystem::exists(small / "big"));
  const File fits(small / "fits", {.mode = OpenMode::create, .reserve_bytes = 4 * kMiB});
  struct stat info {};
  ASSERT_EQ(::stat(fits.path().c_str(), &info), 0);
  EXPECT_GE(static_cast<std::uint64_t>(info.st_blocks) * 512, 4 * kMiB);
}

TEST_P(Reserve, NeverOverwritesAnExistingFile) {
  const SmallFileSystem small(directory_.path().string(), GetParam());
  if (!small.mounted()) GTEST_SKIP() << "a loop device cannot be mounted here (needs root)";
  std::ofstream(small / "old") << "precious";
  try {
    const File file(small / "old", {.reserve_bytes = kMiB});
    EXPECT_EQ(file.size_bytes(), kMiB);
  } catch (const IoError& error) {
    EXPECT_EQ(error.where.code, EOPNOTSUPP);
  }
  std::string text(8, ' ');
  std::ifstream(small / "old").read(text.data(), 8);
  EXPECT_EQ(text, "precious");
}

INSTANTIATE_TEST_SUITE_P(FileSystems, Reserve, testing::Values("ext4", "ext2"),
                         [](const auto& way) { return std::string(way.param); });

}  // namespace
}  // namespace hoist::aio::file_test
