// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <tuple>

#include <fmt/format.h>

#include <hoist/aio/transfer_memory.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/pace.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/store_reader.hpp>
#include <hoist/zero/checkpoint/commit_state.hpp>
#include <hoist/zero/checkpoint/store_copy.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/layout/record_map.hpp>
#include <hoist/zero/layout/record_pieces.hpp>
#include <hoist/zero/layout/tile_values.hpp>

namespace hoist {

using detail::TileRun;
using tiers::CommitHeader;
using tiers::Region;
using tiers::Store;

namespace {

// For an error: whose file it is, and how far its run has come.
std::string described(const StoreSummary::Rank& rank, int world_size) {
  return fmt::format("rank {}'s is of a run of {}, {}", rank.rank, counted(world_size, "rank"),
                     rank.commits.empty() ? "without a commit" : fmt::format("at step {}", rank.commits.front().step));
}

// The entries that all ranks have.
void find_common(StoreSummary& summary) {
  const std::span<const StoreSummary::Rank> ranks(summary.ranks);
  summary.commits = detail::common_commits(ranks, &StoreSummary::Rank::commits);
  summary.all_commits = detail::common_commits(ranks, &StoreSummary::Rank::commits_and_abandoned);
  summary.checkpoints = detail::common_commits(ranks, &StoreSummary::Rank::checkpoints);
}

std::vector<StoredParameter> describe(const detail::UnitTable& table) {
  std::vector<StoredParameter> parameters;
  for (std::uint32_t i = 0; i < table.specs().size(); ++i) {
    const ParameterSpec& spec = table.specs()[i];
    parameters.push_back({.name = spec.name,
                          .unit = table.unit(table.parameter(ParameterId{i}).unit).name,
                          .shape = spec.shape,
                          .dtype = spec.dtype,
                          .trainable = spec.trainable,
                          .state = table.segment_of(ParameterId{i}).state});
  }
  return parameters;
}

// The most that a store can hold: tiles have their checksums in the manifest, whose length was compared with the
// file's. A store of durability none has no checksums there; no more is believed of it than this machine could list.
std::uint64_t elements_max(const Store::Found& found) {
  constexpr std::uint64_t kTilesMax = 1 << 24;
  const std::uint64_t tiles =
      found.durability == tiers::Durability::none ? std::min(found.tile_count, kTilesMax) : found.tile_count;
  const std::uint64_t tile_elements = tiers::kTileElements * static_cast<std::uint64_t>(found.identity->world_size);
  return tiles > ~std::uint64_t{0} / tile_elements ? ~std::uint64_t{0} : tiles * tile_elements;
}

// A copy of a store in the store's own place would be found there, and be the same. Compared as places, which links and
// mounts name in several ways.
void check_places(std::span<const std::string> directories, const std::string& store) {
  if (directories.empty()) throw UsageError("a copy of a store needs a directory");
  for (std::size_t i = 0; i < directories.size(); ++i) {
    if (is_same_place(directories[i], store) || is_same_place(directories[i], detail::offload_directory_of(store)))
      throw UsageError(
          fmt::format("{} is where the store itself is; name a directory on another drive", directories[i]));
    for (const std::string& before : directories.first(i))
      if (is_same_place(before, directories[i]))
        throw UsageError(fmt::format("{} and {} are one directory; name each drive once", before, directories[i]));
  }
}

}  // namespace

StoreSummary look_at_one_store(const std::string& directory) {
  StoreSummary summary{.directory = directory};
  std::optional<std::string> layout;
  std::uint64_t first_run = 0, largest_model = 0;
  for (const int rank : Store::ranks_in(directory)) {
    Store::Found found = Store::look(directory, rank);
    if (!found.exists) continue;  // replaced meanwhile
    if (found.identity && found.identity->rank != rank)
      throw StoreError(fmt::format("a file of rank {} in {} was written by rank {}: restore its own name", rank,
                                   directory, found.identity->rank));
    summary.ranks.push_back({static_cast<Store::Commits&&>(found), rank, std::move(found.damage), found.data_bytes});
    summary.checkpoints_max = found.checkpoints_max;
    if (!found.identity) continue;
    const std::uint64_t run = found.store_number - static_cast<std::uint64_t>(rank);
    if (layout && run != first_run)
      throw StoreError(
          fmt::format("{0} holds files of two different runs: {1}, and {2}; keep those of the run that you want, and "
                      "move the files of the other ({0}/rank-*) away",
                      directory, described(summary.ranks.front(), *summary.world_size),
                      described(summary.ranks.back(), found.identity->world_size)));
    first_run = run;
    if (layout && (*layout != found.identity->layout || *summary.world_size != found.identity->world_size))
      throw StoreError(
          fmt::format("{} holds files of two different models or world sizes: rank {} differs from rank {}", directory,
                      rank, summary.ranks.front().rank));
    largest_model = elements_max(found);
    layout = found.identity->layout;
    summary.world_size = found.identity->world_size;
    summary.durability = found.durability;
  }
  for (const int rank : Store::ranks_without_manifest(directory))
    if (!summary.world_size || rank < *summary.world_size)
      summary.ranks.push_back({{},
                               rank,
                               {{fmt::format("{}/rank-{:05}.manifest is missing, and its data are here: bring it back",
                                             directory, rank)}}});
  std::ranges::sort(summary.ranks, {}, &StoreSummary::Rank::rank);
  if (summary.ranks.empty()) throw StoreError(fmt::format("there is no store in {}", directory));
  if (!layout) return summary;
  summary.run = first_run;
  summary.layout = *layout;
  const detail::UnitTable table = detail::UnitTable::from_identity(*layout, *summary.world_size, largest_model);
  summary.parameters = describe(table);
  summary.unit_count = table.units().size();
  if (is_whole(summary)) find_common(summary);
  return summary;
}

bool lost_a_checkpoint(const StoreSummary& store) {
  return std::ranges::any_of(store.ranks, [](const StoreSummary::Rank& rank) {
    return std::ranges::any_of(rank.damage, &tiers::ManifestDamage::is_of_checkpoint);
  });
}

bool has_store(const std::string& directory) {
  return std::ranges::any_of(detail::store_directories(directory), [&](const detail::StoreDirectory& place) {
    return !Store::ranks_in(place.in(directory)).empty();
  });
}

bool has_data_without_manifest(const std::string& directory) {
  return !Store::ranks_without_manifest(directory).empty() || !detail::readable_stores(directory).empty();
}

bool is_whole(const StoreSummary& store) {
  return store.world_size && store.ranks.size() == static_cast<std::size_t>(*store.world_size);
}

StoreSummary without_passing_damage(StoreSummary store) {
  constexpr int kLooks = 10;
  const auto damage_of = [](const StoreSummary& summary) {
    std::vector<tiers::ManifestDamage> all;
    for (const StoreSummary::Rank& rank : summary.ranks) std::ranges::copy(rank.damage, std::back_inserter(all));
    return all;
  };
  auto damage = damage_of(store);
  for (int look = 1; look < kLooks && !damage.empty(); ++look) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    store = look_at_one_store(store.directory);
    const auto is_new = [&](const auto& part) { return std::ranges::find(damage, part) == damage.end(); };
    for (StoreSummary::Rank& rank : store.ranks) std::erase_if(rank.damage, is_new);
    damage = damage_of(store);
  }
  return store;
}

