// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/float_environment.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/zero/detail/engine_impl.hpp>
#include <hoist/zero/passes/waits.hpp>
#include <hoist/zero/predict/step_bytes.hpp>

namespace hoist {

using tiers::Region;

void detail::refuse_capture(StreamRef stream, std::string_view call) {
  if (!stream->capturing()) return;
  throw UsageError(fmt::format(
      "{} on stream '{}', which is being captured into a CUDA graph: a replay would neither fetch anything "
      "nor wait for what is fetched. End the capture before the call; capture only kernels between gather() "
      "and release(), of units whose memory stays where it is (a Binding, or ZeRO stage 2)",
      call, stream->name()));
}

// --- passes ----------------------------------------------------------------------------------------------------------

void Engine::Impl::begin(Pass kind, const PassOptions& pass_options) {
  if (pass) throw UsageError("a pass is already under way");
  if (kind > Pass::generate) throw UsageError(fmt::format("there is no pass {}", static_cast<unsigned>(kind)));
  if (kind == Pass::train) check_micro_batch(pass_options);
  require_undecided("begin()");
  check_agreement(/*on_settings=*/false);
  if (kind == Pass::train) {
    held_micro_batches = in_vertical_order() ? pass_options.micro_batches : 1;
    micro_batches = in_vertical_order() ? 1 : pass_options.micro_batches;
    live.gradients->begin_pass(/*first=*/pass_options.micro_batch == 0, held_micro_batches);
  }
  pass = kind;
  pass_was_left = false;
  reading_ahead = false;
  last_refusal.clear();
  pass_began = Clock::now();
  ++pass_serial;
  live.gatherer->begin_pass(static_cast<std::size_t>(kind), /*last=*/completes_step());
}

void Engine::Impl::end_pass(bool complete) {
  if (!pass) return;
  constexpr std::array kNames{"train pass", "evaluate pass", "generate pass"};
  if (Trace* const trace = runtime.trace(); trace != nullptr)
    trace->add(TraceRow::program, kNames[static_cast<std::size_t>(*pass)], pass_began, Clock::now());
  ended_pass = *pass;
  pass_was_left = !complete;
  const bool train = std::exchange(pass, std::nullopt) == Pass::train;
  live.gatherer->end_pass(complete);
  if (!complete && updating) fail_updating("its pass was left before its end");
  agreement_due = complete;
  if (!train) return;  // gradients that wait for step() still do
  if (!complete) {
    micro_batches_done = 0;
    return live.gradients->clear();
  }
  ++micro_batches_done;
  gradients_due = micro_batches_done == micro_batches;
}

void Engine::Impl::check_micro_batch(const PassOptions& wanted) const {
  if (gradients_due) throw UsageError("the last pass's gradients wait for step() or discard()");
  if (wanted.micro_batches < 1 || static_cast<unsigned>(wanted.micro_batches) > options.micro_batches_max) {
    throw UsageError(
        fmt::format("{} micro-batches in a step; the engine was made for 1 to {} "
                    "(gradient_accumulation_steps, EngineOptions::micro_batches_max)",
                    wanted.micro_batches, options.micro_batches_max));
  }
  if (in_vertical_order() && wanted.micro_batch != 0) {
    throw UsageError(
        fmt::format("micro-batch {} of {} in a pass of its own; in vertical order (hoist.micro_batch_order) one pass, "
                    "micro-batch 0, holds them all",
                    wanted.micro_batch, wanted.micro_batches));
  }
  if (in_vertical_order()) return;
  if (wanted.micro_batch != micro_batches_done || (micro_batches_done > 0 && wanted.micro_batches != micro_batches)) {
    throw UsageError(
        fmt::format("micro-batch {} of {} begins after {} of {}: they come in order, from 0; discard() "
                    "drops those that were done",
                    wanted.micro_batch, wanted.micro_batches, micro_batches_done, micro_batches));
  }
  if (micro_batches_done > 0) require_finished();
}

void Engine::Impl::require_finished() const {
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    if (table.units()[u].is_trainable() && !live.gradients->finished(UnitId{u})) {
      throw UsageError(fmt::format("unit '{}' was not finished in the pass; call finish() for every trainable unit",
                                   table.units()[u].name));
    }
  }
}

