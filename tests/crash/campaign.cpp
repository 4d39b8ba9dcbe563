// SPDX-License-Identifier: Apache-2.0
#include "campaign.hpp"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <thread>

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/zero/toy_ranks.hpp>

#include "watched.hpp"

namespace hoist::test {

namespace {

constexpr std::uint64_t kSteps = 60;
// A planned moment lies within so many steps of a life's begin.
constexpr std::uint64_t kStepsToMoment = 2;
constexpr std::chrono::microseconds kSlowManifest = std::chrono::milliseconds(3);
const ToyShape kShape{.matrices = {3000, 20000, 5000}, .norm = 40};

enum ExitCode : int { kFinished = 0, kFailed = 3 };

void say(Witness& witness, const std::string& text) {
  const std::size_t length = std::min(text.size(), witness.text.size() - 1);
  std::memcpy(witness.text.data(), text.data(), length);
  witness.text[length] = '\0';
}

void raise_to(std::atomic<std::int64_t>& value, std::int64_t to) {
  std::int64_t seen = value;
  while (seen < to && !value.compare_exchange_weak(seen, to)) {
  }
}

std::uint64_t step_in(std::span<const std::byte> state) {
  std::uint64_t step = 0;
  if (state.size() == sizeof(step)) std::memcpy(&step, state.data(), sizeof(step));
  return step;
}

// Says which stage the program is in, from inside the model's passes.
void follow(ToyModel& model, WatchedRank& rank) {
  model.in_forward = [&rank](std::size_t unit) {
    if (unit + 1 == kShape.matrices.size()) rank.stage = Stage::backward;
  };
  model.in_backward = [&rank](std::size_t) { rank.kills.event(Phase::backward); };
}

}  // namespace

std::string CrashSetup::name() const {
  return fmt::format("{}_{}_{}", parameters == Placement::nvme ? "nvme" : "memory",
                     update_mode == UpdateMode::forward ? "forward" : "step", ranks == 1 ? "1_rank" : "2_ranks");
}

std::vector<CrashSetup> all_crash_setups() {
  std::vector<CrashSetup> setups;
  for (const int ranks : {1, 2}) {
    for (const UpdateMode mode : {UpdateMode::forward, UpdateMode::step}) {
      for (const Placement place : {Placement::nvme, Placement::pinned}) setups.push_back({place, mode, ranks});
    }
  }
  return setups;
}

std::uint64_t CrashTally::kills() const { return std::accumulate(hits.begin(), hits.end(), from_outside); }

void CrashTally::add(const CrashTally& other) {
  for (std::size_t i = 0; i < kPhaseCount; ++i) hits[i] += other.hits[i];
  chained_restores += other.chained_restores;
  from_outside += other.from_outside;
  manifests_differed += other.manifests_differed;
  runs += other.runs;
  missed += other.missed;
}

Campaign::Campaign(CrashSetup setup, std::string directory)
    : setup_(setup), directory_(std::move(directory)), store_(directory_ + "/" + setup.name()) {}

ToySetup Campaign::toy(const std::string& store) const {
  ToySetup toy = toy_setup(setup_.parameters, Placement::nvme, store);
  toy.runtime.aio_block_bytes = 64 * kKiB;  // several blocks a piece
  toy.engine.update_mode = setup_.update_mode;
  return toy;
}

// --- in the child ----------------------------------------------------------------------------------------------------

void Campaign::train(const Life& life, KillSwitch& kills) const {
  WatchedSystemCalls calls(kills);
  SystemCallObserver* const before = observe_system_calls(&calls);
  Witness& witness = kills.witness();
  on_ranks(setup_.ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
    WatchedRank watched(kills, setup_.update_mode == UpdateMode::forward);
    if (rank == life.slow_rank) watched.manifest_delay = kSlowManifest;
    ToySetup toy = this->toy(store_);
    toy.runtime.make_aio_backend = [&](const aio::EngineOptions& options) {
      return watch(aio::make_backend(options), watched);
    };
    Runtime runtime(toy.runtime,
                    [&](const comm::CommunicatorOptions& options) { return watch(join(options), watched); });
    Engine engine(runtime, toy.engine);
    ToyModel model(engine, kShape);
    follow(model, watched);
    std::uint64_t first = 1;
    if (engine.find_commit()) {
      watched.stage = Stage::restoring;
      witness.restoring = true;
      const RestoreReport report = engine.restore();
      const auto step = static_cast<std::int64_t>(report.step);
      if (step < life.promised || step > life.begun)
        throw Error(
            fmt::format("step {} came back, where {} was durable and {} begun", step, life.promised, life.begun));
      if (step_in(report.caller_state) != report.step)
        throw Error(fmt::format("the caller state of step {} is step {}'s", report.step, step_in(report.caller_state)));
      witness.restored = step;
      witness.restoring = false;
      first = report.step + 1;
    } else if (life.promised >= 0) {
      throw Error(fmt::format("step {} was durable and nothing is there", life.promised));
    } else {
      engine.initialize(model.fill());
      raise_to(witness.committed, 0);
    }
    raise_to(witness.stepped, static_cast<std::int64_t>(first) - 1);
    for (std::uint64_t step = first; step <= kSteps; ++step) {
      watched.stage = Stage::forward;
      model.pass(step);
      watched.stage = Stage::stepping;
      raise_to(witness.stepped, static_cast<std::int64_t>(step));
      const StepReport report = engine.step({.caller_state = std::as_bytes(std::span(&step, 1))});
      report.committed.then([&witness, step](const std::exception_ptr& error) {
        if (!error) raise_to(witness.committed, static_cast<std::int64_t>(step));
      });
    }
    watched.stage = Stage::forward;  // the last update has no pass of its own
    engine.settle();
    watched.stage = Stage::ended;
    model.losses.clear();
    const Digests digests = digests_of(engine, model);
    if (rank == 0) say(witness, fmt::format("{} {} {}", digests.master, digests.moment1, digests.moment2));
  });
  observe_system_calls(before);
}

