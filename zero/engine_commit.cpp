// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/core/digest.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/tiers/store_format.hpp>
#include <hoist/zero/detail/engine_impl.hpp>

namespace hoist {

using detail::TileAccess;
using tiers::Region;

// --- commits ---------------------------------------------------------------------------------------------------------

detail::CommitState Engine::Impl::commit_state(std::span<const std::byte> program_state) const {
  return {.scaler = scaler.is_dynamic() ? std::optional(scaler.state()) : std::nullopt,
          .program = {program_state.begin(), program_state.end()}};
}

void Engine::Impl::commit_barrier(const std::exception_ptr& problem) {
  std::optional<comm::Problem> first;
  try {
    first = detail::first_problem(*live.commit_channel, problem);
  } catch (const CommError& lost) {
    throw CommError(fmt::format("{} (whether a commit landed at all ranks)", lost.what()));
  }
  if (!first || problem) return;
  throw CommError(fmt::format("{} could not commit the step: {}", name_in_job(first->rank), first->text));
}

void Engine::Impl::fail_commit_barrier(const std::exception_ptr& problem) noexcept {
  if (peers_gone) return;
  try {
    commit_barrier(problem);
  } catch (...) {  // the error that counts is this rank's own
  }
}

Completion Engine::Impl::commit(const std::string& name, const detail::CommitState& state) {
  const Completion done =
      live.store->commit(detail::encode(name, state), [this](const auto& problem) { commit_barrier(problem); });
  const auto promise = std::make_shared<Promise>();
  last_commit = promise->completion();
  // Whoever waited for the commit finds it in committed_step(), and nothing of it still needs this engine.
  done.then([this, promise, step = step_count](std::exception_ptr error) {
    if (error) return promise->fail(error);
    if (is_durable()) committed_step = static_cast<std::int64_t>(step);
    promise->complete();
  });
  return last_commit;
}

Completion Engine::Impl::keep(const std::string& name, const detail::CommitState& state) {
  last_keep =
      live.store->keep(name, detail::encode(name, state), [this](const auto& problem) { commit_barrier(problem); });
  return last_keep;
}

Completion Engine::Impl::commit_deferred(const detail::CommitState& state, bool due) {
  const std::lock_guard lock(saves_mutex);
  commit_ahead = false;
  if (!nvme_placement() || !due) return {};
  const Completion committed = commit("", state);
  for (PendingSave& save : pending_saves) {
    const auto promise = std::make_shared<Promise>(std::move(save.promise));
    const auto settle = [promise](std::exception_ptr error) { error ? promise->fail(error) : promise->complete(); };
    try {
      keep(save.name, save.state).then(settle);
    } catch (...) {  // the commit has failed already, and tells the other ranks so itself
      settle(std::current_exception());
    }
  }
  pending_saves.clear();
  return committed;
}

void Engine::Impl::fail_pending_saves(const std::exception_ptr& error) {
  const std::lock_guard lock(saves_mutex);
  commit_ahead = false;
  update_error = error;
  for (PendingSave& save : pending_saves) save.promise.fail(error);
  pending_saves.clear();
}

std::uint64_t Engine::Impl::name_digest(const std::string& name) {
  Digest digest;
  digest.update(std::as_bytes(std::span(name)));
  return digest.value();
}

// --- saving ----------------------------------------------------------------------------------------------------------

void Engine::Impl::require_room_for(std::span<const std::byte> program_state) const {
  if (program_state.size() <= options.caller_state_bytes_max) return;
  throw UsageError(
      fmt::format("the caller state has {} bytes; at most {} were reserved (EngineOptions::caller_state_bytes_max)",
                  program_state.size(), options.caller_state_bytes_max));
}

void Engine::Impl::check_save(const std::string& name, std::span<const std::byte> program_state) const {
  if (pass || micro_batches_done > 0) throw UsageError("save() belongs between step() and the next pass");
  require_room_for(program_state);
  if (!live.store) throw UsageError("nothing to save to: the configuration names no hoist.checkpoint_path");
  if (nvme_placement() && !stores_steps()) {
    throw UsageError("the store was made with durability \"none\" and cannot be resumed; use durability \"step\"");
  }
  if (name.empty() || options.keep_steps == 0) return;
  if (const std::string problem = tiers::wrong_step_name(name); !problem.empty())
    throw UsageError(fmt::format("'{}' cannot be the name of a step: {}", name, problem));
}

Completion Engine::Impl::save(const std::string& name, std::span<const std::byte> program_state) {
  check_save(name, program_state);
  if (job().size() > 1) {
    comm::agree(job(), random_bits(name_digest(name), step_count),
                fmt::format("save '{}' of step {}", name, step_count));
  }
  if (!nvme_placement()) return save_in_background(name, program_state);
  const bool keeps = options.keep_steps > 0 && !name.empty();
  if (uncommitted || !keeps) {
    settle_together();
    const Ledger::Apart apart(runtime.ledger());
    together("begin the commit", [&] {
      live.store->begin_step(step_count);
      if (std::exchange(uncommitted, false)) write_homes(/*with_frozen=*/false);
    });
    step_state = commit_state(program_state);
    commit(name, step_state);
    if (!keeps) return last_commit;
  }
  const std::lock_guard lock(saves_mutex);
  if (update_error) std::rethrow_exception(update_error);
  if (!commit_ahead) return keep(name, commit_state(program_state));
  pending_saves.push_back({name, commit_state(program_state), {}});
  return pending_saves.back().promise.completion();
}

void Engine::Impl::write_homes(bool with_frozen) {
  live.pipeline->walk({.read = false,
                       .write_stored = false,
                       .write_resident = true,
                       .change_device_only = false,
                       .waits = WaitCause::none,
                       .in_background = true},
                      [](const TileAccess&) {});
  if (!with_frozen) return;
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    const UnitId id{u};
    if (table.unit(id).frozen.tiles().empty()) continue;
    live.record_io->store(live.record_io->whole_region(id, detail::RecordKind::frozen, Region::weights));
  }
}

// The state does not change before the next step, which waits for last_commit.
Completion Engine::Impl::save_in_background(const std::string& name, std::span<const std::byte> program_state) {
  drain();
  if (saver.joinable()) saver.join();
  const auto ended = std::make_shared<Promise>();
  last_commit = ended->completion();
  const Completion completion = last_commit;
  step_state = commit_state(program_state);
  const bool changed = changed_since_save.exchange(false);
  const auto write = [this, name, ended, changed, state = detail::encode(name, step_state), step = step_count] {
    bool landing = true;  // the other ranks are still to be told
    try {
      if (live.deferred) live.deferred->finish();
      live.store->begin_step(step);
      if (changed) write_homes(/*with_frozen=*/true);  // else the last commit's records are this one's
      const auto agree = [this](const std::exception_ptr& problem) { commit_barrier(problem); };
      const Completion committed = live.store->commit(state, agree);
      landing = false;
      committed.wait();
      if (options.keep_steps > 0 && !name.empty()) live.store->keep(name, state, agree).wait();
      committed_step = static_cast<std::int64_t>(step);
      ended->complete();
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      changed_since_save = true;
      if (landing) fail_commit_barrier(error);
      ended->fail(error);
    }
  };
  saver = start_thread("hoist-save", write);
  return completion;
}

Completion Engine::save(std::string name, std::span<const std::byte> caller_state) {
  return impl_->guarded([&] { return impl_->save(name, caller_state); });
}

}  // namespace hoist
