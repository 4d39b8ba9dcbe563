// SPDX-License-Identifier: Apache-2.0
#include "disturbance.hpp"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include <hoist/tests/support/file_contents.hpp>

namespace hoist::test {

namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t kAllOfARankOneIn = 3, kAllOfTheStoreOneIn = 4;

void put(const fs::path& path, const std::optional<std::string>& content) {
  fs::remove(path);
  if (!content) return;
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << *content;
}

// "rank-00001" of "group-0/rank-00001.data".
std::string rank_in(const std::string& path) { return path.substr(0, path.rfind('.')); }

std::vector<std::string> drawn_paths(const Files& files, Rng& rng) {
  std::vector<std::string> all, drawn;
  for (const auto& [path, content] : files) all.push_back(path);
  const std::string one = all[rng.below(all.size())];
  if (rng.below(kAllOfARankOneIn) != 0) return {one};
  for (const std::string& path : all)
    if (rank_in(path) == rank_in(one)) drawn.push_back(path);
  return drawn.size() == all.size() ? std::vector{one} : drawn;  // another store altogether is no disturbance
}

void shift_times(const std::string& store, const Files& files, Rng& rng) {
  constexpr std::int64_t kHours = 10 * 365 * 24;
  for (const auto& [path, content] : files) {
    const auto hours = static_cast<std::int64_t>(rng.below(2 * kHours)) - kHours;
    fs::last_write_time(fs::path(store) / path, fs::file_time_type::clock::now() + std::chrono::hours(hours));
  }
}

}  // namespace

const char* name_of(Disturbance disturbance) {
  constexpr std::array kNames{"missing files",   "foreign files", "longer files",     "older files",
                              "clocks that lie", "forks",         "signals all over", "a second start"};
  static_assert(kNames.size() == kDisturbanceCount);
  return kNames[static_cast<std::size_t>(disturbance)];
}

Files files_below(const std::string& directory) {
  Files files;
  if (!fs::exists(directory)) return files;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file() && entry.path().extension() != ".lock-info")
      files[fs::relative(entry.path(), directory).string()] = contents_of(entry.path());
  }
  return files;
}

DisturbedFiles::DisturbedFiles(Disturbance disturbance, const std::string& store, const Files& foreign,
                               const Files& older, Rng& rng)
    : store_(store), text_(name_of(disturbance)) {
  const Files now = files_below(store);
  if (now.empty()) return;
  const auto of = [](const Files& files, const std::string& path) {
    const auto found = files.find(path);
    return found == files.end() ? std::nullopt : std::optional(found->second);
  };
  if (disturbance == Disturbance::older) before_.insert(now.begin(), now.end());
  if (disturbance == Disturbance::clocks) shift_times(store, now, rng);
  if (disturbance == Disturbance::older && rng.below(kAllOfTheStoreOneIn) == 0) {
    for (const auto& [path, content] : now) write(path, of(older, path));
    for (const auto& [path, content] : older) write(path, content);
    return;
  }
  if (!is_of_files(disturbance)) return;
  for (const std::string& path : drawn_paths(now, rng)) {
    if (disturbance == Disturbance::missing) write(path, std::nullopt);
    if (disturbance == Disturbance::foreign) write(path, of(foreign, path));
    if (disturbance == Disturbance::longer) write(path, now.at(path) + std::string(1 + rng.below(8192), '\x5a'));
    if (disturbance == Disturbance::older) write(path, of(older, path));
  }
}

void DisturbedFiles::write(const std::string& path, const std::optional<std::string>& content) {
  const fs::path whole = fs::path(store_) / path;
  before_.emplace(path, fs::exists(whole) ? std::optional(contents_of(whole)) : std::nullopt);
  text_ += " " + path;
  put(whole, content);
}

void DisturbedFiles::undo() const {
  for (const auto& [path, content] : before_) put(fs::path(store_) / path, content);
}

}  // namespace hoist::test
