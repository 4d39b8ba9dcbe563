// SPDX-License-Identifier: Apache-2.0
// The stores below a directory, on a file system that names its entries without their kinds, and that may fail to tell
// them.
#include <cerrno>
#include <filesystem>
#include <string_view>

#include <dirent.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/temp_directory.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>

namespace {

bool names_only = false;
int stat_error = 0;

template <typename Function>
Function* next_definition(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

bool fails(const char* path) {
  if (stat_error == 0 || std::string_view(path).find("/reshard-") == std::string_view::npos) return false;
  errno = stat_error;
  return true;
}

}  // namespace

// The program's own definitions come before those of the C library.
extern "C" dirent* readdir(DIR* directory) {
  static auto* const next = next_definition<dirent*(DIR*)>("readdir");
  dirent* const entry = next(directory);
  if (names_only && entry != nullptr) entry->d_type = DT_UNKNOWN;
  return entry;
}
extern "C" int stat(const char* path, struct stat* status) noexcept {
  static auto* const next = next_definition<int(const char*, struct stat*)>("stat");
  return fails(path) ? -1 : next(path, status);
}
extern "C" int lstat(const char* path, struct stat* status) noexcept {
  static auto* const next = next_definition<int(const char*, struct stat*)>("lstat");
  return fails(path) ? -1 : next(path, status);
}

namespace hoist::test::store_directory_test {
namespace {

class StoreDirectories : public testing::Test {
 protected:
  StoreDirectories() {
    std::filesystem::create_directory(store_);
    names_only = true;
  }
  ~StoreDirectories() override {
    names_only = false;
    stat_error = 0;
  }
  std::size_t count() const { return detail::store_directories(directory_.path().string()).size(); }

  const TempDirectory directory_;
  const std::string store_ = directory_ / detail::new_store_directory(1, 2).name;
};

TEST_F(StoreDirectories, AreFoundByTheirNames) {
  std::filesystem::create_directory_symlink(store_, directory_ / detail::new_store_directory(2, 2).name);
  std::filesystem::create_directory(directory_ / "reshard-of-somebody");
  EXPECT_EQ(count(), 1u);
}

// An older store would otherwise continue the run.
TEST_F(StoreDirectories, OneWhoseKindCannotBeReadIsAnError) {
  stat_error = EIO;
  try {
    EXPECT_EQ(count(), 1u);
    ADD_FAILURE() << "nothing was noticed";
  } catch (const IoError& error) {
    EXPECT_EQ(error.where.path, store_);
    EXPECT_EQ(error.where.code, EIO);
    EXPECT_THAT(error.what(), testing::HasSubstr("which stores are in it cannot be known"));
  }
}

TEST_F(StoreDirectories, OneThatIsRemovedMeanwhileIsNone) {
  stat_error = ENOENT;
  EXPECT_EQ(count(), 0u);
}

}  // namespace
}  // namespace hoist::test::store_directory_test