// Of all that decides how the next step changes state, but for the gradients.
std::uint64_t Engine::Impl::hash_of_settings() const {
  std::uint64_t hash = std::bit_cast<std::uint64_t>(options.gradient_clipping);
  const auto add = [&](auto value) {
    if constexpr (std::is_same_v<decltype(value), double>)
      hash = random_bits(hash, std::bit_cast<std::uint64_t>(value));
    else
      hash = random_bits(hash, static_cast<std::uint64_t>(value));
  };
  for (const GroupOptions& own : groups) {
    const GroupOptions group = scheduled(own, step_count);
    add(group.kind), add(group.learning_rate), add(group.beta1), add(group.beta2), add(group.epsilon);
    add(group.weight_decay), add(group.bias_correction), add(group.momentum), add(group.dampening);
    add(group.nesterov), add(group.learning_rate_decay), add(group.rounding_seed);
  }
  return hash;
}

// Ranks that made different calls have mixed up their data already; they must not step on it. Nor must ranks that would
// step differently: each would change its own shard in its own way, and nobody would ever hear of it.
void Engine::Impl::check_agreement(bool on_settings) {
  if (!std::exchange(agreement_due, false) || runtime.world_size() == 1) return;
  const scheduler::AccessTrace& trace = live.gatherer->planner().trace();
  std::string last = "no unit";
  if (!trace.empty()) last = fmt::format("unit '{}' last", table.units()[trace.back().item].name);
  // Equal accesses in another kind of pass, or another micro-batch, are another program too.
  constexpr std::array kNames{"train", "evaluate", "generate"};
  const std::uint64_t what = static_cast<std::uint64_t>(ended_pass) << 62 |
                             static_cast<std::uint64_t>(micro_batches) << 24 |
                             static_cast<std::uint64_t>(micro_batches_done);
  std::uint64_t hash =
      random_bits(random_bits(scheduler::trace_hash(trace), what), static_cast<std::uint64_t>(held_micro_batches));
  std::string settings;
  if (on_settings) {
    hash = random_bits(hash, hash_of_settings());
    settings = fmt::format(", learning rate {:g}, clipping {:g}", scheduled(groups.front(), step_count).learning_rate,
                           options.gradient_clipping);
  }
  comm::agree(runtime.communicator(), hash,
              fmt::format("a {} pass ({} of {} micro-batches done{}) of {} accesses{}, {}",
                          kNames[static_cast<std::size_t>(ended_pass)], micro_batches_done, micro_batches,
                          held_micro_batches > 1 ? fmt::format(", {} held", held_micro_batches) : "", trace.size(),
                          settings, last));
}

PassScope Engine::begin(Pass pass, PassOptions options) {
  impl_->guarded([&] { impl_->begin(pass, options); });
  return PassScope(impl_->self, impl_->pass_serial);
}

Lease Engine::gather(UnitId unit, StreamRef stream) {
  return impl_->guarded([&] {
    if (!impl_->pass) throw UsageError("gather() outside of a pass; call begin() first");
    detail::refuse_capture(stream, "gather()");
    if (unit.index >= impl_->table.units().size()) throw UsageError(fmt::format("there is no unit {}", unit.index));
    impl_->require_untouched(unit);
    impl_->live.gatherer->gather(unit, stream);
    return Lease(impl_->self, unit, stream, impl_->pass_serial);
  });
}

GradientLease Engine::gradients(UnitId unit, StreamRef stream) {
  return impl_->guarded([&] {
    if (impl_->pass != Pass::train) throw UsageError("gradients are made in train passes only");
    detail::refuse_capture(stream, "gradients()");
    if (unit.index >= impl_->table.units().size()) throw UsageError(fmt::format("there is no unit {}", unit.index));
    if (!impl_->table.unit(unit).is_trainable()) {
      throw UsageError(fmt::format("unit '{}' is frozen: it has no gradients", impl_->table.unit(unit).name));
    }
    return GradientLease(impl_->self, unit, impl_->live.gradients->buffer(unit, stream), impl_->pass_serial);
  });
}

