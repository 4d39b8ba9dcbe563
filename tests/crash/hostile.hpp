// SPDX-License-Identifier: Apache-2.0
// tests/crash/hostile.hpp - runs a training that a test disturbs, and checks the state that is left.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include <hoist/tests/zero/toy_model.hpp>

namespace hoist::test {

class Hostile : public testing::Test {
 protected:
  static constexpr std::uint64_t kSteps = 40;

  static ToySetup toy(const std::string& store);
  // The digests of the state that an undisturbed training ends in.
  static const std::string& expected();

  struct Life {
    std::string error;            // what ended it; empty: it trained to the end
    std::int64_t committed = -1;  // the newest that was reported durable
  };
  // Trains from what is there to `last_step`; `between` is called after each step, and before the first. At the end of
  // all steps the digests are compared.
  static Life train(
      const ToySetup& setup, const std::function<void(std::uint64_t)>& between = [](std::uint64_t) {},
      std::uint64_t last_step = kSteps);
  // The durable state is there, and training that continues from it ends in the right bits.
  static void expect_intact(const ToySetup& setup, std::int64_t committed);

  const TempDirectory directory_;
};

#define HOIST_NEEDS_MOUNTED(volume) \
  if (!(volume).mounted()) GTEST_SKIP() << (volume).obstacle()

}  // namespace hoist::test
