// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <utility>

#include <fmt/format.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/ledger.hpp>
#include <hoist/core/mutex.hpp>
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
      channel_(std::move(channel)),
      state_access_(state_access),
      updates_(updates) {}

Checkpointer::~Checkpointer() { end(); }

void Checkpointer::end() noexcept {
  last_commit_.wait_quietly();  // its error was thrown where it counted
  if (saver_.joinable()) saver_.join();
  if (mirror_) mirror_->end();
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
  const Completion done = store_->commit(encode(name, state), [this](const auto& problem) { commit_barrier(problem); });
  const auto promise = std::make_shared<Promise>();
  last_commit_ = promise->completion();
  // After a wait for the commit, committed_step() has it, and the commit does not need this object any more.
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
      add_checkpoint(save.name, save.state).then([promise](std::exception_ptr error) { promise->settle(error); });
    } catch (...) {  // the commit has failed already, and tells the other ranks so itself
      promise->fail(std::current_exception());
    }
  }
  pending_saves_.clear();
  return committed;
}

void Checkpointer::fail(const Decided& decided, const std::exception_ptr& error) {
  // The other ranks learn it where they would have heard that this rank's commit is durable.
  if (stores_steps() && decided.due) fail_commit_barrier(error);
  if (decided.mirrored) mirror_->drop(error);
  const MutexLock lock(mutex_);
  commit_ahead_ = false;
  decided_error_ = error;
  for (PendingSave& save : pending_saves_) save.promise.fail(error);
  pending_saves_.clear();
}

void Checkpointer::commit_barrier(const std::exception_ptr& problem) {
  std::optional<comm::Problem> first;
  try {
    first = first_problem(*channel_, problem);
  } catch (const CommError& lost) {
    throw CommError(fmt::format("{} (whether a commit landed at all ranks)", lost.what()));
  }
  if (!first || problem) return;
  throw CommError(fmt::format("{} could not commit the step: {}", ranks_.name_in_job(first->rank), first->text));
}

void Checkpointer::fail_commit_barrier(const std::exception_ptr& problem) noexcept {
  if (peers_gone_) return;
  try {
    commit_barrier(problem);
  } catch (...) {  // the error that counts is this rank's own
  }
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
  if (const std::string problem = tiers::wrong_step_name(name); !problem.empty())
    throw UsageError(fmt::format("'{}' cannot be the name of a step: {}", name, problem));
}

Checkpointer::SaveNeeds Checkpointer::save_needs(const std::string& name, const SaveOptions& options) const {
  if (!on_nvme()) return SaveNeeds::drained_streams;
  return uncommitted_ || options.mirror || !keeps(name) ? SaveNeeds::settled_engine : SaveNeeds::nothing;
}

Completion Checkpointer::save(const std::string& name, CommitState state, std::uint64_t step,
                              const SaveOptions& options) {
  if (!on_nvme()) {
    if (saver_.joinable()) saver_.join();  // it starts the copy that was claimed before this one
    const bool mirrored = options.mirror || (mirror_ && mirror_->is_due(step));
    const Completion copied = mirrored ? mirror_->claim(step) : Completion();
    state_ = std::move(state);
    const Completion saved = save_in_background(name, step, mirrored);
    return options.mirror ? copied : saved;
  }
  Completion copied;
  if (save_needs(name, options) == SaveNeeds::settled_engine) {
    const Ledger::Apart apart(ranks_.runtime().ledger());
    if (options.mirror) copied = mirror_->claim(step);
    ranks_.together("begin the commit", [&] {
      store_->begin_step(step);
      if (std::exchange(uncommitted_, false)) bytes_written_by_saves_ += state_access_.write_resident();
    });
    state_ = state;
    commit_as(name, state_, step, options.mirror);
    if (!keeps(name)) return options.mirror ? copied : last_commit_;
  }
  const MutexLock lock(mutex_);
  if (decided_error_) std::rethrow_exception(decided_error_);
  if (options.mirror) {
    const std::array both{add_checkpoint(name, state), copied};
    return when_all(both);
  }
  if (!commit_ahead_) return add_checkpoint(name, state);
  pending_saves_.push_back({name, std::move(state), {}});
  return pending_saves_.back().promise.completion();
}

Completion Checkpointer::add_checkpoint(const std::string& name, const CommitState& state) {
  last_checkpoint_ =
      store_->add_checkpoint(name, encode(name, state), [this](const auto& problem) { commit_barrier(problem); });
  return last_checkpoint_;
}

// The state does not change before the next step, which waits for last_commit_. Pre: saver_ has ended.
Completion Checkpointer::save_in_background(const std::string& name, std::uint64_t step, bool mirrored) {
  std::vector<std::byte> encoded = encode(name, state_);
  const auto ended = std::make_shared<Promise>();
  const Completion completion = ended->completion();
  const bool changed = changed_since_save_.exchange(false);
  const auto write = [this, keeps = keeps(name), name, ended, changed, mirrored, state = std::move(encoded), step] {
    bool barrier_ahead = true;  // the other ranks are still to be told
    try {
      updates_.finish();
      store_->begin_step(step);
      if (changed) {  // else the last commit's records are this one's
        state_access_.write_resident();
        state_access_.write_frozen_resident();
      }
      const auto agree = [this](const std::exception_ptr& problem) { commit_barrier(problem); };
      const Completion committed = store_->commit(state, agree);
      barrier_ahead = false;
      committed.wait();
      if (keeps) store_->add_checkpoint(name, state, agree).wait();
      committed_step_ = static_cast<std::int64_t>(step);
      if (mirrored) mirror_->start(*store_);
      ended->complete();
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      changed_since_save_ = true;
      if (barrier_ahead) fail_commit_barrier(error);
      if (mirrored) mirror_->drop(error);
      ended->fail(error);
    }
  };
  try {
    saver_ = start_thread("hoist-save", write);
  } catch (...) {
    changed_since_save_ = true;
    fail_commit_barrier(std::current_exception());
    if (mirrored) mirror_->drop(std::current_exception());
    ended->fail(std::current_exception());
    throw;
  }
  last_commit_ = completion;
  return completion;
}

}  // namespace hoist::detail
