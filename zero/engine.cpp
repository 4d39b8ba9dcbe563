// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <random>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/core/digest.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tiers/store_format.hpp>
#include <hoist/zero/detail/engine_impl.hpp>
#include <hoist/zero/predict/step_bytes.hpp>

namespace hoist {

Engine::Impl::Impl(Runtime& runtime_in, const EngineOptions& options_in)
    : runtime(runtime_in),
      options(options_in),
      groups{options_in.optimizer_defaults},
      table(runtime_in.world_size(), detail::gradient_sums(options_in)),
      abort_notifier(std::make_shared<detail::AbortNotifier>(runtime_in)),
      scaler(options_in.loss_scale) {
  check(options, runtime.options(), runtime.world_size());
}

Engine::Impl::~Impl() {
  self.reset();
  const bool unwinding = std::uncaught_exceptions() > exceptions_at_birth;
  ended_by_exception = sealed && !failure && unwinding && (pass || pass_was_left);
  tear_down();
}

// The program's exception left a pass and takes the engine with it, while the others wait in that pass. They are told
// after the step decided before it, which is whole on this rank and is not lost by an end of the program's.
void Engine::Impl::tell_of_exception() {
  try {
    last_commit.wait();
  } catch (...) {  // told where it was agreed on
  }
  const std::string refusal = last_refusal.empty() ? "" : fmt::format("; refused in it: {}", last_refusal);
  abort_notifier->notify(std::make_exception_ptr(Error("its program left a pass by an exception" + refusal)));
}

void Engine::Impl::fail(const std::exception_ptr& error) {
  if (failure) return;
  abort_notifier->notify(error);
  failure = abort_notifier->cause_of(error);
}

// Threads first, then what they use. Errors have been delivered, or nobody wants them any more.
void Engine::Impl::tear_down() noexcept {
  const auto attempt = [](const auto& call) {
    try {
      call();
    } catch (...) {
    }
  };
  attempt([&] { end_pass(/*complete=*/false); });
  attempt([&] {
    if (live.executor) live.executor->drain();
  });
  attempt([&] {
    peers_gone = failed_in_communication();
    if (!live.deferred) return;
    if (live.gradients) live.gradients->await_handed_on();
    if (failure || updating) return live.deferred->stop();
    live.deferred->finish();  // a step that was taken is not lost by an orderly end
  });
  attempt([&] {
    if (ended_by_exception) tell_of_exception();
  });
  for (platform::Stream* stream : {live.streams.up.get(), live.streams.comm.get(), live.streams.down.get()}) {
    attempt([&] {
      if (stream != nullptr) stream->synchronize();
    });
  }
  // The program's streams may still use gathered weights and gradient buffers.
  attempt([&] {
    if (live.gatherer) live.gatherer->quiesce();
  });
  attempt([&] {
    if (live.gradients) live.gradients->wait();
  });
  attempt([&] { last_commit.wait(); });
  if (saver.joinable()) saver.join();
  live.gradients.reset();
  live.gatherer.reset();
  live.executor.reset();
  live.weight_reader.reset();
  live.deferred.reset();
  live.pipeline.reset();
  live.record_io.reset();
  live.streams = {};
  live.store.reset();
  const bool drive_is_lost = live.drives && live.drives->gave_up();
  live.drives.reset();
  live.commit_channel.reset();
  live.group.reset();
  runtime.device().unregister_host(std::exchange(live.registered, {}));
  if (drive_is_lost) live.memory->quarantine();
  live.memory.reset();
  live.records.reset();
  metrics.reset();
  attempt([&] {
    abort_notifier->disarm();
    abort_notifier = std::make_shared<detail::AbortNotifier>(runtime);
  });

  place = {};
  sealed = peers_gone = false;
  gradients_due = agreement_due = updating = false;
  begun_update = nullptr;
  micro_batches_done = 0;
  step_count = 0;
  committed_step = -1;
  last_commit = {};
  step_state = {};
  scaler = LossScaler(options.loss_scale);
  counted_io = {};
  uncommitted = commit_ahead = false;
  changed_since_save = true;
  update_error = nullptr;
}

bool Engine::Impl::failed_in_communication() const {
  if (!failure) return false;
  try {
    std::rethrow_exception(failure);
  } catch (const CommError&) {
    return true;
  } catch (...) {
    return false;
  }
}

void Engine::Impl::require_open_model() const {
  if (sealed)
    throw UsageError(
        "initialize() or restore() was called before: from then on the model cannot change; another "
        "Engine begins anew");
}

void Engine::Impl::require_live() const {
  if (failure) std::rethrow_exception(failure);
  if (!sealed) throw UsageError("call initialize() or restore() first");
}

std::string Engine::Impl::name_in_job(int rank) const {
  return fmt::format("rank {}{}", rank, runtime.has_several_groups() ? " of the norm group" : "");
}

void Engine::Impl::together(const char* what, const std::function<void()>& part) const {
  together_in(runtime.communicator(), what, part);
}

void Engine::Impl::all_together(const char* what, const std::function<void()>& part) const {
  together_in(job(), what, part);
}

void Engine::Impl::together_in(comm::Communicator& ranks, const char* what, const std::function<void()>& part) const {
  std::exception_ptr error;
  try {
    part();
  } catch (...) {
    error = std::current_exception();
  }
  std::optional<comm::Problem> problem;
  try {
    problem = detail::first_problem(ranks, error);
    if (problem && &ranks != &runtime.communicator()) abort_notifier->told_in_norm();
    if (error) abort_notifier->told_in_exchange();
  } catch (const CommError& lost) {
    if (!error) throw CommError(fmt::format("{} (whether all could {})", lost.what(), what));
  } catch (...) {
    if (!error) throw;
  }
  if (error) std::rethrow_exception(error);
  if (!problem) return;
  const std::string who = &ranks == &job() ? name_in_job(problem->rank) : fmt::format("rank {}", problem->rank);
  throw CommError(fmt::format("{} could not {}: {}", who, what, problem->text));
}

// What follows is made of exchanges between all ranks of the job, and is no place for one group to turn back alone.
void Engine::Impl::compare_groups() const {
  if (!runtime.has_several_groups()) return;
  all_together("lay out its model", [&] { require_model(); });
  const bool has_store = !options.store_directory.empty();
  const std::string rules = !has_store ? "no store"
                                       : fmt::format("{}, durability {}, a commit every {} steps, room to keep {}",
                                                     nvme_placement() ? "a store of steps" : "a store of saves",
                                                     options.durability == tiers::Durability::step ? "step" : "none",
                                                     options.commit_every, options.keep_steps);
  comm::agree(job(), name_digest(rules), rules);
}

void Engine::Impl::require_model() const {
  if (table.units().empty()) throw UsageError("the engine has no units");
  require_weights_dtype();
}

void Engine::Impl::seal(bool create_store) {
  require_model();
  const std::uint64_t run = create_store ? agree_on_run() : 0;
  // Ranks that died between each other's first commits left one here and none there: nothing that could be resumed.
  const bool first_commit_is_useless = create_store && job().size() > 1 && !find_commit();
  if (const int ranks = detail::gathering_group(options, runtime.world_size()); ranks > 1)
    live.group = runtime.communicator().split(ranks);
  all_together(create_store ? "take its memory and make its store" : "take its memory and open its store", [&] {
    if (job().rank() == 0 && !options.metrics_path.empty())
      metrics = std::make_unique<detail::Metrics>(options.metrics_path, runtime.ledger());
    lay_out(create_store, run, first_commit_is_useless);
  });
  const std::uint64_t slots = fewest_gather_slots();
  all_together("start its streams and threads", [&] { start(slots); });
  if (live.store) live.commit_channel = job().duplicate();
  sealed = true;
}

// A loss scale that the program does not know of would shrink its gradients without a word.
void Engine::Impl::require_weights_dtype() const {
  if (options.weights_dtype != DType::fp16) return;
  const bool has_fp16 = std::ranges::any_of(
      table.specs(), [](const ParameterSpec& spec) { return spec.trainable && spec.dtype == DType::fp16; });
  if (has_fp16) return;
  throw ConfigError("fp16.enabled",
                    "no trainable parameter of the program is fp16: declare its matrices so (ParameterSpec::dtype) and "
                    "multiply its loss by Engine::loss_scale(), or remove the section fp16");
}

void Engine::Impl::agree_on_model(std::string_view call) const {
  if (runtime.world_size() == 1) return;
  Digest model;
  const std::string identity = table.identity();
  model.update(std::as_bytes(std::span(identity)));
  std::uint64_t hash = model.value();
  for (const char c : call) hash = random_bits(hash, static_cast<unsigned char>(c));
  comm::agree(runtime.communicator(), hash,
              fmt::format("{}: {} units, {} parameters", call, table.units().size(), table.parameter_count()));
  detail::agree_on_options(runtime.communicator(), detail::common_options(options, runtime.options(), groups));
}

std::uint64_t Engine::Impl::agree_on_run() const {
  std::random_device device;
  const auto of_first_rank = [](comm::Communicator& ranks, std::uint64_t mine) {
    std::vector<std::uint64_t> all(static_cast<std::size_t>(ranks.size()));
    ranks.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    return all.front();
  };
  const std::uint64_t run = of_first_rank(job(), (std::uint64_t{device()} << 32) | device() | 1);
  if (!runtime.has_several_groups()) return run;
  const auto group = of_first_rank(runtime.communicator(), static_cast<std::uint64_t>(job().rank()));
  return detail::run_of_group(run, static_cast<int>(group));
}

double Engine::Impl::affordable_pinned_fraction(std::uint64_t store_memory_bytes) const {
  const tiers::Budget& budget = runtime.pinned_budget();
  const std::uint64_t taken = budget.held_bytes() + store_memory_bytes;
  return detail::largest_pinned_fraction(options, table, detail::device_access(runtime.options()),
                                         budget.limit_bytes() > taken ? budget.limit_bytes() - taken : 0);
}

void Engine::Impl::lay_out(bool create_store, std::uint64_t run, bool replace_first_commit) {
  live.records = std::make_unique<detail::RecordMap>(table);
  const bool with_store = !options.store_directory.empty();
  tiers::StoreOptions store =
      detail::store_options(options, table, *live.records, runtime.rank(), place, runtime.trace());
  const std::uint64_t store_memory = with_store ? tiers::Store::cost(store).memory_bytes : 0;
  if (!options.optimizer_pinned_fraction) options.optimizer_pinned_fraction = affordable_pinned_fraction(store_memory);
  live.memory = std::make_unique<detail::Memory>(runtime, options, table, store_memory);

  if (const std::span<std::byte> pinned = live.memory->pinned(); !pinned.empty()) {
    runtime.device().register_host(pinned);  // in one: a copy may not cross two registrations
    live.registered = pinned;
  }
  if (with_store) {
    live.drives = std::make_unique<detail::Drives>(runtime.options(), options, live.memory->io_slices());
    const auto engines = live.drives->engines();
    if (create_store) {
      store.store_number = run + static_cast<std::uint64_t>(runtime.rank());
      store.replace_first_commit = replace_first_commit;
      store.stripe_weights = live.drives->measured_weights();
    }
    live.store = create_store ? tiers::Store::create(store, engines) : tiers::Store::open(store, engines);
  }
}

// Which units are gathered when follows from the number of slots, and is the same on every rank.
std::uint64_t Engine::Impl::fewest_gather_slots() const {
  const std::uint64_t mine = live.memory->gather_slots().size();
  if (runtime.world_size() == 1) return mine;
  std::vector<std::uint64_t> all(static_cast<std::size_t>(runtime.world_size()));
  runtime.communicator().exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  const std::uint64_t fewest = *std::ranges::min_element(all);
  if (fewest < mine)
    spdlog::info("rank {} has device memory to gather {} units at once and uses {}: a rank with less has no more",
                 runtime.rank(), mine, fewest);
  return fewest;
}

void Engine::Impl::start(std::uint64_t gather_slots) {
  live.streams.up = runtime.device().create_stream("up");
  live.streams.down = runtime.device().create_stream("down");
  live.streams.comm = runtime.device().create_stream("comm");
  live.executor = std::make_unique<scheduler::Executor>("hoist-submit");
  live.record_io = std::make_unique<detail::RecordIo>(runtime, table, *live.memory, *live.records, live.store.get());
  live.pipeline = std::make_unique<detail::TilePipeline>(runtime, table, *live.memory, *live.records, *live.record_io,
                                                         live.store.get());
  const bool weights_on_nvme = options.parameters == Placement::nvme;
  const UpdateMode mode = detail::update_mode(options);
  if (mode != UpdateMode::step)
    live.deferred = std::make_unique<detail::UpdateQueue>(
        *live.pipeline, table, /*on_request=*/weights_on_nvme && mode == UpdateMode::forward);
  if (weights_on_nvme) {
    live.weight_reader = std::make_unique<detail::WeightReader>(
        *live.store, table, *live.records, live.memory->staging_buffers(),
        [this](UnitId unit) { return newest_weights_written(unit); },
        [this](UnitId unit, std::byte* target) {
          return live.deferred ? live.deferred->deliver(unit, target) : std::nullopt;
        });
  }
  live.gatherer = std::make_unique<detail::Gatherer>(runtime, options, table, *live.memory, gather_slots,
                                                     *live.executor, live.streams, live.weight_reader.get(),
                                                     live.deferred.get(), *abort_notifier, live.group.get());
  live.gradients = std::make_unique<detail::Gradients>(runtime, table, *live.memory, *live.executor, live.streams,
                                                       live.deferred.get(), *abort_notifier);
}

// Where the unit's update is still under way, first that, then its writes.
Completion Engine::Impl::newest_weights_written(UnitId unit) const {
  const Completion updated = live.deferred ? live.deferred->updated(unit) : Completion();
  if (updated.done()) return updated.error() ? updated : live.pipeline->weights_written(unit);
  const auto promise = std::make_shared<Promise>();
  updated.then([promise, unit, pipeline = live.pipeline.get()](std::exception_ptr error) {
    if (error) return promise->fail(error);
    pipeline->weights_written(unit).then([promise](std::exception_ptr failed_write) {
      failed_write ? promise->fail(failed_write) : promise->complete();
    });
  });
  return promise->completion();
}

// --- parts ----------------------------------------------------------------------------------------------------------

void Engine::Impl::drain() {
  live.executor->drain();
  live.streams.up->synchronize();
  live.streams.comm->synchronize();
  live.streams.down->synchronize();
}

// What the drives moved since the last call, told to the ledger.
void Engine::Impl::book_io() {
  if (!live.drives) return;
  // With nothing placed there, NVMe sees explicit saves only, whichever step it is that hears of them.
  std::optional<Ledger::Apart> apart;
  if (!nvme_placement()) apart.emplace(runtime.ledger());
  const aio::DriveQueue::Stats now = live.drives->stats();
  runtime.ledger().count(Link::nvme_read, now.read_bytes - counted_io.read_bytes, now.read_busy - counted_io.read_busy);
  runtime.ledger().count(Link::nvme_write, now.written_bytes - counted_io.written_bytes,
                         now.write_busy - counted_io.write_busy);
  counted_io = now;
}

// --- the face --------------------------------------------------------------------------------------------------------

Engine::Engine(Runtime& runtime, const EngineOptions& options) : impl_(std::make_unique<Impl>(runtime, options)) {
  impl_->self = std::shared_ptr<Engine>(this, [](Engine*) {});
}
Engine::~Engine() = default;

GroupId Engine::add_group(const GroupOptions& options) {
  impl_->require_open_model();
  check(options, impl_->options, impl_->runtime.options());
  impl_->groups.push_back(options);
  return {static_cast<std::uint32_t>(impl_->groups.size() - 1)};
}

UnitId Engine::add_unit(std::string name, std::span<const ParameterSpec> parameters, UnitOptions options) {
  impl_->require_open_model();
  const std::optional<DType> wanted = impl_->options.weights_dtype;
  for (const ParameterSpec& spec : parameters) {
    if (!wanted || !spec.trainable || spec.dtype == DType::fp32 || spec.dtype == *wanted) continue;
    const std::string key =
        *wanted == DType::fp32 ? "bf16.enabled is false" : fmt::format("{}.enabled", dtype_name(*wanted));
    throw UsageError(fmt::format(
        "parameter '{}' is {}, but the configuration asks for {} weights ({}); declare it so, or change the "
        "configuration",
        spec.name, dtype_name(spec.dtype), dtype_name(*wanted), key));
  }
  std::vector<optim::StateForm> groups;
  for (const GroupOptions& group : impl_->groups) groups.push_back(optim::state_form(group));
  return impl_->table.add(std::move(name), parameters, std::move(options), groups);
}

void Engine::tie(UnitId user, ParameterId owner) {
  impl_->require_open_model();
  impl_->table.tie(user, owner);
}

ParameterId Engine::parameter(std::string_view name) const {
  const auto found = impl_->table.find(name);
  if (!found) throw UsageError(fmt::format("there is no parameter '{}'", name));
  return *found;
}

std::span<const ParameterSpec> Engine::parameters() const { return impl_->table.specs(); }
bool Engine::keeps(ParameterId parameter, State state) const {
  if (parameter.index >= parameters().size())
    throw UsageError(fmt::format("there is no parameter {}", parameter.index));
  if (state == State::master) return true;
  const detail::Segment& segment = impl_->table.segment_of(parameter);
  return state == State::gradient ? segment.trainable : segment.has(state);
}
std::uint64_t Engine::parameter_count() const { return impl_->table.parameter_count(); }

Engine::Place Engine::place(ParameterId parameter) const {
  const detail::UnitTable& table = impl_->table;
  if (parameter.index >= table.specs().size())
    throw UsageError(fmt::format("there is no parameter {}", parameter.index));
  const detail::Parameter& p = table.parameter(parameter);
  const detail::Segment& segment = table.segment_of(parameter);
  return {.unit = p.unit,
          .offset_bytes = segment.gathered_offset + p.first_element * dtype_bytes(segment.dtype),
          .unit_bytes = table.unit(p.unit).gathered_bytes};
}

ModelShape Engine::shape() const {
  const detail::UnitTable& table = impl_->table;
  ModelShape model;
  for (const GroupOptions& group : impl_->groups) model.groups.push_back(optim::state_form(group));
  for (const detail::Unit& unit : table.units()) {
    UnitShape& shape =
        model.units.emplace_back(UnitShape{.name = unit.name, .bound = static_cast<bool>(unit.options.binding)});
    for (const ParameterId parameter : unit.parameters) shape.parameters.push_back(table.spec(parameter));
    // Gathers bring whole units, so one parameter stands for all that are tied to its unit.
    for (const UnitId owner : unit.tied) shape.tied.push_back(table.spec(table.unit(owner).parameters.front()).name);
  }
  return model;
}

// No device has as much, and a little more of it is still a number.
constexpr std::uint64_t kProgramBytesMax = std::uint64_t{1} << 62;

void Engine::require_device_memory(std::uint64_t program_bytes) const {
  detail::require_device_memory(impl_->runtime, impl_->options, impl_->table,
                                std::min(program_bytes, kProgramBytesMax));
}

std::optional<std::uint64_t> Engine::find_commit() { return impl_->find_commit(); }
Runtime& Engine::runtime() { return impl_->runtime; }
std::uint64_t Engine::step_count() const { return impl_->step_count; }

std::optional<std::uint64_t> Engine::committed_step() const {
  const std::int64_t step = impl_->committed_step;
  return step < 0 ? std::nullopt : std::optional(static_cast<std::uint64_t>(step));
}

double Engine::learning_rate(GroupId group) const {
  if (group.index >= impl_->groups.size()) throw UsageError(fmt::format("there is no group {}", group.index));
  return impl_->scheduled(impl_->groups[group.index], impl_->step_count).learning_rate;
}

void Engine::set_learning_rate(GroupId group, double learning_rate) {
  if (group.index >= impl_->groups.size()) throw UsageError(fmt::format("there is no group {}", group.index));
  if (!(std::isfinite(learning_rate) && learning_rate >= 0))
    throw UsageError(
        fmt::format("{} is not a learning rate: it has to be a finite number of at least 0", learning_rate));
  if (learning_rate != impl_->groups[group.index].learning_rate) impl_->require_undecided("set_learning_rate()");
  impl_->groups[group.index].learning_rate = learning_rate;
}

std::uint64_t Engine::wire_bytes_in_group() const { return impl_->live.group ? impl_->live.group->sent_bytes() : 0; }

std::vector<std::string> Engine::describe() const {
  std::vector<std::string> lines;
  constexpr std::array kPlaces{"device", "pinned memory", "NVMe"};
  const double fraction =
      impl_->options.optimizer == Placement::nvme ? impl_->options.optimizer_pinned_fraction.value_or(0) : 0;
  const double on_device =
      impl_->options.optimizer == Placement::device
          ? 0
          : detail::UnitRegions(impl_->options, impl_->table, detail::device_access(impl_->runtime.options()))
                .device_state_share();
  lines.push_back(fmt::format("parameters in {}, optimizer states in {}{}{}, update mode {}",
                              kPlaces[static_cast<std::size_t>(impl_->options.parameters)],
                              kPlaces[static_cast<std::size_t>(impl_->options.optimizer)],
                              fraction > 0 ? fmt::format(" ({:.4g} % of them pinned)", 100 * fraction) : "",
                              on_device > 0 ? fmt::format(", but {:.4g} % in device memory", 100 * on_device) : "",
                              detail::describe_update_mode(impl_->options)));
  if (impl_->in_vertical_order()) {
    lines.push_back(
        fmt::format("vertical order: a pass holds up to {} micro-batches, their gradients added up in fp32 on "
                    "the device",
                    impl_->options.micro_batches_max));
  }
  if (const LossScaler& scaler = impl_->scaler; scaler.is_dynamic() || scaler.scale() != 1)
    lines.push_back(fmt::format("loss scale {}{}", scaler.scale(), scaler.is_dynamic() ? ", dynamic" : ""));
  if (impl_->live.memory) lines.push_back(impl_->live.memory->describe());
  if (impl_->live.drives) lines.push_back("io: " + impl_->live.drives->describe());
  lines.push_back("device: " + impl_->runtime.device().description());
  return lines;
}

}  // namespace hoist
