// SPDX-License-Identifier: Apache-2.0
#include "rank_life.hpp"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tests/support/forked.hpp>
#include <hoist/tests/zero/toy_ranks.hpp>

namespace hoist::test {

namespace {

constexpr std::chrono::minutes kHangsAfter{10};

std::uint64_t step_in(std::span<const std::byte> state) {
  std::uint64_t step = 0;
  if (state.size() == sizeof(step)) std::memcpy(&step, state.data(), sizeof(step));
  return step;
}

// Says which stage the program is in, from inside the model's passes.
void follow(ToyModel& model, WatchedRank& rank) {
  model.in_forward = [&rank](std::size_t unit) {
    if (unit + 1 == crash_shape().matrices.size()) rank.stage = Stage::backward;
  };
  model.in_backward = [&rank](std::size_t) { rank.kills.event(Phase::backward); };
}

// From a commit or from the beginning; returns the step that is there.
std::uint64_t come_to_life(ToyModel& model, WatchedRank& rank, const LifeTerms& terms) {
  Witness& witness = rank.kills.witness();
  if (!model.find_commit()) {
    model.initialize();
    if (terms.promised >= 0) throw WrongLife(fmt::format("step {} was durable and nothing was there", terms.promised));
    raise_to(witness.committed, 0);
    return 0;
  }
  rank.stage = Stage::restoring;
  witness.restoring = true;
  const RestoreReport report = model.restore();
  const auto step = static_cast<std::int64_t>(report.step);
  if (step < terms.promised || step > terms.begun)
    throw WrongLife(
        fmt::format("step {} came back, where {} was durable and {} begun", step, terms.promised, terms.begun));
  if (step_in(report.caller_state) != report.step)
    throw WrongLife(fmt::format("the caller state of step {} is step {}'s", report.step, step_in(report.caller_state)));
  witness.restored = step;
  witness.restoring = false;
  return report.step;
}

// The child must neither do anything to the store nor hang at its end.
void use_in_a_fork(Engine& engine) {
  const int code = exit_code_of_fork([&]() -> int {
    try {
      engine.settle();
    } catch (const UsageError&) {
      std::exit(kExitFinished);
    }
    return kExitFailed;
  });
  if (code != kExitFinished) throw WrongLife(fmt::format("a forked child ended with {}", code));
}

}  // namespace

void raise_to(std::atomic<std::int64_t>& value, std::int64_t to) {
  std::int64_t seen = value;
  while (seen < to && !value.compare_exchange_weak(seen, to)) {
  }
}

const ToyShape& crash_shape() {
  static const ToyShape shape{.matrices = {3000, 20000, 5000}, .norm = 40};
  return shape;
}

const char* mode_name(UpdateMode mode) {
  if (mode == UpdateMode::backward) return "backward";
  return mode == UpdateMode::forward ? "forward" : "step";
}

ToySetup crash_setup(Placement parameters, UpdateMode mode, const std::string& store, double pinned_fraction) {
  ToySetup toy = toy_setup(parameters, Placement::nvme, store);
  toy.runtime.aio_block_bytes = 64 * kKiB;  // several blocks a piece
  toy.engine.update_mode = mode;
  if (mode == UpdateMode::backward) toy.engine.gradient_clipping = 0;
  toy.engine.optimizer_pinned_fraction = toy.engine.parameters_pinned_fraction = pinned_fraction;
  return toy;
}

void say(Witness& witness, const std::string& text) {
  const std::size_t length = std::min(text.size(), witness.text.size() - 1);
  std::memcpy(witness.text.data(), text.data(), length);
  witness.text[length] = '\0';
}

std::string store_of_group(const std::string& store, int groups, int group) {
  return groups == 1 ? store : fmt::format("{}/group-{}", store, group);
}

std::string train_job(int groups, int ranks,
                      const std::function<std::string(int group, int index, const Runtime::Groups& joins)>& train) {
  std::vector<std::string> digests(static_cast<std::size_t>(groups));
  on_groups(std::vector<int>(digests.size(), ranks), [&](int group, int rank, const Runtime::Groups& joins) {
    const std::string found = train(group, group * ranks + rank, joins);
    if (rank == 0) digests[static_cast<std::size_t>(group)] = found;
  });
  return fmt::format("{}", fmt::join(digests, "; "));
}

std::string train_rank(const ToySetup& setup, const Runtime::Groups& groups, WatchedRank& rank,
                       const LifeTerms& terms) {
  Witness& witness = rank.kills.witness();
  ToySetup toy = setup;
  toy.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& options) {
    return watch(aio::make_backend(options), rank);
  };
  Runtime::Groups watched;
  watched.sharding = [&](const comm::CommunicatorOptions& options) { return watch(groups.sharding(options), rank); };
  if (groups.norm)
    watched.norm = [&](const comm::CommunicatorOptions& options) { return watch(groups.norm(options), rank); };
  Runtime runtime(toy.runtime, watched);
  ToyShape shape = crash_shape();
  shape.seed = terms.seed;
  ToyModel model(runtime, toy.engine, shape);
  model.equal_gradients = terms.equal_gradients;
  follow(model, rank);
  const std::uint64_t found = come_to_life(model, rank, terms);
  Engine& engine = model.engine();
  raise_to(witness.stepped, static_cast<std::int64_t>(found));
  for (std::uint64_t step = found + 1; step <= terms.last_step; ++step) {
    if (terms.forks) use_in_a_fork(engine);
    rank.stage = Stage::forward;
    model.pass(step);
    rank.stage = Stage::stepping;
    raise_to(witness.stepped, static_cast<std::int64_t>(step));
    const StepReport report = engine.step({.caller_state = std::as_bytes(std::span(&step, 1))});
    report.committed.then([&witness, step](const std::exception_ptr& error) {
      if (!error) raise_to(witness.committed, static_cast<std::int64_t>(step));
    });
    // Now and then a copy is waited for, so that there is one to go on from however slow they are.
    const bool mirrored = !toy.engine.mirror.directory.empty();
    if (mirrored && step % 4 == 0) engine.save("", std::as_bytes(std::span(&step, 1)), {.mirror = true}).wait();
    if (const auto copied = engine.mirror().step) raise_to(witness.mirrored, static_cast<std::int64_t>(*copied));
  }
  rank.stage = Stage::forward;  // the last update has no pass of its own
  engine.settle();
  rank.stage = Stage::ended;
  const Digests digests = state_digests(model);
  return fmt::format("{} {} {}", digests.master, digests.moment1, digests.moment2);
}

