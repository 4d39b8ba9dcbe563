// SPDX-License-Identifier: Apache-2.0
// zero/step/step_runner.hpp - Engine::step(): from the gradients of the passes to a decision, and on to the update.
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
  UpdatePolicy& policy() { return *policy_; }
  const UpdatePolicy& policy() const { return *policy_; }

 private:
  double global_norm();  // of the sum over micro-batches, with the loss scale

  StepParts parts_;
  AbortNotifier& notifier_;
  const std::unique_ptr<UpdatePolicy> policy_;
};

}  // namespace hoist::detail
