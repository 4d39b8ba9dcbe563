// SPDX-License-Identifier: Apache-2.0
#include "store_directory.hpp"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

namespace hoist::cli {

namespace fs = std::filesystem;

namespace {

// As docs/format.md names them.
std::string rank_file(const std::string& directory, int rank, const char* suffix) {
  return (fs::path(directory) / fmt::format("rank-{:05}.{}", rank, suffix)).string();
}

bool is_locked(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) return false;
  const bool locked = ::flock(descriptor, LOCK_SH | LOCK_NB) != 0;
  ::close(descriptor);
  return locked;
}

}  // namespace

std::string find_store(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) throw BadInput(fmt::format("{} is not a directory", path));
  const std::string below = (fs::path(path) / "hoist").string();
  for (const std::string& directory : {path, below}) {
    if (has_store(directory)) return directory;
  }
  throw BadInput(fmt::format("there is no store in {} (a store is the subdirectory hoist of nvme_path)", path));
}

std::optional<std::string> store_owner(const StoreSummary& store) {
  for (const StoreSummary::Rank& rank : store.ranks) {
    if (!is_locked(rank_file(store.directory, rank.rank, "data"))) continue;
    std::ifstream file(rank_file(store.directory, rank.rank, "lock-info"));
    std::string owner;
    std::getline(file, owner);
    return owner.empty() ? "a process that did not say its name" : owner;
  }
  return std::nullopt;
}

std::optional<double> store_age_seconds(const StoreSummary& store) {
  std::optional<fs::file_time_type> newest;
  for (const StoreSummary::Rank& rank : store.ranks) {
    std::error_code failed;
    const auto time = fs::last_write_time(rank_file(store.directory, rank.rank, "manifest"), failed);
    if (!failed) newest = newest ? std::max(*newest, time) : time;
  }
  if (!newest) return std::nullopt;
  const std::chrono::duration<double> age = fs::file_time_type::clock::now() - *newest;
  return std::max(age.count(), 0.0);
}

}  // namespace hoist::cli
