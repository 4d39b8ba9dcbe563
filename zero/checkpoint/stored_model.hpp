// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/stored_model.hpp - one commit of a whole store, read by parameter, without the program that trained
// it.
//
// A store's manifests say what model they hold and how it is cut over ranks; this puts the ranks' shards together
// again. For inspection and export; nothing on disk is changed.
//
// Threading  One thread at a time per object.
// Memory     Tables of every rank's records (16 bytes a tile of 16384 parameters), and buffers of a few MiB.
// Errors     StoreError (no store, a rank's files missing, no such commit, a trainer holds it), IoError,
//            CorruptionError naming unit, file and offset: every byte handed out was verified.
// Main path  StoredModel(directory) -> parameters() -> read(parameter, state, range).
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <hoist/core/error.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/zero/types.hpp>
#include <hoist/zero/update/loss_scale.hpp>

namespace hoist {

struct StoredParameter {
  std::string name;
  std::string unit;
  std::vector<std::int64_t> shape;
  DType dtype = DType::bf16;
  bool trainable = true;
  optim::StateForm state{};  // what its optimizer keeps; of trainable ones

  std::uint64_t element_count() const { return TensorView{.shape = shape}.element_count(); }
};

// The facts that are found without locking or reading records, also for a store in use.
struct StoreSummary {
  struct Rank : tiers::Store::Commits {
    int rank = 0;
    std::vector<tiers::ManifestDamage> damage;
    std::uint64_t data_bytes = 0;  // reserved on disk
  };
  std::string directory;
  std::uint64_t run = 0;          // what the store numbers of all ranks have in common
  std::string layout;             // the model, as text: equal for equal models
  std::vector<Rank> ranks;        // those found here, ascending; on shared storage all of them
  std::optional<int> world_size;  // nothing when no manifest could be read
  std::vector<StoredParameter> parameters;
  std::uint64_t unit_count = 0;
  tiers::Durability durability = tiers::Durability::step;
  // Commits that every rank has, newest first. Empty when a rank is missing.
  std::vector<tiers::CommitHeader> commits;
  std::vector<tiers::CommitHeader> all_commits;  // the same, with abandoned ones (Store::commits_and_abandoned())
  std::vector<tiers::CommitHeader> checkpoints;  // likewise, oldest first
  std::uint32_t checkpoints_max = 0;  // a run with a mirror needs one of these places for the commit that is copied

  // What a restore chooses from: an abandoned commit only if there is no other.
  const std::vector<tiers::CommitHeader>& restorable() const { return commits.empty() ? all_commits : commits; }
};
// Looks at the store that continues the run when there are several below `directory` (docs/format.md), and names it:
// that of look_at_job() (stored_job.hpp).
// Errors: StoreError when there is no store in `directory`, or its ranks hold different models.
StoreSummary look_at_store(const std::string& directory);
// Looks again for up to a second while manifests seem damaged, and keeps such damage as every look saw: a slot that a
// training is writing seems damaged for a moment. Errors: as above.
StoreSummary without_passing_damage(StoreSummary store);
// Whether there is one to look at.
bool has_store(const std::string& directory);
// Where has_store() is false: whether there is one that has lost all its manifests.
bool has_data_without_manifest(const std::string& directory);
// Whether all its ranks are here.
bool is_whole(const StoreSummary& store);
// The same of the store whose files are in `directory` itself.
StoreSummary look_at_one_store(const std::string& directory);
// Whether a rank's damage is that of a named checkpoint.
bool lost_a_checkpoint(const StoreSummary& store);

namespace detail {

// The entries that all parts have in their `list`, in the order of the first one's.
template <typename Part, typename List>
std::vector<tiers::CommitHeader> common_commits(std::span<const Part> parts, const List& list) {
  std::vector<tiers::CommitHeader> common = std::invoke(list, parts.front());
  std::erase_if(common, [&](const tiers::CommitHeader& candidate) {
    return !std::ranges::all_of(parts, [&](const Part& part) {
      return std::ranges::any_of(std::invoke(list, part),
                                 [&](const tiers::CommitHeader& c) { return c.same_commit(candidate); });
    });
  });
  return common;
}

}  // namespace detail

struct StoredModelOptions {
  // The step of the commit; a named checkpoint of that step counts too. Absent: the newest commit that all ranks have.
  std::optional<std::uint64_t> step;
  // With `step`: which of that step's commits, abandoned ones included. Absent: the newest.
  std::optional<std::uint32_t> revision{};
  std::string from{};                     // the name of a named checkpoint, instead
  std::optional<std::uint64_t> serial{};  // with `from`: which checkpoint of that name; absent: the newest
  bool below = true;                      // opens the newer store below the directory, if one continues the run
  // Opens only this rank's part of the store in `directory` itself (`below` is false), for which the rank's own files
  // suffice. Its commits are then the rank's, and a read of another rank's shard is a UsageError.
  std::optional<int> rank{};
  // Directories in which further drives are looked for, in any order, besides those where they were when the store was
  // made.
  std::vector<std::string> drives{};
};

struct StoreCopyOptions {
  // Where the copy is made, each rank's files in the first of them, its data spread over all. Missing directories are
  // made (0700).
  std::vector<std::string> directories;
  std::uint64_t bytes_per_second = 0;  // that are copied at most, on average; 0: as fast as the drives
  // Called with bytes done and bytes in all.
  std::function<void(std::uint64_t, std::uint64_t)> progress{};
};

struct StoreCopyReport {
  std::uint64_t step = 0;
  int ranks_copied = 0;
  int ranks_compared = 0;  // that were there already, and are the same byte by byte
  std::uint64_t data_bytes = 0;
};

class StoredModel {
 public:
  // Shares the store's lock with other readers while the object lives.
  explicit StoredModel(const std::string& directory, const StoredModelOptions& options = {});
  ~StoredModel();
  StoredModel(const StoredModel&) = delete;
  StoredModel& operator=(const StoredModel&) = delete;

  std::span<const StoredParameter> parameters() const;  // in declaration order
  int world_size() const;
  std::uint64_t step() const;
  std::span<const std::byte> caller_state(int rank) const;  // as the program gave it to step() or save()
  std::optional<LossScaler::State> loss_scaler() const;     // nothing without dynamic loss scaling

  // Elements [first_element, first_element + out.size()) of parameters()[parameter], flattened row-major.
  // State::gradient is not stored. Frozen parameters have a master only. A read of zero elements is allowed, at the
  // parameter's end too. Errors: UsageError; `out` is then as it was.
  void read(std::size_t parameter, State state, std::uint64_t first_element, std::span<float> out);
  // The weights themselves, in the parameter's dtype; `out` may lie at any address. Errors: UsageError, also where
  // out.size() is no multiple of the dtype's bytes.
  void read_weights(std::size_t parameter, std::uint64_t first_element, std::span<std::byte> out);

  // The memory that it keeps as long as it lives: the tables of all ranks' files, and its buffers.
  std::uint64_t memory_bytes() const;

  // Copies the commit into another store, which a run continues from as it would from this one. Every byte is verified
  // on its way. A rank counts as copied when its commit is durable; when an earlier copy was interrupted, the ranks
  // that it finished are compared instead. Errors: CorruptionError for damage here; StoreError when the directories
  // hold something else; UsageError when they hold a copy of this run at another step, or this copy on other drives,
  // when one is this store's own, and when two are one; BudgetError when they have too little space.
  StoreCopyReport copy(const StoreCopyOptions& options);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hoist
