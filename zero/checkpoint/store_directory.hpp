// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/store_directory.hpp - the stores below one offload directory: the first one lies in it, and each
// change of the world size makes a new one in a directory of its own, which has taken over the state before the old one
// goes.
//
// A store is the files of one world size (tiers/store.hpp). Which of several continues the run is said by their order
// alone: the newest one that holds a commit at all its ranks.
//
// A run's number joins the stores that are made together (tiers/store.hpp): by it the files of one store know each
// other, and the stores of one job's sharding groups theirs.
//
// Threading  Pure functions on the file system.
// Errors     IoError.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <hoist/core/clock.hpp>

namespace hoist::detail {

struct StoreDirectory {
  std::string name;         // of the directory below the offload directory; empty: that itself
  std::uint64_t order = 0;  // 0: the first one
  int world_size = 0;       // 0: not known from the name
  std::string in(const std::string& directory) const { return name.empty() ? directory : directory + "/" + name; }
  std::vector<std::string> in(std::vector<std::string> directories) const {
    for (std::string& directory : directories) directory = in(directory);
    return directories;
  }
};

// Newest first. The first one is listed when a rank's manifest is in it.
std::vector<StoreDirectory> store_directories(const std::string& directory);
// Those with a manifest, for readers: a program that was killed early may have left a directory without one.
std::vector<StoreDirectory> readable_stores(const std::string& directory);
StoreDirectory new_store_directory(std::uint64_t order, int world_size);

// The offload directory of the store in `store`: that itself, or the one above it.
std::string offload_directory_of(const std::string& store);

// Removes the files of all ranks of a store, its manifests first, and its directory when that is its own; false when
// another process holds it. `directories`: of all its drives. `check`: as in tiers::Store::remove().
bool remove_store(const std::vector<std::string>& directories, const StoreDirectory& place, Nanoseconds lock_timeout,
                  const std::function<void()>& check = {});

}  // namespace hoist::detail
