// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/memory/device_buffers.hpp>
#include <hoist/zero/passes/gatherer.hpp>
#include <hoist/zero/passes/waits.hpp>

namespace hoist::detail {

using platform::CopyKind;
using platform::StreamEvent;

Gatherer::Gatherer(Runtime& runtime, const EngineOptions& options, const UnitTable& table, const Memory& memory,
                   std::uint64_t gather_bytes, scheduler::Executor& executor, Streams& streams,
                   WeightReader* weight_reader, UpdateQueue& updates, AbortNotifier& abort_notifier,
                   comm::Communicator* group)
    : runtime_(runtime),
      options_(options),
      table_(table),
      memory_(memory),
      executor_(executor),
      streams_(streams),
      weight_reader_(weight_reader),
      updates_(updates),
      abort_notifier_(abort_notifier),
      group_(group),
      planner_(plan_inputs(options, memory.plan().units(), gather_bytes)),
      states_(table.units().size()) {}

void Gatherer::begin_pass(std::size_t kind, bool last) {
  training_ = kind == static_cast<std::size_t>(Pass::train);
  last_ = last;
  planned_fetches_ = planner_.fetch_counts(kind);
  const auto first = planner_.begin(kind);
  // A pass that is being recorded has no order; what was staged for another kind's is given up.
  if (weight_reader_ != nullptr)
    weight_reader_->expect(planner_.following() ? reads_ahead(first) : std::vector<UnitId>());
  issue(first);
}

void Gatherer::end_pass(bool complete) {
  for (std::uint32_t u = 0; u < states_.size(); ++u) drop_pins(UnitId{u});
  planner_.end(complete);
  if (weight_reader_ != nullptr) weight_reader_->expect({});
}

std::vector<UnitId> Gatherer::staged_in_order(std::vector<UnitId> order, bool keeps) const {
  std::vector<bool> secondary(states_.size());
  for (std::size_t u = 0; u < states_.size(); ++u) secondary[u] = states_[u].secondary_current;
  std::erase_if(order, [&](UnitId unit) {
    if (states_[unit.index].valid_in_own_memory) return true;
    const bool has_been_kept = secondary[unit.index];
    secondary[unit.index] = has_been_kept || (keeps && memory_.unit(unit).secondary_shard != nullptr);
    return has_been_kept;
  });
  return order;
}

// The units that the plan fetches from their own shards in this pass, in order: those fetched at its beginning, then
// the others. The weight reader reads those on NVMe, and asks for the updates of the others.
std::vector<UnitId> Gatherer::reads_ahead(std::span<const scheduler::Fetch> first) const {
  std::vector<UnitId> order;
  for (const scheduler::Fetch& f : first) order.push_back(UnitId{f.item});
  for (const scheduler::Item item : planner_.upcoming_fetches()) order.push_back(UnitId{item});
  return staged_in_order(std::move(order), training_);
}

std::vector<UnitId> Gatherer::expected(std::size_t kind) const {
  std::vector<UnitId> order;
  for (const scheduler::Item item : planner_.planned_fetches(kind)) order.push_back(UnitId{item});
  return order;
}

void Gatherer::stage_for(std::size_t kind) {
  if (weight_reader_ == nullptr) return;
  weight_reader_->expect(staged_in_order(expected(kind), kind == static_cast<std::size_t>(Pass::train)));
}

// Runs an access past the planner; the weight_reader's expectations end with the plan they came from.
template <typename Access>
void Gatherer::direct(Access access) {
  const bool followed = planner_.following();
  const auto fetches = access();
  if (followed && !planner_.following() && weight_reader_ != nullptr) weight_reader_->expect({});
  issue(fetches);
}

void Gatherer::issue(std::span<const scheduler::Fetch> fetches) {
  for (const scheduler::Fetch& f : fetches) {
    const UnitId unit{f.item};
    UnitState& state = states_[f.item];
    if (f.place.bytes > 0) {
      FormerUse former = vacate(f.place, state);
      state.place = f.place;
      fetch(unit, memory_.gather_memory().data() + f.place.begin, std::move(former));
      continue;
    }
    std::byte* own = memory_.unit(unit).gathered;
    if (own == nullptr || state.valid_in_own_memory) continue;
    state.valid_in_own_memory = true;
    FormerUse former{.leases = std::exchange(state.uses, {})};
    if (state.transfer) former.transfers.push_back(state.transfer);
    fetch(unit, own, std::move(former));
  }
}

// A range is free once every lease of the units that lay there has ended on the device, and the last transfer of each.
// So is the range that `mover` leaves, which nobody will know of from now on. A unit that was vacated is not asked
// again: the wait for it is enqueued on the stream of all later fetches.
Gatherer::FormerUse Gatherer::vacate(const scheduler::Place& place, const UnitState& mover) {
  FormerUse former;
  for (UnitState& state : states_) {
    if (!state.place || (&state != &mover && !state.place->overlaps(place))) continue;
    former.leases.insert(former.leases.end(), state.uses.begin(), state.uses.end());
    if (state.transfer) former.transfers.push_back(std::move(state.transfer));
    state.uses.clear();
    state.transfer = nullptr;
    state.place.reset();
  }
  return former;
}

void Gatherer::fetch(UnitId unit, std::byte* target, FormerUse former) {
  auto transfer = std::make_shared<Transfer>();
  transfer->target = target;
  transfer->source = choose_source(unit);
  states_[unit.index].transfer = transfer;
  transfer->submitted = executor_.enqueue([this, unit, transfer, former = std::move(former)] {
    try {
      for (const StreamEvent& event : former.leases) streams_.up->wait(event, WaitCause::none);
      for (const std::shared_ptr<Transfer>& last : former.transfers) {
        streams_.up->wait(last->gathered, WaitCause::none);
        streams_.up->wait(last->kept, WaitCause::none);
      }
      submit(unit, *transfer);
    } catch (...) {
      abort_notifier_.notify(std::current_exception(), table_.unit(unit).name);
      throw;
    }
  });
}

// On the executor.
void Gatherer::submit(UnitId unit, Transfer& transfer) {
  const bool in_group = transfer.source == Source::secondary;
  in_group ? copy_secondary_up(unit, transfer.target) : copy_up(unit, transfer.target);
  transfer.copied = streams_.up->record();
  transfer.gathered = transfer.copied;
  if (table_.world_size() == 1) return;
  streams_.comm->wait(transfer.copied, WaitCause::none);
  if (in_group)
    all_gather(table_.unit(unit), transfer.target, *group_, memory_.plan().units().secondary_shard_parts());
  else
    all_gather(table_.unit(unit), transfer.target, runtime_.communicator(), /*shards=*/1);
  transfer.gathered = streams_.comm->record();
  if (transfer.source == Source::shards_and_keep) keep_secondary(unit, transfer);
  abort_notifier_.watch(transfer.gathered, table_.unit(unit).name);
}

void Gatherer::copy_up(UnitId id, std::byte* target) {
  const Unit& unit = table_.unit(id);
  const UnitMemory& here = memory_.unit(id);
  UnitState& state = states_[id.index];
  if (memory_.placement(id).reads_weights()) copy_stored_up(id, target);
  if (here.weights == nullptr) return;
  updates_.request(id).wait();
  const std::byte* source = here.weights;
  CopyKind kind = CopyKind::host_to_device;
  if (here.device_shard != nullptr) {
    if (here.weights != here.device_shard && !state.shard_current) {
      streams_.up->copy(here.device_shard, here.weights, unit.host_bytes(), CopyKind::host_to_device);
      state.shard_current = true;
    }
    source = here.device_shard;
    kind = CopyKind::local;
  }
  if (source == target) return;
  const HostPieces pieces = memory_.plan().units().host_pieces(id);
  for (const HostPiece& piece : {pieces.trainable, pieces.frozen}) copy_piece(unit, target, source, piece, kind);
}

void Gatherer::copy_stored_up(UnitId id, std::byte* target) {
  std::byte* staged = weight_reader_->take(id);
  Completion copied;
  try {
    const HostPieces pieces = memory_.plan().units().host_pieces(id);
    for (const HostPiece& piece : {pieces.stored_trainable, pieces.stored_frozen})
      copy_piece(table_.unit(id), target, staged, piece, CopyKind::host_to_device);
    copied = streams_.up->record().completion();
  } catch (...) {
    try {
      streams_.up->synchronize();  // the first of the copies may be under way
    } catch (...) {                // what failed first is thrown
    }
    weight_reader_->hand_back(staged);
    throw;
  }
  copied.then([weight_reader = weight_reader_, staged](std::exception_ptr) { weight_reader->hand_back(staged); });
}

// Copies this rank's shard of every segment, which is in the piece, to its place among the ranks'.
void Gatherer::copy_piece(const Unit& unit, std::byte* target, const std::byte* source, const HostPiece& piece,
                          CopyKind kind) {
  const std::byte* const host = source + piece.offset;  // of the piece's beginning
  if (table_.world_size() == 1) {                       // host and gathered layout are the same
    if (piece.bytes > 0) streams_.up->copy(target + piece.host_offset, host, piece.bytes, kind);
    return;
  }
  const auto rank = static_cast<std::uint64_t>(runtime_.rank());
  for (const Segment& segment : unit.segments) {
    const std::uint64_t begin = std::max(segment.host_offset, piece.host_offset);
    const std::uint64_t end = std::min(segment.host_offset + segment.shard_bytes(), piece.host_end());
    if (begin >= end) continue;
    streams_.up->copy(target + segment.gathered_offset + rank * segment.shard_bytes() + (begin - segment.host_offset),
                      host + (begin - piece.host_offset), end - begin, kind);
  }
}

// Before the weights change, as far as is known: a unit that stays gathered needs no secondary shard.
bool Gatherer::is_fetched_again(UnitId unit) const {
  return !last_ || !planner_.following() || planned_fetches_[unit.index] > 1;
}

// By the program's calls alone, so that all ranks choose alike.
Gatherer::Source Gatherer::choose_source(UnitId unit) {
  if (memory_.unit(unit).secondary_shard == nullptr) return Source::shards;
  UnitState& state = states_[unit.index];
  if (state.secondary_current) return Source::secondary;
  if (!training_ || !is_fetched_again(unit)) return Source::shards;
  state.secondary_current = true;
  return Source::shards_and_keep;
}

template <typename Part>
void Gatherer::for_secondary_parts(const Unit& unit, const Part& part) const {
  const std::uint64_t shards = memory_.plan().units().secondary_shard_parts();
  std::uint64_t offset = 0;
  for (const Segment& segment : unit.segments) {
    const std::uint64_t bytes = shards * segment.shard_bytes();
    part(segment, offset, bytes);
    offset += bytes;
  }
}

void Gatherer::copy_secondary_up(UnitId id, std::byte* target) {
  const std::byte* const secondary = memory_.unit(id).secondary_shard;
  const CopyKind kind = options_.parameters == Placement::device ? CopyKind::local : CopyKind::host_to_device;
  const auto rank = static_cast<std::uint64_t>(group_->rank());
  for_secondary_parts(table_.unit(id), [&](const Segment& segment, std::uint64_t offset, std::uint64_t bytes) {
    streams_.up->copy(target + segment.gathered_offset + rank * bytes, secondary + offset, bytes, kind);
  });
}

// Every reader of the former secondary shard was enqueued before the copy that this unit was gathered from.
void Gatherer::keep_secondary(UnitId id, Transfer& transfer) {
  std::byte* const secondary = memory_.unit(id).secondary_shard;
  const CopyKind kind = options_.parameters == Placement::device ? CopyKind::local : CopyKind::device_to_host;
  const auto rank = static_cast<std::uint64_t>(group_->rank());
  streams_.down->wait(transfer.gathered, WaitCause::none);
  for_secondary_parts(table_.unit(id), [&](const Segment& segment, std::uint64_t offset, std::uint64_t bytes) {
    streams_.down->copy(secondary + offset, transfer.target + segment.gathered_offset + rank * bytes, bytes, kind);
  });
  transfer.kept = streams_.down->record();
}

// `shards`: that each rank of `ranks` has.
void Gatherer::all_gather(const Unit& unit, std::byte* target, comm::Communicator& ranks, std::uint64_t shards) {
  std::vector<comm::GatherPiece> pieces;
  pieces.reserve(unit.segments.size());
  for (const Segment& segment : unit.segments)
    pieces.push_back({target + segment.gathered_offset, shards * segment.shard_bytes(), unit.name});
  ranks.all_gather(pieces, *streams_.comm);
}

void Gatherer::gather(UnitId unit, StreamRef stream) {
  const std::vector<UnitId>& owners = table_.unit(unit).tied;
  gathered_together_.assign(1, unit.index);
  for (const UnitId owner : owners) gathered_together_.push_back(owner.index);
  if (const auto refused = planner_.make_room(gathered_together_)) no_room(UnitId{*refused});
  pin(unit, stream);
  for (std::size_t i = 0; i < owners.size(); ++i) {
    try {
      pin(owners[i], stream);
    } catch (...) {
      while (i-- > 0) unpin(owners[i], stream, stream);
      unpin(unit, stream, stream);
      throw;
    }
  }
}

void Gatherer::pin(UnitId unit, StreamRef stream) {
  UnitState& state = states_[unit.index];
  if (state.pins.empty()) {
    direct([&] { return planner_.gather(unit.index).value(); });
  }
  await(state, stream);
  state.pins.push_back(&*stream);
}

// The host waits only until the fetch is submitted (for weights on NVMe: until they were read); the device then waits
// for the copy and the all-gather.
void Gatherer::await(UnitState& state, StreamRef stream) {
  Transfer& transfer = *state.transfer;
  await_submitted(transfer.submitted, stream, updates_, runtime_.ledger());
  stream->wait(transfer.copied, WaitCause::host_to_device);
  if (table_.world_size() > 1) stream->wait(transfer.gathered, WaitCause::comm);
}

void Gatherer::release(UnitId unit, StreamRef gathered_on, StreamRef stream) {
  unpin(unit, gathered_on, stream);
  for (const UnitId owner : table_.unit(unit).tied) unpin(owner, gathered_on, stream);
}

void Gatherer::unpin(UnitId unit, StreamRef gathered_on, StreamRef stream) {
  UnitState& state = states_[unit.index];
  const auto pin = std::find(state.pins.begin(), state.pins.end(), &*gathered_on);
  HOIST_ASSERT(pin != state.pins.end(), "unit {} is not pinned", unit.index);
  std::erase_if(state.uses, [](const StreamEvent& event) { return event.reached(); });
  state.uses.push_back(stream->record());
  state.pins.erase(pin);
  if (!state.pins.empty()) return;
  direct([&] { return planner_.release(unit.index); });
}

// For leases that outlive their pass.
void Gatherer::drop_pins(UnitId unit) {
  UnitState& state = states_[unit.index];
  if (state.pins.empty()) return;
  for (platform::Stream* stream : state.pins) state.uses.push_back(stream->record());
  state.pins.clear();
}

void Gatherer::finish(UnitId unit) {
  direct([&] { return planner_.finish(unit.index); });
}

std::byte* Gatherer::address(UnitId unit) const {
  const UnitState& state = states_[unit.index];
  return state.pins.empty() ? nullptr : state.transfer->target;
}

void Gatherer::quiesce() const {
  for (const UnitState& state : states_) {
    for (const StreamEvent& event : state.uses) event.wait();
  }
}

void Gatherer::invalidate() {
  for (UnitState& state : states_) {
    state.valid_in_own_memory = false;
    state.shard_current = false;
    state.secondary_current = false;
  }
  if (weight_reader_ != nullptr) weight_reader_->invalidate();
}

void Gatherer::no_room(UnitId unit) const {
  std::string holders;
  for (std::uint32_t u = 0; u < table_.units().size(); ++u)
    if (!states_[u].pins.empty()) holders += (holders.empty() ? "'" : ", '") + table_.units()[u].name + "'";
  const std::string purpose =
      fmt::format("gathering unit '{}' while {} are still leased", table_.unit(unit).name, holders);
  const tiers::Budget& budget = runtime_.device_budget();
  const std::uint64_t more = round_up(table_.unit(unit).gathered_bytes, kBlockAlignment);
  if (budget.free_bytes() < more) throw over_budget(budget, budget.limit_bytes() + more, purpose);
  // The device has room: a key keeps the memory for gathered weights smaller.
  const std::uint64_t have = memory_.gather_memory().size();
  throw BudgetError({.tier = budget.tier(),
                     .have_bytes = have,
                     .need_bytes = have + more,
                     .key = fmt::format("zero_optimization.stage3_max_live_parameters to {}, and with it the room for "
                                        "gathered weights",
                                        live_elements_for(table_, have + more)),
                     .detail = purpose});
}

}  // namespace hoist::detail
