// SPDX-License-Identifier: Apache-2.0
#include "text.hpp"

#include <ctime>
#include <fstream>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/clock.hpp>
#include <hoist/tests/support/message_of.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::gpt::text_test {
namespace {

using testing::HasSubstr;

class TextTest : public testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream(directory_ / name, std::ios::binary) << content;
    return directory_ / name;
  }
  static std::string error_of(const std::string& path, int context) {
    return test::message_of<BadInputError>([&] { Text::load(path, context); });
  }
  const test::TempDirectory directory_;
};

Text counting(std::size_t bytes) {
  std::vector<std::uint8_t> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) values[i] = static_cast<std::uint8_t>(i);
  return Text(std::move(values));
}

TEST_F(TextTest, LoadsEveryByte) {
  std::string all;
  for (int i = 0; i < 256; ++i) all.push_back(static_cast<char>(i));
  const Text text = Text::load(write("all", all), 255);
  EXPECT_EQ(text.byte_count(), 256u);
  const Batch batch = text.batch({.context = 255});  // one window fits
  for (int i = 0; i < 255; ++i) {
    ASSERT_EQ(batch.inputs[static_cast<std::size_t>(i)], i);
    ASSERT_EQ(batch.targets[static_cast<std::size_t>(i)], i + 1);
  }
}

TEST_F(TextTest, RefusesWhatCannotBeLearnt) {
  EXPECT_THAT(error_of(directory_ / "none", 4), HasSubstr("there is no text"));
  EXPECT_THAT(error_of(directory_.path(), 4), HasSubstr("not a regular file"));
  EXPECT_THAT(error_of("/dev/zero", 4), HasSubstr("not a regular file"));
  EXPECT_THAT(error_of(write("empty", ""), 4), HasSubstr("has 0 bytes; a context of 4 needs at least 5"));
  EXPECT_THAT(error_of(write("four", "abcd"), 4), HasSubstr("has 4 bytes"));
  EXPECT_EQ(error_of(write("five", "abcde"), 4), "no error");
}

TEST_F(TextTest, TargetsFollowInputs) {
  const Text text = counting(200);
  const Batch batch = text.batch({.seed = 3, .step = 7, .batch = 5, .context = 9});
  ASSERT_EQ(batch.inputs.size(), 45u);
  for (std::size_t i = 0; i < 45; ++i) ASSERT_EQ(batch.targets[i], batch.inputs[i] + 1);
}

TEST_F(TextTest, BatchIsAPureFunctionOfSeedStepAndRank) {
  const Text text = counting(251);
  const BatchOptions options{.seed = 11, .step = 1000, .rank = 2, .world_size = 4, .batch = 3, .context = 8};
  const Batch first = text.batch(options);
  (void)text.batch({.seed = 11, .step = 1001, .batch = 3, .context = 8});
  EXPECT_EQ(text.batch(options).inputs, first.inputs);
  for (const auto change : {&BatchOptions::seed, &BatchOptions::step}) {
    BatchOptions other = options;
    other.*change += 1;
    EXPECT_NE(text.batch(other).inputs, first.inputs);
  }
}

TEST_F(TextTest, RanksShareTheBatchOfOneRank) {
  const Text text = counting(256);
  for (const std::uint64_t step : {0u, 1u, 17u}) {
    const Batch whole = text.batch({.seed = 5, .step = step, .batch = 12, .context = 6});
    std::vector<std::uint8_t> joined;
    for (int rank = 0; rank < 4; ++rank) {
      const Batch part = text.batch({.seed = 5, .step = step, .rank = rank, .world_size = 4, .batch = 3, .context = 6});
      joined.insert(joined.end(), part.inputs.begin(), part.inputs.end());
    }
    EXPECT_EQ(joined, whole.inputs);
  }
}

TEST_F(TextTest, EveryWindowIsReached) {
  const Text text = counting(20);
  std::set<std::uint8_t> starts;
  for (std::uint64_t step = 0; step < 400; ++step)
    starts.insert(text.batch({.seed = 1, .step = step, .context = 4}).inputs[0]);
  EXPECT_EQ(starts.size(), 16u);
  EXPECT_EQ(*starts.rbegin(), 15);
}

TEST_F(TextTest, FingerprintTellsTextsApart) {
  EXPECT_EQ(counting(100).fingerprint(), counting(100).fingerprint());
  EXPECT_NE(counting(100).fingerprint(), counting(101).fingerprint());
}

// Every step asks for it.
TEST_F(TextTest, FingerprintIsComputedOnce) {
  std::vector<std::uint8_t> bytes(std::size_t{32} << 20);
  const double begin = processor_seconds(CLOCK_THREAD_CPUTIME_ID);
  const Text text(std::move(bytes));
  const double made = processor_seconds(CLOCK_THREAD_CPUTIME_ID);
  std::uint64_t sum = 0;
  for (int i = 0; i < 100; ++i) sum += text.fingerprint();
  EXPECT_LT(processor_seconds(CLOCK_THREAD_CPUTIME_ID) - made, made - begin);
  EXPECT_EQ(sum, 100 * text.fingerprint());
}

}  // namespace
}  // namespace hoist::gpt::text_test
