// SPDX-License-Identifier: Apache-2.0
#include "mpi_campaign.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/core/clock.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/support/spawn.hpp>
#include <hoist/tiers/store.hpp>

namespace hoist::test {

namespace {

constexpr std::uint64_t kSteps = 16;
constexpr std::uint64_t kStepsUntilKillMax = 2;
constexpr std::chrono::seconds kHang{120};  // a job that takes so long hangs
constexpr std::chrono::milliseconds kPoll{5};

std::string program_beside_this(const std::string& name) {
  return (std::filesystem::canonical("/proc/self/exe").parent_path() / name).string();
}

pid_t start(std::vector<std::string> words, const std::string& log) {
  return spawn(std::move(words), log, log, [] {
    ::setpgid(0, 0);
    set_open_mpi_variables();
  });
}

bool is_there(std::int64_t process) { return process > 0 && ::kill(static_cast<pid_t>(process), 0) == 0; }

}  // namespace

std::string MpiCrashSetup::name() const {
  return fmt::format("mpi_{}_{}_{}_ranks", parameters == Placement::nvme ? "nvme" : "memory",
                     update_mode == UpdateMode::forward ? "forward" : "step", ranks);
}

std::vector<MpiCrashSetup> all_mpi_crash_setups() {
  return {{Placement::nvme, UpdateMode::forward, 2},
          {Placement::pinned, UpdateMode::step, 2},
          {Placement::nvme, UpdateMode::step, 4},
          {Placement::pinned, UpdateMode::forward, 4}};
}

void MpiTally::add(const MpiTally& other) {
  kills.add(other.kills);
  survivors += other.survivors;
  named_a_unit += other.named_a_unit;
  slowest_end_seconds = std::max(slowest_end_seconds, other.slowest_end_seconds);
}

std::string table(const MpiTally& tally, std::uint64_t seed) {
  return table(tally.kills, seed) +
         fmt::format(
             "  {} survivors ended by themselves, each with an error that names the dead rank, {} also a unit; the "
             "slowest {:.2f} s after it (time-out {:.1f} s)\n",
             tally.survivors, tally.named_a_unit, tally.slowest_end_seconds, to_seconds(MpiCampaign::kTimeout));
}

MpiCampaign::MpiCampaign(MpiCrashSetup setup, const std::string& directory)
    : setup_(setup), store_(directory + "/" + setup.name()), witness_(store_ + ".witness-"), log_(store_ + ".log") {}

std::string MpiCampaign::obstacle() {
  if (!std::filesystem::exists(program_beside_this("hoist_crash_mpi_rank"))) return "this build has no MPI";
  const TempDirectory directory;
  const std::string log = directory / "version";
  int status = 0;
  ::waitpid(start({HOIST_TEST_MPIEXEC, "--version"}, log), &status, 0);
  const std::string version = contents_of(log);  // mpiexec calls itself OpenRTE
  if (version.find("Open MPI") == std::string::npos && version.find("OpenRTE") == std::string::npos)
    return "that a rank dies and the others live needs Open MPI's mpirun --enable-recovery";
  return {};
}

MpiCampaign::Witnesses MpiCampaign::make_witnesses() const {
  Witnesses witnesses;
  for (int rank = 0; rank < setup_.ranks; ++rank)
    witnesses.push_back(std::make_unique<SharedWitness>(witness_ + std::to_string(rank), SharedWitness::File::make));
  return witnesses;
}

std::vector<std::string> MpiCampaign::command(const Life& life) const {
  std::vector<std::string> words{HOIST_TEST_MPIEXEC, "-np", std::to_string(setup_.ranks)};
  if (life.survivors) words.emplace_back("--enable-recovery");
  const auto add = [&](const char* key, const auto& value) {
    words.emplace_back(key);
    words.push_back(fmt::format("{}", value));
  };
  words.push_back(program_beside_this("hoist_crash_mpi_rank"));
  add("--store", store_);
  add("--witness", witness_);
  add("--parameters", setup_.parameters == Placement::nvme ? "nvme" : "memory");
  add("--mode", setup_.update_mode == UpdateMode::forward ? "forward" : "step");
  add("--timeout-ms", kTimeout.count());
  add("--steps", life.terms.last_step);
  add("--promised", life.terms.promised);
  add("--begun", life.terms.begun);
  add("--victim", life.outside ? -1 : life.victim);
  add("--phase", static_cast<int>(life.plan.phase));
  add("--nth", life.plan.nth);
  add("--slow-rank", life.slow_rank);
  return words;
}

std::string MpiCampaign::live(const Life& life, std::uint64_t seed, const Witnesses& witnesses, LifeEnd& end) const {
  const TimePoint began = Clock::now();
  const pid_t job = start(command(life), log_);
  if (job < 0) return fmt::format("fork: errno {}", errno);
  std::optional<TimePoint> kill_at;
  int status = 0;
  while (::waitpid(job, &status, WNOHANG) == 0) {
    std::this_thread::sleep_for(kPoll);
    if (life.outside && !(*witnesses[static_cast<std::size_t>(life.victim)])->killed_ns) {
      Witness& victim = **witnesses[static_cast<std::size_t>(life.victim)];
      if (!kill_at && victim.process != 0)
        kill_at = Clock::now() + std::chrono::microseconds(random_bits(seed, 1) % 1'000'000);
      if (kill_at && Clock::now() >= *kill_at && victim.ended_ns == 0) {
        victim.killed_ns = Clock::now().time_since_epoch().count();
        ::kill(static_cast<pid_t>(victim.process.load()), SIGKILL);
      }
    }
    if (Clock::now() - began < kHang) continue;
    ::kill(-job, SIGKILL);
    for (const auto& witness : witnesses) {
      if (is_there((*witness)->process)) ::kill(static_cast<pid_t>((*witness)->process.load()), SIGKILL);
    }
    ::waitpid(job, &status, 0);
    return "the job hangs\n" + contents_of(log_);
  }
  // The ranks of an aborted job are gone a moment after mpirun.
  for (const auto& witness : witnesses) {
    const TimePoint deadline = Clock::now() + kEnding;
    while (is_there((*witness)->process)) {
      if (Clock::now() > deadline) return fmt::format("process {} outlives its job", (*witness)->process.load());
      std::this_thread::sleep_for(kPoll);
    }
  }
  if (life.victim >= 0 && (*witnesses[static_cast<std::size_t>(life.victim)])->killed_ns != 0) {
    end = LifeEnd::killed;
    return {};
  }
  for (const auto& witness : witnesses) {
    if ((*witness)->failed) return (*witness)->text.data();
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    return fmt::format("mpirun ended with status {:#x}\n{}", status, contents_of(log_));
  end = LifeEnd::finished;
  return {};
}

std::string MpiCampaign::judge_survivors(const Life& life, const Witnesses& witnesses, MpiTally& tally) const {
  const std::string dead = fmt::format("rank {}", life.victim);
  const std::int64_t died = (*witnesses[static_cast<std::size_t>(life.victim)])->killed_ns;
  for (int rank = 0; rank < setup_.ranks; ++rank) {
    if (rank == life.victim) continue;
    const Witness& witness = **witnesses[static_cast<std::size_t>(rank)];
    const std::string text = witness.text.data();
    if (!witness.failed) return fmt::format("rank {} did not end with an error\n{}", rank, contents_of(log_));
    if (text.find(dead) == std::string::npos) return fmt::format("rank {} does not name {}: {}", rank, dead, text);
    const Nanoseconds after(witness.ended_ns - died);
    if (after > kTimeout + kEnding)
      return fmt::format("rank {} ended {:.1f} s after {}: {}", rank, to_seconds(after), dead, text);
    ++tally.survivors;
    if (text.find("of 'unit") != std::string::npos || text.find("unit 'unit") != std::string::npos)
      ++tally.named_a_unit;
    tally.slowest_end_seconds = std::max(tally.slowest_end_seconds, to_seconds(after));
  }
  return {};
}

std::string MpiCampaign::prepare() {
  std::filesystem::remove_all(store_);
  for (const bool resumed : {false, true}) {  // and once more, from its end: what a restore consists of
    Life life{.terms = {.last_step = kSteps}};
    if (resumed) life.terms.promised = life.terms.begun = kSteps;
    const Witnesses witnesses = make_witnesses();
    LifeEnd end{};
    if (const std::string problem = live(life, 0, witnesses, end); !problem.empty()) return problem;
    const std::string digests = (*witnesses[0])->text.data();
    if (!resumed) expected_ = digests;
    if (expected_ != digests) return "the end of an undisturbed run is not what it is resumed from";
    for (const auto& witness : witnesses) {
      for (std::size_t i = 0; i < kPhaseCount; ++i) {
        if (resumed == (static_cast<Phase>(i) == Phase::restore))
          events_[i] = std::max(events_[i], (*witness)->events[i].load());
      }
    }
  }
  return {};
}

MpiCampaign::Life MpiCampaign::next_life(std::uint64_t seed, std::uint64_t number, const LifeTerms& terms) const {
  Rng rng(random_bits(seed, number));
  Life life{.terms = terms};
  life.victim = static_cast<int>(rng.below(static_cast<std::uint64_t>(setup_.ranks)));
  life.survivors = rng.below(2) == 0;
  std::vector<Phase> phases;
  const bool fresh = terms.begun < 0;
  for (std::size_t i = 0; i < kPhaseCount; ++i) {
    const auto phase = static_cast<Phase>(i);
    const bool first = phase == Phase::create || phase == Phase::initialize;
    if (events_[i] > 0 && phase != Phase::remove && first == fresh) phases.push_back(phase);
  }
  // From outside as often as in a phase; between the ranks' manifests twice as often.
  if (!fresh) phases.push_back(Phase::between_ranks);
  const std::uint64_t choice = rng.below(phases.size() + 1);
  life.outside = choice == phases.size();
  if (!life.outside) {
    const Phase phase = phases[choice];
    const std::uint64_t all = events_[static_cast<std::size_t>(phase)];
    const std::uint64_t range = fresh || phase == Phase::restore ? all : all * kStepsUntilKillMax / kSteps;
    life.plan = {phase, 1 + rng.below(std::max<std::uint64_t>(1, range))};
  }
  // The victim's manifest is late half the time, another rank's a quarter of it.
  const std::uint64_t slow = rng.below(4);
  life.slow_rank = slow < 2 ? life.victim : slow == 2 ? (life.victim + 1) % setup_.ranks : -1;
  return life;
}

std::string MpiCampaign::run(std::uint64_t seed, std::uint64_t kills, MpiTally& tally) {
  std::filesystem::remove_all(store_);
  ++tally.kills.runs;
  LifeTerms terms{.last_step = kSteps};
  for (std::uint64_t number = 0;; ++number) {
    const bool last = number >= kills;
    const Life life = last ? Life{.terms = terms} : next_life(seed, number, terms);
    const Witnesses witnesses = make_witnesses();
    LifeEnd end{};
    std::string problem = live(life, random_bits(seed, 1000 + number), witnesses, end);
    if (problem.empty() && end == LifeEnd::killed && life.survivors) problem = judge_survivors(life, witnesses, tally);
    if (problem.empty() && end == LifeEnd::finished && expected_ != (*witnesses[0])->text.data())
      problem = fmt::format("ended in {} instead of {}", (*witnesses[0])->text.data(), expected_);
    if (!problem.empty())
      return fmt::format("{}, seed {}, life {} (rank {}, planned: event {} of {}{}): {}", setup_.name(), seed, number,
                         life.victim, life.plan.nth, life.outside || last ? "nothing" : name_of(life.plan.phase),
                         life.survivors ? ", others live" : "", problem);
    if (end == LifeEnd::finished) {
      tally.kills.missed += kills - std::min(number, kills);
      return {};
    }
    ++(life.outside ? tally.kills.from_outside : tally.kills.hits[static_cast<std::size_t>(life.plan.phase)]);
    std::vector<std::int64_t> newest;
    for (int rank = 0; rank < setup_.ranks; ++rank) {
      const auto commits = tiers::Store::look(store_, rank).commits;
      newest.push_back(commits.empty() ? -1 : static_cast<std::int64_t>(commits.front().step));
      const Witness& witness = **witnesses[static_cast<std::size_t>(rank)];
      terms.promised = std::max(terms.promised, witness.committed.load());
      terms.begun = std::max(terms.begun, witness.stepped.load());
      if (newest.back() >= 0) terms.begun = std::max(terms.begun, std::int64_t{0});
    }
    if (std::ranges::adjacent_find(newest, std::ranges::not_equal_to{}) != newest.end())
      ++tally.kills.manifests_differed;
  }
}

}  // namespace hoist::test
