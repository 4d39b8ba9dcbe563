// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/zero/checkpoint/reshard.hpp>
#include <hoist/zero/checkpoint/restore.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>
#include <hoist/zero/detail/engine_core.hpp>

namespace hoist::detail {

// --- the end ---------------------------------------------------------------------------------------------------------

// Ends what is under way. No call is left that could report an error: a step that one costs is logged, others are
// ignored. EngineParts' destructor then ends the parts.
EngineCore::~EngineCore() {
  self.reset();
  if (runtime.engine_at_work_ == this) runtime.engine_at_work_ = nullptr;
  if (!state_calls) return;  // not all parts were made: nothing is under way
  const bool unwinding = std::uncaught_exceptions() > exceptions_at_birth_;
  const bool ended_by_exception = is_made_ && !failure_ && unwinding;
  const auto attempt = [](const auto& call) -> std::exception_ptr {
    try {
      call();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  };
  attempt([&] { end_pass(PassState::End::dropped); });
  attempt([&] { executor->drain(); });
  std::exception_ptr step_lost = attempt([&] {
    // After an error that all ranks have exchanged, those that stand in a barrier are met there by this rank.
    if (failure_ && is_comm_error(failure_) && !is_exchanged_error(failure_)) checkpoints->close_barriers();
    if (failure_) checkpoints->abandon_copy();
    gradients->arrivals().await_handed_on();
    if (failure_ || !is_made_ || stepper->policy().is_decided()) return updates->stop();
    updates->finish();  // a step that was taken is not lost by an orderly end
  });
  for (platform::Stream* stream : {streams.up.get(), streams.comm.get(), streams.down.get()})
    attempt([&] { stream->synchronize(); });
  // The program's streams may still use gathered weights and gradient buffers.
  attempt([&] { gatherer->quiesce(); });
  attempt([&] { gradients->wait(); });
  // Now: a kernel's error, which the streams have told by themselves, says more.
  attempt([&] {
    if (ended_by_exception) tell_of_exception();
  });
  if (is_made_ && !failure_) {
    if (!step_lost) step_lost = attempt([&] { checkpoints->await_last(); });
    if (step_lost) say_lost(step_lost);
  }
  checkpoints->end();
}

// The program's exception takes the engine with it, while the others wait in a pass or at its begin. They are told
// after the step decided before it, which is whole on this rank and is not lost by an end of the program's.
void EngineCore::tell_of_exception() {
  try {
    checkpoints->await_last();
  } catch (...) {  // told where it was agreed on
  }
  const std::string refusal = last_refusal_.empty() ? "" : fmt::format("; refused in it: {}", last_refusal_);
  notifier->notify(std::make_exception_ptr(Error("its program ended the engine by an exception" + refusal)));
}

void EngineCore::say_lost(const std::exception_ptr& error) const {
  if (!options.uses_nvme()) return;  // the engine's end loses all state but what save() was asked for
  const auto committed = checkpoints->committed_step();
  log_error("the engine ended, and what it still had to write for step {} failed: {}; {}", settings.step_count,
            text_of(error), committed ? fmt::format("the last commit is step {}", *committed) : "nothing is committed");
}

void EngineCore::fail(const std::exception_ptr& error) {
  if (failure_) return;
  notifier->notify(error);
  failure_ = notifier->cause_of(error);
}

// --- making one ------------------------------------------------------------------------------------------------------

template <typename Call>
void EngineCore::make(Call call) {
  try {
    call();
    is_made_ = true;
  } catch (const UsageError&) {  // of what every rank was given alike
    throw;
  } catch (const ConfigError&) {
    throw;
  } catch (const CommonStoreError&) {
    throw;
  } catch (...) {
    notifier->notify(std::current_exception());
    throw;
  }
}

void EngineCore::agree_on_engine(const char* call) {
  ranks.agree_on_call(call);
  ranks.compare_groups(options, [&] { check(table.model(), options); });
  ranks.agree_on_model(call, table, options, settings.groups());
  check(table.model(), options);  // after that, since all ranks of the group refuse it alike
}

// A run that begins at a later step took its state from elsewhere: a first commit of it that only some ranks have
// cannot be resumed, and is removed. Otherwise only the store in the offload directory itself is looked at: one that
// took over from another holds what was trained, though other ranks' part of it may be missing just now.
StoreDirectory EngineCore::directory_for(const InitialState& state) {
  ranks.agree_on_beginning("begin", state);
  refuse_other_stores(ranks, options);
  const bool takes_over = state.step > 0 && !options.store_directory.empty();
  if (takes_over) refuse_any_commit(ranks, options);
  refuse_unfit_mirror(ranks, options, nullptr, "");
  if (options.store_directory.empty()) return {};
  remove_unfinished_stores(ranks, options, takes_over ? StoreOrders{} : StoreOrders{.last = 0});
  if (!takes_over) return {};
  return new_store_directory(StoreSurvey(ranks, options).newest_order() + 1, runtime.world_size());
}

void EngineCore::create(const InitialState& state, std::span<const std::byte> program_state) {
  if (!state.masters) throw UsageError("Engine::create() needs an Initializer, which makes the initial values");
  make([&] {
    agree_on_engine("Engine::create()");
    ranks.run_in_job("keep its program's state", [&] { require_room(options, program_state); });
    const StoreDirectory directory = directory_for(state);
    make_parts(directory, StoreUse::create);
    settings.step_count = state.step;
    if (state.loss_scale) settings.scaler.restore(*state.loss_scale);
    const Ledger::OutsideSteps outside_steps(runtime.ledger());
    try {
      if (!directory.name.empty()) refuse_newer_store(ranks, options, {.own = directory.name});
      ranks.run_in_job("make its initial state", [&] {
        checkpoints->open_step(state.step);
        state_access->fill(state.masters, memory->first_staging_buffer(), state.moments);
      });
      open_mirror();
    } catch (...) {
      if (store) store->remove_new();
      throw;
    }
    checkpoints->commit_open(CommitState::of(settings.scaler, program_state), state.step);
    stepper->count_io();
  });
}

// --- continuing one --------------------------------------------------------------------------------------------------

void EngineCore::restore(const RestoreOptions& restore_options) {
  make([&] {
    agree_on_engine("Engine::restore()");
    if (options.store_directory.empty())
      throw UsageError(
          "nothing can be restored: the configuration names no store (nvme_path or hoist.checkpoint_path)");
    const Ledger::OutsideSteps outside_steps(runtime.ledger());
    const RestorePlan plan = plan_restore(ranks, options, restore_options.from);
    refuse_unfit_mirror(ranks, options, &plan, restore_options.from);
    const StoreDirectory directory =
        plan.in_place ? restore_in_place(plan, restore_options) : reshard(plan, restore_options);
    checkpoints->restored(settings.step_count);
    open_mirror();
    // With nothing on NVMe, a new store has no commit before the next save(): until then the one before it stays.
    const bool has_commit = checkpoints->on_nvme() || !store->commits().empty();
    if (has_commit || !plan.from_mirror) {
      std::vector<StoreDirectory> spared{directory};
      if (!restore_options.from.empty()) spared.push_back(plan.source.directory);  // to go back once more
      remove_replaced_stores(ranks, options, has_commit ? directory : plan.source.directory, spared);
    }
    stepper->count_io();
    restored = report_of(plan, settings.step_count, checkpoints->state());
  });
}

void EngineCore::use_state(CommitState state, std::uint64_t step) {
  if (state.scaler) settings.scaler.restore(*state.scaler);
  settings.step_count = step;
  checkpoints->set_state(std::move(state));
}

RestoreReport EngineCore::report_of(const RestorePlan& plan, std::uint64_t step, const CommitState& state) {
  return {.step = step,
          .caller_state = state.program,
          .world_size = plan.source.world_size,
          .mirror = plan.from_mirror ? plan.directory : std::string()};
}

StoreDirectory EngineCore::restore_in_place(const RestorePlan& plan, const RestoreOptions& restore_options) {
  make_parts(plan.source.directory, StoreUse::open);
  refuse_newer_store(ranks, options, plan.newer_stores());
  const tiers::CommitHeader commit = choose_commit(ranks, options, *store, restore_options.from);
  std::optional<CommitState> state;
  ranks.run_in_job("look at the commit", [&] {
    store->load(commit);
    state = decode(store->caller_state());
    if (!state) throw StoreError(fmt::format("the commit in {} was not made by this engine", options.store_directory));
    if (restore_options.accept) restore_options.accept(report_of(plan, commit.step, *state));
  });
  // The newer commits, which may be whole, are then given up.
  if (!restore_options.from.empty()) verify_checkpoint(ranks, options, *store, memory->first_staging_buffer());
  adopt_commit(ranks, options, *store, commit);
  for (const tiers::ManifestDamage& damage : store->damage()) log_warning("{}", damage.text);  // soon written over
  ranks.run_in_job("read the commit", [&] {
    try {
      state_access->load();
    } catch (const CorruptionError& error) {
      throw with_remedy(error);
    }
    use_state(*std::move(state), commit.step);
  });
  return plan.source.directory;
}

// Into a new store, so that the old one is whole until this one is committed everywhere.
StoreDirectory EngineCore::reshard(const RestorePlan& plan, const RestoreOptions& restore_options) {
  std::optional<FormerState> former(std::in_place, runtime, options, table, ranks, plan, restore_options.from);
  // Its files are locked now. Their last owner may have committed before, and gone on in another store.
  refuse_changed_source(ranks, plan.from_mirror ? mirror_options(options) : options, plan.source, restore_options.from);
  refuse_newer_store(ranks, options, plan.newer_stores());
  const std::uint64_t step = former->step();
  ranks.run_in_job("look at the commit", [&] {
    if (restore_options.accept) restore_options.accept(report_of(plan, step, former->commit_state()));
  });
  const StoreSurvey survey(ranks, options);
  if (plan.from_mirror) {
    const auto newest_step = survey.newest_step_of_any();
    log_warning("rank {} continues from step {} of the mirror in {}: {}", runtime.rank(), step, plan.directory,
                newest_step ? fmt::format("not all ranks have the store any more, which was at step {}", *newest_step)
                            : "what came after it is lost with the store");
    if (plan.given_up && runtime.rank() == 0)
      log_warning(
          "the run may have gone back by a name, and have given this step up; no copy of what came after that is "
          "there");
  }
  if (ranks.group().rank() == 0) {
    const std::string former_store = plan.source.directory.in(plan.directory);
    for (const int rank : tiers::Store::ranks_in(former_store))
      for (const tiers::ManifestDamage& damage : tiers::Store::look(former_store, rank).damage)
        log_warning("{}", damage.text);
  }
  // A store of which a rank's files may only be out of reach stays until what the mirror holds has been read, and is
  // committed here: remove_replaced_stores() removes it then.
  remove_unfinished_stores(ranks, options, {.first = plan.from_mirror ? 1 : plan.source.directory.order + 1},
                           plan.from_mirror ? 0 : step);
  const StoreDirectory directory = new_store_directory(survey.newest_order() + 1, runtime.world_size());
  make_parts(directory, StoreUse::create, plan.source.commits.front().run);
  try {  // locks on the source are shared: another process may have made a new store at the same time
    NewerStores newer = plan.newer_stores();
    newer.own = directory.name;
    refuse_newer_store(ranks, options, newer);
  } catch (...) {
    store->remove_new();
    throw;
  }
  use_state(former->commit_state(), step);
  ranks.run_in_job("take over the state", [&] {
    const auto read = [&](ParameterId parameter, State of, std::uint64_t first, std::span<float> out) {
      former->read(parameter, of, first, out);
    };
    checkpoints->open_step(step);
    state_access->fill([&](ParameterId parameter, std::uint64_t first,
                           std::span<float> out) { read(parameter, State::master, first, out); },
                       memory->first_staging_buffer(), read);
    former.reset();
  });
  // With nothing on NVMe, the next save() will be the new store's first commit.
  checkpoints->commit_open(CommitState::of(settings.scaler, checkpoints->state().program), step);
  return directory;
}

void EngineCore::open_mirror() {
  if (options.mirror.directory.empty()) return;
  checkpoints->use_mirror(
      std::make_unique<Mirror>(options, table, records, ranks, store->store_number(), settings.step_count));
}

CorruptionError EngineCore::with_remedy(const CorruptionError& error) const {
  return CorruptionError(error.where, store ? remedy_for(options, *store, error.where) : std::string());
}

// --- calls -----------------------------------------------------------------------------------------------------------

void EngineCore::take_turn(const char* call) {
  EngineCore*& at_work = runtime.engine_at_work_;
  if (runtime.world_size() == 1 || at_work == this) return;
  if (at_work != nullptr) {
    if (at_work->pass->under_way())
      throw UsageError(
          fmt::format("{} while another engine of this runtime has a pass under way: with several ranks end "
                      "that pass first, or give each engine a runtime of its own",
                      call));
    try {
      at_work->executor->drain();
      at_work->streams.comm->synchronize();
    } catch (...) {  // the other engine's next call says so
    }
  }
  at_work = this;
}

void EngineCore::begin_pass(Pass kind, const PassOptions& pass_options) {
  pass->check_begin(kind, pass_options);
  take_turn("begin()");
  stepper->policy().require_undecided("begin()");
  last_refusal_.clear();
  pass->begin(kind, pass_options);
}

void EngineCore::end_pass(PassState::End how) {
  if (!pass->under_way()) return;
  if (how != PassState::End::complete && stepper->policy().is_decided())
    fail(stepper->policy().undone("its pass was left before its end"));
  pass->end(how);
  stepper->count_io();  // no step may follow an evaluation
}

void EngineCore::discard() {
  if (pass->under_way()) return end_pass(PassState::End::dropped);
  if (stepper->policy().is_decided()) fail(stepper->policy().undone("it was discarded"));
  pass->drop();
}

bool EngineCore::discard_pass() {
  end_pass(PassState::End::undone);
  return pass->passes_done() > 0;
}

double EngineCore::gradient_norm() {
  take_turn("gradient_norm()");
  return stepper->gradient_norm();
}

StepReport EngineCore::step(const StepOptions& step_options) {
  take_turn("step()");
  const StepReport report = stepper->run(step_options);
  if (metrics) {
    const auto committed = checkpoints->committed_step();
    const auto mirrored = checkpoints->mirror() ? checkpoints->mirror()->step() : std::nullopt;
    metrics->write(report, runtime.ledger(), committed, mirrored);
  }
  return report;
}

}  // namespace hoist::detail
