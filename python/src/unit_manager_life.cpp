// SPDX-License-Identifier: Apache-2.0
// A unit manager from its construction to its end: its engine, commits, sleep.
#include <algorithm>
#include <exception>
#include <utility>

#include <fmt/format.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/comm/communicator.hpp>
#include <hoist/comm/launch.hpp>
#include <hoist/core/checksum.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/units.hpp>

#include "interruption.hpp"
#include "unit_manager.hpp"

namespace hoist::python {

Model model_of(const std::vector<ManagedUnit>& units, const std::vector<GroupOptions>& groups) {
  Model model;
  for (const GroupOptions& group : groups) model.add_group(group);
  for (const ManagedUnit& unit : units) {
    UnitOptions options{.stable_in_pass = true, .own_gradient_memory = unit.own_gradient_memory};
    for (const std::uint32_t other : unit.gathered_with) options.gathered_with.push_back(UnitId{other});
    model.add_unit(unit.name, unit.parameters, options);
  }
  return model;
}

UnitManager::UnitManager(UnitManagerOptions options) : options_(std::move(options)) {
  model_ = model_of(options_.units, options_.groups);
  options_.config.engine = options_.config.engine_at(world_size_at_start());
  open_runtime();
  lay_out_units();
  const nb::module_ torch = nb::module_::import_("torch");
  fp32_ = torch.attr("float32");
  bf16_ = torch.attr("bfloat16");
  fp16_ = torch.attr("float16");
}

UnitManager::~UnitManager() {
  if (is_open()) end_engine(Life::closed);
}

void EngineMutex::lock() {
  if (is_mine())
    throw UsageError(
        "a signal handler calls the engine while its thread is in the middle of another call of that engine: let the "
        "handler only note that the signal came, and call the engine when the other call has returned");
  mutex_.lock();
  owner_ = std::this_thread::get_id();
}
void EngineMutex::unlock() {
  owner_ = std::thread::id();
  mutex_.unlock();
}

void UnitManager::refuse() const {
  switch (life_) {
    case Life::fresh:
    case Life::training:
      throw UsageError("call initialize() or restore() first");
    case Life::restoring:
      throw UsageError(
          "the engine is being restored: ask again when restore(), wake() or load_checkpoint() has returned");
    case Life::failed:
      throw UsageError("the last initialize() or restore() failed, and the state is gone: call restore() again");
    case Life::asleep:
      throw UsageError("the engine sleeps, and its memory was given back: call wake() first");
    case Life::closed:
      break;
  }
  throw UsageError(
      "the engine was closed, and the model's weights with it: the next wrap() needs resume=True or weights=..., and "
      "model.load_state_dict(state, assign=True) gives it weights for PyTorch alone");
}

void UnitManager::close() {
  if (!process_.is_this()) return;
  await_others();
  if (!is_open()) return;
  if (pass_) discard();
  std::exception_ptr failure;
  if (const EngineTurn turn(engine_mutex()); engine_) {
    try {
      if (engine_->has_begun_step()) engine_->discard();  // when the step before is committed
      engine_->settle();
    } catch (const StepUndoneError&) {
      log_warning(
          "step {} was begun by backward() (hoist.update_mode \"backward\") and not taken by step(): it is given up, "
          "and the commits before it stay",
          engine_->step_count() + 1);
    } catch (...) {
      failure = std::current_exception();  // after the store was given up: the next process can open it then
    }
  }
  end_engine(Life::closed);
  unbind();
  if (failure) std::rethrow_exception(failure);
}

// Another thread may be ending the engine, which is not open then. Errors: UsageError inside of a call.
void UnitManager::await_others() { const EngineTurn turn(engine_mutex()); }

void UnitManager::abandon(const std::string& why) noexcept {
  if (!runtime_ || !process_.is_this() || mutex_.is_mine()) return;
  if (runtime_->world_size() == 1 && !runtime_->has_several_groups()) return;
  if (pass_) discard();
  end_engine(Life::closed, &why);
  unbind();
}

void UnitManager::initialize(const InitialState& state, std::span<const std::byte> caller_state) {
  const EngineTurn turn(engine_mutex());
  if (engine_) throw UsageError("the model is being trained already");
  require_awake();
  try {
    begin_with(Engine::create(runtime(), options_.config.engine, model_, state, caller_state));
  } catch (...) {
    const nb::gil_scoped_acquire no_reader;
    life_ = Life::failed;
    throw;
  }
}

// Pre: an EngineTurn. Takes the GIL, because properties such as step_count read `engine_` with the GIL and without a
// turn.
void UnitManager::begin_with(Engine engine) {
  const nb::gil_scoped_acquire no_reader;
  engine_ = std::move(engine);
  life_ = Life::training;
  for (Unit& unit : units_) unit.stays_up = engine_->keeps_gathered(unit.id);
  keeps_all_up_ = std::ranges::all_of(units_, &Unit::stays_up);
}

comm::Communicator& UnitManager::ranks_of(Among among) {
  return among == Among::job ? runtime().norm_group() : runtime().communicator();
}

bool UnitManager::same_on_all(std::string_view text, Among among) {
  const EngineTurn turn(engine_mutex());
  const auto all = comm::values_of_all(ranks_of(among), checksum(std::as_bytes(std::span(text))));
  return std::ranges::all_of(all, [&](std::uint64_t other) { return other == all.front(); });
}

std::string UnitManager::first_problem(std::string_view mine, Among among) {
  const auto first = comm::first_problem(ranks_of(among), mine.empty() ? std::nullopt : std::optional(mine));
  return first ? fmt::format("rank {} failed: {}", first->rank, first->text) : "";
}

std::vector<bool> UnitManager::overwrite_with_rank_0(std::span<const std::span<std::byte>> values) {
  const EngineTurn turn(engine_mutex());
  comm::Communicator& ranks = runtime().communicator();
  std::vector<bool> differs(values.size());
  if (values.empty()) return differs;
  std::vector<std::uint64_t> mine;
  for (const std::span<std::byte> value : values) mine.push_back(checksum(value));
  std::vector<std::uint64_t> all(mine.size() * static_cast<std::size_t>(ranks.size()));
  ranks.exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  constexpr std::size_t kMessageBytes = 64 * kMiB;
  for (std::size_t v = 0; v < values.size(); ++v) {
    for (std::size_t at = v; at < all.size(); at += values.size()) differs[v] = differs[v] || all[at] != all[v];
    if (!differs[v]) continue;
    for (std::span<std::byte> rest = values[v]; !rest.empty();
         rest = rest.subspan(std::min(rest.size(), kMessageBytes)))
      ranks.broadcast_host(rest.first(std::min(rest.size(), kMessageBytes)), 0);
  }
  return differs;
}

void UnitManager::require_commit(const std::string& from) {
  const std::string& directory = options_.config.engine.store_directory;
  if (directory.empty())
    throw UsageError("restore() without a store: all state is in memory, and nothing is committed");
  try {
    if (engine_) engine_->settle();  // saves under way count
  } catch (const Error&) {           // of a failed engine, or of a step that mode `backward` has decided in part
  }
  try {
    if (from.empty()) {
      if (Engine::find_commit(runtime(), options_.config.engine)) return;
      throw StoreError(fmt::format("{} holds no commit yet: call save() before restore()", directory));
    }
    const std::vector<NamedCheckpoint> known = Engine::find_checkpoints(runtime(), options_.config.engine);
    if (std::ranges::find(known, from, &NamedCheckpoint::name) != known.end()) return;
    if (engine_ && engine_->step_count() == 0)
      throw StoreError(
          fmt::format("{} has no named checkpoint '{}': a run begins there. The model is in the store of the run that "
                      "saved it: name that directory in nvme_path, or copy the store with `hoist copy`",
                      directory, from));
    const unsigned kept = options_.config.engine.keep_steps;
    std::string others;
    for (const NamedCheckpoint& step : known)
      others += fmt::format("{}'{}' (step {})", others.empty() ? "" : ", ", step.name, step.step);
    throw StoreError(fmt::format("{} has no named checkpoint '{}'; it has {}, and hoist.keep_steps keeps {}", directory,
                                 from, others.empty() ? "none" : others,
                                 kept == 0 ? "none" : fmt::format("the newest {}", kept)));
  } catch (const StoreError&) {
    throw;
  } catch (const ExchangedError&) {  // all ranks know it, and nothing has changed
    throw;
  } catch (const Error& error) {
    log_warning("restore() looks for the commit when the engine has ended: {}", error.what());
  }
}

RestoreReport UnitManager::restore(const std::string& from) {
  await_others();
  if (pass_) discard();
  if (const EngineTurn turn(engine_mutex()); engine_) {
    try {
      engine_->settle();
    } catch (const Error&) {  // of the run that is being left
    }
  }
  const Life before = std::exchange(life_, Life::restoring);
  if (before != Life::fresh) {
    end_engine(Life::restoring);
    unbind();
  }
  try {
    if (!runtime_) open_runtime();
    const EngineTurn turn(engine_mutex());
    begin_with(Engine::restore(runtime(), options_.config.engine, model_, {.from = from}));
    return *engine_->restored();
  } catch (...) {
    if (before == Life::asleep || before == Life::closed) {
      end_engine(before);
      unbind();
    } else {
      life_ = Life::failed;
    }
    throw;
  }
}

void UnitManager::fall_asleep(std::uint64_t step) noexcept {
  asleep_at_ = step;
  end_engine(Life::asleep);
  unbind();
}

void UnitManager::sleep(std::span<const std::byte> caller_state) {
  const std::uint64_t step = engine().step_count();
  {
    const EngineTurn turn(engine_mutex());
    engine().save("", caller_state).wait();
  }
  fall_asleep(step);
}

void UnitManager::wake() {
  if (!is_asleep()) {
    require_awake();
    throw UsageError("wake() belongs after sleep()");
  }
  const std::uint64_t step = asleep_at_;
  const std::uint64_t found = restore("").step;
  if (found == step) return;
  fall_asleep(step);
  throw StoreError(
      fmt::format("the engine fell asleep at step {}, and the store is at step {}: another run has changed "
                  "it; restore() goes on from there",
                  step, found));
}

std::optional<std::uint64_t> UnitManager::find_commit() {
  const EngineTurn turn(engine_mutex());
  return Engine::find_commit(runtime(), options_.config.engine);
}

std::vector<NamedCheckpoint> UnitManager::find_checkpoints() {
  const EngineTurn turn(engine_mutex());
  return Engine::find_checkpoints(runtime(), options_.config.engine);
}

// A failed restore() leaves no runtime, or one without an engine.
void UnitManager::end_engine(Life next, const std::string* why_for_others) noexcept {
  if (!process_.is_this()) return;
  pass_.reset();
  // Tensors that a stream may still read. They go after the streams, and when the GIL is held again.
  const auto read_by_streams = std::make_pair(std::exchange(collecting_, {}), std::exchange(adding_, {}));
  const EngineTurn turn(engine_mutex());
  std::optional<Engine> engine;
  std::unique_ptr<Runtime> runtime;
  {
    const nb::gil_scoped_acquire no_reader;
    engine.swap(engine_);
    runtime.swap(runtime_);
    life_ = next;
  }
  if (engine) engine->discard();  // ends leases
  for (Unit& unit : units_) unit.uses.clear();
  scope_.reset();
  weights_stream_ = {nullptr, kEngine};
  gradients_stream_ = {nullptr, kEngine};
  engine.reset();  // the step that was decided is carried out, and committed with the others
  if (runtime && why_for_others != nullptr) {
    runtime->communicator().abort(*why_for_others);
    if (runtime->has_several_groups()) runtime->norm_group().abort(*why_for_others);
  }
  borrowed_streams_.clear();
}

// The memory is given back as soon as no tensor of the program's is over it.
void UnitManager::unbind() noexcept {
  for (Unit& unit : units_) {
    unit.memory = nullptr;
    unit.is_shown = false;
  }
  if (!torch_.unbind.is_valid()) return;
  if (const std::string why = call_again_if_interrupted(torch_.unbind); !why.empty())
    log_warning("the model's tensors keep the engine's memory: {}", why);
}

int UnitManager::world_size_at_start() const {
  if (options_.make_channel) return options_.world_size;
  return options_.config.runtime.communicator == CommunicatorKind::self ? 1 : std::max(1, comm::mpi_size_of_launch());
}

// Takes no more of a GPU's memory than the engine will use: the rest is PyTorch's.
void UnitManager::take_memory() {
  RuntimeOptions& runtime = options_.config.runtime;
  if (runtime.device != platform::DeviceKind::cuda) return;
  const Prediction prediction = predict(runtime, options_.config.engine, model_, world_size_at_start());
  runtime.device_arena_bytes = round_up(std::max(prediction.device.bytes, kBlockAlignment), kBlockAlignment);
}

int UnitManager::local_rank() { return std::max(local_rank_ >= 0 ? local_rank_ : runtime().options().local_rank, 0); }

// The channels come first, and all ranks of the job meet: they divide the memory of each machine, and a rank that lacks
// memory can tell the others.
void UnitManager::open_runtime() {
  const nb::gil_scoped_release release;
  const platform::DeviceKind device = options_.config.runtime.device.value_or(platform::DeviceKind::host);
  const auto met = [&](const MakeChannel& make) {
    const GroupChannel channel = make ? make() : GroupChannel{};
    if (channel.local_ranks > 0) {
      RuntimeOptions& runtime = options_.config.runtime;
      runtime.local_ranks = channel.local_ranks;
      runtime.local_rank = channel.local_index;
      local_rank_ = channel.local_rank;
      const int gpus = device == platform::DeviceKind::cuda ? platform::cuda_device_count() : 0;
      if (runtime.device_ordinal < 0 && gpus > 0) runtime.device_ordinal = local_rank_ % gpus;
    }
    return channel.transport;
  };
  const std::shared_ptr<comm::Transport> job = met(options_.make_job_channel);
  const std::shared_ptr<comm::Transport> sharding = met(options_.make_channel);
  // Both are called when this rank has taken its memory; the first one called waits for the other ranks.
  const auto join = [&](const comm::CommunicatorOptions& comm) {
    (job ? job : sharding)->barrier();
    return join_over(sharding, device, comm);
  };
  // The job's ranks exchange what they agree on, never weights.
  const auto norm = [&](const comm::CommunicatorOptions& comm) {
    if (!sharding) job->barrier();
    return join_over(job, platform::DeviceKind::host, {.timeout = comm.timeout});
  };
  try {
    if (life_ == Life::fresh) take_memory();
    std::unique_ptr<Runtime> opened;
    if (job) {
      Runtime::Groups groups{.sharding = {}, .norm = norm};
      if (sharding) groups.sharding = join;
      opened = std::make_unique<Runtime>(options_.config.runtime, groups);
    } else if (sharding) {
      opened = std::make_unique<Runtime>(options_.config.runtime, join);
    } else {
      opened = std::make_unique<Runtime>(options_.config.runtime);
    }
    {
      const nb::gil_scoped_acquire no_reader;
      runtime_ = std::move(opened);
    }
    weights_stream_ = {runtime_->device().create_stream("torch weights"), kEngine};
    gradients_stream_ = {runtime_->device().create_stream("torch gradients"), kEngine};
  } catch (const std::exception& error) {
    for (const auto& channel : {sharding, job})
      if (channel) channel->abort(error.what());
    throw;
  }
  learning_ = true;
  gradient_places_.reset();
}

void UnitManager::lay_out_units() {
  places_ = gathered_layout(options_.config.engine, model_, runtime_->world_size());
  for (std::uint32_t u = 0; u < model_.units().size(); ++u) {
    Unit& unit = units_.emplace_back(Unit{.id = UnitId{u}});
    unit.shared = options_.units[u].shared;
    std::uint64_t elements = 0;
    for (const ParameterSpec& spec : options_.units[u].parameters) {
      elements += element_count(spec);
      unit.trainable += spec.trainable ? 1 : 0;
      unit.has_frozen = unit.has_frozen || !spec.trainable;
    }
    unit.is_small = elements <= options_.config.engine.persistence_elements;
  }
  has_arrived_.resize(model_.parameters().size());
}

}  // namespace hoist::python
