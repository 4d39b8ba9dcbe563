// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/float_environment.hpp>
#include <hoist/core/log.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>
#include <hoist/zero/passes/waits.hpp>
#include <hoist/zero/step/step_runner.hpp>

namespace hoist::detail {

namespace {

// What each rank sends to all ranks of the job: its part of the norm, the limit of its step, and whether it has to
// refuse the step. gradient_norm() takes no step, and sends kOnlyAsked.
struct NormPart {
  double sum_of_squares = 0;
  double norm_max = 0;
  std::uint64_t long_state_bytes = 0;  // of a caller state that the rank has no room for; 0: it has
};
constexpr double kOnlyAsked = -1;

}  // namespace

double StepRunner::global_norm(double norm_max, std::span<const std::byte> program_state) {
  if (!sum_ || sum_->pass_serial != parts_.pass.serial())
    sum_ = {parts_.pass.serial(), parts_.gradients.arrivals().sum_of_squares()};
  const NormPart mine{.sum_of_squares = sum_->of_squares,
                      .norm_max = norm_max,
                      .long_state_bytes = has_room(parts_.options, program_state) ? 0 : program_state.size()};
  std::vector<NormPart> all;
  try {
    const RankWait wait(parts_.runtime, parts_.ranks.job());
    all = comm::values_of_all(parts_.ranks.job(), mine);
  } catch (const CommError& lost) {
    throw CommError(fmt::format("{} (the gradient norm of step {})", lost.what(), parts_.settings.step_count + 1));
  }
  double total = 0;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    total += all[rank].sum_of_squares;
    if (all[rank].norm_max == norm_max) continue;
    const auto call = [](double limit) {
      return limit == kOnlyAsked ? std::string("gradient_norm()") : fmt::format("step(), clipping to {:g}", limit);
    };
    throw ExchangedError(fmt::format(
        "the ranks have diverged before step {}: rank {} of the job called {}, and rank {} {}",
        parts_.settings.step_count + 1, rank, call(all[rank].norm_max), parts_.ranks.job().rank(), call(norm_max)));
  }
  require_room(parts_.options, program_state);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].long_state_bytes == 0) continue;
    throw UsageError(
        fmt::format("{} cannot take the step: its caller state has {} bytes, more than were reserved there; "
                    "raise hoist.caller_state_max (EngineOptions::caller_state_bytes_max)",
                    parts_.ranks.name_in_job(static_cast<int>(rank)), all[rank].long_state_bytes));
  }
  return std::sqrt(total) * parts_.settings.gradient_mean(parts_.pass.passes_of_step());
}

double StepRunner::gradient_norm() {
  const FloatEnvironment environment;
  parts_.pass.require_gradients("gradient_norm()");
  policy_->require_undecided("gradient_norm()");
  parts_.pass.agree_on(/*of_the_pass=*/true, PassState::StepFingerprint{.hash = 0, .text = ", then gradient_norm()"});
  policy_->await_inputs();
  return global_norm(kOnlyAsked, {});
}

void StepRunner::check_options(const StepOptions& options) {
  parts_.pass.require_gradients("step()");
  if (const auto made = static_cast<unsigned>(parts_.pass.micro_batches_of_step());
      !std::exchange(has_run_, true) && made < parts_.options.micro_batches_max)
    log_info(
        "the first step has {} of at most {} micro-batches (gradient_accumulation_steps): pass their number to begin()",
        made, parts_.options.micro_batches_max);
  if (!(options.gradient_norm_max > 0)) {
    throw UsageError(
        fmt::format("step() with a largest norm of {}, which leaves no gradient: leave it out for no limit",
                    options.gradient_norm_max));
  }
  if (std::isfinite(options.gradient_norm_max)) policy_->require_no_norm_limit();
}

// The step is applied if its norm is finite, and skipped otherwise.
void StepRunner::decide(double norm_max, const StepOptions& options, StepReport& report) {
  StepSettings& settings = parts_.settings;
  report.learning_rate = settings.learning_rate(settings.reported_group());
  report.loss_scale = settings.scaler.scale();
  report.gradient_norm = global_norm(norm_max, options.caller_state);
  report.applied = std::isfinite(report.gradient_norm);
  if (!report.applied && policy_->is_decided()) {
    notifier_.all_ranks_told();
    std::rethrow_exception(policy_->undone("a gradient is not finite"));
  }
  try {
    settings.scaler.update(/*overflow=*/!report.applied);  // before the commit, which the next scale belongs to
  } catch (...) {
    notifier_.all_ranks_told();  // so that the commit of the step before is not broken off
    throw;
  }
}

StepReport StepRunner::run(const StepOptions& options) {
  const FloatEnvironment environment;  // of the norm, the clip factor and the rates; the program may have another
  const TraceSpan span(parts_.runtime.trace(), TraceRow::program, "step");
  check_options(options);
  StepSettings& settings = parts_.settings;
  const double norm_max = settings.gradient_norm_max(options.gradient_norm_max);
  parts_.pass.check_agreement(PassState::StepFingerprint{settings.hash(norm_max), settings.describe(norm_max),
                                                         [&settings] { return settings.describe_groups(); }});
  policy_->await_inputs();

  StepReport report;
  const double mean = settings.gradient_mean(parts_.pass.passes_of_step());  // with the loss scale before the decision
  decide(norm_max, options, report);
  parts_.pass.gradients_taken();
  if (report.applied) {
    if (std::isfinite(norm_max)) report.clip_factor = std::min(1.0, norm_max / (report.gradient_norm + 1e-6));
    parts_.gatherer.quiesce();
    report.committed =
        policy_->apply(report.clip_factor * mean, CommitState::of(settings.scaler, options.caller_state));
  } else {
    report.committed = parts_.checkpoints.last();
  }
  if (!parts_.checkpoints.stores_steps()) report.committed = {};
  parts_.gradients.clear();
  report.step = settings.step_count;
  count_io();
  return report;
}

void StepRunner::settle() {
  policy_->require_undecided("settle()");
  if (!parts_.pass.under_way()) drain();
  const UpdateWait wait(parts_.updates);
  parts_.updates.finish();
  parts_.checkpoints.settle(parts_.settings.step_count);
  wait.count_into(parts_.runtime.ledger(), wait.elapsed());
  count_io();
}

void StepRunner::settle_in_group() {
  parts_.ranks.run_in_group("carry out the last step", [&] {
    const UpdateWait wait(parts_.updates);
    parts_.updates.finish();
    wait.count_into(parts_.runtime.ledger(), wait.elapsed());
  });
  settle();
}

void StepRunner::drain() {
  parts_.executor.drain();
  parts_.streams.synchronize();
}

// With no state on NVMe, drives serve only explicit saves. These bytes count apart from every step's.
void StepRunner::count_io() {
  if (parts_.drives == nullptr) return;
  const Mirror* const mirror = parts_.checkpoints.mirror();
  parts_.drives->count_into(
      parts_.runtime.ledger(), parts_.checkpoints.on_nvme(),
      {.read = mirror ? mirror->store_bytes_read() : 0, .written = parts_.checkpoints.bytes_written_by_saves()});
}

}  // namespace hoist::detail
