// SPDX-License-Identifier: Apache-2.0
// Writing: how tensors are dealt to shards, and that an unfinished export leaves nothing that looks whole.
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <functional>
#include <iterator>
#include <set>
#include <utility>

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/interchange/safetensors_reader.hpp>
#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/support/full_table.hpp>
#include <hoist/tests/support/other_kinds.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "safetensors_files.hpp"

namespace {
std::function<void()> before_the_next_lock;
int lock_error = 0;
}  // namespace

// The program's own definition comes before that of the C library.
extern "C" int flock(int descriptor, int operation) noexcept {
  static auto* const next = reinterpret_cast<decltype(&flock)>(::dlsym(RTLD_NEXT, "flock"));
  if (const auto act = std::exchange(before_the_next_lock, nullptr)) act();
  if (lock_error != 0) {
    errno = lock_error;
    return -1;
  }
  return next(descriptor, operation);
}

namespace hoist::interchange::writer_test {
namespace {

namespace fs = std::filesystem;
using test::TempDirectory;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<TensorSpec> bytes_of(const std::vector<std::uint64_t>& lengths) {
  std::vector<TensorSpec> specs;
  for (const std::uint64_t length : lengths)
    specs.push_back({"t" + std::to_string(specs.size()), TensorType::u8, {length}});
  return specs;
}

std::vector<std::uint64_t> shard_lengths(const std::vector<std::uint64_t>& lengths, std::uint64_t bytes_max) {
  std::vector<std::uint64_t> result;
  for (const Shard& shard : plan_shards(bytes_of(lengths), bytes_max)) result.push_back(shard.data_bytes());
  return result;
}

std::set<std::string> names_in(const fs::path& directory) {
  std::set<std::string> names;
  if (!fs::exists(directory)) return names;
  for (const auto& entry : fs::directory_iterator(directory)) names.insert(entry.path().filename().string());
  return names;
}

void put(SafetensorsWriter& writer, std::size_t count, char value = 'x') {
  const std::string text(count, value);
  writer.write(std::as_bytes(std::span(text)));
}

TEST(SafetensorsWriter, AShardEndsBeforeItWouldBeTooLong) {
  EXPECT_THAT(shard_lengths({3, 3, 3}, 9), ElementsAre(9));
  EXPECT_THAT(shard_lengths({3, 3, 4}, 9), ElementsAre(6, 4));
  EXPECT_THAT(shard_lengths({20, 1, 20, 9}, 9), ElementsAre(20, 1, 20, 9));
  EXPECT_THAT(shard_lengths({9, 0, 1}, 9), ElementsAre(9, 1));
  EXPECT_THAT(shard_lengths({}, 9), ElementsAre(0));
  EXPECT_THAT(shard_lengths({1, 1}, 0), ElementsAre(1, 1));
}

TEST(SafetensorsWriter, NoTensorBeginsWithinAnElement) {
  const std::vector<TensorSpec> narrow_first{{"a", TensorType::u8, {1}}, {"b", TensorType::f32, {1}}};
  EXPECT_THROW(plan_shards(narrow_first, 100), UsageError);
  const std::vector<TensorSpec> wide_first{{"b", TensorType::f32, {1}}, {"a", TensorType::u8, {1}}};
  EXPECT_EQ(plan_shards(wide_first, 100).size(), 1u);
}

TEST(SafetensorsWriter, WritesCrossTensorsAndShards) {
  const TempDirectory directory;
  SafetensorsWriter writer({.directory = directory / "new/m", .shard_bytes_max = 5}, bytes_of({4, 0, 4, 3, 0}));
  EXPECT_EQ(writer.data_bytes(), 11u);
  const std::string all = "0123456789a";
  for (std::size_t at = 0; at < all.size(); at += 3) {
    const auto piece = all.substr(at, 3);
    writer.write(std::as_bytes(std::span(piece)));
  }
  writer.finish();
  const SafetensorsModel model(directory / "new/m");
  std::string read(4, ' ');
  model.find("t2")->read(0, std::as_writable_bytes(std::span(read)));
  EXPECT_EQ(read, "4567");
  EXPECT_THAT(names_in(directory / "new/m"),
              ElementsAre("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                          "model-00003-of-00003.safetensors", "model.safetensors.index.json"));
}

TEST(SafetensorsWriter, MoreShardsThanDescriptors) {
  const TempDirectory directory;
  const auto write = [&](const std::string& name, std::size_t bytes) {
    const test::FullTable few(4);
    SafetensorsWriter writer({.directory = directory / name, .shard_bytes_max = 1},
                             bytes_of(std::vector<std::uint64_t>(40, 1)));
    put(writer, bytes);
    if (bytes == 40) writer.finish();
  };
  write("whole", 40);
  EXPECT_EQ(SafetensorsModel(directory / "whole").tensors().size(), 40u);
  write("abandoned", 30);
  EXPECT_FALSE(fs::exists(directory / "abandoned"));
}

TEST(SafetensorsWriter, AnAbandonedExportLeavesNothing) {
  const TempDirectory directory;
  for (const std::string name : {"new", "."}) {
    {
      SafetensorsWriter writer({.directory = directory / name, .shard_bytes_max = 5}, bytes_of({4, 4, 4}));
      put(writer, 9);
      EXPECT_THAT(names_in(directory / name),
                  ElementsAre("export.lock", "model-00001-of-00003.safetensors.partial",
                              "model-00002-of-00003.safetensors.partial", "model-00003-of-00003.safetensors.partial"));
    }
    EXPECT_THAT(names_in(directory.path()), IsEmpty()) << name;
  }
}

TEST(SafetensorsWriter, AKilledExportLeavesNothingThatLooksWholeAndCanBeRepeated) {
  const TempDirectory directory;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    SafetensorsWriter writer({.directory = directory / "m", .shard_bytes_max = 5}, bytes_of({4, 4, 4}));
    put(writer, 12);
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  ASSERT_EQ(names_in(directory / "m").size(), 4u);
  EXPECT_THROW(SafetensorsModel(directory / "m"), SafetensorsError);

  SafetensorsWriter writer({.directory = directory / "m", .shard_bytes_max = 5}, bytes_of({4, 4, 4}));
  put(writer, 12);
  writer.finish();
  EXPECT_EQ(names_in(directory / "m").size(), 4u);
  EXPECT_EQ(SafetensorsModel(directory / "m").tensors().size(), 3u);
}

TEST(SafetensorsWriter, NeverOverwritesAModel) {
  const TempDirectory directory;
  const auto refused = [&](const std::string& present) -> std::string {
    fs::create_directory(directory / "m");
    test::write_file(directory / ("m/" + present), "precious");
    std::string problem;
    try {
      SafetensorsWriter writer({.directory = directory / "m"}, bytes_of({1}));
    } catch (const SafetensorsError& error) {
      problem = error.what();
    }
    EXPECT_THAT(names_in(directory / "m"), ElementsAre(present));
    fs::remove_all(directory / "m");
    return problem;
  };
  EXPECT_THAT(refused("model.safetensors"), HasSubstr("already holds model.safetensors"));
  EXPECT_THAT(refused("other.safetensors"), HasSubstr("already holds other.safetensors"));
  EXPECT_THAT(refused("model.safetensors.index.json"), HasSubstr("already holds"));

  // One that appears while the export runs is kept as well.
  SafetensorsWriter writer({.directory = directory / "m"}, bytes_of({1}));
  put(writer, 1);
  test::write_file(directory / "m/model.safetensors", "precious");
  EXPECT_THROW(writer.finish(), IoError);
  EXPECT_EQ(fs::file_size(directory / "m/model.safetensors"), 8u);
}

TEST(SafetensorsWriter, TwoExportsDoNotShareADirectory) {
  for (const std::uint64_t shard_bytes_max : {8u, 4u}) {  // as many files as the first, or more
    const TempDirectory directory;
    SafetensorsWriter first({.directory = directory / "m"}, bytes_of({4, 4}));
    const SafetensorsWriterOptions second{.directory = directory / "m", .shard_bytes_max = shard_bytes_max};
    EXPECT_THROW(SafetensorsWriter(second, bytes_of({4, 4})), IoError);
    put(first, 8);
    first.finish();
    EXPECT_THROW(SafetensorsWriter(second, bytes_of({4, 4})), SafetensorsError);
    EXPECT_THAT(names_in(directory / "m"), ElementsAre("model.safetensors"));
  }
}

// One export has opened the lock and not taken it yet, while another one takes it, writes and finishes.
TEST(SafetensorsWriter, ADelayedExportLeavesAFinishedOneAlone) {
  const TempDirectory directory;
  before_the_next_lock = [&] {
    SafetensorsWriter other({.directory = directory / "m"}, bytes_of({4}));
    put(other, 4, 'a');
    other.finish();
  };
  EXPECT_THROW(SafetensorsWriter({.directory = directory / "m"}, bytes_of({4})), SafetensorsError);
  EXPECT_THAT(test::contents_of(directory / "m/model.safetensors"), testing::EndsWith("aaaa"));
  EXPECT_THAT(names_in(directory / "m"), ElementsAre("model.safetensors"));
}

TEST(SafetensorsWriter, AFileSystemWithoutLocksIsWrittenToAndOneWhoseLocksFailIsNot) {
  const TempDirectory directory;
  for (const int code : {ENOLCK, ENOSYS, ENOTSUP}) {
    lock_error = code;
    SafetensorsWriter writer({.directory = directory / std::to_string(code)}, bytes_of({1}));
    put(writer, 1);
    writer.finish();
    EXPECT_THAT(names_in(directory / std::to_string(code)), ElementsAre("model.safetensors"));
  }
  lock_error = EIO;
  EXPECT_THROW(SafetensorsWriter({.directory = directory / "m"}, bytes_of({1})), IoError);
  lock_error = 0;
}

TEST(SafetensorsWriter, AFileSystemThatIsTooSmallIsSaidBeforeTheFirstByte) {
  const TempDirectory directory;
  try {
    SafetensorsWriter writer({.directory = directory / "m"}, bytes_of({1ull << 60}));
    FAIL() << "an exbibyte fits";
  } catch (const IoError& error) {
    EXPECT_EQ(error.where.code, ENOSPC);  // Python's OSError with that errno
    EXPECT_THAT(error.what(), HasSubstr("the tensors need 1024 PiB"));
  }
  EXPECT_THAT(names_in(directory.path()), IsEmpty());
}

TEST(SafetensorsWriter, AFailedWriteIsSaidWithItsPlaceAndLength) {
  const TempDirectory directory;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  SafetensorsWriter writer({.directory = directory / "m"}, bytes_of({10'000}));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string text;
  try {
    put(writer, 10'000);
  } catch (const IoError& error) {
    text = error.what();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(text, HasSubstr("(10000 bytes) failed: File too large; raise the limit of file sizes"));
}

TEST(SafetensorsWriter, WhatIsNoFileUnderATemporaryNameIsRefusedAndNeverWaitedFor) {
  const test::TestDeadline deadline;
  for (const test::OtherKind& kind : test::kOtherKinds) {
    const TempDirectory directory;
    for (const std::string name : {"model.safetensors.partial", "export.lock"}) {
      const std::string path = directory / name;
      if (!kind.make(path)) continue;  // devices are root's
      EXPECT_THROW(SafetensorsWriter({.directory = directory.path().string()}, bytes_of({1})), IoError) << kind.name;
      EXPECT_TRUE(fs::exists(fs::symlink_status(path))) << kind.name;
      fs::remove(path);
    }
  }
}

TEST(SafetensorsWriter, ADirectoryThatCannotBeMadeIsAnIoError) {
  const TempDirectory directory;
  test::write_file(directory / "file", "");
  EXPECT_THROW(SafetensorsWriter({.directory = directory / "file"}, bytes_of({1})), IoError);
  EXPECT_THROW(SafetensorsWriter({.directory = directory / "file/m"}, bytes_of({1})), IoError);
}

}  // namespace
}  // namespace hoist::interchange::writer_test