class StoredModel::Impl {
 public:
  Impl(const std::string& directory, const StoredModelOptions& options)
      : summary_(readable(find(directory, options), options.rank)),
        first_rank_(options.rank.value_or(0)),
        commit_(choose(summary_, options)),
        table_(detail::UnitTable::from_identity(summary_.layout, *summary_.world_size)),
        records_(table_) {
    for (const StoreSummary::Rank& rank : summary_.ranks) {
      const std::vector<CommitHeader> commits = commit_.name.empty() ? rank.commits_and_abandoned() : rank.checkpoints;
      const auto commit = std::ranges::find_if(commits, [&](const CommitHeader& c) { return c.same_commit(commit_); });
      readers_.push_back(std::make_unique<tiers::StoreReader>(summary_.directory, rank.rank, records_.records(),
                                                              *commit, io_, tiers::StoreReader::Lock::shared,
                                                              options.drives));
    }
  }

  const StoreSummary& summary() const { return summary_; }
  std::uint64_t step() const { return commit_.step; }

  std::span<const std::byte> caller_state(int rank) const {
    if (rank < 0 || rank >= *summary_.world_size) throw UsageError(fmt::format("there is no rank {}", rank));
    const auto state = reader(rank).caller_state();
    return state.size() < detail::kCommitHeadBytes ? state : state.subspan(detail::kCommitHeadBytes);
  }

  // The ranks' scalers are alike.
  std::optional<LossScaler::State> loss_scaler() const {
    const auto state = detail::decode(readers_.front()->caller_state());
    return state ? state->scaler : std::nullopt;
  }

  void read(std::size_t parameter, State state, std::uint64_t first, std::span<float> out) {
    check(parameter, first, out.size());
    if (state == State::gradient) throw UsageError("gradients are not stored");
    table_.require_kept(ParameterId{static_cast<std::uint32_t>(parameter)}, state);
    for_each_shard(parameter, first, out.size(), [&](const Shard& shard) {
      detail::read_values(*shard.layout, *shard.segment, state, shard.owned.shard.first,
                          out.subspan(shard.owned.offset, shard.owned.shard.count), shard.fetch);
    });
  }

