// SPDX-License-Identifier: Apache-2.0
#include "campaign.hpp"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <numeric>
#include <thread>

#include <fmt/format.h>

#include <hoist/core/rng.hpp>
#include <hoist/tests/zero/toy_ranks.hpp>
#include <hoist/tiers/store.hpp>

#include "watched.hpp"

namespace hoist::test {

namespace {

constexpr std::uint64_t kSteps = LifeTerms{}.last_step;
// A planned kill comes within so many steps of a life's beginning. With a mirror, copies have the time to end.
constexpr std::uint64_t kStepsUntilKillMax = 2, kStepsUntilKillMaxMirrored = 12;
constexpr unsigned kStepsToCopy = 2;
constexpr std::uint64_t kLossesOneIn = 3;  // kills after which there is a copy to go on from
constexpr std::chrono::minutes kSignalsFor{1};
// A child of a process with several threads may hang in the thread sanitizer's own code, which does not support it.
// (Nor does it support a handler that interrupts glibc's pthread_join() where that frees stacks: GLIBC_TUNABLES in
// CMakePresets.json lets it keep them.)
#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif
constexpr Nanoseconds kRivalsTimeout = std::chrono::milliseconds(300);  // two processes may each hold one rank's lock

}  // namespace

std::string CrashSetup::name() const {
  return fmt::format("{}_{}_{}{}{}", parameters == Placement::nvme ? "nvme" : "memory", mode_name(update_mode),
                     groups == 1 ? "" : "2_groups_of_", ranks == 1 ? "1_rank" : "2_ranks",
                     pinned_fraction > 0 ? "_half_pinned" : "") +
         (mirrored ? "_mirrored" : "") + (disturbed ? "_disturbed" : "");
}

std::vector<CrashSetup> disturbed_crash_setups() {
  std::vector<CrashSetup> setups{{Placement::nvme, UpdateMode::forward, 1},
                                 {Placement::nvme, UpdateMode::step, 2},
                                 {Placement::pinned, UpdateMode::backward, 2},
                                 {Placement::nvme, UpdateMode::forward, 1, 0, 2}};
  for (CrashSetup& setup : setups) setup.disturbed = true;
  return setups;
}

std::vector<CrashSetup> mirror_crash_setups() {
  std::vector<CrashSetup> setups{{Placement::nvme, UpdateMode::forward, 1},
                                 {Placement::nvme, UpdateMode::step, 2},
                                 {Placement::pinned, UpdateMode::backward, 2},
                                 {Placement::pinned, UpdateMode::forward, 2, 0.5},
                                 {Placement::nvme, UpdateMode::forward, 1, 0, 2}};
  for (CrashSetup& setup : setups) setup.mirrored = true;
  return setups;
}

std::vector<CrashSetup> group_crash_setups() {
  std::vector<CrashSetup> setups{{Placement::nvme, UpdateMode::forward, 2},
                                 {Placement::pinned, UpdateMode::step, 1},
                                 {Placement::nvme, UpdateMode::backward, 1}};
  for (CrashSetup& setup : setups) setup.groups = 2;
  return setups;
}

std::vector<CrashSetup> all_crash_setups() {
  std::vector<CrashSetup> setups;
  for (const int ranks : {1, 2}) {
    for (const UpdateMode mode : {UpdateMode::forward, UpdateMode::step}) {
      for (const Placement place : {Placement::nvme, Placement::pinned}) setups.push_back({place, mode, ranks});
    }
  }
  for (const std::size_t i : {0u, 3u, 5u, 6u}) {  // each placement, mode and number of ranks twice
    CrashSetup half = setups[i];
    half.pinned_fraction = 0.5;
    setups.push_back(half);
  }
  for (const int ranks : {1, 2}) {
    for (const Placement place : {Placement::nvme, Placement::pinned})
      setups.push_back({place, UpdateMode::backward, ranks});
  }
  setups.push_back({Placement::nvme, UpdateMode::backward, 1, 0.5});
  setups.push_back({Placement::pinned, UpdateMode::backward, 2, 0.5});
  return setups;
}

std::uint64_t CrashTally::kills() const { return std::accumulate(hits.begin(), hits.end(), from_outside); }

std::uint64_t CrashTally::troubles() const {
  return std::accumulate(disturbances.begin(), disturbances.end(), std::uint64_t{0});
}

void CrashTally::add(const CrashTally& other) {
  for (std::size_t i = 0; i < kPhaseCount; ++i) hits[i] += other.hits[i];
  for (std::size_t i = 0; i < kDisturbanceCount; ++i) {
    disturbances[i] += other.disturbances[i];
    refusals[i] += other.refusals[i];
  }
  chained_restores += other.chained_restores;
  from_outside += other.from_outside;
  manifests_differed += other.manifests_differed;
  groups_differed += other.groups_differed;
  lost_stores += other.lost_stores;
  two_stores += other.two_stores;
  runs += other.runs;
  missed += other.missed;
}

Campaign::Campaign(CrashSetup setup, std::string directory)
    : setup_(setup),
      directory_(std::move(directory)),
      store_(directory_ + "/" + setup.name()),
      mirror_(setup.mirrored ? store_ + ".mirror" : "") {}

std::string Campaign::store_of(int group, int rank) const {
  const std::string store = store_of_group(store_, setup_.groups, group);
  return setup_.mirrored ? fmt::format("{}/drive-{}", store, rank) : store;
}

// In the child.
std::string Campaign::train(const Life& life, KillSwitch& kills) const {
  WatchedSystemCalls calls(kills);
  SystemCallObserver* const before = observe_system_calls(&calls);
  const auto train = [&](int group, int index, const Runtime::Groups& joins) {
    WatchedRank watched(kills, setup_.update_mode != UpdateMode::step);
    if (index == life.slow_rank) watched.manifest_delay = kSlowManifestDelay;
    LifeTerms terms = life.terms;
    terms.seed += static_cast<std::uint64_t>(group);
    const std::string store = store_of(group, index % setup_.ranks);
    ToySetup toy = crash_setup(setup_.parameters, setup_.update_mode, store, setup_.pinned_fraction);
    if (life.has_rival) toy.engine.lock_timeout = kRivalsTimeout;
    if (setup_.mirrored)
      toy.engine.mirror = {.directory = store_of_group(mirror_, setup_.groups, group), .every = kStepsToCopy};
    return train_rank(toy, joins, watched, terms);
  };
  const std::string digests = train_job(setup_.groups, setup_.ranks, train);
  observe_system_calls(before);
  return digests;
}

LifeEnd Campaign::live(const Life& life, std::uint64_t seed, Witness& witness) const {
  std::optional<std::chrono::microseconds> kill_after;
  if (life.outside) kill_after = std::chrono::microseconds(random_bits(seed, 1) % 25'000);
  return live_in_child(
      [&] {
        KillSwitch kills(witness, life.plan);
        return train(life, kills);
      },
      witness, kill_after);
}

void Campaign::remove_files() const {
  std::filesystem::remove_all(store_);
  if (setup_.mirrored) std::filesystem::remove_all(mirror_);
}

// Another run of the same model, which has come as far as its third step.
std::string Campaign::prepare_foreign() {
  const SharedWitness witness;
  remove_files();
  if (live({.terms = {.last_step = 3, .seed = 1000}}, 0, *witness) != LifeEnd::finished) return witness->text.data();
  foreign_ = files_below(store_);
  return {};
}

LifeEnd Campaign::live_with(Disturbance disturbance, const LifeTerms& terms, Witness& witness) const {
  const auto life = [&](Witness& of, const LifeTerms& on) {
    return [this, &of, on, has_rival = disturbance == Disturbance::second] {
      KillSwitch kills(of, {});
      return train({.terms = on, .has_rival = has_rival}, kills);
    };
  };
  if (disturbance == Disturbance::forks) {
    LifeTerms forking = terms;
    forking.forks = true;
    return live_in_child(life(witness, forking), witness, {});
  }
  if (disturbance == Disturbance::signals) {
    struct sigaction interrupt {
    }, before{};
    interrupt.sa_handler = [](int) {};
    ::sigaction(SIGPROF, &interrupt, &before);
    ChildLife child(life(witness, terms), witness);
    const auto end = std::chrono::steady_clock::now() + kSignalsFor;
    while (!child.has_ended() && std::chrono::steady_clock::now() < end) {
      child.send(SIGPROF);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    ::sigaction(SIGPROF, &before, nullptr);
    return child.wait();
  }
  if (disturbance != Disturbance::second) return live_in_child(life(witness, terms), witness, {});
  // Each may find what the other has committed.
  LifeTerms either = terms;
  either.begun = std::max(terms.begun, static_cast<std::int64_t>(terms.last_step));
  const SharedWitness second;
  ChildLife one(life(witness, either), witness), other(life(*second, either), *second);
  const LifeEnd end = one.wait(), other_end = other.wait();
  raise_to(witness.committed, second->committed);
  raise_to(witness.stepped, second->stepped);
  if (other_end == LifeEnd::finished || second->refused) return end;
  say(witness, second->text.data());
  witness.refused = false;
  return other_end;
}

// Runs a life that begins in trouble: either it continues correctly, or hoist refuses it and the next life continues.
std::string Campaign::disturb(std::uint64_t seed, LifeTerms& terms, CrashTally& tally) {
  Rng rng(seed);
  if (older_.empty() || rng.below(2) == 0) {
    older_ = files_below(store_);
    older_promised_ = terms.promised;
    return {};
  }
  auto disturbance = static_cast<Disturbance>(rng.below(kDisturbanceCount));
  if (disturbance == Disturbance::forks && kThreadSanitizer) disturbance = Disturbance::signals;
  const DisturbedFiles files(disturbance, store_, foreign_, older_, rng);
  const Files begun_with = files_below(store_);
  LifeTerms life = terms;
  life.last_step = std::min(kSteps, static_cast<std::uint64_t>(std::max<std::int64_t>(terms.promised, 0)) + 2);
  if (disturbance == Disturbance::older) life.promised = std::min(terms.promised, older_promised_);
  // Without any file of a rank, a store that was only begun is begun anew.
  if (disturbance == Disturbance::missing && terms.promised == 0) life.promised = -1;
  if (disturbance == Disturbance::foreign) {  // its manifest may name any step; the tiles are not that step's
    life.promised = -1;
    life.begun = kSteps;
  }
  const SharedWitness witness;
  const LifeEnd end = live_with(disturbance, life, *witness);
  const auto index = static_cast<std::size_t>(disturbance);
  ++tally.disturbances[index];
  const auto wrong = [&](const std::string& what) {
    return fmt::format("after {} ({} promised, {} begun): {}", files.text(), terms.promised, terms.begun, what);
  };
  if (end == LifeEnd::finished) {
    if (disturbance == Disturbance::foreign && witness->restored < terms.promised) return wrong("it was trained from");
    terms.promised = std::max(life.promised, witness->committed.load());
    terms.begun = std::max(terms.begun, witness->stepped.load());
    return {};
  }
  const bool may_be_refused = is_of_files(disturbance) || disturbance == Disturbance::second;
  if (!witness->refused || !may_be_refused) return wrong(witness->text.data());
  ++tally.refusals[index];
  if (disturbance != Disturbance::older) terms.promised = std::max(terms.promised, witness->committed.load());
  terms.begun = std::max(terms.begun, witness->stepped.load());
  if (disturbance == Disturbance::second) return {};
  // Damage inside of a file may show only when it is read; everything else is seen before anything is changed.
  const bool late = disturbance == Disturbance::foreign || disturbance == Disturbance::older;
  const bool restored = witness->restored >= 0;
  if (restored && !late) return wrong(fmt::format("refused too late: {}", witness->text.data()));
  if (terms.promised >= 0 && !restored && !late && files_below(store_) != begun_with)
    return wrong(fmt::format("files were changed, and then: {}", witness->text.data()));
  files.undo();
  return {};
}

std::string Campaign::prepare() {
  if (setup_.disturbed) {
    if (std::string problem = prepare_foreign(); !problem.empty()) return problem;
  }
  remove_files();
  const SharedWitness whole, resumed;
  if (live({}, 0, *whole) != LifeEnd::finished) return whole->text.data();
  for (std::size_t i = 0; i < kPhaseCount; ++i) events_[i] = whole->events[i];
  expected_ = whole->text.data();
  // And once more, from its end: what a restore consists of, where a mirror has nothing to go on with.
  if (setup_.mirrored) std::filesystem::remove_all(mirror_);
  if (live({.terms = {.promised = kSteps, .begun = kSteps}}, 0, *resumed) != LifeEnd::finished)
    return resumed->text.data();
  constexpr auto kRestore = static_cast<std::size_t>(Phase::restore);
  events_[kRestore] = resumed->events[kRestore];
  if (expected_ != resumed->text.data()) return "the end of an undisturbed run is not what it is resumed from";
  return {};
}

KillPlan Campaign::plan_in(Phase phase, std::uint64_t random) const {
  const std::uint64_t all = events_[static_cast<std::size_t>(phase)];
  const bool once = phase == Phase::create || phase == Phase::initialize || phase == Phase::restore;
  const std::uint64_t range =
      once ? all : all * (setup_.mirrored ? kStepsUntilKillMaxMirrored : kStepsUntilKillMax) / kSteps;
  return {phase, 1 + random % std::max<std::uint64_t>(1, range)};
}

std::vector<KillPlan> Campaign::plans(std::uint64_t seed) const {
  Rng rng(seed);
  std::vector<KillPlan> first, later;
  for (std::size_t i = 0; i < kPhaseCount; ++i) {
    const auto phase = static_cast<Phase>(i);
    if (events_[i] == 0 || phase == Phase::reshard || phase == Phase::remove) continue;
    if (phase == Phase::create || phase == Phase::initialize) {
      first.push_back(plan_in(phase, rng.bits()));
    } else if (phase != Phase::restore) {
      later.push_back(plan_in(phase, rng.bits()));
      if (phase == Phase::reduce || phase == Phase::between_ranks) later.push_back(plan_in(phase, rng.bits()));
    }
  }
  later.push_back({});  // from outside
  for (std::size_t i = later.size(); i-- > 1;) std::swap(later[i], later[rng.below(i + 1)]);
  // A chain of restores somewhere among them.
  const auto at = later.begin() + static_cast<std::ptrdiff_t>(rng.below(later.size() + 1));
  std::vector<KillPlan> chain(2 + rng.below(3));
  for (KillPlan& plan : chain) plan = plan_in(Phase::restore, rng.bits());
  later.insert(at, chain.begin(), chain.end());
  first.insert(first.end(), later.begin(), later.end());
  return first;
}

std::vector<std::int64_t> Campaign::newest_of(int group) const {
  std::vector<std::int64_t> newest;
  for (int rank = 0; rank < setup_.ranks; ++rank) {
    const auto commits = tiers::Store::look(store_of(group, rank), rank).commits;
    newest.push_back(commits.empty() ? -1 : static_cast<std::int64_t>(commits.front().step));
  }
  return newest;
}

std::string Campaign::run(std::uint64_t seed, CrashTally& tally) {
  remove_files();
  older_.clear();
  ++tally.runs;
  Life life;
  bool restore_before = false;
  std::int64_t mirrored = -1;  // the newest step that was reported whole in the mirror
  const std::vector<KillPlan> moments = plans(seed);
  for (std::size_t i = 0; i <= moments.size() + 1; ++i) {
    const bool last = i >= moments.size();
    life.plan = last ? KillPlan{} : moments[i];
    life.outside = !last && life.plan.nth == 0;
    life.slow_rank = -1;
    if (const auto ranks = static_cast<std::uint64_t>(setup_.rank_count()); ranks > 1)
      life.slow_rank = static_cast<int>(random_bits(seed, 100 + i) % (ranks + 1)) - 1;
    const SharedWitness witness;
    const LifeEnd end = live(life, random_bits(seed, 200 + i), *witness);
    const auto where = [&] {
      return fmt::format("{}, seed {}, life {} (planned: event {} of {}): ", setup_.name(), seed, i, life.plan.nth,
                         life.outside || last ? "nothing" : name_of(life.plan.phase));
    };
    if (end == LifeEnd::failed) return where() + witness->text.data();
    if (end == LifeEnd::finished) {
      tally.missed += moments.size() - std::min(i, moments.size());
      if (expected_ == witness->text.data()) return {};
      return where() + "ended in " + witness->text.data() + " instead of " + expected_;
    }
    const bool in_restore = !life.outside && life.plan.phase == Phase::restore;
    ++(life.outside ? tally.from_outside : tally.hits[static_cast<std::size_t>(life.plan.phase)]);
    if (in_restore && restore_before) ++tally.chained_restores;
    restore_before = in_restore;
    std::vector<std::int64_t> newest;
    for (int group = 0; group < setup_.groups; ++group) {
      const auto of_group = newest_of(group);
      if (group > 0 && std::ranges::max(of_group) != std::ranges::max(newest)) ++tally.groups_differed;
      newest.insert(newest.end(), of_group.begin(), of_group.end());
    }
    if (std::ranges::adjacent_find(newest, std::ranges::not_equal_to{}) != newest.end()) ++tally.manifests_differed;
    life.terms.promised = std::max(life.terms.promised, witness->committed.load());
    // initialize() commits step 0; it was begun although nobody called step().
    life.terms.begun = std::max({life.terms.begun, witness->stepped.load(), std::int64_t{0}});
    mirrored = std::max(mirrored, witness->mirrored.load());
    if (mirrored >= 0 && random_bits(seed, 300 + i) % kLossesOneIn == 0) {
      const auto group = static_cast<int>(random_bits(seed, 500 + i) % static_cast<std::uint64_t>(setup_.groups));
      const auto rank = static_cast<int>(random_bits(seed, 600 + i) % static_cast<std::uint64_t>(setup_.ranks));
      const bool all = random_bits(seed, 700 + i) % 2 == 0;
      std::filesystem::remove_all(all ? store_ : store_of(group, rank));
      life.terms.promised = mirrored;
      ++tally.lost_stores;
    }
    if (setup_.disturbed) {
      const std::string problem = disturb(random_bits(seed, 400 + i), life.terms, tally);
      if (!problem.empty()) return where() + problem;
    }
  }
  return fmt::format("{}, seed {}: the run did not come to its end", setup_.name(), seed);
}

std::string table(const CrashTally& tally, std::uint64_t seed) {
  std::string text = fmt::format("seed {}: {} runs, {} kills, {} planned moments not reached\n", seed, tally.runs,
                                 tally.kills(), tally.missed);
  const auto row = [&](const std::string& name, std::uint64_t hits) {
    text += fmt::format("  {:<34} {:>6}\n", name, hits);
  };
  for (std::size_t i = 0; i < kPhaseCount; ++i) {
    if (tally.hits[i] > 0) row(name_of(static_cast<Phase>(i)), tally.hits[i]);
  }
  const auto row_if_any = [&](const std::string& name, std::uint64_t hits) {
    if (hits > 0) row(name, hits);
  };
  row_if_any("  of these, after a killed restore", tally.chained_restores);
  row_if_any("from outside, at any moment", tally.from_outside);
  row_if_any("left ranks with different commits", tally.manifests_differed);
  row_if_any("left groups with different commits", tally.groups_differed);
  row_if_any("whose store was lost thereafter", tally.lost_stores);
  for (std::size_t i = 0; i < kDisturbanceCount; ++i) {
    const std::string name = name_of(static_cast<Disturbance>(i));
    row_if_any("then, " + name, tally.disturbances[i]);
    row_if_any("  of these, refused by hoist", tally.refusals[i]);
  }
  row_if_any("left an old store and a new one", tally.two_stores);
  return text;
}

}  // namespace hoist::test
