// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <span>
#include <utility>

#include <fmt/format.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/zero/passes/pass_state.hpp>

namespace hoist::detail {

void PassState::check_begin(Pass pass, const PassOptions& wanted) const {
  if (pass_) throw UsageError("a pass is already under way");
  if (pass > Pass::generate) throw UsageError(fmt::format("there is no pass {}", static_cast<unsigned>(pass)));
  if (pass == Pass::train) check_micro_batch(wanted);
}

void PassState::begin(Pass pass, const PassOptions& wanted) {
  check_agreement();
  if (pass == Pass::train) {
    micro_batches_in_pass_ = in_vertical_order() ? wanted.micro_batches : 1;
    passes_of_step_ = in_vertical_order() ? 1 : wanted.micro_batches;
  }
  pass_ = pass;
  if (pass == Pass::train)
    gradients_.begin_pass(
        {.first = wanted.micro_batch == 0, .last = completes_step(), .micro_batches = micro_batches_in_pass_});
  began_ = Clock::now();
  ++serial_;
  gatherer_.begin_pass(static_cast<std::size_t>(pass), /*last=*/completes_step());
}

void PassState::end(End how) {
  const bool complete = how == End::complete;
  constexpr std::array kNames{"train pass", "evaluate pass", "generate pass"};
  if (Trace* const trace = ranks_.runtime().trace(); trace != nullptr)
    trace->add(TraceRow::program, kNames[static_cast<std::size_t>(*pass_)], began_, Clock::now());
  ended_ = *pass_;
  const bool train = std::exchange(pass_, std::nullopt) == Pass::train;
  gatherer_.end_pass(complete);
  agreement_due_ = true;  // all ranks leave a pass after the same calls, however they leave it
  if (!train) return;     // gradients that wait for step() still do
  if (how == End::undone && !gradients_.finished_any()) return gradients_.clear_pass();
  if (!complete) {
    passes_done_ = 0;
    return gradients_.clear();
  }
  ++passes_done_;
  gradients_due_ = passes_done_ == passes_of_step_;
}

void PassState::drop() {
  gradients_due_ = false;
  if (std::exchange(passes_done_, 0) > 0) gradients_.clear();
}

void PassState::gradients_taken() {
  gradients_due_ = false;
  passes_done_ = 0;
}

void PassState::check_micro_batch(const PassOptions& wanted) const {
  if (wanted.micro_batches < 1 || static_cast<unsigned>(wanted.micro_batches) > options_.micro_batches_max) {
    throw UsageError(
        fmt::format("{} micro-batches in a step; the engine was made for 1 to {} "
                    "(gradient_accumulation_steps, EngineOptions::micro_batches_max)",
                    wanted.micro_batches, options_.micro_batches_max));
  }
  if (in_vertical_order() && wanted.micro_batch != 0) {
    throw UsageError(
        fmt::format("micro-batch {} of {} in a pass of its own; in vertical order (hoist.micro_batch_order) one pass, "
                    "micro-batch 0, holds them all",
                    wanted.micro_batch, wanted.micro_batches));
  }
  if (gradients_due_) throw UsageError("the last pass's gradients wait for step() or discard()");
  if (in_vertical_order()) return;
  if (wanted.micro_batch != passes_done_ || (passes_done_ > 0 && wanted.micro_batches != passes_of_step_)) {
    throw UsageError(
        fmt::format("micro-batch {} of {} begins after {} of {}: they come in order, from 0; discard() "
                    "drops those that were done",
                    wanted.micro_batch, wanted.micro_batches, passes_done_, passes_of_step_));
  }
  if (passes_done_ > 0) require_finished();
}

void PassState::require_finished() const {
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    if (table_.units()[u].is_trainable() && !gradients_.finished(UnitId{u})) {
      throw UsageError(fmt::format("unit '{}' was not finished in the pass; call finish() for every trainable unit",
                                   table_.units()[u].name));
    }
  }
}

void PassState::require_gradients(const char* call) const {
  if (pass_) throw UsageError(fmt::format("{} inside of a pass; end the PassScope first", call));
  if (!gradients_due_) {
    throw UsageError(passes_done_ == 0 ? fmt::format("{} needs a train pass before it", call)
                                       : fmt::format("{} after micro-batch {} of {}; it needs all of them", call,
                                                     passes_done_, passes_of_step_));
  }
  require_finished();
}

void PassState::check_agreement(const std::optional<StepFingerprint>& fingerprint) {
  const bool of_the_pass = std::exchange(agreement_due_, false);
  if (of_the_pass || fingerprint) agree_on(of_the_pass, fingerprint);
}

void PassState::check_agreement_before(std::string_view call) {
  if (agreement_due_) check_agreement(StepFingerprint{.hash = text_hash(call), .text = fmt::format(", then {}", call)});
}

void PassState::agree_on(bool of_the_pass, const std::optional<StepFingerprint>& fingerprint) const {
  if (table_.world_size() == 1) return;
  std::span<const scheduler::Access> trace;
  if (of_the_pass) trace = gatherer_.planner().trace();
  std::string last = "no unit";
  if (!trace.empty()) last = fmt::format("unit '{}' last", table_.units()[trace.back().item].name);
  // Equal accesses in another kind of pass, or another micro-batch, are another program too.
  constexpr std::array kNames{"train", "evaluate", "generate"};
  const std::uint64_t what = static_cast<std::uint64_t>(ended_) << 62 |
                             static_cast<std::uint64_t>(passes_of_step_) << 24 |
                             static_cast<std::uint64_t>(passes_done_);
  std::uint64_t hash =
      random_bits(random_bits(scheduler::trace_hash(trace), what), static_cast<std::uint64_t>(micro_batches_in_pass_));
  if (fingerprint) hash = random_bits(hash, fingerprint->hash);
  const RankWait wait(ranks_.runtime(), ranks_.group());
  comm::agree(ranks_.group(), hash,
              fmt::format("a {} pass ({} of {} micro-batches done{}) of {} accesses{}, {}",
                          kNames[static_cast<std::size_t>(ended_)], passes_done_, passes_of_step_,
                          micro_batches_in_pass_ > 1 ? fmt::format(", {} held", micro_batches_in_pass_) : "",
                          trace.size(), fingerprint ? fingerprint->text : "", last),
              [&] {
                std::string lines;
                for (const scheduler::Access& access : trace)
                  lines += fmt::format("unit '{}'\n", table_.units()[access.item].name);
                return lines + (fingerprint && fingerprint->lines ? fingerprint->lines() : "");
              });
}

}  // namespace hoist::detail
