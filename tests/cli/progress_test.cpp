// SPDX-License-Identifier: Apache-2.0
#include "../../cli/progress.hpp"

#include <cstdio>
#include <cstdlib>
#include <string>

#include <gmock/gmock.h>

#include <hoist/core/units.hpp>

namespace hoist::cli::progress_test {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using namespace std::chrono_literals;

// A stream in memory and a clock of the test's own.
class ProgressTest : public ::testing::Test {
 protected:
  ProgressTest() : stream_(::open_memstream(&text_, &length_)) {}
  ~ProgressTest() override {
    std::fclose(stream_);
    std::free(text_);
  }

  ProgressOptions options(ProgressStyle style) const {
    return {.what = "verifying", .total = 4 * kGiB, .style = style, .out = stream_};
  }
  std::string text() const {
    std::fflush(stream_);
    return {text_, length_};
  }

 private:
  char* text_ = nullptr;
  std::size_t length_ = 0;
  std::FILE* stream_ = nullptr;
};

TEST_F(ProgressTest, QuietSaysNothing) {
  Progress progress(options(ProgressStyle::quiet));
  progress.update(kGiB, Clock::now() + 1h);
  EXPECT_THAT(text(), IsEmpty());
}

TEST_F(ProgressTest, LinesComeEveryFewSecondsAndShortWorkHasNone) {
  Progress progress(options(ProgressStyle::lines));
  const TimePoint begin = Clock::now();
  progress.update(1, begin + 1s);
  EXPECT_THAT(text(), IsEmpty());
  progress.update(kGiB, begin + 6s);
  progress.update(kGiB + 1, begin + 7s);
  EXPECT_THAT(text(), HasSubstr("verifying 1.0 GiB of 4.0 GiB, 0.18 GB/s, 18 s left\n"));
  EXPECT_EQ(text().find('\n'), text().size() - 1) << "one line: " << text();
}

TEST_F(ProgressTest, ABarIsRewrittenAndTakenAway) {
  {
    Progress progress(options(ProgressStyle::bar));
    progress.update(2 * kGiB, Clock::now() + 1s);
    EXPECT_THAT(text(), HasSubstr("\r[############............]  50 % verifying 2.0 GiB of 4.0 GiB"));
    EXPECT_THAT(text(), Not(HasSubstr("\n")));
    progress.update(3 * kGiB, Clock::now() + 2s);
  }
  EXPECT_THAT(text(), EndsWith(" \r"));
}

TEST_F(ProgressTest, ABarFitsTheTerminal) {
  ProgressOptions wide = options(ProgressStyle::bar);
  wide.what = std::string(200, 'x');
  Progress progress(wide);
  progress.update(kGiB, Clock::now() + 1s);
  EXPECT_LE(text().size(), 80u);
}

TEST_F(ProgressTest, WithoutATotalThereIsNoBar) {
  ProgressOptions open = options(ProgressStyle::bar);
  open.total = 0;
  open.unit = ProgressOptions::Unit::count;
  Progress progress(open);
  progress.update(17, Clock::now() + 1s);
  EXPECT_THAT(text(), HasSubstr("\rverifying 17"));
  EXPECT_THAT(text(), Not(HasSubstr("[")));
}

}  // namespace
}  // namespace hoist::cli::progress_test
