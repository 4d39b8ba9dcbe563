// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <hoist/core/units.hpp>
#include <hoist/tests/support/faulty_backend.hpp>

namespace hoist::test {

using aio::Block;
using aio::Operation;

namespace {

constexpr std::uint64_t kSector = Faults::kSectorBytes;
constexpr std::uint64_t kMisdirectionMax = 16;  // sectors

std::int64_t as_result(std::uint64_t bytes) { return static_cast<std::int64_t>(bytes); }

}  // namespace

FaultyBackend::FaultyBackend(std::unique_ptr<aio::Backend> inner, std::shared_ptr<Faults> faults)
    : inner_(std::move(inner)), faults_(std::move(faults)) {}

std::string FaultyBackend::description() const {
  return fmt::format("faulty (seed {}) over {}", faults_->seed(), inner_->description());
}

void FaultyBackend::submit(Block& block) {
  if (free_.empty()) free_.push_back(&flights_.emplace_back());
  Flight& flight = *free_.back();
  free_.pop_back();
  static_cast<Block&>(flight) = block;
  flight.outer = &block;
  flight.decision = faults_->decide(block);
  flight.tracked_id = 0;
  if (flight.decision.delay > Nanoseconds::zero()) {
    flight.due = Clock::now() + flight.decision.delay;
    held_.push_back(&flight);
  } else {
    start(flight);
  }
}

void FaultyBackend::start(Flight& flight) {
  if (flight.operation == Operation::sync) flight.tracked_id = faults_->sync_begins(flight);  // even if it will fail
  if (flight.decision.kind == Fault::Kind::error) return report(flight, -flight.decision.code);
  // Half a block, in sectors; a single sector is moved whole and half of it reported.
  if (flight.decision.kind == Fault::Kind::short_transfer && flight.length_bytes > kSector)
    flight.length_bytes = std::max(kSector, round_down(flight.length_bytes / 2, kSector));
  if (flight.operation == Operation::write) return start_write(flight);
  inner_->submit(flight);
}

void FaultyBackend::start_write(Flight& flight) {
  if (flight.decision.kind == Fault::Kind::dropped_write) return report(flight, as_result(flight.length_bytes));
  if (flight.decision.kind == Fault::Kind::misdirected_write) misdirect(flight);
  if (flight.decision.kind == Fault::Kind::torn_write)
    flight.length_bytes = flight.decision.random % (flight.length_bytes / kSector) * kSector;
  if (flight.length_bytes == 0) return report(flight, as_result(flight.outer->length_bytes));
  flight.tracked_id = faults_->write_begins(flight);
  inner_->submit(flight);
}

// Somewhere else in the same file; where there is no such place, nowhere.
void FaultyBackend::misdirect(Flight& flight) {
  const std::uint64_t shift = (1 + flight.decision.random % kMisdirectionMax) * kSector;
  const std::uint64_t file_bytes = flight.file->size_bytes();
  if (flight.offset_bytes + shift + flight.length_bytes <= file_bytes) {
    flight.offset_bytes += shift;
  } else if (flight.offset_bytes >= shift) {
    flight.offset_bytes -= shift;
  } else if (flight.offset_bytes + kSector + flight.length_bytes <= file_bytes) {
    flight.offset_bytes += kSector;
  } else if (flight.offset_bytes >= kSector) {
    flight.offset_bytes -= kSector;
  } else {
    flight.length_bytes = 0;
  }
}

void FaultyBackend::finish(Flight& flight) {
  if (flight.tracked_id != 0 && flight.operation == Operation::write) faults_->write_ended(flight.tracked_id);
  if (flight.tracked_id != 0 && flight.operation == Operation::sync && flight.result == 0)
    faults_->sync_succeeded(flight.tracked_id);
  const auto kind = flight.decision.kind;
  if (!kind || flight.result != as_result(flight.length_bytes)) return report(flight, flight.result);
  switch (*kind) {
    case Fault::Kind::bit_flip: {
      const std::uint64_t bit = flight.decision.random % (flight.length_bytes * 8);
      flight.data[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
      return report(flight, flight.result);
    }
    case Fault::Kind::short_transfer:
      return report(flight, flight.outer->length_bytes > kSector ? flight.result : flight.result / 2);
    case Fault::Kind::misdirected_write:
    case Fault::Kind::torn_write:
      return report(flight, as_result(flight.outer->length_bytes));
    case Fault::Kind::error:
    case Fault::Kind::delay:
    case Fault::Kind::dropped_write:
      return report(flight, flight.result);
  }
}

void FaultyBackend::report(Flight& flight, std::int64_t result) {
  flight.outer->result = result;
  ready_.push_back(flight.outer);
  free_.push_back(&flight);
}

void FaultyBackend::start_due() {
  const TimePoint now = Clock::now();
  std::vector<Flight*> due;
  std::erase_if(held_, [&](Flight* flight) {
    if (flight->due > now) return false;
    due.push_back(flight);
    return true;
  });
  for (Flight* flight : due) start(*flight);
}

Nanoseconds FaultyBackend::limit(Nanoseconds timeout) const {
  if (!ready_.empty()) return Nanoseconds::zero();
  const TimePoint now = Clock::now();
  for (const Flight* flight : held_)
    timeout = std::min(timeout, std::max(Nanoseconds::zero(), Nanoseconds(flight->due - now)));
  return timeout;
}

std::size_t FaultyBackend::reap(std::span<Block*> done, Nanoseconds timeout) {
  start_due();
  inner_done_.resize(done.size());
  const std::size_t finished = inner_->reap(inner_done_, limit(timeout));
  for (std::size_t i = 0; i < finished; ++i) finish(static_cast<Flight&>(*inner_done_[i]));
  start_due();
  const std::size_t count = std::min(done.size(), ready_.size());
  std::copy_n(ready_.begin(), count, done.begin());
  ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

std::unique_ptr<aio::Backend> make_faulty_backend(const aio::DriveQueueOptions& options,
                                                  std::shared_ptr<Faults> faults) {
  return std::make_unique<FaultyBackend>(aio::make_backend(options), std::move(faults));
}

}  // namespace hoist::test
