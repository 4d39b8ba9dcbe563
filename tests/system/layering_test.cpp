// SPDX-License-Identifier: Apache-2.0
// A module includes only from rows below it, and only its own detail/; only certain modules include certain libraries.
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

// Lowest row first; modules of one row do not include each other.
const std::vector<std::set<std::string>> kRows{
    {"core"},      {"platform"}, {"aio", "comm", "optim_cpu"},         {"tiers"},
    {"scheduler"}, {"zero"},     {"config", "interchange", "measure"}, {"cli", "examples", "bench", "python"}};
// The modules inside zero/, lowest row first. Files directly in zero/ are the public face: its headers of types,
// options, model, leases and the runtime may be included by every module of zero/, engine.hpp by none of them.
const std::vector<std::set<std::string>> kZeroRows{
    {"layout"}, {"ranks", "memory"}, {"update"}, {"passes"}, {"checkpoint"}, {"step"}, {"predict"}, {"detail"}};
const std::set<std::string> kZeroVocabulary{"types.hpp", "options.hpp", "model.hpp",
                                            "lease.hpp", "runtime.hpp", "machine.hpp"};
// Headers of options that modules of lower rows than their own may include.
const std::set<std::string> kZeroOptions{"update/learning_rate.hpp", "update/loss_scale.hpp"};
// platform gives access to the hardware, which the CPU optimizers do not need.
const std::set<std::pair<std::string, std::string>> kForbidden{{"optim_cpu", "platform"}};
// Libraries and the only modules that may include them.
const std::vector<std::pair<std::regex, std::set<std::string>>> kLibraryUsers{
    // A bench compares with what a program without hoist would call.
    {std::regex("cuda.*"), {"platform", "comm", "bench"}},
    {std::regex("nccl.*"), {"comm"}},
    {std::regex("mpi\\.h"), {"comm", "bench"}},
    {std::regex("liburing.*"), {"aio"}},
    {std::regex("libaio.*"), {"measure"}},
    {std::regex("hwloc.*"), {"platform"}},
    {std::regex("hwy/.*"), {"core", "optim_cpu", "measure"}},
    {std::regex("nlohmann/.*"), {"config", "interchange", "cli", "examples", "bench", "measure"}},
    {std::regex("xxhash.*"), {"core"}},
    {std::regex("spdlog/.*"), {"core"}}};  // core/log.hpp makes every line printable

std::size_t row_of(const std::string& module, const std::vector<std::set<std::string>>& rows = kRows) {
  const auto contains = [&](const auto& row) { return row.contains(module); };
  return static_cast<std::size_t>(std::ranges::find_if(rows, contains) - rows.begin());
}

struct Include {
  std::string module, file, header;
};

std::vector<Include> all_includes() {
  std::vector<Include> includes;
  const std::regex line_pattern(R"(^\s*#\s*include\s*[<"]([^>"]+)[>"])");
  for (const auto& row : kRows) {
    for (const std::string& module : row) {
      const fs::path folder = fs::path(HOIST_SOURCE_DIR) / module;
      if (!fs::exists(folder)) continue;
      for (const auto& entry : fs::recursive_directory_iterator(folder)) {
        const std::string extension = entry.path().extension().string();
        if (extension != ".hpp" && extension != ".cpp" && extension != ".cu" && extension != ".cuh") continue;
        std::ifstream file(entry.path());
        std::smatch match;
        for (std::string line; std::getline(file, line);) {
          if (std::regex_search(line, match, line_pattern))
            includes.push_back({module, fs::relative(entry.path(), HOIST_SOURCE_DIR).string(), match[1]});
        }
      }
    }
  }
  return includes;
}

