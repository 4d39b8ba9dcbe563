// SPDX-License-Identifier: Apache-2.0
#include <cerrno>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>

namespace hoist::test::error_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Error, ConfigErrorNamesItsKey) {
  const ConfigError error("zero_optimization.stage", "must be 0 to 3");
  EXPECT_EQ(error.key, "zero_optimization.stage");
  EXPECT_STREQ(error.what(), "zero_optimization.stage: must be 0 to 3");
  EXPECT_STREQ(ConfigError("", "no such file").what(), "no such file");
}

TEST(Error, BudgetErrorSaysHaveNeedAndKey) {
  const BudgetError error(
      {.tier = "pinned", .have_bytes = 1024, .need_bytes = 5000, .key = "hoist.pinned", .detail = "buffers"});
  EXPECT_THAT(error.what(), AllOf(HasSubstr("pinned"), HasSubstr("1024"), HasSubstr("5000"), HasSubstr("hoist.pinned"),
                                  HasSubstr("buffers")));
  EXPECT_EQ(error.need.need_bytes, 5000u);
}

TEST(Error, IoErrorSaysWhereAndWhyAndKeepsTheErrno) {
  const IoError error(
      {.operation = "write", .path = "/mnt/a", .offset_bytes = 4096, .length_bytes = 512, .code = ENOSPC},
      "free some space");
  EXPECT_EQ(error.where.code, ENOSPC);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("write of /mnt/a"), HasSubstr("4096"), HasSubstr("No space left"),
                                  HasSubstr("free some space")));
  const IoError shortened({.operation = "read", .path = "/mnt/a", .length_bytes = 512});
  EXPECT_THAT(shortened.what(), HasSubstr("fewer bytes"));
  const IoError whole({.operation = "open", .path = "/mnt/a", .code = ENOENT});
  EXPECT_STREQ(whole.what(), "open of /mnt/a failed: No such file or directory");
}

TEST(Error, AnIoErrorWithoutARemedyOfTheCallersHasTheUsualOne) {
  for (const int code : {EIO, ENOSPC, EDQUOT, EFBIG, EROFS, EACCES, EMFILE, ENAMETOOLONG}) {
    const IoError error({.operation = "write", .path = "/mnt/a", .code = code});
    EXPECT_STRNE(usual_remedy(code), "") << code;
    EXPECT_THAT(error.what(), testing::EndsWith(std::string("; ") + usual_remedy(code)));
  }
}

TEST(Error, AFileThatCannotBeMadeForWantOfSpaceMayLackAnInode) {
  for (const char* operation : {"open", "create", "mkdir"}) {
    const IoError error({.operation = operation, .path = "/mnt/a", .code = ENOSPC});
    EXPECT_THAT(error.what(), AllOf(HasSubstr(usual_remedy(ENOSPC)), HasSubstr("df -i")));
  }
}

TEST(Error, MemoryThatIsFreeButRefusedIsNoLack) {
  const auto refusal = [](std::uint64_t have) {
    return std::string(BudgetError::machine({"pinned", have, 4096, "hoist.pinned_memory", "the buffers (why)"}).what());
  };
  EXPECT_THAT(refusal(1024), HasSubstr("offers 1.0 KiB (1024 bytes) of pinned memory, but 4.0 KiB"));
  EXPECT_EQ(
      refusal(4096),
      "the system refused 4.0 KiB (4096 bytes) of pinned memory for the buffers (why), although as much is free; lower "
      "hoist.pinned_memory");
}

TEST(Error, CorruptionErrorNamesUnitRegionFileAndOffset) {
  const CorruptionError error({.unit = "layer.3",
                               .region = "weights",
                               .path = "/mnt/a",
                               .offset_bytes = 8192,
                               .expected = 0xAB,
                               .found = 0xCD});
  EXPECT_THAT(error.what(), AllOf(HasSubstr("layer.3"), HasSubstr("weights"), HasSubstr("/mnt/a"), HasSubstr("8192"),
                                  HasSubstr("00000000000000ab"), HasSubstr("00000000000000cd")));
}

TEST(Error, DeviceErrorCarriesItsCode) {
  const DeviceError error("cudaMalloc", 2, "out of memory", "lower the device budget");
  EXPECT_EQ(error.code, 2);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("cudaMalloc"), HasSubstr("out of memory"), HasSubstr("lower the device")));
}

TEST(Error, AllAreCaughtAsError) {
  EXPECT_THROW(throw StoreError("in use"), Error);
  EXPECT_THROW(throw UsageError("x"), Error);
  EXPECT_THROW(throw CommError("x"), std::runtime_error);
}

TEST(AssertDeathTest, PrintsExpressionPlaceAndValues) {
  const int have = 3;
  HOIST_ASSERT(have == 3, "not evaluated to death");
  EXPECT_DEATH(HOIST_ASSERT(have == 4, "have {} of {}", have, 4), "have == 4.*error_test.cpp.*have 3 of 4");
  EXPECT_DEATH(HOIST_ASSERT(have > 5), "have > 5");
}

}  // namespace
}  // namespace hoist::test::error_test
