// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/store_directory.hpp - the stores below one offload directory: the first one lies in it, and each
// change of the world size makes a new one in a directory of its own, which has taken over the state before the old one
// goes.
//
// A store is the files of one world size (tiers/store.hpp). The run continues from the newest store that holds a commit
// at all its ranks; the `order` in their names says which is newer.
//
// Every file of a store carries the number of its run (agree_on_run()): files with one number are one store, and the
// stores of one job's sharding groups have numbers that agree in part (job_part()).
//
// Threading  Any thread.
// Errors     IoError. remove_store(): also StoreError, and what `check` throws.
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
// Those with a manifest, or with data that have lost theirs, for readers: a program that was killed early may have left
// a directory without any.
std::vector<StoreDirectory> readable_stores(const std::string& directory);
StoreDirectory new_store_directory(std::uint64_t order, int world_size);

// The offload directory of the store in `store`: that itself, or the one above it.
std::string offload_directory_of(const std::string& store);

// Removes the files of all ranks of a store, its manifests first, and its directory when that is its own; returns false
// if another process holds it (with a `check`: StoreError). `directories`: of all its drives. `check`: as in
// tiers::Store::remove().
bool remove_store(const std::vector<std::string>& directories, const StoreDirectory& place, Nanoseconds lock_timeout,
                  const std::function<void()>& check = {});

}  // namespace hoist::detail