  void read_weights(std::size_t parameter, std::uint64_t first, std::span<std::byte> out) {
    check(parameter, first, 0);
    const std::uint64_t width = dtype_bytes(summary_.parameters[parameter].dtype);
    if (out.size() % width != 0)
      throw UsageError(fmt::format("{} bytes are no whole number of the {} weights of parameter '{}', {} bytes each",
                                   out.size(), dtype_name(summary_.parameters[parameter].dtype),
                                   summary_.parameters[parameter].name, width));
    check(parameter, first, out.size() / width);
    for_each_shard(parameter, first, out.size() / width, [&](const Shard& shard) {
      detail::read_weights(*shard.layout, *shard.segment, shard.owned.shard.first,
                           out.subspan(shard.owned.offset * width, shard.owned.shard.count * width), shard.fetch);
    });
  }

  std::uint64_t memory_bytes() const {
    std::uint64_t bytes = weights_.span().size() + state_.span().size();
    for (const auto& reader : readers_) bytes += reader->memory_bytes();
    return bytes;
  }

  StoreCopyReport copy(const StoreCopyOptions& options) {
    check_places(options.directories, summary_.directory);
    StoreCopyReport report{.step = commit_.step, .data_bytes = data_bytes()};
    const TimePoint begun = Clock::now();
    std::uint64_t done = 0;
    const auto copied = [&](std::uint64_t bytes) {
      done += bytes;
      const auto tell = [&] {
        if (options.progress) options.progress(done, report.data_bytes);
      };
      tell();
      sleep_paced(paced_time(begun, done, options.bytes_per_second), tell);
    };
    for (const auto& reader : readers_) {
      tiers::StoreOptions target = reader->options();
      target.directory = options.directories.front();
      target.stripe_directories.assign(options.directories.begin() + 1, options.directories.end());
      ++(detail::copy_commit(*reader, target, commit_.step, copied) ? report.ranks_copied : report.ranks_compared);
    }
    return report;
  }

 private:
  // The size of the commit on all ranks.
  std::uint64_t data_bytes() const { return detail::bytes_of(records_.records()) * readers_.size(); }

  // A rank's part of a range of a parameter, and how its tiles are read.
  struct Shard {
    const tiers::RecordLayout* layout = nullptr;
    const detail::Segment* segment = nullptr;
    OwnedRange owned;
    detail::FetchTiles fetch;
  };

  static StoreSummary find(const std::string& directory, const StoredModelOptions& options) {
    if (!options.below) return look_at_one_store(directory);
    if (!options.from.empty()) {
      for (const detail::StoreDirectory& place : detail::readable_stores(directory)) {
        StoreSummary summary = look_at_one_store(place.in(directory));
        if (std::ranges::find(summary.checkpoints, options.from, &CommitHeader::name) != summary.checkpoints.end())
          return summary;
      }
    }
    return look_at_store(directory);
  }

  static StoreSummary readable(StoreSummary summary, std::optional<int> only) {
    const std::string& directory = summary.directory;
    if (!summary.world_size)
      throw StoreError(
          fmt::format("no manifest in {} can be read: {}", directory, summary.ranks.front().damage.front().text));
    if (summary.durability == tiers::Durability::none)
      throw StoreError(fmt::format("the store in {} was made with durability 'none' and holds no commit", directory));
    if (only) {
      std::erase_if(summary.ranks, [&](const StoreSummary::Rank& rank) { return rank.rank != *only; });
      if (summary.ranks.empty()) throw StoreError(fmt::format("no file of rank {} is in {}", *only, directory));
      find_common(summary);
    } else if (!is_whole(summary))
      throw StoreError(
          fmt::format("the store in {} is one of {} ranks, and the files of {} are here: bring them together",
                      directory, *summary.world_size, summary.ranks.size()));
    return summary;
  }

  static CommitHeader choose_checkpoint(const StoreSummary& summary, const StoredModelOptions& options) {
    const std::string& name = options.from;
    std::string held;
    for (auto checkpoint = summary.checkpoints.rbegin(); checkpoint != summary.checkpoints.rend(); ++checkpoint) {
      const bool other = options.serial && checkpoint->checkpoint_serial != *options.serial;
      if (checkpoint->name == name && !other) return *checkpoint;
      held += fmt::format("{}'{}'", held.empty() ? "; it has " : ", ", checkpoint->name);
    }
    throw StoreError(fmt::format("{} has no named checkpoint '{}'{}", summary.directory, name, held));
  }

