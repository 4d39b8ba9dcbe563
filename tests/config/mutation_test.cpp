// SPDX-License-Identifier: Apache-2.0
// Damaged configurations are refused or accepted, never anything else. A failure prints its seed.
#include <random>

#include <gtest/gtest.h>

#include <hoist/config/config.hpp>
#include <hoist/core/rng.hpp>

#include "samples.hpp"

namespace hoist::mutation_test {
namespace {

// True when parsing ended in one of the two legal ways.
bool survives(const std::string& text) {
  try {
    Config::parse(text, "mutated.json");
  } catch (const ConfigProblems& error) {
    return !error.problems.empty() && error.what()[0] != '\0';
  } catch (const std::exception& error) {
    ADD_FAILURE() << "unexpected exception: " << error.what();
    return false;
  }
  return true;
}

std::string mutate(std::string text, const std::vector<std::string>& donors, Rng& rng) {
  static const std::string kSpice = "{}[]\",:0123456789eE+-.truefalsn\\u \n\x01\x7f\xff\xc3";
  for (std::uint64_t changes = 1 + rng.below(4); changes > 0; --changes) {
    const std::size_t at = text.empty() ? 0 : rng.below(text.size());
    const std::size_t length = text.empty() ? 0 : rng.below(std::min<std::size_t>(text.size() - at, 24) + 1);
    switch (rng.below(6)) {
      case 0:
        text.erase(at, length);
        break;
      case 1:
        text.insert(at, 1, kSpice[rng.below(kSpice.size())]);
        break;
      case 2:
        if (!text.empty()) text[at] = kSpice[rng.below(kSpice.size())];
        break;
      case 3:
        text.insert(at, text.substr(at, length));
        break;
      case 4: {
        const std::string& donor = donors[rng.below(donors.size())];
        const std::size_t from = donor.empty() ? 0 : rng.below(donor.size());
        text.insert(at, donor.substr(from, rng.below(60)));
        break;
      }
      default:
        if (!text.empty()) text[at] = static_cast<char>(rng.below(256));
    }
  }
  return text;
}

// At every third byte; in parts, which run beside each other: the sanitizers take minutes.
class Truncation : public testing::TestWithParam<std::size_t> {};
constexpr std::size_t kTruncationParts = 4;

TEST_P(Truncation, IsHandled) {
  for (const std::string& text : test::sample_texts()) {
    // The sample of 100 kB is brackets and nothing else: fewer places will do.
    const std::size_t stride = 3 * kTruncationParts * (1 + text.size() / 10'000);
    for (std::size_t length = 3 * GetParam(); length < text.size(); length += stride) {
      ASSERT_TRUE(survives(text.substr(0, length))) << text.substr(0, length);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, Truncation, testing::Range<std::size_t>(0, kTruncationParts));

TEST(Mutation, RandomDamageIsHandled) {
  const std::uint64_t seed = std::random_device{}();
  RecordProperty("seed", std::to_string(seed));
  const std::vector<std::string> samples = test::sample_texts();
  Rng rng(seed);
  for (int round = 0; round < 6000; ++round) {
    const std::string text = mutate(samples[rng.below(samples.size())], samples, rng);
    ASSERT_TRUE(survives(text)) << "seed " << seed << " round " << round << "\n" << text;
  }
}

}  // namespace
}  // namespace hoist::mutation_test
