// SPDX-License-Identifier: Apache-2.0
// The house's rule: a room includes only from rows below it, and only its own detail/; certain libraries have one door.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace {

namespace fs = std::filesystem;

// Lowest row first; siblings do not know each other.
const std::vector<std::set<std::string>> kRows{
    {"core"},      {"platform"}, {"aio", "comm", "optim_cpu"},         {"tiers"},
    {"scheduler"}, {"zero"},     {"config", "interchange", "measure"}, {"cli", "examples", "bench", "python"}};
// platform is hardware's door; the optimizers need none of it.
const std::set<std::pair<std::string, std::string>> kForbidden{{"optim_cpu", "platform"}};
// Libraries and the only rooms that may include them.
const std::vector<std::pair<std::regex, std::set<std::string>>> kDoors{
    // A bench compares with what a program without hoist would call; an example has kernels of its own.
    {std::regex("cuda.*"), {"platform", "comm", "bench", "examples"}},
    {std::regex("cublas.*"), {"examples"}},
    {std::regex("nccl.*"), {"comm"}},
    {std::regex("mpi\\.h"), {"comm"}},
    {std::regex("liburing.*"), {"aio"}},
    {std::regex("libaio.*"), {"measure"}},
    {std::regex("hwloc.*"), {"platform"}},
    {std::regex("hwy/.*"), {"optim_cpu", "measure"}},
    {std::regex("nlohmann/.*"), {"config", "interchange", "cli", "examples", "bench", "measure"}},
    {std::regex("isa-l/.*|xxhash.*"), {"core"}}};

std::size_t row_of(const std::string& room) {
  for (std::size_t row = 0; row < kRows.size(); ++row) {
    if (kRows[row].contains(room)) return row;
  }
  return kRows.size();
}

struct Include {
  std::string room, file, header;
};

std::vector<Include> all_includes() {
  std::vector<Include> includes;
  const std::regex line_pattern(R"(^\s*#\s*include\s*[<"]([^>"]+)[>"])");
  for (const auto& row : kRows) {
    for (const std::string& room : row) {
      const fs::path folder = fs::path(HOIST_SOURCE_DIR) / room;
      if (!fs::exists(folder)) continue;
      for (const auto& entry : fs::recursive_directory_iterator(folder)) {
        const std::string extension = entry.path().extension().string();
        if (extension != ".hpp" && extension != ".cpp" && extension != ".cu" && extension != ".cuh") continue;
        std::ifstream file(entry.path());
        std::smatch match;
        for (std::string line; std::getline(file, line);) {
          if (std::regex_search(line, match, line_pattern))
            includes.push_back({room, fs::relative(entry.path(), HOIST_SOURCE_DIR).string(), match[1]});
        }
      }
    }
  }
  return includes;
}

TEST(Layering, RoomsIncludeOnlyFromRowsBelow) {
  const auto includes = all_includes();
  ASSERT_GT(includes.size(), 100u);
  std::set<std::string> rooms_seen;
  for (const Include& include : includes) {
    if (!include.header.starts_with("hoist/")) continue;
    const std::string target = include.header.substr(6, include.header.find('/', 6) - 6);
    rooms_seen.insert(target);
    ASSERT_LT(row_of(target), kRows.size())
        << include.file << " includes <" << include.header << ">, which is in no room";
    if (target == include.room) continue;
    EXPECT_LT(row_of(target), row_of(include.room)) << include.file << " includes <" << include.header << ">";
    EXPECT_FALSE(kForbidden.contains({include.room, target})) << include.file << " includes <" << include.header << ">";
    EXPECT_EQ(include.header.find("/detail/"), std::string::npos)
        << include.file << " includes another room's <" << include.header << ">";
  }
  EXPECT_GE(rooms_seen.size(), 8u);
}

TEST(Layering, EveryLibraryHasOneDoor) {
  std::size_t doors_used = 0;
  for (const Include& include : all_includes()) {
    for (const auto& [pattern, rooms] : kDoors) {
      if (!std::regex_match(include.header, pattern)) continue;
      ++doors_used;
      EXPECT_TRUE(rooms.contains(include.room)) << include.file << " includes <" << include.header << ">";
    }
  }
  EXPECT_GT(doors_used, 5u);
}

TEST(Layering, NobodyBelowConfigReadsTheEnvironment) {
  for (const std::string room : {"core", "platform", "aio", "optim_cpu", "tiers", "scheduler", "zero", "interchange"}) {
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(HOIST_SOURCE_DIR) / room)) {
      if (!entry.is_regular_file()) continue;
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) {
        EXPECT_EQ(line.find("getenv("), std::string::npos) << entry.path() << ": " << line;
      }
    }
  }
}

}  // namespace
