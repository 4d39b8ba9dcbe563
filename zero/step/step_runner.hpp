// SPDX-License-Identifier: Apache-2.0
// zero/step/step_runner.hpp - Engine::step(): from the gradients of the passes to a decision, and on to the update; and
// Engine::settle(), which carries out what that has left pending.
//
// Threading  The program's thread.
// Errors     UsageError where no step can be taken, the state unchanged; after any other error the engine has failed.
// Main path  run -> [all gradients have arrived] -> global norm -> clip, or skip -> UpdatePolicy::apply.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include <hoist/zero/step/update_policy.hpp>

namespace hoist::detail {

class StepRunner {
 public:
  StepRunner(const StepParts& parts, AbortNotifier& notifier)
      : parts_(parts), notifier_(notifier), policy_(make_update_policy(parts)) {}

  StepReport run(const StepOptions& options);  // [J]
  double gradient_norm();                      // [J] what the next run() will report
  void settle();
  void settle_in_group();  // [C] the same; an update that fails on one rank fails on all
  void drain();            // until the streams have no work
  void count_io();         // tells the ledger what the drives have moved
  UpdatePolicy& policy() { return *policy_; }

 private:
  // The norm of the mean over micro-batches, without the loss scale. Every rank of the job passes the same limit, and
  // its own caller state: UsageError on every rank when one of them is too long. Pre: all gradients have arrived.
  double global_norm(double norm_max, std::span<const std::byte> program_state);

  void check_options(const StepOptions& options);
  void decide(double norm_max, const StepOptions& options, StepReport& report);

  StepParts parts_;
  AbortNotifier& notifier_;
  const std::unique_ptr<UpdatePolicy> policy_;
  struct Sum {
    std::uint64_t pass_serial = 0;
    double of_squares = 0;
  };
  bool has_run_ = false;
  std::optional<Sum> sum_;  // this rank's, of the gradients that are due after that pass
};

}  // namespace hoist::detail
