// SPDX-License-Identifier: Apache-2.0
// One rank of an MPI job of MpiCampaign: trains, and dies where it is told to. Started by mpirun.
#include <cstdlib>
#include <map>
#include <string>

#include <fmt/core.h>
#include <unistd.h>

#include <hoist/core/clock.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tests/support/system_calls.hpp>

#include "rank_life.hpp"
#include "watched.hpp"

namespace hoist::test {
namespace {

constexpr std::chrono::milliseconds kSlowManifest{20};

class Words {
 public:
  Words(int count, char** words) {
    for (int i = 1; i + 1 < count; i += 2) values_[words[i]] = words[i + 1];
  }
  const std::string& text(const std::string& key) const {
    const auto found = values_.find(key);
    if (found == values_.end()) throw UsageError(key + " is missing");
    return found->second;
  }
  std::int64_t number(const std::string& key) const { return std::stoll(text(key)); }

 private:
  std::map<std::string, std::string> values_;
};

int run(const Words& words) {
  const comm::CommunicatorOptions options{.timeout = std::chrono::milliseconds(words.number("--timeout-ms"))};
  const int rank = comm::make_mpi(options)->rank();
  const SharedWitness witness(words.text("--witness") + std::to_string(rank), SharedWitness::File::open);
  witness->process = ::getpid();
  const auto end = [&](const std::string& text) {
    say(*witness, text);
    witness->ended_ns = Clock::now().time_since_epoch().count();
  };
  try {
    KillPlan plan;
    if (rank == words.number("--victim"))
      plan = {static_cast<Phase>(words.number("--phase")), static_cast<std::uint64_t>(words.number("--nth"))};
    KillSwitch kills(*witness, plan);
    WatchedSystemCalls calls(kills);
    observe_system_calls(&calls);
    const UpdateMode mode = words.text("--mode") == "forward" ? UpdateMode::forward : UpdateMode::step;
    WatchedRank watched(kills, mode == UpdateMode::forward);
    if (rank == words.number("--slow-rank")) watched.manifest_delay = kSlowManifest;
    ToySetup setup = crash_setup(words.text("--parameters") == "nvme" ? Placement::nvme : Placement::pinned, mode,
                                 words.text("--store"));
    setup.runtime.comm_timeout = options.timeout;
    const LifeTerms terms{.promised = words.number("--promised"),
                          .begun = words.number("--begun"),
                          .last_step = static_cast<std::uint64_t>(words.number("--steps"))};
    const std::string digests = train_rank(
        setup, {.sharding = [](const comm::CommunicatorOptions& given) { return comm::make_mpi(given); }, .norm = {}},
        watched, terms);
    observe_system_calls(nullptr);
    end(digests);
    return kExitFinished;
  } catch (const std::exception& error) {
    end(error.what());
    witness->failed = true;
    fmt::print(stderr, "rank {}: {}\n", rank, error.what());
    return kExitFailed;
  }
}

}  // namespace
}  // namespace hoist::test

int main(int count, char** words) {
  try {
    return hoist::test::run(hoist::test::Words(count, words));
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return hoist::test::kExitFailed;
  }
}
