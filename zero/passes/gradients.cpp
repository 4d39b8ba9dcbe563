// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/float_environment.hpp>
#include <hoist/zero/passes/gradients.hpp>
#include <hoist/zero/passes/waits.hpp>

namespace hoist::detail {

using platform::CopyKind;

Gradients::Gradients(Runtime& runtime, const EngineOptions& options, const UnitTable& table, const Memory& memory,
                     GradientSpill* spill, scheduler::Executor& executor, Streams& streams, UpdateQueue& updates,
                     AbortNotifier& abort_notifier)
    : runtime_(runtime),
      reduces_(table.world_size() > 1 && !options.gradients_are_reduced),
      table_(table),
      memory_(memory),
      executor_(executor),
      streams_(streams),
      updates_(updates),
      abort_notifier_(abort_notifier),
      states_(table.units().size()),
      own_(table.units().size()),
      arrivals_(runtime, options, table, memory, spill, streams) {
  for (const std::span<std::byte> bytes : memory.gradient_buffers()) shared_.push_back({.data = bytes.data()});
  for (std::uint32_t u = 0; u < own_.size(); ++u) own_[u].data = memory.unit(UnitId{u}).own_gradient;
  if (!memory.sum_buffers().empty()) accumulator_ = std::make_unique<Accumulator>(runtime, memory.sum_buffers());
}

std::byte* Gradients::buffer(UnitId unit, StreamRef stream) {
  State& state = states_[unit.index];
  if (state.finished) {
    throw UsageError(fmt::format("gradients of unit '{}' were already finished in this pass", table_.unit(unit).name));
  }
  if (state.buffer != nullptr) {
    if (state.stream != &*stream) stream->wait(state.stream->record(), WaitCause::none);
  } else {
    state.buffer = &acquire(unit);
    state.buffer->busy = true;
    state.stream = &*stream;  // clear() needs it, also after an error below
    if (state.buffer->reduction) {
      await_submitted(state.buffer->reduction->submitted, stream, updates_, runtime_.ledger());
      const GradientArrivals::Arrival& arrival = state.buffer->reduction->arrival;
      stream->wait(arrival.reduced, WaitCause::comm);
      stream->wait(arrival.arrived, WaitCause::device_to_host);
    }
    stream->wait(state.buffer->dropped, WaitCause::none);
    const Unit& description = table_.unit(unit);
    if (micro_batches_in_pass_ > 1)
      stream->fill(state.buffer->data + description.gradient_bytes, 0, description.gradient_sum_bytes);
    else
      stream->fill(state.buffer->data, 0, description.gradient_bytes);
  }
  state.stream = &*stream;
  return state.buffer->data;
}

Gradients::Place Gradients::place(const Segment& segment) const {
  if (micro_batches_in_pass_ > 1) return {segment.gradient_sum_offset, DType::fp32};
  return {segment.gradient_offset, segment.dtype};
}

// The unit's own buffer, else a shared one; of several free ones, one whose last reduction is furthest along.
Gradients::Buffer& Gradients::acquire(UnitId unit) {
  if (own_[unit.index].data != nullptr) return own_[unit.index];
  Buffer* best = nullptr;
  for (Buffer& buffer : shared_) {
    if (buffer.busy) continue;
    const bool submitted = !buffer.reduction || buffer.reduction->submitted.done();
    if (submitted && (!buffer.reduction || buffer.reduction->arrival.arrived.reached())) return buffer;
    if (best == nullptr || submitted) best = &buffer;
  }
  if (best != nullptr) return *best;
  std::uint64_t bytes = 0;
  for (const Unit& other : table_.units()) bytes = std::max(bytes, other.gradient_buffer_bytes());
  const tiers::Budget& budget = runtime_.device_budget();
  throw over_budget(budget, budget.limit_bytes() + bytes,
                    fmt::format("gradients of unit '{}' while other units' are not finished", table_.unit(unit).name));
}

void Gradients::finish(UnitId id, StreamRef stream) {
  State& state = states_[id.index];
  std::byte* source = buffer(id, stream);  // zeros when the pass made no gradient for this unit
  if (micro_batches_in_pass_ > 1) take_mean(table_.unit(id), source, stream);
  auto reduction = std::make_shared<Reduction>();
  reduction->arrival = {.hand_on = arrivals_.hands_on(id), .completes_step = completes_step_};
  last_made_ = stream->record();
  reduction->submitted =
      executor_.enqueue([this, id, source, reduction, ready = last_made_,
                         how = state.summed ? optim::Accumulate::add : optim::Accumulate::overwrite] {
        try {
          reduce(id, source, ready, how, reduction->arrival);
        } catch (...) {
          abort_notifier_.notify(std::current_exception(), table_.unit(id).name);
          throw;
        }
      });
  state.buffer->reduction = reduction;
  state.buffer->busy = false;
  state.buffer = nullptr;
  state.reduction = std::move(reduction);
  state.finished = true;
}

// Makes the mean of the micro-batches' sum, in the type that goes over the links.
void Gradients::take_mean(const Unit& unit, std::byte* buffer, StreamRef stream) const {
  const FloatEnvironment environment;  // the program may have another
  for (const Segment& segment : unit.trainable_segments())
    stream->scale_into(buffer + segment.gradient_offset, segment.dtype, buffer + segment.gradient_sum_offset,
                       DType::fp32, static_cast<std::uint64_t>(table_.world_size()) * segment.shard_elements,
                       1.0f / static_cast<float>(micro_batches_in_pass_), platform::Stream::Combine::overwrite);
}

// On the executor. Takes the mean over ranks, unless the program has, and brings this rank's shard of it down.
void Gradients::reduce(UnitId id, std::byte* source, const platform::StreamEvent& ready, optim::Accumulate how,
                       GradientArrivals::Arrival& arrival) {
  const Unit& unit = table_.unit(id);
  if (reduces_) {
    std::vector<comm::ReducePiece> pieces;
    pieces.reserve(unit.segments.size());
    for (const Segment& segment : unit.trainable_segments())
      pieces.push_back({.data = source + segment.gradient_offset,
                        .dtype = segment.dtype,
                        .shard_elements = segment.shard_elements,
                        .scale = 1.0f / static_cast<float>(table_.world_size()),
                        .what = unit.name});
    streams_.comm->wait(ready, WaitCause::none);
    runtime_.communicator().reduce_scatter(pieces, *streams_.comm);
    arrival.reduced = streams_.comm->record();
    abort_notifier_.watch(arrival.reduced, unit.name);
    streams_.down->wait(arrival.reduced, WaitCause::none);
  } else {
    streams_.down->wait(ready, WaitCause::none);
  }
  // A unit that no gather of this pass has brought up may still owe an update from its last gradient.
  updates_.request(id).wait();
  std::byte* const shards = arrivals_.place(id);
  try {
    if (table_.gradient_sums() == GradientSums::in_memory) {
      sum_in_memory(id, source, shards, how, arrival);
    } else {
      bring_down(id, source, shards);
      arrival.arrived = streams_.down->record();
    }
  } catch (...) {
    arrivals_.fail(id);
    throw;
  }
  arrivals_.follow(id, shards, arrival);
}

const std::byte* Gradients::own_shard(const Segment& segment, const std::byte* source) const {
  return source + segment.gradient_offset + static_cast<std::uint64_t>(runtime_.rank()) * segment.shard_bytes();
}

void Gradients::bring_down(UnitId id, const std::byte* source, std::byte* shards) {
  const CopyKind kind = memory_.state_on_device(id) ? CopyKind::local : CopyKind::device_to_host;
  for (const Segment& segment : table_.unit(id).trainable_segments())
    streams_.down->copy(shards + segment.gradient_shard_offset, own_shard(segment, source), segment.shard_bytes(),
                        kind);
}

void Gradients::sum_in_memory(UnitId id, const std::byte* source, std::byte* shards, optim::Accumulate how,
                              GradientArrivals::Arrival& arrival) {
  std::vector<Accumulator::Part> parts;
  std::function<void()> bring_sums;
  if (memory_.placement(id).gradient_spilled && how == optim::Accumulate::add)
    bring_sums = arrivals_.start_reading_sums(id, shards);
  const bool on_device = memory_.state_on_device(id);
  std::byte* buffer = on_device ? nullptr : accumulator_->acquire();
  for (const Segment& segment : table_.unit(id).trainable_segments()) {
    std::byte* const sums = shards + segment.gradient_shard_offset;
    if (on_device) {
      using Combine = platform::Stream::Combine;
      streams_.down->scale_into(sums, DType::fp32, own_shard(segment, source), segment.dtype, segment.shard_elements,
                                1.0f, how == optim::Accumulate::add ? Combine::add : Combine::overwrite);
      continue;
    }
    streams_.down->copy(buffer, own_shard(segment, source), segment.shard_bytes(), CopyKind::device_to_host);
    parts.push_back({reinterpret_cast<float*>(sums), buffer, segment.dtype, segment.shard_elements});
    buffer += round_up(segment.shard_bytes(), 64);
  }
  arrival.arrived = streams_.down->record();
  if (!on_device) arrival.added = accumulator_->add(arrival.arrived, std::move(parts), how, std::move(bring_sums));
}

// --- a pass, a step --------------------------------------------------------------------------------------------------

void Gradients::begin_pass(const PassOfStep& pass) {
  micro_batches_in_pass_ = pass.micro_batches;
  completes_step_ = pass.last;
  for (State& state : states_) {
    const bool summed = !pass.first && state.finished;
    const auto reduction = std::move(state.reduction);
    state = State{};
    state.summed = summed;
    state.reduction = summed ? reduction : nullptr;
  }
}

void Gradients::await_made() noexcept {
  try {
    last_made_.wait();
  } catch (...) {  // its reduction fails with it
  }
}

void Gradients::wait() {
  arrivals_.await_opened();  // where every unit's states are on the device, nothing else has waited for it
  for (const State& state : states_) {
    if (!state.reduction) continue;
    const GradientArrivals::Arrival& arrival = state.reduction->arrival;
    arrival.arrived.wait();
    arrival.added.wait();
    arrival.handed_on.wait();
    arrival.spilling.wait();
  }
  for (const std::vector<Buffer>* buffers : {&shared_, &own_}) {
    for (const Buffer& buffer : *buffers) buffer.dropped.wait();
  }
}

void Gradients::drop_buffer(State& state) {
  if (state.buffer == nullptr) return;
  state.buffer->dropped = state.stream->record();
  state.buffer->busy = false;
  state.buffer = nullptr;
}

void Gradients::clear() {
  for (State& state : states_) {
    drop_buffer(state);
    state = State{};
  }
  arrivals_.stop_handing_on();
}

void Gradients::clear_pass() {
  for (State& state : states_) {
    drop_buffer(state);
    state.finished = state.summed;  // as after the last pass
  }
  arrivals_.stop_handing_on();
}

}  // namespace hoist::detail
