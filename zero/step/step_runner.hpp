// SPDX-License-Identifier: Apache-2.0
// zero/step/step_runner.hpp - Engine::step(): from the gradients of the passes to a decision, and on to the update; and
// Engine::settle(), which carries out what that has left pending.
//
// Threading  The program's thread.
// Errors     UsageError where no step can be taken, the state unchanged; after any other error the engine has failed.
// Main path  run -> [all gradients have arrived] -> global norm -> clip, or skip -> UpdatePolicy::apply.
#pragma once

#include <memory>

#include <hoist/zero/step/update_policy.hpp>

namespace hoist::detail {

class StepRunner {
 public:
  StepRunner(const StepParts& parts, AbortNotifier& notifier)
      : parts_(parts), notifier_(notifier), policy_(make_update_policy(parts)) {}

  StepReport run(const StepOptions& options);  // [J]
  double gradient_norm();                      // [J] what the next run() will report
  void settle();
  void settle_together();  // [C] the same; an update that fails on one rank fails on all
  void drain();            // until the streams have no work
  void count_io();         // tells the ledger what the drives have moved
  UpdatePolicy& policy() { return *policy_; }

 private:
  double global_norm();  // of the mean over micro-batches, without the loss scale. Pre: all gradients have arrived

  StepParts parts_;
  AbortNotifier& notifier_;
  const std::unique_ptr<UpdatePolicy> policy_;
};

}  // namespace hoist::detail
