// SPDX-License-Identifier: Apache-2.0
// The corpora of the store's fuzzers as an ordinary test: every file, and small changes of each. What a fuzzing run
// finds becomes a file.
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <string>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/tests/support/file_contents.hpp>

extern "C" {
int fuzz_manifest(const std::uint8_t* data, std::size_t count);
int fuzz_slot(const std::uint8_t* data, std::size_t count);
int fuzz_label(const std::uint8_t* data, std::size_t count);
}

namespace hoist::corpus_test {
namespace {

struct Target {
  const char* name;
  int (*run)(const std::uint8_t*, std::size_t);
};

class StoreCorpus : public testing::TestWithParam<Target> {};

TEST_P(StoreCorpus, NothingInItAndNoSmallChangeDoesHarm) {
  constexpr std::uint64_t kSeed = 5;
  constexpr int kChanges = 300;
  Rng rng(kSeed);
  std::size_t files = 0;
  const auto run = [](const std::string& bytes) {
    EXPECT_EQ(GetParam().run(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()), 0);
  };
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(HOIST_STORE_CORPORA) + "/" + GetParam().name + "-corpus")) {
    SCOPED_TRACE(testing::Message() << entry.path().filename().string() << ", seed " << kSeed);
    const std::string bytes = test::contents_of(entry.path());
    run(bytes);
    ++files;
    for (int change = 0; change < kChanges && bytes.size() > 1; ++change) {
      std::string changed = bytes;
      // The decisive bytes are at the beginning; the first one is the fuzzer's own.
      const std::size_t range = rng.below(2) == 0 ? std::min<std::size_t>(bytes.size(), 200) : bytes.size();
      for (std::uint64_t n = 1 + rng.below(3); n > 0; --n)
        changed[rng.below(range)] = static_cast<char>(rng.below(3) == 0 ? 0xFF : rng.below(256));
      if (rng.below(8) == 0) changed.resize(rng.below(changed.size()));
      run(changed);
    }
  }
  EXPECT_GE(files, 3u);
}

INSTANTIATE_TEST_SUITE_P(Targets, StoreCorpus,
                         testing::Values(Target{"manifest", fuzz_manifest}, Target{"slot", fuzz_slot},
                                         Target{"label", fuzz_label}),
                         [](const auto& c) { return std::string(c.param.name); });

}  // namespace
}  // namespace hoist::corpus_test
