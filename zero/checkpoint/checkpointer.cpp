// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <utility>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/ledger.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/printable.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/tiers/store_format.hpp>
#include <hoist/zero/checkpoint/checkpointer.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>

namespace hoist::detail {

Checkpointer::Checkpointer(const EngineOptions& options, const RankAgreement& ranks, tiers::Store* store,
                           std::unique_ptr<comm::Communicator> channel, StateAccess& state_access, UpdateQueue& updates)
    : options_(options),
      ranks_(ranks),
      store_(store),
      barrier_(std::move(channel), ranks, "commit the step"),
      state_access_(state_access),
      updates_(updates) {}

Checkpointer::~Checkpointer() { end(); }

void Checkpointer::end() noexcept {
  last_commit_.wait_quietly();  // its error was thrown where it counted
  if (saver_.joinable()) saver_.join();
  if (mirror_) mirror_->end();
}

void Checkpointer::close_barriers() {
  barrier_.close();
  if (mirror_) mirror_->close_barrier();
}

void Checkpointer::abandon_copy() {
  if (mirror_) mirror_->abandon();
}

std::optional<std::uint64_t> Checkpointer::committed_step() const {
  const std::int64_t step = committed_step_;
  return step < 0 ? std::nullopt : std::optional(static_cast<std::uint64_t>(step));
}

// --- commits ---------------------------------------------------------------------------------------------------------

void Checkpointer::open_step(std::uint64_t step) {
  last_commit_.wait();
  if (on_nvme()) store_->begin_step(step);
}

void Checkpointer::reopen_step(std::uint64_t step) {
  if (on_nvme()) store_->begin_step(step);
  if (!std::exchange(uncommitted_, false)) return;
  state_access_.write_resident();
  store_->begin_step(step);
}

void Checkpointer::commit_open(CommitState state, std::uint64_t step) {
  set_state(std::move(state));
  if (on_nvme()) commit_as("", state_, step, /*mirrored=*/false).wait();
}

void Checkpointer::settle(std::uint64_t step) {
  last_commit_.wait();
  if (uncommitted_) store_->begin_step(step);
  Completion checkpoint;
  {
    const MutexLock lock(mutex_);
    checkpoint = last_checkpoint_;
  }
  checkpoint.wait();
}

Completion Checkpointer::commit_as(const std::string& name, const CommitState& state, std::uint64_t step,
                                   bool mirrored) {
  const Completion done = store_->commit(encode(name, state), [this](const auto& problem) { barrier_.agree(problem); });
  const auto promise = std::make_shared<Promise>();
  last_commit_ = promise->completion();
  // The program may destroy this object as soon as the promise is done. So committed_step_ is set, and the copy begun,
  // before that.
  done.then([this, promise, step, mirrored](std::exception_ptr error) {
    if (error && mirrored) mirror_->drop(error);
    if (error) return promise->fail(error);
    if (is_durable()) committed_step_ = static_cast<std::int64_t>(step);
    if (mirrored) mirror_->start(*store_);
    promise->complete();
  });
  return last_commit_;
}

Checkpointer::Decided Checkpointer::decide(std::uint64_t step, CommitState state) {
  const bool due = is_due(step);
  const bool mirrored = due && stores_steps() && mirror_ && mirror_->is_due(step);
  if (mirrored) mirror_->claim(step);
  state_ = std::move(state);
  uncommitted_ = stores_steps() && !due;
  changed_since_save_ = true;
  const MutexLock lock(mutex_);
  commit_ahead_ = due && stores_steps();
  return {.step = step, .state = state_, .due = due, .mirrored = mirrored};
}

Completion Checkpointer::commit(const Decided& decided) {
  const MutexLock lock(mutex_);
  commit_ahead_ = false;
  if (!on_nvme() || !decided.due) return {};
  const Completion committed = commit_as("", decided.state, decided.step, decided.mirrored);
  for (PendingSave& save : pending_saves_) {
    const auto promise = std::make_shared<Promise>(std::move(save.promise));
    try {
      keep_step(save.name, save.state).then([promise](std::exception_ptr error) { promise->settle(error); });
    } catch (...) {  // the commit has failed already, and tells the other ranks so itself
      promise->fail(std::current_exception());
    }
  }
  pending_saves_.clear();
  return committed;
}

void Checkpointer::fail(const Decided& decided, const std::exception_ptr& error) {
  // The other ranks learn it where they would have heard that this rank's commit is durable.
  if (stores_steps() && decided.due) barrier_.tell(error);
  if (decided.mirrored) mirror_->drop(error);
  const MutexLock lock(mutex_);
  commit_ahead_ = false;
  decided_error_ = error;
  for (PendingSave& save : pending_saves_) save.promise.fail(error);
  pending_saves_.clear();
}

// --- saves -----------------------------------------------------------------------------------------------------------

void Checkpointer::check_save(const std::string& name, const SaveOptions& options) const {
  if (options.mirror && !mirror_)
    throw UsageError("there is no mirror to save to: the configuration has no hoist.mirror");
  if (store_ == nullptr) throw UsageError("nothing to save to: the configuration names no hoist.checkpoint_path");
  if (on_nvme() && !stores_steps()) {
    throw UsageError("the store was made with durability \"none\" and cannot be resumed; use durability \"step\"");
  }
  if (!keeps(name)) return;
  if (const std::string problem = tiers::checkpoint_name_problem(name); !problem.empty())
    throw UsageError(fmt::format("'{}' cannot be the name of a step: {}", on_one_line(name), problem));
}

Checkpointer::SaveNeeds Checkpointer::save_needs(const std::string& name, const SaveOptions& options) const {
  if (!on_nvme()) return SaveNeeds::drained_streams;
  return uncommitted_ || options.mirror || !keeps(name) ? SaveNeeds::settled_engine : SaveNeeds::nothing;
}

Completion Checkpointer::save(const std::string& name, CommitState state, std::uint64_t step,
                              const SaveOptions& options, SaveNeeds needs) {
  if (!on_nvme()) {
    if (saver_.joinable()) saver_.join();  // it starts the copy that was claimed before this one
    const bool mirrored = options.mirror || (mirror_ && mirror_->is_due(step));
    const Completion copied = mirrored ? mirror_->claim(step) : Completion();
    state_ = std::move(state);
    const Completion saved = save_in_background(name, step, mirrored);
    return options.mirror ? copied : saved;
  }
  Completion copied;
  if (needs == SaveNeeds::settled_engine) {
    const Ledger::OutsideSteps outside_steps(ranks_.runtime().ledger());
    if (options.mirror) copied = mirror_->claim(step);
    ranks_.run_in_group("begin the commit", [&] {
      store_->begin_step(step);
      if (std::exchange(uncommitted_, false)) bytes_written_by_saves_ += state_access_.write_resident();
    });
    state_ = state;
    commit_as(name, state_, step, options.mirror);
    if (!keeps(name)) return options.mirror ? copied : last_commit_;
    const MutexLock lock(mutex_);
    const std::array both{add_checkpoint(name, state_), copied};
    return when_all(both);
  }
  state_ = state;
  const MutexLock lock(mutex_);
  if (decided_error_) std::rethrow_exception(decided_error_);
  if (!commit_ahead_) return keep_step(name, state);
  pending_saves_.push_back({name, std::move(state), {}});
  return pending_saves_.back().promise.completion();
}

// The step's commit is made again first: a restore without a name finds the caller state of this save.
Completion Checkpointer::keep_step(const std::string& name, const CommitState& state) {
  // It may have failed before the checkpoint is asked for; settle() then waits for this error.
  last_checkpoint_ = store_->recommit(encode(name, state), [this](const auto& problem) { barrier_.agree(problem); });
  return add_checkpoint(name, state);
}

Completion Checkpointer::add_checkpoint(const std::string& name, const CommitState& state) {
  last_checkpoint_ =
      store_->add_checkpoint(name, encode(name, state), [this](const auto& problem) { barrier_.agree(problem); });
  return last_checkpoint_;
}

// The state does not change before the next step, which waits for last_commit_. Pre: saver_ has ended.
Completion Checkpointer::save_in_background(const std::string& name, std::uint64_t step, bool mirrored) {
  const auto save = std::make_shared<BackgroundSave>(BackgroundSave{.name = name,
                                                                    .encoded = encode(name, state_),
                                                                    .step = step,
                                                                    .changed = changed_since_save_.exchange(false),
                                                                    .mirrored = mirrored});
  const Completion ended = save->promise.completion();
  try {
    saver_ = start_thread("hoist-save", [this, save] { write_save(*save); });
  } catch (...) {
    give_up(*save, std::current_exception());
    throw;
  }
  last_commit_ = ended;
  return ended;
}

void Checkpointer::write_save(BackgroundSave& save) {
  try {
    updates_.finish();
    store_->begin_step(save.step);
    if (save.changed) {  // else the last commit's records are this one's
      state_access_.write_resident();
      state_access_.write_frozen_resident();
    }
    const auto agree = [this](const std::exception_ptr& problem) { barrier_.agree(problem); };
    const Completion committed = store_->commit(save.encoded, agree);
    save.barrier_ahead = false;
    committed.wait();
    if (keeps(save.name)) store_->add_checkpoint(save.name, save.encoded, agree).wait();
    committed_step_ = static_cast<std::int64_t>(save.step);
    if (save.mirrored) mirror_->start(*store_);
    save.promise.complete();
  } catch (...) {
    give_up(save, std::current_exception());
  }
}

void Checkpointer::give_up(BackgroundSave& save, const std::exception_ptr& error) {
  changed_since_save_ = true;
  if (save.barrier_ahead) barrier_.tell(error);
  if (save.mirrored) mirror_->drop(error);
  save.promise.fail(error);
}

}  // namespace hoist::detail
