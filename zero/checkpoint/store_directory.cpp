// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>

namespace hoist::detail {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "reshard-", kRanks = "-ranks-";

// The place of that name, when it is one that new_store_directory() gives.
StoreDirectory parsed(const std::string& name) {
  StoreDirectory place;
  const std::size_t ranks_at = name.find(kRanks);
  if (!name.starts_with(kPrefix) || ranks_at == std::string::npos) return place;
  std::from_chars(name.data() + kPrefix.size(), name.data() + ranks_at, place.order);
  std::from_chars(name.data() + ranks_at + kRanks.size(), name.data() + name.size(), place.world_size);
  return place.order > 0 && place.world_size > 0 && new_store_directory(place.order, place.world_size).name == name
             ? new_store_directory(place.order, place.world_size)
             : StoreDirectory{};
}

}  // namespace

StoreDirectory new_store_directory(std::uint64_t order, int world_size) {
  return {fmt::format("{}{:04}{}{}", kPrefix, order, kRanks, world_size), order, world_size};
}

std::string offload_directory_of(const std::string& store) {
  const fs::path path(plain_path(absolute_path(store)));
  return parsed(path.filename().string()).name.empty() ? store : path.parent_path().string();
}

std::vector<StoreDirectory> store_directories(const std::string& directory) {
  std::vector<StoreDirectory> places;
  std::error_code failed, unknown;
  for (fs::directory_iterator entry(directory, failed), end; !failed && entry != end; entry.increment(failed)) {
    const StoreDirectory place = parsed(entry->path().filename().string());
    if (place.name.empty()) continue;
    const bool is_place = !entry->is_symlink(unknown) && entry->is_directory(unknown);
    if (unknown && !is_absent(unknown))
      throw IoError({"stat", entry->path().string(), 0, 0, unknown.value()}, "which stores are in it cannot be known");
    if (is_place) places.push_back(place);
  }
  if (failed && !is_absent(failed))  // a store that is not seen might be taken for one that was never finished
    throw IoError({"list", directory, 0, 0, failed.value()}, "which stores are in it cannot be known");
  if (!tiers::Store::ranks_in(directory).empty()) places.push_back({});
  std::ranges::sort(places, std::greater{}, &StoreDirectory::order);
  return places;
}

std::vector<StoreDirectory> readable_stores(const std::string& directory) {
  std::vector<StoreDirectory> places = store_directories(directory);
  std::erase_if(places, [&](const StoreDirectory& place) {
    const std::string store = place.in(directory);
    return tiers::Store::ranks_in(store).empty() && tiers::Store::ranks_without_manifest(store).empty();
  });
  return places;
}

bool remove_store(const std::vector<std::string>& directories, const StoreDirectory& place, Nanoseconds lock_timeout,
                  const std::function<void()>& check) {
  const std::vector<std::string> drives = place.in(directories);
  if (!tiers::Store::remove(drives, lock_timeout, check)) return false;
  if (place.name.empty()) return true;
  std::error_code ignored;
  for (const std::string& drive : drives) fs::remove(drive, ignored);  // unless somebody has put something there
  return true;
}

}  // namespace hoist::detail
