// SPDX-License-Identifier: Apache-2.0
// zero/passes/pass_state.hpp - the pass under way, and the micro-batches of the step that it belongs to.
//
// Threading  The program's thread.
// Errors     UsageError for calls out of order; CommError where ranks made different calls.
// Main path  begin -> (gather, release, finish of units) -> end -> ... -> step() checks agreement and gradients_taken.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <hoist/zero/options.hpp>
#include <hoist/zero/passes/gatherer.hpp>
#include <hoist/zero/passes/gradients.hpp>
#include <hoist/zero/ranks/rank_agreement.hpp>

namespace hoist::detail {

class PassState {
 public:
  PassState(const EngineOptions& options, const UnitTable& table, const RankAgreement& ranks, Gatherer& gatherer,
            Gradients& gradients)
      : options_(options), table_(table), ranks_(ranks), gatherer_(gatherer), gradients_(gradients) {}

  // Throws when the pass cannot begin now: another one is under way, or the micro-batch is out of order.
  void check_begin(Pass pass, const PassOptions& wanted) const;
  void begin(Pass pass, const PassOptions& wanted);  // Pre: check_begin()
  // Pre: a pass is under way.
  enum class End : std::uint8_t {
    complete,
    dropped,  // by an exception or discard(): with the micro-batches before it
    undone,   // by discard_pass(): as if it had not begun, where it has finished no unit's gradient; else dropped
  };
  void end(End how);
  // Forgets the micro-batches that ended since the last step. Pre: no pass is under way.
  void drop();

  bool under_way() const { return pass_.has_value(); }
  bool is(Pass pass) const { return pass_ == pass; }
  bool is_serial(std::uint64_t serial) const { return pass_ && serial_ == serial; }
  std::uint64_t serial() const { return serial_; }

  // --- the step that the train passes make
  int passes_of_step() const { return passes_of_step_; }  // train passes that make one step
  int micro_batches_of_step() const { return passes_of_step_ * micro_batches_in_pass_; }
  int passes_done() const { return passes_done_; }
  bool gradients_due() const { return gradients_due_; }  // all passes ended; step() or discard() is next
  bool completes_step() const { return pass_ == Pass::train && passes_done_ + 1 == passes_of_step_; }
  void require_gradients(const char* call) const;  // UsageError, naming `call`, unless step() can follow
  void gradients_taken();                          // step() has applied or skipped them

  // Stands for the values that decide, besides the gradients, how the next step changes state.
  struct StepFingerprint {
    std::uint64_t hash = 0;
    std::string text;
    std::function<std::string()> lines{};  // one for each group
  };
  // [C] All ranks made the same calls in the pass that ended or was left, which is compared once, and have equal
  // settings, which are compared whenever they are given: ranks that differ have mixed up their data, or would each
  // change their own shard in their own way.
  void check_agreement(const std::optional<StepFingerprint>& fingerprint = std::nullopt);
  // [C] The first half of it, before another call of all ranks; only if it has not been compared yet.
  void check_agreement_before(std::string_view call);
  // [C] The same before another exchange between the pass and its step, as often as there is one.
  void agree_on(bool of_the_pass, const std::optional<StepFingerprint>& fingerprint) const;

 private:
  bool in_vertical_order() const { return table_.gradient_sums() == GradientSums::on_device; }
  void check_micro_batch(const PassOptions& wanted) const;
  void require_finished() const;  // every trainable unit's gradient in the last pass

  const EngineOptions& options_;
  const UnitTable& table_;
  const RankAgreement& ranks_;
  Gatherer& gatherer_;
  Gradients& gradients_;
  std::optional<Pass> pass_;
  TimePoint began_{};
  std::uint64_t serial_ = 0;
  Pass ended_ = Pass::train;  // the last one
  bool agreement_due_ = false;
  int micro_batches_in_pass_ = 1;  // by the train pass under way; several in vertical order
  int passes_of_step_ = 1;
  int passes_done_ = 0;
  bool gradients_due_ = false;
};

}  // namespace hoist::detail