ChildLife::ChildLife(const std::function<std::string()>& life, Witness& witness)
    : witness_(witness), process_(::fork()) {
  if (process_ != 0) return;
  int status = kExitFinished;
  try {
    say(witness, life());
  } catch (const std::exception& error) {
    witness.refused = dynamic_cast<const Error*>(&error) != nullptr;
    say(witness, error.what());
    status = kExitFailed;
  }
  ::_exit(status);
}

ChildLife::~ChildLife() {
  if (process_ < 0 || has_ended()) return;
  send(SIGKILL);
  ::waitpid(process_, nullptr, 0);
}

void ChildLife::send(int signal) const {
  if (process_ > 0) ::kill(process_, signal);
}

bool ChildLife::has_ended() {
  int status = 0;
  if (!status_ && ::waitpid(process_, &status, WNOHANG) != 0) status_ = status;
  return status_.has_value();
}

LifeEnd ChildLife::wait(bool killed) {
  if (process_ < 0) {
    say(witness_, "there was no process for it");
    return LifeEnd::failed;
  }
  if (!status_) status_ = status_within(process_, kHangsAfter);
  if (!status_) {
    say(witness_, "it hangs");
    std::cerr << stacks_of(process_) << '\n';
    return LifeEnd::failed;  // the destructor kills it
  }
  const int status = *status_;
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && (witness_.killed_itself || killed)) return LifeEnd::killed;
  if (WIFEXITED(status) && WEXITSTATUS(status) == kExitFinished) return LifeEnd::finished;
  if (WIFSIGNALED(status)) say(witness_, fmt::format("died of signal {}", WTERMSIG(status)));
  return LifeEnd::failed;
}

LifeEnd live_in_child(const std::function<std::string()>& life, Witness& witness,
                      std::optional<std::chrono::microseconds> kill_after) {
  ChildLife child(life, witness);
  if (kill_after) {
    std::this_thread::sleep_for(*kill_after);
    child.send(SIGKILL);
  }
  return child.wait(kill_after.has_value());
}

}  // namespace hoist::test