void Campaign::child(const Life& life, Witness& witness) const {
  try {
    KillSwitch kills(witness, life.plan);
    train(life, kills);
  } catch (const std::exception& error) {
    say(witness, error.what());
    ::_exit(kFailed);
  }
  ::_exit(kFinished);
}

// --- in the parent ---------------------------------------------------------------------------------------------------

Campaign::End Campaign::live(const Life& life, std::uint64_t seed, Witness& witness) {
  const pid_t process = ::fork();
  if (process == 0) child(life, witness);
  if (process < 0) {
    say(witness, fmt::format("fork: errno {}", errno));
    return End::failed;
  }
  if (life.outside) {
    std::this_thread::sleep_for(std::chrono::microseconds(random_bits(seed, 1) % 25'000));
    ::kill(process, SIGKILL);
  }
  int status = 0;
  ::waitpid(process, &status, 0);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && (witness.killed_itself || life.outside)) return End::killed;
  if (WIFEXITED(status) && WEXITSTATUS(status) == kFinished) return End::finished;
  if (WIFSIGNALED(status)) say(witness, fmt::format("died of signal {}", WTERMSIG(status)));
  return End::failed;
}

std::string Campaign::prepare() {
  std::filesystem::remove_all(store_);
  const SharedWitness whole, resumed;
  if (live({}, 0, *whole) != End::finished) return whole->text.data();
  for (std::size_t i = 0; i < kPhaseCount; ++i) events_[i] = whole->events[i];
  expected_ = whole->text.data();
  // And once more, from its end: what a restore consists of.
  if (live({.promised = kSteps, .begun = kSteps}, 0, *resumed) != End::finished) return resumed->text.data();
  constexpr auto kRestore = static_cast<std::size_t>(Phase::restore);
  events_[kRestore] = resumed->events[kRestore];
  if (expected_ != resumed->text.data()) return "the end of an undisturbed run is not what it is resumed from";
  return {};
}

KillPlan Campaign::plan_in(Phase phase, std::uint64_t random) const {
  const std::uint64_t all = events_[static_cast<std::size_t>(phase)];
  const bool once = phase == Phase::create || phase == Phase::initialize || phase == Phase::restore;
  const std::uint64_t range = once ? all : all * kStepsToMoment / kSteps;
  return {phase, 1 + random % std::max<std::uint64_t>(1, range)};
}

std::vector<KillPlan> Campaign::plans(std::uint64_t seed) const {
  Rng rng(seed);
  std::vector<KillPlan> first, later;
  for (std::size_t i = 0; i < kPhaseCount; ++i) {
    const auto phase = static_cast<Phase>(i);
    if (events_[i] == 0) continue;
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

bool Campaign::manifests_differ() const {
  if (setup_.ranks == 1) return false;
  const auto newest = [&](int rank) {
    const auto commits = tiers::Store::look(store_, rank).commits;
    return commits.empty() ? std::int64_t{-1} : static_cast<std::int64_t>(commits.front().step);
  };
  return newest(0) != newest(1);
}

std::string Campaign::run(std::uint64_t seed, CrashTally& tally) {
  std::filesystem::remove_all(store_);
  ++tally.runs;
  Life life;
  bool restore_before = false;
  const std::vector<KillPlan> moments = plans(seed);
  for (std::size_t i = 0; i <= moments.size() + 1; ++i) {
    const bool last = i >= moments.size();
    life.plan = last ? KillPlan{} : moments[i];
    life.outside = !last && life.plan.nth == 0;
    life.slow_rank = setup_.ranks == 1 ? -1 : static_cast<int>(random_bits(seed, 100 + i) % 3) - 1;
    const SharedWitness witness;
    const End end = live(life, random_bits(seed, 200 + i), *witness);
    const auto where = [&] {
      return fmt::format("{}, seed {}, life {} (planned: event {} of {}): ", setup_.name(), seed, i, life.plan.nth,
                         life.outside || last ? "nothing" : name_of(life.plan.phase));
    };
    if (end == End::failed) return where() + witness->text.data();
    if (end == End::finished) {
      tally.missed += moments.size() - std::min(i, moments.size());
      if (expected_ == witness->text.data()) return {};
      return where() + "ended in " + witness->text.data() + " instead of " + expected_;
    }
    const bool in_restore = !life.outside && life.plan.phase == Phase::restore;
    ++(life.outside ? tally.from_outside : tally.hits[static_cast<std::size_t>(life.plan.phase)]);
    if (in_restore && restore_before) ++tally.chained_restores;
    restore_before = in_restore;
    if (manifests_differ()) ++tally.manifests_differed;
    life.promised = std::max(life.promised, witness->committed.load());
    life.begun = std::max(life.begun, witness->stepped.load());
    // initialize() commits step 0; it was begun although nobody called step().
    life.begun = std::max(life.begun, std::int64_t{0});
  }
  return fmt::format("{}, seed {}: the run did not come to its end", setup_.name(), seed);
}

std::string table(const CrashTally& tally, std::uint64_t seed) {
  std::string text = fmt::format("seed {}: {} runs, {} kills, {} planned moments not reached\n", seed, tally.runs,
                                 tally.kills(), tally.missed);
  const auto row = [&](const std::string& name, std::uint64_t hits) {
    text += fmt::format("  {:<34} {:>6}\n", name, hits);
  };
  for (std::size_t i = 0; i < kPhaseCount; ++i) row(name_of(static_cast<Phase>(i)), tally.hits[i]);
  row("  of these, after a killed restore", tally.chained_restores);
  row("from outside, at any moment", tally.from_outside);
  row("left ranks with different commits", tally.manifests_differed);
  return text;
}

}  // namespace hoist::test
