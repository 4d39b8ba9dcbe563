// SPDX-License-Identifier: Apache-2.0
#include "reshard_campaign.hpp"

#include <algorithm>
#include <chrono>
#include <filesystem>

#include <fmt/format.h>

#include <hoist/core/rng.hpp>
#include <hoist/tests/zero/toy_ranks.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>

namespace hoist::test {

namespace {

constexpr std::uint64_t kLastStep = 24;
constexpr std::uint64_t kStepsBetweenChanges = 3;
constexpr int kChanges = 5;
constexpr std::array kPhases{Phase::create,        Phase::initialize, Phase::reshard,
                             Phase::between_ranks, Phase::remove,     Phase::manifest};

}  // namespace

ReshardCampaign::ReshardCampaign(Placement parameters, UpdateMode mode, const std::string& directory, int groups)
    : parameters_(parameters),
      mode_(mode),
      groups_(groups),
      store_(fmt::format("{}/reshard_{}_{}{}", directory, parameters == Placement::nvme ? "nvme" : "memory",
                         mode == UpdateMode::forward ? "forward" : "step",
                         groups == 1 ? "" : fmt::format("_{}_groups", groups))) {}

bool ReshardCampaign::has_two_stores() const {
  for (int group = 0; group < groups_; ++group)
    if (detail::store_directories(store_of_group(store_, groups_, group)).size() > 1) return true;
  return false;
}

// In the child.
std::string ReshardCampaign::train(const Life& life, KillSwitch& kills) const {
  WatchedSystemCalls calls(kills);
  SystemCallObserver* const before = observe_system_calls(&calls);
  const auto train = [&](int group, int index, const Runtime::Groups& joins) {
    ToySetup setup = crash_setup(parameters_, mode_, store_of_group(store_, groups_, group));
    setup.engine.gradient_clipping = 0;  // the norm's last bits depend on the partition
    WatchedRank watched(kills, mode_ == UpdateMode::forward);
    watched.reshards = life.reshards;
    if (index == life.slow_rank) watched.manifest_delay = kSlowManifestDelay;
    LifeTerms terms = life.terms;
    terms.seed += static_cast<std::uint64_t>(group);
    return train_rank(setup, joins, watched, terms);
  };
  const std::string digests = train_job(groups_, life.ranks, train);
  observe_system_calls(before);
  return digests;
}

LifeEnd ReshardCampaign::live(const Life& life, Witness& witness) const {
  return live_in_child(
      [&] {
        KillSwitch kills(witness, life.plan);
        return train(life, kills);
      },
      witness, std::nullopt);
}

std::string ReshardCampaign::prepare() {
  for (std::size_t w = 0; w < kWorlds.size(); ++w) {
    std::filesystem::remove_all(store_);
    const SharedWitness whole, begun, changed;
    LifeTerms terms{.last_step = kLastStep, .equal_gradients = true};
    if (live({.ranks = kWorlds[w], .terms = terms}, *whole) != LifeEnd::finished) return whole->text.data();
    if (w == 0) expected_ = whole->text.data();
    if (expected_ != whole->text.data())
      return fmt::format("{} ranks end in {} and 1 in {}", kWorlds[w], whole->text.data(), expected_);
    std::filesystem::remove_all(store_);
    terms.last_step = 2;
    if (live({.ranks = kWorlds[(w + 1) % kWorlds.size()], .terms = terms}, *begun) != LifeEnd::finished)
      return begun->text.data();
    terms.promised = terms.begun = 2;
    if (live({.ranks = kWorlds[w], .reshards = true, .terms = terms}, *changed) != LifeEnd::finished)
      return changed->text.data();
    for (std::size_t p = 0; p < kPhaseCount; ++p) events_[w][p] = changed->events[p];
    if (events_[w][static_cast<std::size_t>(Phase::reshard)] == 0)
      return fmt::format("a change to {} ranks has no event of {}", kWorlds[w], name_of(Phase::reshard));
  }
  return {};
}

KillPlan ReshardCampaign::plan_for(std::size_t world, Phase phase, std::uint64_t random) const {
  const std::uint64_t events = events_[world][static_cast<std::size_t>(phase)];
  if (events == 0) return plan_for(world, Phase::reshard, random);
  return {phase, 1 + random % events};
}

std::string ReshardCampaign::run(std::uint64_t seed, CrashTally& tally) {
  std::filesystem::remove_all(store_);
  ++tally.runs;
  Rng rng(seed);
  LifeTerms terms{.last_step = kStepsBetweenChanges, .equal_gradients = true};
  std::size_t world = rng.below(kWorlds.size());
  std::uint64_t lives = 0;
  std::string problem;
  // False when the run is over.
  const auto next_life = [&](std::size_t wanted, Phase phase, bool dies) {
    const SharedWitness witness;
    Life life{.ranks = kWorlds[wanted], .reshards = wanted != world, .terms = terms};
    if (dies) life.plan = plan_for(wanted, phase, rng.bits());
    if (const int ranks = groups_ * life.ranks; ranks > 1)
      life.slow_rank = static_cast<int>(rng.below(static_cast<std::uint64_t>(ranks) + 1)) - 1;
    ++lives;
    const LifeEnd end = live(life, *witness);
    if (end == LifeEnd::failed) {
      problem = fmt::format("{}, seed {}, life {} ({} ranks, planned: event {} of {}): {}", store_, seed, lives,
                            life.ranks, life.plan.nth, name_of(life.plan.phase), witness->text.data());
      return false;
    }
    terms.promised = std::max(terms.promised, witness->committed.load());
    terms.begun = std::max({terms.begun, witness->stepped.load(), std::int64_t{0}});
    if (end == LifeEnd::killed) {
      ++tally.hits[static_cast<std::size_t>(life.plan.phase)];
      if (has_two_stores()) ++tally.two_stores;
    } else {
      if (dies) ++tally.missed;
      world = wanted;
      if (terms.last_step == kLastStep && expected_ != witness->text.data())
        problem = fmt::format("{}, seed {}: ended in {} instead of {}", store_, seed, witness->text.data(), expected_);
      if (terms.last_step == kLastStep) return false;
    }
    return true;
  };
  if (!next_life(world, Phase::reshard, /*dies=*/false)) return problem;
  for (int change = 0; change < kChanges; ++change) {
    const std::size_t target = (world + 1 + rng.below(kWorlds.size() - 1)) % kWorlds.size();
    const std::uint64_t kills = 1 + rng.below(4);
    for (std::uint64_t k = 0; k < kills; ++k) {
      // Mostly the number that was wanted before; now and then any, the old one among them.
      const std::size_t wanted = rng.below(4) == 0 ? rng.below(kWorlds.size()) : target;
      terms.last_step = std::min(kLastStep - 1, static_cast<std::uint64_t>(terms.begun) + 1);
      if (!next_life(wanted, kPhases[rng.below(kPhases.size())], /*dies=*/true)) return problem;
    }
    terms.last_step = std::min(kLastStep - 1, static_cast<std::uint64_t>(terms.begun) + kStepsBetweenChanges);
    if (!next_life(target, Phase::reshard, /*dies=*/false)) return problem;
  }
  terms.last_step = kLastStep;
  next_life(rng.below(kWorlds.size()), Phase::reshard, /*dies=*/false);
  return problem;
}

}  // namespace hoist::test
