// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/checkpoint/restore.hpp>
#include <hoist/zero/detail/engine_core.hpp>
#include <hoist/zero/predict/step_bytes.hpp>

namespace hoist {

void detail::refuse_capture(StreamRef stream, std::string_view call) {
  if (!stream->capturing()) return;
  throw UsageError(fmt::format(
      "{} on stream '{}', which is being captured into a CUDA graph: a replay would neither fetch anything "
      "nor wait for what is fetched. End the capture before the call; capture only kernels between gather() "
      "and release(), of units whose memory stays where it is (UnitOptions::stable_address, or ZeRO stage 2)",
      call, stream->name()));
}

// --- making one ------------------------------------------------------------------------------------------------------

Engine::Engine(std::unique_ptr<detail::EngineCore> core) : core_(std::move(core), "the engine") {}
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;
Engine::~Engine() = default;

Engine Engine::create(Runtime& runtime, const EngineOptions& options, Model model, const Initializer& initializer,
                      std::span<const std::byte> caller_state) {
  return create(runtime, options, std::move(model), InitialState{.masters = initializer}, caller_state);
}

Engine Engine::create(Runtime& runtime, const EngineOptions& options, Model model, const InitialState& state,
                      std::span<const std::byte> caller_state) {
  auto core = std::make_unique<detail::EngineCore>(runtime, options, std::move(model));
  core->create(state, caller_state);
  return Engine(std::move(core));
}

Engine Engine::restore(Runtime& runtime, const EngineOptions& options, Model model,
                       const RestoreOptions& restore_options) {
  auto core = std::make_unique<detail::EngineCore>(runtime, options, std::move(model));
  core->restore(restore_options);
  return Engine(std::move(core));
}

namespace {

// Calls `search` after all ranks have agreed on the call. Ranks of another sharding group, who wait for this one, are
// told if this one's ranks differ.
template <typename Search>
auto search_stores(Runtime& runtime, const EngineOptions& options, std::string_view call, const Search& search) {
  check(options, runtime.options(), runtime.world_size());
  const auto notifier = std::make_shared<detail::AbortNotifier>(runtime);
  const detail::RankAgreement ranks(runtime, *notifier);
  try {
    ranks.agree_on_call(call);
  } catch (...) {
    if (ranks.has_several_groups()) notifier->notify(std::current_exception());
    throw;
  }
  return search(ranks);
}

}  // namespace

std::optional<std::uint64_t> Engine::find_commit(Runtime& runtime, const EngineOptions& options) {
  // With a mirror, ranks look there as well.
  const std::string call =
      fmt::format("Engine::find_commit() {} hoist.mirror", options.mirror.directory.empty() ? "without" : "with");
  return search_stores(runtime, options, call, [&](const detail::RankAgreement& ranks) {
    const auto plan = detail::find_restore(ranks, options, "");
    return plan ? std::optional(plan->source.commits.front().step) : std::nullopt;
  });
}

std::vector<NamedCheckpoint> Engine::find_checkpoints(Runtime& runtime, const EngineOptions& options) {
  return search_stores(runtime, options, "Engine::find_checkpoints()", [&](const detail::RankAgreement& ranks) {
    return detail::StoreSurvey(ranks, options).checkpoints();
  });
}

// No device has as much, and a little more of it is still a number.
constexpr std::uint64_t kProgramBytesMax = std::uint64_t{1} << 62;

void require_device_memory(Runtime& runtime, const EngineOptions& options, const Model& model,
                           std::uint64_t program_bytes) {
  const detail::UnitTable table(model, detail::state_forms(options, model), runtime.world_size(),
                                detail::gradient_sums(options));
  detail::require_device_memory(runtime, options, table, std::min(program_bytes, kProgramBytesMax));
}

std::vector<ParameterPlace> gathered_layout(const EngineOptions& options, const Model& model, int world_size) {
  if (world_size < 1) throw UsageError(fmt::format("{} ranks cannot gather anything", world_size));
  const detail::UnitTable table(model, detail::state_forms(options, model), world_size, detail::gradient_sums(options));
  std::vector<ParameterPlace> places;
  for (std::uint32_t p = 0; p < model.parameters().size(); ++p) {
    const detail::Parameter& parameter = table.parameter(ParameterId{p});
    const detail::Segment& segment = table.segment_of(ParameterId{p});
    places.push_back({.unit = parameter.unit,
                      .offset_bytes = segment.gathered_offset + parameter.first_element * dtype_bytes(segment.dtype),
                      .unit_bytes = table.unit(parameter.unit).gathered_bytes});
  }
  return places;
}

// --- what it trains --------------------------------------------------------------------------------------------------

const Model& Engine::model() const { return core_->table.model(); }
Runtime& Engine::runtime() { return core_->runtime; }
const RestoreReport* Engine::restored() const { return core_->restored ? &*core_->restored : nullptr; }
bool Engine::keeps(ParameterId parameter, State state) const {
  core_->table.require(parameter);
  return core_->table.keeps(parameter, state);
}

// --- a pass ----------------------------------------------------------------------------------------------------------

PassScope Engine::begin(Pass pass, PassOptions options) {
  core_->run([&] { core_->begin_pass(pass, options); });
  return PassScope(core_->self, core_->pass->serial());
}

Lease Engine::gather(UnitId unit, StreamRef stream) {
  return core_->run([&] {
    if (!core_->pass->under_way()) throw UsageError("gather() outside of a pass; call begin() first");
    detail::refuse_capture(stream, "gather()");
    core_->table.require(unit);
    core_->stepper->policy().require_gatherable(unit);
    core_->gatherer->gather(unit, stream);
    return Lease(core_->self, unit, stream, core_->pass->serial());
  });
}

GradientLease Engine::gradients(UnitId unit, StreamRef stream) {
  return core_->run([&] {
    if (!core_->pass->is(Pass::train)) throw UsageError("gradients are made in train passes only");
    detail::refuse_capture(stream, "gradients()");
    core_->table.require(unit);
    if (!core_->table.unit(unit).is_trainable())
      throw UsageError(fmt::format("unit '{}' is frozen: it has no gradients", core_->table.unit(unit).name));
    return GradientLease(core_->self, unit, core_->gradients->buffer(unit, stream), core_->pass->serial());
  });
}

namespace {

void check_gradient(const TensorView& gradient, const ParameterSpec& spec) {
  if (gradient.data == nullptr)
    throw UsageError(fmt::format("the gradient of '{}' has no memory: TensorView::data is null", spec.name));
  // As many elements in another order would be another gradient.
  if (!std::ranges::equal(gradient.shape, spec.shape)) {
    throw UsageError(fmt::format("the gradient of '{}' has the shape [{}], the parameter [{}]", spec.name,
                                 fmt::join(gradient.shape, ", "), fmt::join(spec.shape, ", ")));
  }
  if (gradient.dtype > DType::fp32)
    throw UsageError(fmt::format("the gradient of '{}' has no type that hoist knows", spec.name));
  if (gradient.device < 0) {
    throw UsageError(
        fmt::format("the gradient of '{}' is in host memory (TensorView::device {}); copy it to memory of "
                    "the device first (Runtime::device_arena, Stream::copy)",
                    spec.name, gradient.device));
  }
  if (reinterpret_cast<std::uintptr_t>(gradient.data) % dtype_bytes(gradient.dtype) != 0) {
    throw UsageError(
        fmt::format("the gradient of '{}' begins at {}, which is not aligned for {}: copy it into a new tensor",
                    spec.name, gradient.data, dtype_name(gradient.dtype)));
  }
}

}  // namespace

void Engine::accumulate(ParameterId parameter, const TensorView& gradient, StreamRef stream) {
  core_->run([&] {
    core_->table.require(parameter);
    check_gradient(gradient, core_->table.spec(parameter));
    const detail::Parameter& p = core_->table.parameter(parameter);
    const TensorView target = gradients(p.unit, stream).view(parameter);
    stream->scale_into(static_cast<std::byte*>(target.data), target.dtype, static_cast<const std::byte*>(gradient.data),
                       gradient.dtype, p.count, 1.0f, platform::Stream::Combine::add);
  });
}

void Engine::finish(UnitId unit, StreamRef stream) {
  core_->run([&] {
    if (!core_->pass->is(Pass::train)) throw UsageError("finish() belongs to a train pass");
    detail::refuse_capture(stream, "finish()");
    core_->table.require(unit);
    if (!core_->table.unit(unit).is_trainable()) return;
    if (core_->gradients->finished(unit))
      throw UsageError(fmt::format("unit '{}' was already finished in this pass", core_->table.unit(unit).name));
    const bool completes_step = core_->pass->completes_step();
    if (completes_step) core_->stepper->policy().before_finish(unit, stream);
    core_->gradients->finish(unit, stream);
    core_->gatherer->finish(unit);
    if (completes_step) core_->stepper->policy().after_finish();
  });
}

// --- a step ----------------------------------------------------------------------------------------------------------

double Engine::learning_rate(GroupId group) const { return core_->settings.learning_rate(group); }

void Engine::set_learning_rate(GroupId group, double learning_rate) {
  if (!core_->settings.changes_learning_rate(group, learning_rate)) return;
  core_->stepper->policy().require_undecided("set_learning_rate()");
  core_->settings.set_learning_rate(group, learning_rate);
}

float Engine::loss_scale() const { return static_cast<float>(core_->settings.scaler.scale()); }

double Engine::gradient_norm() {
  return core_->run([&] { return core_->gradient_norm(); });
}

StepReport Engine::step(const StepOptions& options) {
  return core_->run([&] { return core_->step(options); });
}

void Engine::discard() noexcept {
  if (!core_.is_usable()) return;
  try {
    core_->discard();
  } catch (...) {
    core_->fail(std::current_exception());
  }
}

bool Engine::discard_pass() noexcept {
  if (!core_.is_usable()) return false;
  try {
    return core_->discard_pass();
  } catch (...) {
    core_->fail(std::current_exception());
    return false;
  }
}

void Engine::abandon(std::string_view why) noexcept {
  if (!core_.is_usable()) return;
  try {
    core_->fail(std::make_exception_ptr(Error(fmt::format("its program gave up: {}", why))));
  } catch (...) {  // no memory for the words; destruction is what is left
  }
}

void Engine::settle() {
  core_->run([&] { core_->stepper->settle(); });
}

bool Engine::has_begun_step() const { return core_->stepper->policy().is_decided(); }

// --- state -----------------------------------------------------------------------------------------------------------

void Engine::read(ParameterId parameter, State state, std::uint64_t first_element, std::span<float> out) {
  core_->run([&] { core_->state_calls->read(parameter, state, first_element, out); });
}

void Engine::write(ParameterId parameter, State state, std::uint64_t first_element, std::span<const float> values) {
  core_->run([&] { core_->state_calls->write(parameter, state, first_element, values); });
}

void Engine::write(std::span<const UnitId> units, const UnitChanges& changes,
                   std::optional<std::span<const std::byte>> caller_state) {
  core_->run([&] { core_->state_calls->write(units, changes, caller_state); });
}

void Engine::replace_state(const InitialState& state, std::span<const std::byte> caller_state) {
  core_->run([&] { core_->state_calls->replace_state(state, caller_state); });
}

void Engine::change_masters(const Initializer& change) {
  core_->run([&] { core_->state_calls->change_masters(change); });
}

Completion Engine::save(std::string name, std::span<const std::byte> caller_state, const SaveOptions& options) {
  return core_->run([&] { return core_->state_calls->save(name, caller_state, options); });
}

// --- what happened ---------------------------------------------------------------------------------------------------

std::uint64_t Engine::step_count() const { return core_->settings.step_count; }
std::optional<std::uint64_t> Engine::committed_step() const { return core_->checkpoints->committed_step(); }
MirrorReport Engine::mirror() const {
  const detail::Mirror* const mirror = core_->checkpoints->mirror();
  return mirror ? MirrorReport{.step = mirror->step(), .copied_bytes = mirror->copied_bytes()} : MirrorReport{};
}
std::vector<std::string> Engine::describe() const { return core_->describe(); }

bool Engine::keeps_gathered(UnitId unit) const {
  core_->table.require(unit);
  return core_->gatherer->planner().all_fit() || core_->memory->unit(unit).gathered != nullptr;
}

StepBytes Engine::formula_bytes() const {
  auto fetches = core_->gatherer->planner().fetch_counts(static_cast<std::size_t>(Pass::train));
  if (fetches.empty()) fetches.assign(core_->table.units().size(), 2);  // forward and backward
  return detail::sum_of(detail::unit_steps(core_->options, core_->memory->plan().units(), fetches));
}

std::uint64_t Engine::wire_bytes_in_group() const {
  return core_->gathering_group ? core_->gathering_group->sent_bytes() : 0;
}

}  // namespace hoist