void Engine::accumulate(ParameterId parameter, const TensorView& gradient, StreamRef stream) {
  if (parameter.index >= impl_->table.specs().size())
    throw UsageError(fmt::format("there is no parameter {}", parameter.index));
  const detail::Parameter& p = impl_->table.parameter(parameter);
  const ParameterSpec& spec = impl_->table.spec(parameter);
  if (gradient.data == nullptr)
    throw UsageError(fmt::format("the gradient of '{}' has no memory: TensorView::data is null", spec.name));
  // As many elements in another order would be another gradient.
  if (!std::ranges::equal(gradient.shape, spec.shape)) {
    throw UsageError(fmt::format("the gradient of '{}' has the shape [{}], the parameter [{}]", spec.name,
                                 fmt::join(gradient.shape, ", "), fmt::join(spec.shape, ", ")));
  }
  if (gradient.device < 0) {
    throw UsageError(
        fmt::format("the gradient of '{}' is in host memory (TensorView::device {}); copy it to memory of "
                    "the device first (Runtime::device_arena, Stream::copy)",
                    spec.name, gradient.device));
  }
  if (reinterpret_cast<std::uintptr_t>(gradient.data) % dtype_bytes(gradient.dtype) != 0) {
    throw UsageError(
        fmt::format("the gradient of '{}' begins at {}, which is not aligned for {}: copy it into a new tensor",
                    impl_->table.spec(parameter).name, gradient.data, dtype_name(gradient.dtype)));
  }
  const TensorView target = gradients(p.unit, stream).view(parameter);
  stream->scale_into(static_cast<std::byte*>(target.data), target.dtype, static_cast<const std::byte*>(gradient.data),
                     gradient.dtype, p.count, 1.0f, platform::Stream::Combine::add);
}

void Engine::finish(UnitId unit, StreamRef stream) {
  impl_->guarded([&] {
    if (impl_->pass != Pass::train) throw UsageError("finish() belongs to a train pass");
    detail::refuse_capture(stream, "finish()");
    if (unit.index >= impl_->table.units().size()) throw UsageError(fmt::format("there is no unit {}", unit.index));
    if (!impl_->table.unit(unit).is_trainable()) return;
    if (impl_->live.gradients->finished(unit)) {
      throw UsageError(fmt::format("unit '{}' was already finished in this pass", impl_->table.unit(unit).name));
    }
    if (impl_->updates_in_backward() && impl_->completes_step() && !impl_->updating) {
      impl_->live.gradients->buffer(unit, stream);  // a budget that refuses it does so before the step is begun
      impl_->begin_updating();
    }
    impl_->live.gradients->finish(unit, stream);
    impl_->live.gatherer->finish(unit);
    if (impl_->completes_step()) impl_->read_ahead();
  });
}

// --- the step --------------------------------------------------------------------------------------------------------

float Engine::loss_scale() const { return static_cast<float>(impl_->scaler.scale()); }

double Engine::Impl::global_norm() {
  const double mine = live.gradients->sum_of_squares();
  std::vector<double> all(static_cast<std::size_t>(runtime.norm_group().size()));
  try {
    runtime.norm_group().exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  } catch (const CommError& lost) {
    throw CommError(fmt::format("{} (the gradient norm of step {})", lost.what(), step_count + 1));
  }
  double total = 0;
  for (const double rank : all) total += rank;
  return std::sqrt(total);
}

GroupOptions Engine::Impl::scheduled(GroupOptions group, std::uint64_t applied_steps) const {
  const LearningRateSchedule& schedule = options.learning_rate_schedule;
  group.learning_rate = hoist::learning_rate(schedule, applied_steps, group.learning_rate);
  if (const auto betas = scheduled_betas(schedule, applied_steps)) {
    group.beta1 = betas->beta1;
    group.beta2 = betas->beta2;
  }
  return group;
}

std::shared_ptr<detail::StepUpdate> Engine::Impl::make_update(std::uint64_t step, double gradient_scale) const {
  std::vector<GroupOptions> now;
  for (const GroupOptions& group : groups) now.push_back(scheduled(group, step - 1));
  return std::make_shared<detail::StepUpdate>(step, now, gradient_scale, runtime.rank());
}

detail::WalkOptions Engine::Impl::walk_of_update(std::uint64_t step) const {
  detail::WalkOptions walk = step_writes(commit_is_due(step));
  walk.makes_weights = true;
  // Of what the device updates, a walk only writes what there is to be written.
  walk.read_device_only = walk.write_resident;
  walk.change_device_only = false;
  return walk;
}

