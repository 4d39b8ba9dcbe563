// SPDX-License-Identifier: Apache-2.0
// tests/zero/random_program.hpp - random training programs, and random setups that run them.
//
// A Program is the mathematics: the model, its optimizers, clipping, loss scale, and the program's actions in order. It
// consists of sessions; each one ends its engine, and the next one resumes, maybe with another number of ranks. A
// ToySetup is everything else: where state lives and how it moves. The setup must not change the result.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "toy_model.hpp"

namespace hoist::test {

struct UnitPlan {
  std::vector<ParameterSpec> parameters;  // the first one may be tied to
  bool stable_address = false;
  std::optional<std::size_t> tied_to, gathered_with;

  bool is_trainable() const;
};

enum class Act : std::uint8_t {
  train,
  evaluate,
  generate,
  step,
  discard,
  read,
  write,
  settle,
  set_rate,
  save,     // under a name
  restart,  // the engine ends, maybe in a pass, and a new one goes on from its last commit
};

struct Action {
  Act act = Act::train;
  std::vector<std::size_t> forward, backward;
  int micro_batches = 1;
  std::size_t fails_after = std::numeric_limits<std::size_t>::max();  // visits; then the pass is left by an exception
  bool nests = false;        // leases of other units and of the same one, as recomputation takes them
  bool keeps_lease = false;  // the last lease outlives the pass
  bool poisoned = false;     // gradients are not finite
  bool accumulates = false;  // gradients through accumulate(), of another type
  std::size_t stream = 0;    // which of the program's two streams
  std::uint64_t salt = 0;
};

struct Session {
  int ranks = 1;
  std::string from;  // the step that it goes back to; empty: where the last session ended
  std::vector<Action> actions;
};

struct Program {
  std::vector<UnitPlan> units;
  std::vector<GroupOptions> groups;  // the first is EngineOptions::optimizer_defaults
  double gradient_clipping = 0;
  LossScaleOptions loss_scale{};
  LearningRateSchedule schedule{};
  MicroBatchOrder order = MicroBatchOrder::horizontal;  // with several micro-batches, it changes the rounding
  int micro_batches_max = 1;
  // Keeps what update mode `backward` asks for: nothing vetoes a step, and nothing comes between a unit's last use, its
  // finish() and step().
  bool fits_backward_mode = false;
  bool saves = false;
  std::vector<Session> sessions;

  bool has_several_sessions() const { return sessions.size() > 1; }
};
Program random_program(std::uint64_t seed);
std::string describe(const Program& program);

// Everything in device memory, whole and updated in step() by one thread, nothing fetched ahead.
ToySetup plain_setup(const Program& program, const std::string& directory);
// The configuration of the program's session `session`. The directories are those of all sessions.
ToySetup random_setup(const Program& program, std::uint64_t seed, std::size_t session, const std::string& directory);
std::string describe(const ToySetup& setup);

}  // namespace hoist::test
