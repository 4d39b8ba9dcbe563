// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/aio/transfer_memory.hpp>
#include <hoist/core/pace.hpp>
#include <hoist/tiers/store_reader.hpp>
#include <hoist/zero/checkpoint/stored_job.hpp>
#include <hoist/zero/checkpoint/verification.hpp>
#include <hoist/zero/layout/record_map.hpp>
#include <hoist/zero/layout/record_pieces.hpp>

namespace hoist {

using tiers::CommitHeader;
using tiers::StoreReader;

namespace {

// A rank's files, and its own header of the commit that is verified.
struct Part {
  std::size_t group = 0;
  int rank = 0;
  CommitHeader commit;
};

std::string damage_of(const StoredJob& job) {
  std::string damage;
  for (const StoreSummary& group : job.groups)
    for (const StoreSummary::Rank& rank : group.ranks)
      for (const tiers::ManifestDamage& part : rank.damage) damage += "; " + part.text;
  return damage;
}

// The parts of a commit of which all ranks whose files are here have theirs; empty if there is none that `wanted`
// accepts.
template <typename List, typename Wanted>
std::vector<Part> find_commit(const StoredJob& job, const List& list, const Wanted& wanted) {
  for (const CommitHeader& candidate : std::invoke(list, job.groups.front().ranks.front())) {
    if (!wanted(candidate)) continue;
    std::vector<Part> parts;
    bool everywhere = true;
    for (std::size_t g = 0; g < job.groups.size(); ++g) {
      for (const StoreSummary::Rank& rank : job.groups[g].ranks) {
        const std::vector<CommitHeader> commits = std::invoke(list, rank);
        const auto own = std::ranges::find_if(commits, [&](const CommitHeader& c) { return c.same_commit(candidate); });
        everywhere = everywhere && own != commits.end();
        if (everywhere) parts.push_back({g, rank.rank, *own});
      }
    }
    if (everywhere) return parts;
  }
  return {};
}

template <typename List>
std::vector<Part> newest_commit(const StoredJob& job, const List& list) {
  return find_commit(job, list, [](const CommitHeader&) { return true; });
}

std::vector<Part> named_checkpoint(const StoredJob& job, const CommitHeader& checkpoint) {
  return find_commit(job, &StoreSummary::Rank::checkpoints,
                     [&](const CommitHeader& c) { return c.same_commit(checkpoint); });
}

// A named checkpoint that was there is not any more.
class RetiredError : public StoreError {
 public:
  using StoreError::StoreError;
};

bool are_same(const StoredJob& job, const std::vector<StoreSummary>& groups) {
  return std::ranges::equal(job.groups, groups, [](const StoreSummary& a, const StoreSummary& b) {
    return a.directory == b.directory && a.run == b.run && a.ranks.size() == b.ranks.size();
  });
}

class Verifier {
 public:
  Verifier(std::span<const std::string> directories, const VerifyOptions& options, const StoredJob& job)
      : directories_(directories), options_(options), groups_(job.groups) {
    for (const StoreSummary& group : groups_) {
      const detail::UnitTable table = detail::UnitTable::from_identity(group.layout, *group.world_size);
      records_.push_back(detail::RecordMap(table).records());
    }
  }

  // The newest commit, or the named checkpoint.
  Verification verify(const std::optional<CommitHeader>& checkpoint) {
    Verification result{.name = checkpoint ? checkpoint->name : ""};
    checkpoint_ = checkpoint;
    begun_ = Clock::now();
    try {
      const std::vector<Part> parts = look();
      result.step = parts.front().commit.step;
      std::uint64_t total = 0;
      for (const Part& part : parts) total += detail::bytes_of(records_[part.group]);
      for (std::size_t p = 0; p < parts.size(); ++p) verify_part(p, total, result);
    } catch (const StoreError& error) {
      result.not_done = error.what();
    } catch (const IoError& error) {  // its store may have been removed just now
      result.not_done = error.what();
    }
    result.retired = !result.not_done.empty() && is_retired();
    reader_.reset();
    return result;
  }