void Engine::Impl::read_ahead() {
  if (std::exchange(reading_ahead, true) || !live.deferred || updates_in_backward() || !nvme_placement()) return;
  live.deferred->read_ahead(walk_of_update(step_count + 1),
                            live.gatherer->expected(static_cast<std::size_t>(Pass::train)));
}

void Engine::Impl::update_on_device(detail::StepUpdate& update) {
  if (!live.memory->has_device_only()) return;
  const TimePoint begin = Clock::now();
  update.run_on_device(table, *live.memory, *live.streams.down);
  runtime.ledger().waited(WaitCause::optimizer, Clock::now() - begin);
}

detail::TilePipeline::Work Engine::Impl::work_of(std::shared_ptr<detail::StepUpdate> update) const {
  return [this, update = std::move(update)](const detail::TileAccess& tile) {
    if (!live.memory->device_only(tile.unit)) update->apply(tile, live.gradients->home(tile.unit));
  };
}

void Engine::Impl::update_now(double gradient_scale) {
  const auto update = make_update(step_count, gradient_scale);
  update_on_device(*update);
  live.pipeline->walk(walk_of_update(step_count), work_of(update));
  update->check(table);
}

detail::UpdateQueue::Ended Engine::Impl::end_of_step(std::shared_ptr<detail::StepUpdate> update,
                                                     std::shared_ptr<Promise> committed) {
  return [this, update = std::move(update), committed = std::move(committed), due = commit_is_due(),
          state = step_state](std::exception_ptr error) {
    Completion done;
    try {
      if (error) std::rethrow_exception(error);
      update->check(table);
      done = commit_deferred(state, due);
    } catch (...) {
      // Nothing will land here; the other ranks learn it where they would have heard that it did.
      if (stores_steps() && due) fail_commit_barrier(std::current_exception());
      fail_pending_saves(std::current_exception());
      committed->fail(std::current_exception());
      throw;
    }
    done.then([committed](std::exception_ptr failed) { failed ? committed->fail(failed) : committed->complete(); });
  };
}

// Returns what is done when the step is committed.
Completion Engine::Impl::update_later(double gradient_scale) {
  const auto update = make_update(step_count, gradient_scale);
  update_on_device(*update);
  const auto committed = std::make_shared<Promise>();
  const Completion completion = committed->completion();
  commit_ahead = commit_is_due() && stores_steps();
  detail::WalkOptions walk = walk_of_update(step_count);
  walk.waits = WaitCause::none;
  walk.in_background = true;
  const auto train = static_cast<std::size_t>(Pass::train);
  live.deferred->begin({.walk = walk,
                        .work = work_of(update),
                        .expected = live.gatherer->expected(train),
                        .ended = end_of_step(update, committed)});
  live.gatherer->stage_for(train);
  return completion;
}

void Engine::Impl::settle_together() {
  if (live.deferred) together("carry out the last step", [&] { live.deferred->finish(); });
  settle();
}

void Engine::Impl::await_deferred() {
  const detail::UpdateWait wait(live.deferred.get());
  live.deferred->finish();
  wait.book(runtime.ledger(), wait.elapsed());
}

// While the program's kernels run nobody waits. What comes then is for reductions, as far as the communicator reports
// when it was busy; in update mode `backward` the rest is for updates, that gradients may come down into the ring, and
// for the step before, which this one's first update waits for.
void Engine::Impl::await_gradients() {
  live.gradients->await_made();
  const detail::UpdateWait wait(live.deferred.get());
  const Nanoseconds reducing_before = runtime.ledger().totals(Link::wire).busy;
  drain();
  live.gradients->wait();
  Nanoseconds reducing{0};
  if (runtime.world_size() > 1) {
    reducing = std::min(wait.elapsed(), runtime.ledger().totals(Link::wire).busy - reducing_before);
    runtime.ledger().waited(WaitCause::comm, reducing);
  }
  if (updates_in_backward()) wait.book(runtime.ledger(), wait.elapsed() - reducing);
}

void Engine::Impl::await_inputs() {
  if (updates_in_backward()) {
    if (!updating) begin_updating();  // no unit has gradients
    return together("update its units", [&] {
      await_gradients();
      live.deferred->check();
    });
  }
  await_gradients();
  if (live.deferred) together("carry out the last step", [&] { await_deferred(); });
}

