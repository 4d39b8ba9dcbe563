// SPDX-License-Identifier: Apache-2.0
// The fuzzer's corpus, run without a fuzzer. Each finding of a fuzzing run becomes a file of it.
#include <gtest/gtest.h>

#include <hoist/tests/support/file_contents.hpp>

#include "samples.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t count);

namespace hoist::corpus_test {
namespace {

void run(const std::string& text) {
  EXPECT_EQ(LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(text.data()), text.size()), 0);
}

TEST(Corpus, EveryFileIsAConfigurationOrRefused) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(HOIST_CORPUS_DIR)) {
    SCOPED_TRACE(entry.path().string());
    run(test::contents_of(entry.path()));
    ++count;
  }
  EXPECT_GE(count, 15);
  for (const std::string& text : test::sample_texts()) run(text);
}

}  // namespace
}  // namespace hoist::corpus_test
