// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <iterator>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/aio/transfer_memory.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/store_format.hpp>
#include <hoist/zero/checkpoint/restore.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>
#include <hoist/zero/checkpoint/stored_job.hpp>
#include <hoist/zero/layout/record_pieces.hpp>
#include <hoist/zero/memory/gradient_spill.hpp>
#include <hoist/zero/memory/memory.hpp>
#include <hoist/zero/memory/pinned_buffers.hpp>

namespace hoist::detail {

using tiers::CommitHeader;

namespace {

std::optional<RestorePlan> find_in_mirror(const RankAgreement& ranks, const EngineOptions& options,
                                          Incomplete incomplete = Incomplete::refuse) {
  const EngineOptions mirror = mirror_options(options);
  auto source = find_store(ranks, mirror, std::nullopt, incomplete);
  if (!source) return std::nullopt;
  const bool given_up = StoreSurvey(ranks, mirror).has_given_up(source->commits.front());
  return RestorePlan{
      .source = *std::move(source), .directory = options.mirror.directory, .from_mirror = true, .given_up = given_up};
}

// Whether the ranks' own stores are of the same training as this commit.
bool is_of_own_training(const RankAgreement& ranks, const EngineOptions& options, const CommonCommit& commit) {
  bool alike = true;
  ranks.run_in_job("look at its store", [&] {
    for (const StoreDirectory& where : store_directories(options.store_directory)) {
      const auto own = tiers::Store::look(where.in(options.store_directory), ranks.group().rank());
      alike = alike && (!own.identity || are_of_one_training(own.store_number, commit.run));
    }
  });
  return ranks.all_true_in_job(alike);
}

// How to go on from the mirror when the newest store cannot be used, as the end of an error; "" if it has no copy of
// this training. The error of a mirror that cannot be read is part of the text.
std::string way_to_mirror(const RankAgreement& ranks, const EngineOptions& options) {
  std::optional<RestorePlan> found;
  try {
    found = find_in_mirror(ranks, options, Incomplete::pass_over);
  } catch (const Error& error) {
    return fmt::format(". The mirror in {} cannot be read: {}", options.mirror.directory, error.what());
  }
  const auto newest = StoreSurvey(ranks, options).newest_step_of_any();
  if (!found || !newest || !is_of_own_training(ranks, options, found->source.commits.front())) return "";
  return fmt::format(
      ". The newest step of any rank there is {}. The mirror in {} has step {}: to continue from it, move {} away, on "
      "all ranks",
      *newest, options.mirror.directory, found->source.commits.front().step, options.store_directory);
}

// A crash while a named checkpoint was being made leaves it on some ranks only, or beside the one it was to replace.
void forget_what_others_lack(const RankAgreement& ranks, const EngineOptions& options, tiers::Store& store) {
  const std::vector<CommitHeader> checkpoints = store.checkpoints();
  auto common = StoreSurvey(ranks, options).common(checkpoints, store.store_number());
  std::ranges::sort(common, std::greater{}, &CommonCommit::checkpoint_serial);
  ranks.run_in_job("give up named checkpoints", [&] {
    std::vector<std::string> names;
    for (auto k = checkpoints.rbegin(); k != checkpoints.rend(); ++k) {  // newest first
      const bool shared = std::ranges::any_of(common, [&](const CommonCommit& c) { return c.is(*k); });
      const bool replaced = std::ranges::find(names, k->name) != names.end();
      if (shared && !replaced && names.size() < store.checkpoints_max())
        names.push_back(k->name);
      else
        store.remove_checkpoint(k->checkpoint_serial);
    }
  });
}

// Takes `bytes` of the pinned budget for the tables of the store that is read.
tiers::Budget::Hold hold_for_tables(Runtime& runtime, const EngineOptions& options, const UnitTable& table,
                                    std::uint64_t bytes) {
  tiers::Budget& budget = runtime.pinned_budget();
  const DeviceAccess access = device_access(runtime.options());
  EngineOptions smallest = options;  // with as many gradients spilled as need least
  choose_pinned_shares(smallest, table, access, 0);
  const MemoryPlan least(smallest, table, {access, 0, 0});
  const StoreCost store = store_cost(options, table, RecordMap(table), runtime.rank());
  const std::uint64_t least_bytes = least.bytes(MemoryTier::pinned) + store.memory_bytes;
  const std::uint64_t need_bytes = round_up(budget.held_bytes() + least_bytes + bytes, kBlockAlignment);
  constexpr const char* kWhat = "the tables of the store that is taken over";
  if (need_bytes > budget.limit_bytes())
    throw over_budget(budget, need_bytes,
                      fmt::format("the engine with its smallest buffers and, until it runs, {}", kWhat));
  return budget.take(bytes, kWhat);
}

// Whether a newer store holds a training. The next start would continue that one, or be refused for its sake.
bool is_behind_another(const StoreSurvey& survey, const StoreDirectory& older) {
  for (const StoreDirectory& where : survey.directories()) {
    if (where.order <= older.order) return false;
    if (!survey.look(where).is_unfinished_beside(0)) return true;
  }
  return false;
}

}  // namespace

std::optional<RestorePlan> find_restore(const RankAgreement& ranks, const EngineOptions& options,
                                        const std::string& from) {
  const StoreSurvey survey(ranks, options);
  const bool mirrored = !options.mirror.directory.empty() && from.empty();
  if (mirrored && survey.has_lost_drives()) {
    const auto left = find_store(ranks, options, std::nullopt, Incomplete::pass_over);
    if (auto plan = find_in_mirror(ranks, options)) {
      if (left) plan->newest_order = left->directory.order;
      return plan;
    }
  }
  std::optional<RestoreSource> newest;
  std::string refusal;
  try {
    const Incomplete incomplete = mirrored ? Incomplete::refuse_first_too : Incomplete::refuse;
    newest = find_store(ranks, options, std::nullopt, from.empty() ? incomplete : Incomplete::pass_over);
  } catch (const CommonStoreError& error) {
    refusal = error.what();
  }
  if (!refusal.empty()) throw CommonStoreError(refusal + (mirrored ? way_to_mirror(ranks, options) : ""));
  auto source = from.empty() ? newest : find_store(ranks, options, from, Incomplete::pass_over);
  if (!source) return mirrored && !survey.has_more_than_first_commit() ? find_in_mirror(ranks, options) : std::nullopt;
  RestorePlan plan{.source = *std::move(source), .directory = options.store_directory};
  plan.newest_order = newest ? newest->directory.order : plan.source.directory.order;
  plan.in_place = plan.source.same_ranks && plan.source.has_room &&
                  (from.empty() || !is_behind_another(survey, plan.source.directory));
  return plan;
}

namespace {

// Whether the run has gone back to an earlier step and its mirror has not followed yet: Mirror::open has made a store
// there for the copies to come, and no copy has reached it.
bool has_gone_back(const RankAgreement& ranks, const EngineOptions& options, const RestorePlan& continued) {
  const EngineOptions mirror = mirror_options(options);
  const StoreSurvey survey(ranks, mirror);
  const std::vector<StoreDirectory> stores = survey.directories();
  if (stores.empty() || !survey.look(stores.front()).is_unfinished()) return false;
  bool is_there = false, is_of_this_run = false;  // of this rank's part
  ranks.run_in_job("look at its mirror", [&] {
    const int rank = ranks.group().rank();
    const auto awaits = tiers::Store::look(stores.front().in(mirror.store_directory), rank);
    const auto own = tiers::Store::look(continued.source.directory.in(continued.directory), rank);
    is_there = awaits.exists;
    is_of_this_run = awaits.store_number == own.store_number;
  });
  const bool nobody = ranks.all_true_in_job(!is_there);
  return ranks.all_true_in_job(!is_there || is_of_this_run) && !nobody;
}

}  // namespace

namespace {

// Refuses to continue from the store where the mirror has come further and the run has not gone back: what comes after
// the store's step would be given up without a word. `step`: in a store of the mirror. `how`: to go on from that.
void refuse_mirror_ahead(const RankAgreement& ranks, const EngineOptions& options, const RestorePlan& continued,
                         const StoreDirectory& mirror, std::uint64_t step, std::string_view how) {
  const std::uint64_t own = continued.source.commits.front().step;
  if (step <= own || has_gone_back(ranks, options, continued)) return;
  throw CommonStoreError(fmt::format(
      "the store in {} ends with step {}, and its mirror in {} has step {}: the run has gone on elsewhere since this "
      "drive was used, or went back by a name and has copied nothing since, or the store is damaged (hoist inspect). "
      "To go on from step {}, {}move the store away; to go on from step {}, move the mirror away, or name another "
      "directory in hoist.mirror.path",
      continued.source.directory.in(continued.directory), own, mirror.in(options.mirror.directory), step, step, how,
      own));
}

// The same for copies that are newer than `newest`, and of which some ranks' files are missing.
void refuse_incomplete_copy_ahead(const RankAgreement& ranks, const EngineOptions& options,
                                  const RestorePlan& continued, const RestorePlan* newest) {
  const EngineOptions mirror = mirror_options(options);
  const StoreSurvey survey(ranks, mirror);
  for (const StoreDirectory& where : survey.directories()) {
    if (newest != nullptr && where.order <= newest->source.directory.order) return;
    const RestoreSource copy = survey.look(where);
    const bool alike =
        copy.store_number == 0 || are_of_one_training(copy.store_number, continued.source.commits.front().run);
    if (!ranks.all_true_in_job(alike)) continue;
    refuse_mirror_ahead(ranks, options, continued, where, copy.step_out_of_reach(),
                        "bring its missing files back and ");
  }
}

}  // namespace

void refuse_unfit_mirror(const RankAgreement& ranks, const EngineOptions& options, const RestorePlan* continued,
                         const std::string& from) {
  if (options.mirror.directory.empty()) return;
  ranks.run_in_job("look at its mirror", [&] {
    for (const std::string& drive : options.drive_directories())
      if (is_same_place(drive, options.mirror.directory))
        throw ConfigError("hoist.mirror.path",
                          fmt::format("{} is where the store itself is, {}; name another place, on "
                                      "another drive",
                                      options.mirror.directory, drive));
  });
  if (!continued) refuse_other_stores(ranks, mirror_options(options));
  const auto found = find_in_mirror(ranks, options, Incomplete::pass_over);
  if (continued && !continued->from_mirror && from.empty())
    refuse_incomplete_copy_ahead(ranks, options, *continued, found ? &*found : nullptr);
  if (!found) {
    const EngineOptions mirror = mirror_options(options);
    if (!StoreSurvey(ranks, mirror).directories().empty()) return;
    // There the mirror would make its store, and be refused when the run may have gone back already.
    ranks.run_in_job("look at its mirror",
                     [&] { tiers::Store::refuse_lost_manifest(mirror.store_directory, ranks.group().rank()); });
    return;
  }
  const CommonCommit& newest = found->source.commits.front();
  if (continued && are_of_one_training(newest.run, continued->source.commits.front().run)) {
    if (from.empty()) refuse_mirror_ahead(ranks, options, *continued, found->source.directory, newest.step, "");
    return;
  }
  throw CommonStoreError(
      fmt::format("the mirror in {} holds step {} of {}, or name another directory in hoist.mirror.path",
                  found->source.directory.in(found->directory), newest.step,
                  continued ? "another training than the store: move it away"
                            : "a training; continue it (Engine::restore(), hoist-gpt "
                              "--resume, resume=True in Python)"));
}

RestorePlan plan_restore(const RankAgreement& ranks, const EngineOptions& options, const std::string& from) {
  std::optional<RestorePlan> plan = find_restore(ranks, options, from);
  if (!plan) throw nothing_to_restore(ranks, options, from);
  return *std::move(plan);
}

namespace {

// Named checkpoints that do not hold the damaged bytes, those of older stores last.
std::string whole_checkpoints(const EngineOptions& options, const tiers::Store& store,
                              const CorruptionError::Where& damage) {
  std::vector<CommitHeader> checkpoints = store.checkpoints_apart_from(damage);
  try {
    for (const StoredJob& older : look_at_job(std::array{options.store_directory}).older)
      std::ranges::copy(older.checkpoints, std::back_inserter(checkpoints));
  } catch (const std::exception&) {  // without the older stores' checkpoints; the error is about the damage
  }
  std::vector<std::string> names;
  for (const CommitHeader& checkpoint : checkpoints)
    names.push_back(fmt::format("'{}' (step {})", checkpoint.name, checkpoint.step));
  return fmt::to_string(fmt::join(names, ", "));
}

}  // namespace

void verify_checkpoint(const RankAgreement& ranks, const EngineOptions& options, tiers::Store& store,
                       std::span<std::byte> buffer) {
  std::optional<aio::TransferMemory> own;
  if (buffer.size() < tiers::kTileElements * tiers::kStateBytesMax) buffer = own.emplace(kPieceBytesMax).span();
  JobBarrier barrier(ranks.job().duplicate(), ranks, "verify the named checkpoint", ranks.meeting_interval());
  std::exception_ptr problem;
  barrier.begin();
  try {
    store.verify_records(buffer, [&] { return barrier.meet_when_due(); });
  } catch (const CorruptionError& error) {
    const std::string others = whole_checkpoints(options, store, error.where);
    problem = std::make_exception_ptr(CorruptionError(
        error.where, fmt::format("nothing was changed: without the checkpoint's name the run goes on from its newest "
                                 "commit, if that is whole{}{}",
                                 others.empty() ? "" : "; named checkpoints that do not hold these bytes: ", others)));
  } catch (...) {
    problem = std::current_exception();
  }
  barrier.tell(problem);
  ranks.run_in_job("verify the named checkpoint", [&] {
    if (problem) std::rethrow_exception(problem);
  });
}

void adopt_commit(const RankAgreement& ranks, const EngineOptions& options, tiers::Store& store,
                  const CommitHeader& commit) {
  ranks.run_in_job("adopt the commit", [&] { store.adopt(commit); });
  forget_what_others_lack(ranks, options, store);
}

std::string remedy_for(const EngineOptions& options, const tiers::Store& store, const CorruptionError::Where& damage) {
  if (damage.region == kGradientRegionName)
    return "no commit holds gradients: continue from the last one, and check the drive (dmesg, smartctl)";
  const std::string names = whole_checkpoints(options, store, damage);
  if (names.empty())
    return store.checkpoints().empty() ? "" : "every named checkpoint holds the same bytes: none of them is whole";
  return fmt::format(
      "named checkpoints that do not hold these bytes: {}; when `hoist verify` has found one whole, go back to it "
      "with --resume --from NAME",
      names);
}

FormerState::FormerState(Runtime& runtime, const EngineOptions& options, const UnitTable& table,
                         const RankAgreement& ranks, const RestorePlan& plan, const std::string& from) {
  const RestoreSource& source = plan.source;
  const std::string directory = source.directory.in(plan.directory);
  if (options.uses_nvme() && options.durability == tiers::Durability::none)
    throw CommonStoreError(
        fmt::format("the store in {} is of {}, and its state would be taken over into one of durability "
                    "\"none\", which nothing outlives; use \"step\"",
                    directory, counted(source.world_size, "rank")));
  // What all ranks and groups have; this group's store may hold a newer one.
  const CommonCommit& chosen = from.empty()
                                   ? source.commits.front()
                                   : *std::ranges::max_element(source.commits, {}, &CommonCommit::checkpoint_serial);
  step_ = chosen.step;
  ranks.run_in_job("open the store it continues from", [&] {
    const std::string layout = look_at_one_store(directory).layout;
    if (layout != table.identity())
      throw StoreError(fmt::format("the store in {} {}", directory, table.difference_from(layout)));
    StoredModelOptions which{.step = chosen.step,
                             .revision = static_cast<std::uint32_t>(chosen.revision),
                             .from = from,
                             .serial = chosen.checkpoint_serial,
                             .below = false,
                             .drives = source.directory.in(options.stripe_directories)};
    // Each rank's state is its own then, and each may have drives of its own.
    if (source.world_size == ranks.group().size()) which.rank = ranks.group().rank();
    stored_ = std::make_unique<StoredModel>(directory, which);
    tables_ = hold_for_tables(runtime, options, table, stored_->memory_bytes());
    const auto program = stored_->caller_state(runtime.rank() < stored_->world_size() ? runtime.rank() : 0);
    require_room(options, program);
    commit_state_ = {.scaler = stored_->loss_scaler(), .program = {program.begin(), program.end()}};
  });
}

void FormerState::read(ParameterId parameter, State state, std::uint64_t first, std::span<float> out) {
  const MutexLock lock(one_at_a_time_);
  stored_->read(parameter.index, state, first, out);
}

}  // namespace hoist::detail
