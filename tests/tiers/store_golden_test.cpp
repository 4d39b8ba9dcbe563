// SPDX-License-Identifier: Apache-2.0
// The format on disk does not change by accident: a small store's manifest, byte by byte, against a checked-in file.
#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/tiers/store_harness.hpp>

namespace hoist::tiers::test::store_golden_test {
namespace {

using hoist::test::TempDirectory;

// Sixteen bytes a line, lines of zeros left out.
std::string as_hex(std::span<const std::byte> bytes) {
  std::string text = fmt::format("# {} bytes\n", bytes.size());
  for (std::size_t at = 0; at < bytes.size(); at += 16) {
    const auto line = bytes.subspan(at, std::min<std::size_t>(16, bytes.size() - at));
    if (std::all_of(line.begin(), line.end(), [](std::byte b) { return b == std::byte{0}; })) continue;
    text += fmt::format("{:06x}:", at);
    for (const std::byte b : line) text += fmt::format(" {:02x}", static_cast<unsigned>(b));
    text += '\n';
  }
  return text;
}

std::vector<std::byte> from_hex(const std::string& text) {
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  std::vector<std::byte> bytes(std::stoull(line.substr(2)));
  while (std::getline(lines, line)) {
    std::istringstream words(line.substr(line.find(':') + 1));
    std::size_t at = std::stoull(line, nullptr, 16);
    for (std::string word; words >> word;) bytes.at(at++) = static_cast<std::byte>(std::stoul(word, nullptr, 16));
  }
  return bytes;
}

class StoreGoldenTest : public ::testing::Test {
 protected:
  StoreGoldenTest() : options_(small_model(directory_ / "store")) {
    options_.records.erase(options_.records.begin());
    options_.identity.rank = 1;
    options_.identity.world_size = 3;
    options_.store_number = 0x0123456789ABCDEFull;
    const auto queue = clean_queue();
    const auto store = create_store(options_, *queue);
    run_step(*store, options_, 0, all_records(options_));
    run_step(*store, options_, 1, {0});
    golden_ = hoist::test::contents_of(std::string(HOIST_TIERS_GOLDEN) + "/manifest-v4.hex");
  }
  std::string path() const { return options_.directory + "/rank-00001.manifest"; }

  TempDirectory directory_;
  StoreOptions options_;
  std::string golden_;
};

TEST_F(StoreGoldenTest, AManifestIsWrittenAsItAlwaysWas) {
  const std::string actual = as_hex(read_file(path()));
  if (actual == golden_) return;
  std::ofstream("manifest-actual.hex") << actual;
  FAIL() << "the bytes differ from tests/tiers/golden/manifest-v4.hex; what is written now is in manifest-actual.hex "
            "beside this test. A changed format needs a new version number and its own golden file.";
}

TEST_F(StoreGoldenTest, TheManifestOfThatFileIsRead) {
  ASSERT_FALSE(golden_.empty());
  write_file(path(), from_hex(golden_));
  Writers writers(options_.records.size(), 0);
  writers[0] = 1;
  EXPECT_EQ(reopen_and_compare(options_, {{1, writers}}), 1u);
}

}  // namespace
}  // namespace hoist::tiers::test::store_golden_test