 private:
  // All parts of the commit as it is on disk now. Errors: StoreError if it is not there, or if the store is another.
  std::vector<Part> look() const {
    // Ranks are read one after the other and may commit in between, so a look may find no commit that all ranks have.
    constexpr int kLooks = 100;
    for (int look = 1; look < kLooks; ++look) {
      if (std::vector<Part> parts = look_once(/*abandoned=*/false); !parts.empty()) return parts;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (std::vector<Part> parts = look_once(/*abandoned=*/true); !parts.empty()) return parts;
    throw StoreError(fmt::format("{} holds no commit that every rank has{}", groups_.front().directory,
                                 damage_of(look_at_job(directories_))));
  }

  // `abandoned`: also commits that a restore chooses only if there are no others.
  std::vector<Part> look_once(bool abandoned) const {
    const StoredJob all = look_at_job(directories_);
    const auto is_this = [&](const StoredJob& job) { return are_same(job, groups_); };
    const auto older = std::ranges::find_if(all.older, is_this);
    const StoredJob* const job = is_this(all) ? &all : older != all.older.end() ? &*older : nullptr;
    if (!job && checkpoint_)
      throw RetiredError(
          fmt::format("checkpoint '{}' is no longer in a store that a run would continue from", checkpoint_->name));
    if (!job)
      throw StoreError(
          fmt::format("{} has the files of another store than when it was looked at first; verify it again",
                      groups_.front().directory));
    std::vector<Part> parts = checkpoint_ ? named_checkpoint(*job, *checkpoint_)
                              : abandoned ? newest_commit(*job, &StoreSummary::Rank::commits_and_abandoned)
                                          : newest_commit(*job, &StoreSummary::Rank::commits);
    if (parts.empty() && checkpoint_)
      throw RetiredError(fmt::format("checkpoint '{}' was removed meanwhile", checkpoint_->name));
    return parts;
  }

  // Whether a named checkpoint, which was there, is gone.
  bool is_retired() const {
    try {
      static_cast<void>(look_once(/*abandoned=*/false));
      return false;
    } catch (const RetiredError&) {
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  // Opens part `p` of the commit as it is on disk now. While training goes on, its place in the manifest may be written
  // over between the look at it and the reading of it.
  void open(std::size_t p) {
    reader_.reset();
    for (std::optional<CommitHeader> failed;;) {
      part_ = look()[p];
      try {
        reader_ = std::make_unique<StoreReader>(groups_[part_.group].directory, part_.rank, records_[part_.group],
                                                part_.commit, io_, StoreReader::Lock::none);
        return;
      } catch (const StoreError&) {
        if (failed == part_.commit) throw;
        failed = part_.commit;
      }
    }
  }

  void verify_part(std::size_t p, std::uint64_t total, Verification& result) {
    open(p);
    detail::for_each_piece(records_[part_.group], [&](const detail::RecordPiece& piece) {
      std::vector<CorruptionError> wrong = check(piece);
      while (!wrong.empty() && look()[p].commit != part_.commit) {
        open(p);
        wrong = check(piece);
      }
      std::ranges::copy(wrong, std::back_inserter(result.damage));
      result.step = std::max(result.step, part_.commit.step);
      result.bytes += piece.bytes();
      const auto tell = [&] {
        if (options_.progress) options_.progress(result.bytes, total);
      };
      tell();
      sleep_paced(paced_time(begun_, result.bytes, options_.bytes_per_second), tell);
    });
  }

  std::vector<CorruptionError> check(const detail::RecordPiece& piece) {
    return reader_->check(piece.record, piece.region, piece.first, piece.count(), buffer_.first(piece.bytes()));
  }

  const std::span<const std::string> directories_;
  const VerifyOptions& options_;
  const std::vector<StoreSummary> groups_;
  std::vector<std::vector<tiers::StoreRecord>> records_;  // of each group
  const aio::TransferMemory buffer_{detail::kPieceBytesMax};
  aio::DriveQueue io_{aio::DriveQueueOptions{}};  // after the buffer: it lets go of it before it is freed
  // The commit that is being verified:
  std::optional<CommitHeader> checkpoint_;  // nothing: the newest
  TimePoint begun_;
  Part part_;
  std::unique_ptr<StoreReader> reader_;  // of part_
};

// Why nothing of these stores can be verified; empty if something can.
std::string obstacle(const StoredJob& job) {
  for (const StoreSummary& group : job.groups) {
    if (!group.world_size) return fmt::format("no manifest in {} can be read{}", group.directory, damage_of(job));
    if (group.durability == tiers::Durability::none)
      return fmt::format("the store in {} was made with durability 'none' and holds no commit", group.directory);
  }
  return {};
}

}  // namespace

std::vector<Verification> verify_job(std::span<const std::string> directories, const VerifyOptions& options) {
  const StoredJob job = look_at_job(directories);
  const std::string gap = incomplete_text(job);
  std::vector<Verification> results;
  if (std::string problem = obstacle(job); !problem.empty()) {
    results.push_back({.not_done = std::move(problem)});
  } else {
    Verifier current(directories, options, job);
    results.push_back(current.verify(std::nullopt));
    for (const CommitHeader& checkpoint : job.groups.front().ranks.front().checkpoints)
      if (!named_checkpoint(job, checkpoint).empty()) results.push_back(current.verify(checkpoint));
  }
  if (!gap.empty()) {  // however whole the part is that is here
    std::string& not_done = results.front().not_done;
    not_done = gap + (not_done.empty() ? "" : "; " + not_done);
  }
  for (const StoredJob& older : job.older) {
    Verifier verifier(directories, options, older);
    for (const CommitHeader& checkpoint : older.checkpoints) results.push_back(verifier.verify(checkpoint));
  }
  return results;
}

}  // namespace hoist
