// SPDX-License-Identifier: Apache-2.0
// The fuzzer's corpus as an ordinary test: nothing in it, and no small change of it, does more than throw
// SafetensorsError. Files named good-* are accepted.
#include <filesystem>
#include <iterator>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/interchange/safetensors.hpp>
#include <hoist/tests/support/file_contents.hpp>

namespace hoist::interchange::corpus_test {
namespace {

// As tests/fuzz/safetensors does it.
bool is_accepted(std::string_view file) {
  try {
    const std::uint64_t length = header_length(std::as_bytes(std::span(file)), file.size(), "file");
    const auto json = file.substr(kHeaderLengthBytes, length);
    parse_header(json, file.size() - kHeaderLengthBytes - length, "file");
    return true;
  } catch (const SafetensorsError&) {
    return false;
  }
}

std::vector<std::pair<std::string, std::string>> corpus() {
  std::vector<std::pair<std::string, std::string>> files;
  for (const auto& entry : std::filesystem::directory_iterator(HOIST_CORPUS_DIR))
    files.emplace_back(entry.path().filename().string(), test::contents_of(entry.path()));
  return files;
}

TEST(SafetensorsCorpus, IsAcceptedOrRefusedAsNamed) {
  const auto files = corpus();
  ASSERT_GE(files.size(), 10u);
  for (const auto& [name, bytes] : files) EXPECT_EQ(is_accepted(bytes), name.starts_with("good-")) << name;
}

TEST(SafetensorsCorpus, SmallChangesDoNoHarm) {
  constexpr std::uint64_t kSeed = 20;
  Rng rng(kSeed);
  std::size_t accepted = 0;
  for (const auto& [name, bytes] : corpus()) {
    if (bytes.empty()) continue;
    for (int change = 0; change < 2000; ++change) {
      std::string changed = bytes;
      changed[rng.below(changed.size())] = static_cast<char>(rng.below(256));
      if (rng.below(4) == 0) changed.resize(rng.below(changed.size()));
      if (is_accepted(changed)) ++accepted;
    }
  }
  EXPECT_GT(accepted, 0u) << "seed " << kSeed << ": a change within the data or a name is no damage";
}

}  // namespace
}  // namespace hoist::interchange::corpus_test
