// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/comm/communicator.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/zero/checkpoint/reshard.hpp>
#include <hoist/zero/checkpoint/restore.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>
#include <hoist/zero/detail/engine_core.hpp>

namespace hoist::detail {

namespace {

const EngineOptions& checked(const EngineOptions& options, const Runtime& runtime, const Model& model) {
  check(options, runtime.options(), runtime.world_size());
  for (const std::optional<GroupOptions>& group : model.added_groups())
    if (group) check(*group, options, runtime.options());
  const std::optional<DType> wanted = options.weights_dtype;
  for (const ParameterSpec& spec : model.parameters()) {
    if (!wanted || !spec.trainable || spec.dtype == DType::fp32 || spec.dtype == *wanted) continue;
    const std::string key =
        *wanted == DType::fp32 ? "bf16.enabled is false" : fmt::format("{}.enabled", dtype_name(*wanted));
    throw UsageError(fmt::format(
        "parameter '{}' is {}, but the configuration asks for {} weights ({}); declare it so, or change the "
        "configuration",
        spec.name, dtype_name(spec.dtype), dtype_name(*wanted), key));
  }
  return options;
}

}  // namespace

EngineCore::EngineCore(Runtime& runtime_in, const EngineOptions& options_in, Model model)
    : runtime(runtime_in),
      options(checked(options_in, runtime_in, model)),
      table(model, state_forms(options, model), runtime.world_size(), gradient_sums(options)),
      settings(options, group_options(options, table.model()), runtime.rank()),
      notifier(std::make_shared<AbortNotifier>(runtime)),
      ranks(runtime, *notifier),
      records(table) {
  self = std::shared_ptr<EngineCore>(this, [](EngineCore*) {});
}

// --- the end ---------------------------------------------------------------------------------------------------------

// Threads first, then what they use. Errors have been delivered, or nobody wants them any more.
EngineCore::~EngineCore() {
  self.reset();
  const bool unwinding = std::uncaught_exceptions() > exceptions_at_birth_;
  const bool ended_by_exception = alive_ && !failure && unwinding && (pass->under_way() || pass->was_left());
  const auto attempt = [](const auto& call) {
    try {
      call();
    } catch (...) {
    }
  };
  attempt([&] { end_pass(/*complete=*/false); });
  attempt([&] {
    if (executor) executor->drain();
  });
  attempt([&] {
    if (checkpoints && failed_in_communication()) checkpoints->peers_are_gone();
    if (checkpoints && failure) checkpoints->abandon_copy();
    if (!updates) return;
    if (gradients) gradients->await_handed_on();
    if (failure || !alive_ || stepper->policy().is_decided()) return updates->stop();
    updates->finish();  // a step that was taken is not lost by an orderly end
  });
  attempt([&] {
    if (ended_by_exception) tell_of_exception();
  });
  for (platform::Stream* stream : {streams.up.get(), streams.comm.get(), streams.down.get()}) {
    attempt([&] {
      if (stream != nullptr) stream->synchronize();
    });
  }
  // The program's streams may still use gathered weights and gradient buffers.
  attempt([&] {
    if (gatherer) gatherer->quiesce();
  });
  attempt([&] {
    if (gradients) gradients->wait();
  });
  if (checkpoints) checkpoints->end();
  stepper.reset();
  pass.reset();
  gradients.reset();
  gatherer.reset();
  executor.reset();
  weight_reader.reset();
  updates.reset();
  store.reset();  // its commit thread uses the checkpointer's channel
  checkpoints.reset();
  state_access.reset();
  pipeline.reset();
  record_io.reset();
  streams = {};
  const bool drive_is_lost = drives && drives->gave_up();
  drives.reset();
  gathering_group.reset();
  runtime.device().unregister_host(std::exchange(registered_, {}));
  if (drive_is_lost) memory->quarantine();
  memory.reset();
  metrics.reset();
  notifier->disarm();
}

// The program's exception left a pass and takes the engine with it, while the others wait in that pass. They are told
// after the step decided before it, which is whole on this rank and is not lost by an end of the program's.
void EngineCore::tell_of_exception() {
  try {
    checkpoints->await_last();
  } catch (...) {  // told where it was agreed on
  }
  const std::string refusal = last_refusal_.empty() ? "" : fmt::format("; refused in it: {}", last_refusal_);
  notifier->notify(std::make_exception_ptr(Error("its program left a pass by an exception" + refusal)));
}

void EngineCore::fail(const std::exception_ptr& error) {
  if (failure) return;
  notifier->notify(error);
  failure = notifier->cause_of(error);
}

bool EngineCore::failed_in_communication() const {
  if (!failure) return false;
  try {
    std::rethrow_exception(failure);
  } catch (const CommError&) {
    return true;
  } catch (...) {
    return false;
  }
}

// --- making one ------------------------------------------------------------------------------------------------------

template <typename Call>
void EngineCore::make(Call call) {
  try {
    call();
    alive_ = true;
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

// A loss scale that the program does not know of would shrink its gradients without a word.
void EngineCore::require_model() const {
  if (table.units().empty()) throw UsageError("the engine has no units");
  if (options.weights_dtype != DType::fp16) return;
  const bool has_fp16 = std::ranges::any_of(
      table.specs(), [](const ParameterSpec& spec) { return spec.trainable && spec.dtype == DType::fp16; });
  if (has_fp16) return;
  throw ConfigError("fp16.enabled",
                    "no trainable parameter of the program is fp16: declare its matrices so (ParameterSpec::dtype) and "
                    "multiply its loss by Engine::loss_scale(), or remove the section fp16");
}

Initializer EngineCore::checked_masters(const Initializer& masters) const {
  return [&](ParameterId parameter, std::uint64_t first, std::span<float> out) {
    masters(parameter, first, out);
    for (const float value : out) {
      const ParameterSpec& spec = table.spec(parameter);
      if (master_is_committable(value, spec.dtype)) continue;
      if (!std::isfinite(value))
        throw UsageError(fmt::format("the initial value {} of parameter '{}' is not finite", value, spec.name));
      throw UsageError(fmt::format("the initial value {} of parameter '{}' is too large for {}", value, spec.name,
                                   dtype_name(spec.dtype == DType::fp16 ? DType::fp16 : DType::bf16)));
    }
  };
}

MomentInitializer EngineCore::checked_moments(const MomentInitializer& moments) const {
  if (!moments) return {};
  return [&](ParameterId parameter, State moment, std::uint64_t first, std::span<float> out) {
    moments(parameter, moment, first, out);
    for (const float value : out) {
      if (std::isfinite(value) && (moment != State::moment2 || value >= 0)) continue;
      throw UsageError(fmt::format("{} cannot be a {} moment of parameter '{}'", value,
                                   moment == State::moment1 ? "first" : "second", table.spec(parameter).name));
    }
  };
}

void EngineCore::agree_on_begin(const char* what, const InitialState& state) const {
  if (ranks.job().size() == 1) return;
  const LossScaler::State scaler = state.loss_scale.value_or(LossScaler::State{});
  std::uint64_t hash = random_bits(state.step, state.loss_scale.has_value());
  hash = random_bits(hash, std::bit_cast<std::uint64_t>(scaler.scale));
  hash = random_bits(hash, scaler.steps_without_overflow);
  hash = random_bits(hash, scaler.hysteresis_left);
  const std::string scale = state.loss_scale ? fmt::format(", loss scale {} ({}, {})", scaler.scale,
                                                           scaler.steps_without_overflow, scaler.hysteresis_left)
                                             : std::string();
  comm::agree(ranks.job(), hash, fmt::format("{} at step {}{}", what, state.step, scale));
}

// One that begins at a later step took its state over: of such a store, a first commit that only some ranks have is
// known to be worth nothing.
StoreDirectory EngineCore::directory_for(const InitialState& state) {
  agree_on_begin("begin", state);
  const StoreSearch search(ranks, options);
  search.refuse_others();
  if (state.step == 0 || options.store_directory.empty()) return {};
  search.refuse_any();
  remove_unfinished_stores(ranks, options, /*after=*/0, {});
  return new_store_directory(search.newest_order() + 1, runtime.world_size());
}

void EngineCore::create(const InitialState& state, std::span<const std::byte> program_state) {
  if (!state.masters) throw UsageError("Engine::create() needs an Initializer, which makes the initial values");
  make([&] {
    ranks.compare_groups(options, [&] { require_model(); });
    ranks.agree_on_model("Engine::create()", table, options, settings.groups());
    ranks.all_together("keep its program's state", [&] { require_room(options, program_state); });
    const StoreDirectory directory = directory_for(state);
    refuse_used_mirror(ranks, options);
    make_parts(directory, StoreUse::create);
    settings.step_count = state.step;
    if (state.loss_scale) settings.scaler.restore(*state.loss_scale);
    const Ledger::Apart apart(runtime.ledger());
    try {
      ranks.all_together("make its initial state", [&] {
        checkpoints->open_step(state.step);
        state_access->fill(checked_masters(state.masters), unused_staging_buffer(), checked_moments(state.moments));
      });
      open_mirror();
    } catch (...) {
      if (store) store->remove_new();
      throw;
    }
    checkpoints->set_state(CommitState::of(settings.scaler, program_state));
    if (!checkpoints->on_nvme()) return;
    checkpoints->commit_open(state.step).wait();
    book_io();
  });
}

void EngineCore::make_parts(const StoreDirectory& directory, StoreUse use) {
  require_model();
  directory_ = directory;
  const bool create_store = use == StoreUse::create;
  const std::uint64_t run = create_store ? ranks.agree_on_run() : 0;
  // Ranks that died between each other's first commits left one here and none there: nothing that could be resumed.
  const bool first_commit_is_useless =
      create_store && ranks.job().size() > 1 && !StoreSearch(ranks, options).find_commit();
  if (const int size = detail::gathering_group(options, runtime.world_size()); size > 1)
    gathering_group = runtime.communicator().split(size);
  ranks.all_together(create_store ? "take its memory and make its store" : "take its memory and open its store", [&] {
    if (ranks.job().rank() == 0 && !options.metrics_path.empty())
      metrics = std::make_unique<StepMetrics>(options.metrics_path, runtime.ledger());
    lay_out(directory, use, run, first_commit_is_useless);
  });
  // Which units are gathered when follows from the gather memory, and is the same on every rank.
  const std::uint64_t mine = memory->gather_memory().size();
  const std::uint64_t common = ranks.smallest(mine);
  if (common < mine)
    log_info("rank {} has {} of device memory for gathered units and uses {}: a rank with less has no more",
             runtime.rank(), format_bytes(mine), format_bytes(common));
  ranks.all_together("start its streams and threads", [&] { start(common); });
  checkpoints = std::make_unique<Checkpointer>(options, ranks, store.get(), store ? ranks.job().duplicate() : nullptr,
                                               *state_access, *updates);
  pass = std::make_unique<PassState>(options, table, ranks, *gatherer, *gradients);
  stepper = std::make_unique<StepRunner>(StepParts{.runtime = runtime,
                                                   .options = options,
                                                   .table = table,
                                                   .memory = *memory,
                                                   .ranks = ranks,
                                                   .settings = settings,
                                                   .updates = *updates,
                                                   .streams = streams,
                                                   .executor = *executor,
                                                   .gatherer = *gatherer,
                                                   .gradients = *gradients,
                                                   .weight_reader = weight_reader.get(),
                                                   .pass = *pass,
                                                   .checkpoints = *checkpoints},
                                         *notifier);
}

void EngineCore::lay_out(const StoreDirectory& directory, StoreUse use, std::uint64_t run, bool replace_first_commit) {
  const bool with_store = !options.store_directory.empty();
  tiers::StoreOptions wanted = store_options(options, table, records, runtime.rank(), directory, runtime.trace());
  const std::uint64_t store_memory = store_cost(options, table, records, runtime.rank()).memory_bytes;
  const MachineFacts facts = machine_facts(runtime, store_memory);
  choose_pinned_shares(options, table, facts.device_access, free_for_pinned(options, table, facts));
  memory = std::make_unique<Memory>(runtime, options, table, store_memory);

  if (const std::span<std::byte> pinned = memory->pinned(); !pinned.empty()) {
    runtime.device().register_host(pinned);  // in one: a copy may not cross two registrations
    registered_ = pinned;
  }
  if (!with_store) return;
  drives = std::make_unique<Drives>(runtime.options(), options, memory->io_slices());
  if (use == StoreUse::open) {
    store = tiers::Store::open(wanted, drives->engines());
    return;
  }
  wanted.store_number = run + static_cast<std::uint64_t>(runtime.rank());
  wanted.replace_first_commit = replace_first_commit;
  wanted.stripe_weights = drives->measured_weights();
  store = tiers::Store::create(wanted, drives->engines());
}

void EngineCore::start(std::uint64_t gather_bytes) {
  streams.up = runtime.device().create_stream("up");
  streams.down = runtime.device().create_stream("down");
  streams.comm = runtime.device().create_stream("comm");
  executor = std::make_unique<scheduler::Executor>("hoist-submit");
  record_io = std::make_unique<RecordIo>(runtime, table, *memory, records, store.get());
  pipeline = std::make_unique<TilePipeline>(runtime, table, *memory, records, *record_io, store.get());
  updates = std::make_unique<UpdateQueue>(*pipeline, table, update_order(options));
  if (options.parameters == Placement::nvme) {
    weight_reader = std::make_unique<WeightReader>(
        *store, memory->plan().units(), records, memory->staging_buffers(),
        [this](UnitId unit) { return newest_weights_written(unit); },
        [this](UnitId unit, std::byte* target) { return updates->deliver(unit, target); });
  }
  gatherer = std::make_unique<Gatherer>(runtime, options, table, *memory, gather_bytes, *executor, streams,
                                        weight_reader.get(), *updates, *notifier, gathering_group.get());
  gradients = std::make_unique<Gradients>(runtime, options, table, *memory, *executor, streams, *updates, *notifier);
  state_access =
      std::make_unique<StateAccess>(runtime.rank(), options, table, settings.groups(), *record_io, *pipeline);
}

std::span<std::byte> EngineCore::unused_staging_buffer() const {
  const auto& buffers = memory->staging_buffers();
  return buffers.empty() ? std::span<std::byte>() : buffers.front();
}

// Where the unit's update is still under way, first that, then its writes.
Completion EngineCore::newest_weights_written(UnitId unit) const {
  const Completion updated = updates->updated(unit);
  if (updated.done()) return updated.error() ? updated : pipeline->weights_written(unit);
  const auto promise = std::make_shared<Promise>();
  updated.then([promise, unit, of = pipeline.get()](std::exception_ptr error) {
    if (error) return promise->fail(error);
    of->weights_written(unit).then([promise](std::exception_ptr failed_write) {
      failed_write ? promise->fail(failed_write) : promise->complete();
    });
  });
  return promise->completion();
}

// --- continuing one --------------------------------------------------------------------------------------------------

void EngineCore::restore(const RestoreOptions& restore_options) {
  make([&] {
    ranks.compare_groups(options, [&] { require_model(); });
    if (options.store_directory.empty()) {
      throw UsageError(
          "nothing can be restored: the configuration names no store (nvme_path or hoist.checkpoint_path)");
    }
    ranks.agree_on_model("Engine::restore()", table, options, settings.groups());
    const RestorePlan plan = plan_restore(ranks, options, restore_options.from);
    if (plan.in_place)
      restore_in_place(plan, restore_options.from);
    else
      reshard(plan, restore_options.from);
    checkpoints->restored(settings.step_count);
    open_mirror();
    // With nothing on NVMe, the old store goes after the next save(), which is the new one's first commit.
    if (checkpoints->on_nvme() || !store->commits().empty())
      remove_older_stores(ranks, options, directory_, plan.passed_over);
    book_io();
    restored = RestoreReport{.step = settings.step_count,
                             .caller_state = checkpoints->state().program,
                             .world_size = plan.source.world_size,
                             .mirror = plan.from_mirror ? plan.directory : std::string()};
  });
}

void EngineCore::use_state(CommitState state, std::uint64_t step) {
  if (state.scaler) settings.scaler.restore(*state.scaler);
  settings.step_count = step;
  checkpoints->set_state(std::move(state));
}

void EngineCore::restore_in_place(const RestorePlan& plan, const std::string& from) {
  make_parts(plan.source.directory, StoreUse::open);
  const Ledger::Apart apart(runtime.ledger());
  const std::uint64_t step = adopt_commit(ranks, options, *store, from);
  ranks.all_together("read the commit", [&] {
    try {
      state_access->load();
    } catch (const CorruptionError& error) {
      throw with_remedy(error);
    }
    auto state = decode(store->caller_state());
    if (!state) throw StoreError(fmt::format("the commit in {} was not made by this engine", options.store_directory));
    use_state(std::move(*state), step);
  });
}

// Into a new store, so that the old one is whole until this one is committed everywhere.
void EngineCore::reshard(const RestorePlan& plan, const std::string& from) {
  std::optional<FormerState> former(std::in_place, runtime, options, table, ranks, plan, from);
  const std::uint64_t step = former->step();
  const StoreSearch search(ranks, options);
  if (plan.from_mirror) {
    const auto newest_step = search.newest_step_of_any();
    log_warning("rank {} goes on from step {} of the mirror in {}: {}", runtime.rank(), step, plan.directory,
                newest_step ? fmt::format("not all ranks have the store any more, which was at step {}", *newest_step)
                            : "what came after it is lost with the store");
  }
  remove_unfinished_stores(ranks, options, plan.from_mirror ? 0 : plan.source.directory.order, plan.passed_over);
  make_parts(new_store_directory(search.newest_order() + 1, runtime.world_size()), StoreUse::create);
  use_state(former->commit_state(), step);
  const Ledger::Apart apart(runtime.ledger());
  ranks.all_together("take over the state", [&] {
    const auto read = [&](ParameterId parameter, State of, std::uint64_t first, std::span<float> out) {
      former->read(parameter, of, first, out);
    };
    checkpoints->open_step(step);
    state_access->fill([&](ParameterId parameter, std::uint64_t first,
                           std::span<float> out) { read(parameter, State::master, first, out); },
                       unused_staging_buffer(), read);
    former.reset();
  });
  if (!checkpoints->on_nvme()) return;  // the next save() will be the new store's first commit
  checkpoints->set_state(CommitState::of(settings.scaler, checkpoints->state().program));
  checkpoints->commit_open(step).wait();
}

void EngineCore::open_mirror() {
  if (options.mirror.directory.empty()) return;
  checkpoints->use_mirror(
      std::make_unique<Mirror>(options, table, records, ranks, store->store_number(), settings.step_count));
}

CorruptionError EngineCore::with_remedy(const CorruptionError& error) const {
  return CorruptionError(error.where, store ? remedy_for(*store, error.where) : std::string());
}

// --- calls -----------------------------------------------------------------------------------------------------------

void EngineCore::begin_pass(Pass kind, const PassOptions& pass_options) {
  pass->check_begin(kind, pass_options);
  stepper->policy().require_undecided("begin()");
  stepper->policy().pass_begins();
  last_refusal_.clear();
  pass->begin(kind, pass_options);
}

void EngineCore::end_pass(bool complete) {
  if (!pass || !pass->under_way()) return;
  if (!complete && stepper->policy().is_decided()) fail(stepper->policy().undone("its pass was left before its end"));
  pass->end(complete);
}

void EngineCore::discard() {
  if (pass->under_way()) return end_pass(/*complete=*/false);
  if (stepper->policy().is_decided()) fail(stepper->policy().undone("it was discarded"));
  pass->drop();
}

StepReport EngineCore::step(const StepOptions& step_options) {
  const StepReport report = stepper->run(step_options);
  book_io();
  if (metrics) {
    const auto committed = checkpoints->committed_step();
    const auto mirrored = checkpoints->mirror() ? checkpoints->mirror()->step() : std::nullopt;
    metrics->write(report, runtime.ledger(), committed, mirrored);
  }
  return report;
}

void EngineCore::drain() {
  executor->drain();
  streams.synchronize();
}

// With nothing placed on NVMe, drives see explicit saves only, whichever step it is that hears of them.
void EngineCore::book_io() {
  if (!drives) return;
  const Mirror* const mirror = checkpoints->mirror();
  drives->book(runtime.ledger(), checkpoints->on_nvme(), mirror ? mirror->store_bytes_read() : 0);
}

void EngineCore::settle() {
  stepper->policy().require_undecided("settle()");
  if (!pass->under_way()) drain();
  updates->finish();
  checkpoints->settle(settings.step_count);
  book_io();
}

void EngineCore::settle_together() {
  if (stepper->policy().defers_updates()) ranks.together("carry out the last step", [&] { updates->finish(); });
  settle();
}

bool EngineCore::keeps(ParameterId parameter, State state) const {
  require_parameter(parameter);
  if (state == State::master) return true;
  const Segment& segment = table.segment_of(parameter);
  return state == State::gradient ? segment.trainable : segment.has(state);
}

void EngineCore::require_parameter(ParameterId parameter) const {
  if (parameter.index >= table.specs().size())
    throw UsageError(fmt::format("there is no parameter {}", parameter.index));
}

void EngineCore::require_unit(UnitId unit) const {
  if (unit.index >= table.units().size()) throw UsageError(fmt::format("there is no unit {}", unit.index));
}

void EngineCore::check_range(ParameterId parameter, std::uint64_t first, std::uint64_t count) const {
  require_parameter(parameter);
  const std::uint64_t elements = table.parameter(parameter).count;
  if (first > elements || count > elements - first) {
    throw UsageError(fmt::format("elements [{}, {}) of parameter '{}', which has {}", first, first + count,
                                 table.spec(parameter).name, elements));
  }
}

void EngineCore::check_kept(ParameterId parameter, State state) const {
  const std::string& name = table.spec(parameter).name;
  if (state == State::master) return;
  if (!table.spec(parameter).trainable)
    throw UsageError(fmt::format("parameter '{}' is frozen: it has weights only", name));
  if (state != State::gradient && !table.segment_of(parameter).has(state))
    throw UsageError(fmt::format("the optimizer of parameter '{}' keeps no {} moment", name,
                                 state == State::moment1 ? "first" : "second"));
}

void EngineCore::read(ParameterId parameter, State state, std::uint64_t first, std::span<float> out) {
  check_range(parameter, first, out.size());
  if (pass->under_way()) throw UsageError("state is read between passes, not inside of one");
  check_kept(parameter, state);
  if (state == State::gradient && !pass->gradients_due())
    throw UsageError("gradients are there after the last pass of a step, and until step()");
  const Parameter& p = table.parameter(parameter);
  if (state == State::gradient && !gradients->finished(p.unit)) {
    throw UsageError(
        fmt::format("the gradient of parameter '{}' was not finished in the pass", table.spec(parameter).name));
  }
  stepper->policy().require_undecided("read()");
  settle_together();
  const Ledger::Apart apart(runtime.ledger());
  gradients->wait();

  const auto mean = static_cast<float>(settings.gradient_mean(pass->micro_batches()));
  const std::uint64_t shard = table.segment_of(parameter).shard_elements;
  for (int rank = 0; rank < runtime.world_size(); ++rank) {
    const OwnedRange owned = owned_range(p.first_element + first, out.size(), shard, rank);
    if (owned.shard.count == 0) continue;
    const std::span<float> part = out.subspan(owned.offset, owned.shard.count);
    if (rank == runtime.rank() && state == State::gradient)
      state_access->read_gradient(parameter, gradients->shards(p.unit), mean, owned.shard.first, part);
    else if (rank == runtime.rank())
      state_access->read(parameter, state, owned.shard.first, part);
    if (runtime.world_size() > 1) runtime.communicator().broadcast_host(std::as_writable_bytes(part), rank);
  }
  book_io();
}

void EngineCore::write(ParameterId parameter, State state, std::uint64_t first, std::span<const float> values) {
  check_range(parameter, first, values.size());
  if (pass->under_way()) throw UsageError("state is written between passes, not inside of one");
  if (state == State::gradient) throw UsageError("gradients cannot be written; use accumulate() in a pass");
  check_kept(parameter, state);
  for (const float value : values) {
    if (!master_is_committable(value, state == State::master ? table.spec(parameter).dtype : DType::fp32) ||
        (state == State::moment2 && value < 0)) {
      throw UsageError(
          fmt::format("{} cannot be committed as state of parameter '{}'", value, table.spec(parameter).name));
    }
  }
  stepper->policy().require_undecided("write()");
  // A commit is the whole job's: a group that made one alone would be one ahead from here on.
  if (checkpoints->on_nvme() && ranks.has_several_groups())
    comm::agree(ranks.job(), settings.step_count, fmt::format("write() after step {}", settings.step_count));
  settle_together();
  const Ledger::Apart apart(runtime.ledger());
  gatherer->quiesce();
  checkpoints->state_changed();
  ranks.together("begin the change", [&] { checkpoints->reopen_step(settings.step_count); });
  const OwnedRange owned = owned_range(table.parameter(parameter).first_element + first, values.size(),
                                       table.segment_of(parameter).shard_elements, runtime.rank());
  state_access->write(parameter, state, owned.shard, values.subspan(owned.offset, owned.shard.count));
  if (checkpoints->on_nvme()) checkpoints->commit_open(settings.step_count).wait();
  gatherer->invalidate();
  book_io();
}

void EngineCore::change_state(const char* call, const InitialState& state, std::span<const std::byte> program_state,
                              const std::function<void()>& change) {
  if (pass->under_way()) throw UsageError(fmt::format("{} belongs between passes, not inside of one", call));
  stepper->policy().require_undecided(call);
  agree_on_begin(call, state);
  settle_together();
  const std::uint64_t step = state.step;
  std::uint64_t newest = checkpoints->committed_step().value_or(0);
  if (checkpoints->on_nvme()) newest = std::max(newest, settings.step_count);
  if (step < newest) {
    throw UsageError(
        fmt::format("state of step {} cannot follow step {} in one store, whose newest commit would be the older one; "
                    "restore() goes back to a named checkpoint, or use another directory",
                    step, newest));
  }
  const Ledger::Apart apart(runtime.ledger());
  pass->drop();
  gatherer->quiesce();
  checkpoints->state_changed();
  ranks.together("change its state", [&] {
    checkpoints->reopen_step(step);
    try {
      change();
    } catch (const UsageError& error) {  // a part of the state has been replaced
      throw Error(error.what());
    }
  });
  settings.step_count = step;
  checkpoints->set_state(CommitState::of(settings.scaler, program_state));
  if (checkpoints->on_nvme()) checkpoints->commit_open(step).wait();
  gatherer->invalidate();
  book_io();
}

void EngineCore::replace_state(const InitialState& state, std::span<const std::byte> program_state) {
  if (!state.masters) throw UsageError("replace_state() needs an Initializer, which makes the values of masters");
  ranks.all_together("keep its program's state", [&] { require_room(options, program_state); });
  change_state("replace_state()", state, program_state, [&] {
    if (state.loss_scale) settings.scaler.restore(*state.loss_scale);
    state_access->fill(checked_masters(state.masters), {}, checked_moments(state.moments));
  });
}

void EngineCore::change_masters(const Initializer& change) {
  if (!change) throw UsageError("change_masters() needs values");
  change_state("change_masters()", {.step = settings.step_count}, checkpoints->state().program,
               [&] { state_access->change_masters(checked_masters(change)); });
}

Completion EngineCore::save(const std::string& name, std::span<const std::byte> program_state,
                            const SaveOptions& save_options) {
  if (pass->under_way() || pass->micro_batches_done() > 0)
    throw UsageError("save() belongs between step() and the next pass");
  checkpoints->check_save(name, program_state, save_options);
  if (ranks.job().size() > 1) {
    comm::agree(ranks.job(),
                random_bits(text_hash(save_options.mirror ? name + " and in the mirror" : name), settings.step_count),
                fmt::format("save '{}' of step {}", name, settings.step_count));
  }
  switch (checkpoints->save_needs(name, save_options)) {
    case Checkpointer::SaveNeeds::nothing:
      break;
    case Checkpointer::SaveNeeds::drained_streams:
      drain();
      break;
    case Checkpointer::SaveNeeds::settled_engine:
      settle_together();
      break;
  }
  return checkpoints->save(name, CommitState::of(settings.scaler, program_state), settings.step_count, save_options);
}

std::vector<std::string> EngineCore::describe() const {
  std::vector<std::string> lines;
  constexpr std::array kPlaces{"device", "pinned memory", "NVMe"};
  const double fraction = options.optimizer == Placement::nvme ? options.optimizer_pinned_fraction.value_or(0) : 0;
  const double on_device = options.optimizer == Placement::device ? 0 : memory->plan().units().device_state_share();
  const double weights = options.parameters == Placement::nvme ? memory->plan().units().pinned_weight_share() : 0;
  const auto pinned = [](double share) {
    return share > 0 ? fmt::format(" ({:.4g} % of them pinned)", 100 * share) : std::string();
  };
  lines.push_back(fmt::format(
      "parameters in {}{}, optimizer states in {}{}{}, {}", kPlaces[static_cast<std::size_t>(options.parameters)],
      pinned(weights), kPlaces[static_cast<std::size_t>(options.optimizer)], pinned(fraction),
      on_device > 0 ? fmt::format(", but {:.4g} % in device memory", 100 * on_device) : "", describe_updates(options)));
  if (table.gradient_sums() == GradientSums::on_device) {
    lines.push_back(
        fmt::format("vertical order: a pass holds up to {} micro-batches, their gradients added up in fp32 on "
                    "the device",
                    options.micro_batches_max));
  }
  if (const LossScaler& scaler = settings.scaler; scaler.is_dynamic() || scaler.scale() != 1)
    lines.push_back(fmt::format("loss scale {}{}", scaler.scale(), scaler.is_dynamic() ? ", dynamic" : ""));
  lines.push_back(memory->describe());
  if (drives) lines.push_back("io: " + drives->describe());
  lines.push_back("device: " + runtime.device().description());
  return lines;
}

}  // namespace hoist::detail
