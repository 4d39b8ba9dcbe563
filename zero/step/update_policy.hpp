// SPDX-License-Identifier: Apache-2.0
// zero/step/update_policy.hpp - when a step's updates are carried out: one class for each update mode.
//
// Every update goes through the UpdateQueue; a policy decides when units enter it, and who waits.
//
//   step      step() puts all units into the queue and waits
//   forward   step() puts all units into the queue and returns; they are updated under the next pass
//   backward  a unit enters the queue as soon as its gradient is final, in the pass that makes it
//
// Threading  The program's thread.
// Errors     A step that fails fails the engine: step() or the next call throws.
// Main path  before_finish/after_finish in the pass -> await_inputs -> apply.
#pragma once

#include <memory>
#include <string>

#include <hoist/zero/checkpoint/checkpointer.hpp>
#include <hoist/zero/memory/drives.hpp>
#include <hoist/zero/passes/pass_state.hpp>
#include <hoist/zero/update/step_settings.hpp>
#include <hoist/zero/update/update_queue.hpp>

namespace hoist::detail {

// The objects that a policy works with. All of them outlive the policy.
struct StepParts {
  Runtime& runtime;
  const EngineOptions& options;
  const UnitTable& table;
  const Memory& memory;
  const RankAgreement& ranks;
  StepSettings& settings;
  UpdateQueue& updates;
  Streams& streams;
  scheduler::Executor& executor;
  Gatherer& gatherer;
  Gradients& gradients;
  WeightReader* weight_reader;  // null unless parameters are on NVMe
  PassState& pass;
  Checkpointer& checkpoints;
  Drives* drives;  // null without a store
};

class UpdatePolicy {
 public:
  explicit UpdatePolicy(const StepParts& parts) : parts_(parts) {}
  virtual ~UpdatePolicy() = default;
  UpdatePolicy(const UpdatePolicy&) = delete;
  UpdatePolicy& operator=(const UpdatePolicy&) = delete;

  // Around Gradients::finish() of a unit in the pass that completes a step.
  virtual void before_finish(UnitId, StreamRef) {}
  virtual void after_finish() {}

  // Units are being updated for the step whose gradients are still being made: nothing may change or drop it any more.
  virtual bool is_decided() const { return false; }
  // UsageError, naming `call`, while is_decided().
  virtual void require_undecided(const char*) const {}
  // UsageError when units were updated before the step's norm was known.
  virtual void require_no_norm_limit() const {}
  // UsageError when the unit's weights may be changing already.
  virtual void require_gatherable(UnitId) const {}
  // Why the engine fails when a decided step is dropped because of `why`: a StepUndoneError, or what the step before
  // failed with.
  // Pre: is_decided().
  virtual std::exception_ptr undone(const std::string& why);

  // [C] Returns when this rank has every gradient of the step, and the step before is carried out.
  virtual void await_inputs() = 0;
  // [C] Carries the step out, or begins to. Returns a completion that is done when the step is durable; it is done
  // already if the step is not committed. `gradient_scale`: what the sums of gradients are multiplied by. Pre:
  // await_inputs(); nothing on the device uses gathered weights.
  virtual Completion apply(double gradient_scale, CommitState state) = 0;

 protected:
  WalkOptions walk(std::uint64_t step) const;
  TilePipeline::Work work(std::shared_ptr<StepUpdate> update) const;
  void update_on_device(StepUpdate& update) const;
  void await_gradients();  // until all of the step's have arrived where they are updated
  void await_updates();    // returns when no update is pending; counts the time as part of this step
  // `ended`: the queue calls it when the step's last update has ended; it commits the step, or passes its error on.
  // `committed`: done when the step is durable. Pre: nothing that can throw stands between end_of_step() and handing
  // `ended` to the queue, because only its call settles `committed`.
  struct StepEnd {
    UpdateQueue::Ended ended;
    Completion committed;
  };
  StepEnd end_of_step(std::shared_ptr<StepUpdate> update, Checkpointer::Decided decided) const;

  StepParts parts_;
};

// The policy of the mode that the options ask for.
std::unique_ptr<UpdatePolicy> make_update_policy(const StepParts& parts);

}  // namespace hoist::detail
