// SPDX-License-Identifier: Apache-2.0
// tests/support/lost_names.hpp - simulates what a power cut does to names and small files. Created and renamed names
// last only after a flush of their directory. Small files that are written past the queue last only after their flush.
//
// Threading  As SystemCallObserver; power_cut when nobody uses the files.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <hoist/tests/support/system_calls.hpp>

namespace hoist::test {

// Observes from construction to destruction.
class LostNames final : public SystemCallObserver {
 public:
  // Flushes for which `forgets` says so are claimed and not made.
  using Forgets = std::function<bool(const std::string& path)>;
  // The files in `root` and below are durable when this is made; `vault`, on the same file system, is ours.
  LostNames(std::string root, std::string vault, Forgets forgets = {});
  ~LostNames() override;
  LostNames(const LostNames&) = delete;
  LostNames& operator=(const LostNames&) = delete;

  bool before(const SystemCall& call) override;
  void after(const SystemCall& call, int result) override;
  // Every name that no flush of its directory covered is, by `seed`, kept or lost; a name that replaced another gives
  // it back, and one that was removed may be there again. Labels that were not flushed may be empty. Returns how many
  // were lost.
  std::uint64_t power_cut(std::uint64_t seed);

 private:
  using Names = std::map<std::string, std::uint64_t>;  // to inodes
  static Names names_in(const std::string& directory);
  void cut(const std::string& directory, std::uint64_t seed, std::uint64_t& lost);
  void keep_what_is_at(const std::string& path);
  bool is_below_root(const std::string& path) const { return path.starts_with(root_); }

  const std::string root_, vault_;
  const Forgets forgets_;
  SystemCallObserver* previous_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, Names> durable_;                             // by directory
  std::map<std::pair<std::string, std::string>, std::string> kept_;  // directory, name: what was replaced or removed
  std::set<std::uint64_t> flushed_;                                  // inodes of files
  bool cutting_ = false;                                             // what happens to names is our own doing
  std::uint64_t next_kept_ = 0;
  std::uint64_t decisions_ = 0;
};

}  // namespace hoist::test