  static CommitHeader choose(const StoreSummary& summary, const StoredModelOptions& options) {
    if (!options.from.empty()) return choose_checkpoint(summary, options);
    for (const CommitHeader& commit : options.revision ? summary.all_commits : summary.restorable()) {
      const bool other_revision = options.revision && commit.revision != *options.revision;
      if (!options.step || (commit.step == *options.step && !other_revision)) return commit;
    }
    for (auto checkpoint = summary.checkpoints.rbegin(); checkpoint != summary.checkpoints.rend(); ++checkpoint)
      if (options.step == checkpoint->step && !options.revision) return *checkpoint;
    std::string held;
    for (const CommitHeader& commit : summary.restorable()) held += fmt::format(" {}", commit.step);
    for (const CommitHeader& kept : summary.checkpoints) held += fmt::format(" {} ('{}')", kept.step, kept.name);
    if (!options.step || held.empty()) {
      std::string damage;
      for (const StoreSummary::Rank& rank : summary.ranks)
        for (const tiers::ManifestDamage& part : rank.damage) damage += "; " + part.text;
      throw StoreError(fmt::format("{} holds no commit that every rank has{}", summary.directory, damage));
    }
    throw StoreError(fmt::format("{} holds no commit of step {}; it holds{}", summary.directory, *options.step, held));
  }

  tiers::StoreReader& reader(int rank) const {
    const auto index = static_cast<std::size_t>(rank - first_rank_);
    if (rank < first_rank_ || index >= readers_.size())
      throw UsageError(
          fmt::format("the part of rank {} was asked for, and only that of rank {} is opened", rank, first_rank_));
    return *readers_[index];
  }

  void check(std::size_t parameter, std::uint64_t first, std::uint64_t count) const {
    if (parameter >= summary_.parameters.size()) throw UsageError(fmt::format("there is no parameter {}", parameter));
    const std::uint64_t elements = summary_.parameters[parameter].element_count();
    if (first > elements || count > elements - first)
      throw UsageError(fmt::format("{} elements from {} of parameter '{}', which has {}", count, first,
                                   summary_.parameters[parameter].name, elements));
  }

  template <typename Visit>
  void for_each_shard(std::size_t index, std::uint64_t first, std::uint64_t count, const Visit& visit) {
    const ParameterId id{static_cast<std::uint32_t>(index)};
    const detail::Parameter& parameter = table_.parameter(id);
    const detail::Segment& segment = table_.segment_of(id);
    const detail::Unit& unit = table_.unit(parameter.unit);
    const tiers::RecordId record =
        segment.trainable ? records_.trainable(parameter.unit).value() : records_.frozen(parameter.unit).value();
    for (int rank = 0; rank < table_.world_size(); ++rank) {
      const OwnedRange owned = owned_range(parameter.first_element + first, count, segment.shard_elements, rank);
      if (owned.shard.count == 0) continue;
      visit(Shard{.layout = segment.trainable ? &unit.trainable : &unit.frozen,
                  .segment = &segment,
                  .owned = owned,
                  .fetch = [this, rank, record](const TileRun& run) -> const std::byte* {
                    const auto target = (run.region == Region::weights ? weights_ : state_).first(run.length_bytes);
                    reader(rank).read(record, run.region, run.first, run.count, target);
                    return target.data();
                  }});
    }
  }

  const StoreSummary summary_;
  const int first_rank_;  // of readers_
  const CommitHeader commit_;
  const detail::UnitTable table_;
  const detail::RecordMap records_;
  aio::TransferMemory weights_{detail::kAccessTiles * tiers::kTileElements * sizeof(float)};
  aio::TransferMemory state_{detail::kAccessTiles * tiers::kTileElements * tiers::kStateBytesMax};
  aio::DriveQueue io_{aio::DriveQueueOptions{}};  // after the buffers: it lets go of them before they are freed
  std::vector<std::unique_ptr<tiers::StoreReader>> readers_;
};

StoredModel::StoredModel(const std::string& directory, const StoredModelOptions& options)
    : impl_(std::make_unique<Impl>(directory, options)) {}
StoredModel::~StoredModel() = default;
std::span<const StoredParameter> StoredModel::parameters() const { return impl_->summary().parameters; }
int StoredModel::world_size() const { return *impl_->summary().world_size; }
std::uint64_t StoredModel::step() const { return impl_->step(); }
std::span<const std::byte> StoredModel::caller_state(int rank) const { return impl_->caller_state(rank); }
std::optional<LossScaler::State> StoredModel::loss_scaler() const { return impl_->loss_scaler(); }
void StoredModel::read(std::size_t parameter, State state, std::uint64_t first_element, std::span<float> out) {
  impl_->read(parameter, state, first_element, out);
}
void StoredModel::read_weights(std::size_t parameter, std::uint64_t first_element, std::span<std::byte> out) {
  impl_->read_weights(parameter, first_element, out);
}
std::uint64_t StoredModel::memory_bytes() const { return impl_->memory_bytes(); }
StoreCopyReport StoredModel::copy(const StoreCopyOptions& options) { return impl_->copy(options); }

}  // namespace hoist
