// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <hoist/core/units.hpp>
#include <hoist/measure/comparison.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::measure::comparison_test {
namespace {

// Says how fast it was without doing anything, and keeps a list of its legs.
class Scripted final : public Contender {
 public:
  Scripted(std::string name, double speed, std::vector<std::string>& order)
      : name_(std::move(name)), speed_(speed), order_(order) {}
  std::string name() const override { return name_; }
  std::string description() const override { return name_; }
  LegResult run(const Leg& leg) override {
    order_.push_back(name_);
    legs.push_back(leg);
    // The drive slows down with every leg, which alternation must take out.
    const double drift = 1.0 / (1 + 0.01 * static_cast<double>(order_.size()));
    return {.bytes = leg.region.length_bytes,
            .seconds = static_cast<double>(leg.region.length_bytes) / (speed_ * drift),
            .processor_seconds = 0.001};
  }
  std::vector<Leg> legs;

 private:
  std::string name_;
  double speed_;
  std::vector<std::string>& order_;
};

class ComparisonTest : public ::testing::Test {
 protected:
  ComparisonTest()
      : file_(directory_.path().string(), 16 * kMiB),
        buffers_(4 * kMiB, -1),
        drive_(file_, buffers_, {.block_bytes = kMiB, .queue_depth = 4}) {}

  test::TempDirectory directory_;
  ScratchFile file_;
  BlockBuffers buffers_;
  Drive drive_;
  Drive* drives_[1] = {&drive_};
};

TEST_F(ComparisonTest, AlternatesOnTheSameRegionsAndTakesDriftOut) {
  std::vector<std::string> order;
  Scripted ours("a", 2.2e9, order);
  Scripted theirs("b", 2.0e9, order);
  const ComparisonResult result = compare(ours, theirs, drives_, {.pairs = 40, .leg = std::chrono::milliseconds(1)});
  ASSERT_EQ(result.ratios.size(), 40u);
  ASSERT_EQ(result.control_ratios.size(), 20u);
  EXPECT_NEAR(median(result.ratios), 1.1, 0.005);
  // After one trial of each: a b, b a, control a a, and again.
  const std::vector<std::string> expected{"a", "b", "a", "b", "b", "a", "a", "a", "a", "b"};
  EXPECT_EQ(std::vector<std::string>(order.begin(), order.begin() + 10), expected);
  EXPECT_EQ(ours.legs[1].region.offset_bytes, theirs.legs[1].region.offset_bytes);
  EXPECT_EQ(ours.legs[1].seed, theirs.legs[1].seed);
  for (const Leg& leg : ours.legs) {
    EXPECT_LE(leg.region.offset_bytes + leg.region.length_bytes, file_.bytes());
    EXPECT_EQ(leg.region.length_bytes % kMiB, 0u);
  }
}

TEST_F(ComparisonTest, StopsBetweenLegs) {
  std::vector<std::string> order;
  Scripted ours("a", 1e9, order);
  Scripted theirs("b", 1e9, order);
  StopFlag stop{false};
  EXPECT_THROW(compare(ours, theirs, drives_,
                       {.pairs = 40,
                        .leg = std::chrono::milliseconds(1),
                        .stop = &stop,
                        .progress = [&](unsigned) { stop = true; }}),
               Interrupted);
}

// The contender loop that stands for DeepSpeed's handle moves what it says.
TEST_F(ComparisonTest, LibaioMovesItsBytes) {
  if (!have_libaio()) GTEST_SKIP() << "this build has no libaio";
  ScratchFile* files[1] = {&file_};
  fill_files(files, nullptr, {});
  const auto libaio = make_libaio_contender(drives_, nullptr);
  for (const Pattern pattern : {Pattern::read, Pattern::write, Pattern::mixed}) {
    const LegResult leg = libaio->run({.pattern = pattern, .region = {4 * kMiB, 8 * kMiB}});
    EXPECT_EQ(leg.bytes, 8 * kMiB);
    EXPECT_GT(leg.seconds, 0);
  }
}

}  // namespace
}  // namespace hoist::measure::comparison_test