TEST(Layering, ModulesIncludeOnlyFromRowsBelow) {
  const auto includes = all_includes();
  ASSERT_GT(includes.size(), 100u);
  std::set<std::string> modules_seen;
  for (const Include& include : includes) {
    if (!include.header.starts_with("hoist/")) continue;
    if (include.header == "hoist/hoist.hpp") {
      EXPECT_EQ(row_of(include.module), kRows.size() - 1) << include.file << " includes <hoist/hoist.hpp>";
      continue;
    }
    const std::string target = include.header.substr(6, include.header.find('/', 6) - 6);
    modules_seen.insert(target);
    ASSERT_LT(row_of(target), kRows.size())
        << include.file << " includes <" << include.header << ">, which is in no module";
    if (target == include.module) continue;
    EXPECT_LT(row_of(target), row_of(include.module)) << include.file << " includes <" << include.header << ">";
    EXPECT_FALSE(kForbidden.contains({include.module, target}))
        << include.file << " includes <" << include.header << ">";
    EXPECT_EQ(include.header.find("/detail/"), std::string::npos)
        << include.file << " includes another module's <" << include.header << ">";
  }
  EXPECT_GE(modules_seen.size(), 8u);
}

TEST(Layering, ModulesOfZeroIncludeOnlyFromRowsBelow) {
  const std::string prefix = "hoist/zero/";
  std::set<std::string> seen;
  for (const Include& include : all_includes()) {
    const fs::path file = include.file;
    const bool in_module = include.module == "zero" && std::distance(file.begin(), file.end()) == 3;
    if (!in_module || !include.header.starts_with(prefix)) continue;
    const std::string module = std::next(file.begin())->string();
    const std::string header = include.header.substr(prefix.size());
    ASSERT_LT(row_of(module, kZeroRows), kZeroRows.size()) << include.file << " is in no module of zero/";
    if (kZeroOptions.contains(header)) continue;
    if (header.find('/') == std::string::npos) {
      EXPECT_TRUE(kZeroVocabulary.contains(header) || module == "detail")
          << include.file << " includes <" << include.header << ">";
      continue;
    }
    const std::string target = header.substr(0, header.find('/'));
    seen.insert(target);
    if (target == module) continue;
    EXPECT_LT(row_of(target, kZeroRows), row_of(module, kZeroRows))
        << include.file << " includes <" << include.header << ">";
  }
  EXPECT_GE(seen.size(), kZeroRows.size() - 2);
}

// The headers that a program includes bring in neither the drives' queues nor the communicators nor the store.
TEST(Layering, ThePublicHeaderIsLight) {
  std::set<std::string> seen;
  std::vector<std::string> open{"hoist/hoist.hpp"};
  const std::regex line_pattern(R"(^\s*#\s*include\s*<(hoist/[^>]+)>)");
  while (!open.empty()) {
    const std::string header = open.back();
    open.pop_back();
    if (!seen.insert(header).second) continue;
    std::ifstream file(fs::path(HOIST_SOURCE_DIR) / header.substr(6));
    ASSERT_TRUE(file.is_open()) << header;
    std::smatch match;
    for (std::string line; std::getline(file, line);)
      if (std::regex_search(line, match, line_pattern)) open.push_back(match[1]);
  }
  for (const char* heavy : {"hoist/aio/drive_queue.hpp", "hoist/comm/communicator.hpp", "hoist/tiers/store.hpp"})
    EXPECT_FALSE(seen.contains(heavy)) << "<hoist/hoist.hpp> includes <" << heavy << ">";
}

TEST(Layering, LibrariesAreIncludedOnlyByTheirModules) {
  std::size_t libraries_seen = 0;
  for (const Include& include : all_includes()) {
    for (const auto& [pattern, modules] : kLibraryUsers) {
      if (!std::regex_match(include.header, pattern)) continue;
      ++libraries_seen;
      EXPECT_TRUE(modules.contains(include.module)) << include.file << " includes <" << include.header << ">";
    }
  }
  EXPECT_GT(libraries_seen, 5u);
}

// comm reads what a launcher or NCCL's user has set, measure what the programs that it starts need, and cli the cache's
// directory.
TEST(Layering, OnlyTheseModulesReadTheEnvironment) {
  std::set<std::string> readers;
  for (const auto& row : kRows) {
    for (const std::string& module : row) {
      for (const auto& entry : fs::recursive_directory_iterator(fs::path(HOIST_SOURCE_DIR) / module)) {
        if (!entry.is_regular_file()) continue;
        std::ifstream file(entry.path());
        for (std::string line; std::getline(file, line);)
          if (line.find("getenv(") != std::string::npos) readers.insert(module);
      }
    }
  }
  EXPECT_EQ(readers, (std::set<std::string>{"cli", "comm", "measure"}));
}

}  // namespace
