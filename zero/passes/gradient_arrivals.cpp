// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/passes/gradient_arrivals.hpp>

namespace hoist::detail {

GradientArrivals::GradientArrivals(Runtime& runtime, const EngineOptions& options, const UnitTable& table,
                                   const Memory& memory, GradientSpill* spill, Streams& streams)
    : table_(table),
      memory_(memory),
      spill_(spill),
      streams_(streams),
      norm_(runtime, table, memory),
      spilling_(table.units().size()) {
  for (std::uint32_t u = 0; u < table.units().size(); ++u) shards_.push_back(memory.unit(UnitId{u}).gradient);
  if (!memory.gradient_ring().empty()) ring_.emplace(memory.gradient_ring());
  if (hands_gradients_on(options) || spill != nullptr)
    thread_ = std::make_unique<scheduler::Executor>("hoist-arrivals");
}

bool GradientArrivals::in_ring(UnitId unit) const { return ring_ && memory_.placement(unit).gradient_in_ring; }

std::byte* GradientArrivals::place(UnitId id) {
  std::byte* const place = in_ring(id) ? ring_->take(table_.unit(id).gradient_shard_bytes) : shards_[id.index];
  if (!memory_.placement(id).gradient_spilled) shards_[id.index] = place;
  return place;
}

void GradientArrivals::follow(UnitId id, const std::byte* shards, Arrival& arrival) {
  if (memory_.placement(id).gradient_spilled) enqueue_spill(id, shards, arrival);
  if (arrival.hand_on) enqueue_hand_on(id, arrival);
}

// --- handing on ------------------------------------------------------------------------------------------------------

void GradientArrivals::hand_on(Recipient recipient) {
  recipient_ = std::move(recipient);
  handing_on_ = true;
  opened_ = thread_->enqueue(recipient_.open);
}

void GradientArrivals::await_opened() { opened_.wait(); }

// The update will change the unit's weights. It waits for copies up that were submitted before; those that are
// submitted later wait for the update.
void GradientArrivals::enqueue_hand_on(UnitId id, Arrival& arrival) {
  const platform::StreamEvent copied_up = streams_.up->record();  // before the unit is announced: it may fail
  const auto updated = std::make_shared<Completion>();
  recipient_.announce(id);
  arrival.handed_on =
      thread_->enqueue([this, id, updated, copied_up, arrived = arrival.arrived, added = arrival.added] {
        arrived.wait();
        added.wait();
        copied_up.wait();
        *updated = hand_on_now(id);
      });
  arrival.handed_on.then([withdraw = recipient_.withdraw, id](std::exception_ptr error) {
    if (error) withdraw(id, error);
  });
  if (in_ring(id)) ring_->lend(followed_by(arrival.handed_on, [updated] { return *updated; }));
}

Completion GradientArrivals::hand_on_now(UnitId id) {
  norm_.sum(id, shards_[id.index]);
  if (norm_.is_finite(id)) return recipient_.take(id);
  recipient_.withdraw(id, nullptr);  // step() will say so
  return {};
}

void GradientArrivals::await_handed_on() noexcept {
  if (!thread_) return;
  try {
    thread_->drain();
  } catch (...) {  // was, or will be, thrown by wait()
  }
}

// --- spilling --------------------------------------------------------------------------------------------------------

std::function<void()> GradientArrivals::start_reading_sums(UnitId id, std::byte* sums) {
  const Completion read = followed_by(spilling_[id.index], [this, id, sums] {
    return spill_->start_read(spill_->all_tiles(id), sums, aio::Priority::foreground);
  });
  return [this, id, sums, read] {
    read.wait();
    spill_->verify(spill_->all_tiles(id), sums);
  };
}

// step() waits until the gradient is in the norm. Only the unit's update waits for the write.
void GradientArrivals::enqueue_spill(UnitId id, const std::byte* shards, Arrival& arrival) {
  const auto written = std::make_shared<Completion>();
  arrival.spilling = thread_->enqueue([this, id, shards, written, arrived = arrival.arrived, added = arrival.added,
                                       completes_step = arrival.completes_step] {
    arrived.wait();
    added.wait();
    if (completes_step) norm_.sum(id, shards);
    *written = spill_->write(id, {shards, table_.unit(id).gradient_shard_bytes});
  });
  spilling_[id.index] = arrival.spilling;
  ring_->lend(followed_by(arrival.spilling, [written] { return *written; }));
}

// --- the norm --------------------------------------------------------------------------------------------------------

// Whether the unit's gradient is added to the norm when it arrives; sum_of_squares() then leaves it out.
bool GradientArrivals::is_summed_on_arrival(UnitId id) const {
  return memory_.placement(id).gradient_spilled || hands_on(id);
}

double GradientArrivals::sum_of_squares() {
  if (memory_.has_device_only()) norm_.sum_on_device(*streams_.down);
  left_.clear();
  for (std::uint32_t u = 0; u < table_.units().size(); ++u)
    if (const UnitId unit{u}; !memory_.device_only(unit) && !is_summed_on_arrival(unit)) left_.push_back(unit);
  norm_.sum(left_, shards_);
  return norm_.total();
}

}  // namespace hoist::detail