void Engine::Impl::begin_step(double gradient_scale) {
  if (updating) {  // its units' updates have long begun
    ++step_count;
    changed_since_save = true;
    return;
  }
  together("apply the step", [&] {
    const detail::UpdateWait wait(nullptr);
    last_commit.wait();  // its extents, and memory it may still be written from, are free after it
    wait.book(runtime.ledger(), wait.elapsed());
    ++step_count;
    changed_since_save = true;
    if (nvme_placement()) live.store->begin_step(step_count);
    if (!live.deferred) update_now(gradient_scale);
  });
}

StepReport Engine::Impl::step(const StepOptions& step_options) {
  const FloatEnvironment environment;  // of the norm, the clip factor and the rates; the program may have another
  const TraceSpan span(runtime.trace(), TraceRow::program, "step");
  if (pass) throw UsageError("step() inside of a pass; end the PassScope first");
  if (!gradients_due) {
    throw UsageError(micro_batches_done == 0 ? std::string("step() needs a train pass before it")
                                             : fmt::format("step() after micro-batch {} of {}; it needs all of them",
                                                           micro_batches_done, micro_batches));
  }
  require_room_for(step_options.caller_state);
  require_finished();
  check_agreement(/*on_settings=*/true);
  await_inputs();

  StepReport report;
  report.learning_rate = scheduled(groups.front(), step_count).learning_rate;
  report.loss_scale = scaler.scale();
  const double mean = gradient_mean();
  report.gradient_norm = global_norm() * mean;
  report.applied = std::isfinite(report.gradient_norm);
  if (updating && !report.applied) {
    abort_notifier->told_in_norm();
    fail_updating("a gradient is not finite");
    std::rethrow_exception(failure);
  }
  scaler.update(/*overflow=*/!report.applied);  // before the commit, which the next scale belongs to
  gradients_due = false;
  micro_batches_done = 0;
  if (report.applied) {
    if (options.gradient_clipping > 0) {
      report.clip_factor = std::min(1.0, options.gradient_clipping / (report.gradient_norm + 1e-6));
    }
    live.gatherer->quiesce();
    begin_step(report.clip_factor * mean);
    uncommitted = stores_steps() && !commit_is_due();
    live.gatherer->invalidate();
    step_state = commit_state(step_options.caller_state);
    if (updating) {
      report.committed = conclude_updating();
    } else if (live.deferred) {
      report.committed = update_later(report.clip_factor * mean);
    } else if (nvme_placement() && commit_is_due()) {
      report.committed = commit("", step_state);
    }
  } else {
    report.committed = last_commit;
  }
  if (!stores_steps()) report.committed = {};
  live.gradients->clear();
  book_io();
  report.step = step_count;
  if (metrics) metrics->write(report, runtime.ledger(), committed_step);
  return report;
}

StepReport Engine::step(const StepOptions& options) {
  return impl_->guarded([&] { return impl_->step(options); });
}

void Engine::discard() noexcept {
  if (!impl_->sealed) return;
  try {
    if (impl_->pass) return impl_->end_pass(/*complete=*/false);
    if (impl_->updating) impl_->fail_updating("it was discarded");
    impl_->gradients_due = false;
    if (std::exchange(impl_->micro_batches_done, 0) > 0) impl_->live.gradients->clear();
  } catch (...) {
    impl_->fail(std::current_exception());
  }
}

void Engine::abandon(std::string_view why) noexcept {
  try {
    impl_->fail(std::make_exception_ptr(Error(fmt::format("its program gave up: {}", why))));
  } catch (...) {  // no memory for the words; destruction is what is left
  }
}

void Engine::settle() {
  impl_->guarded([&] { impl_->settle(); });
}

StepBytes Engine::formula_bytes() const {
  const Impl& e = *impl_;
  auto fetches = e.live.gatherer ? e.live.gatherer->planner().fetch_counts(static_cast<std::size_t>(Pass::train))
                                 : std::vector<std::uint32_t>();
  if (fetches.empty()) fetches.assign(e.table.units().size(), 2);  // forward and backward
  const detail::UnitRegions units(e.options, e.table, detail::device_access(e.runtime.options()));
  return detail::step_phases(e.options, units, fetches).sum();
}

}  // namespace hoist
