// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include <hoist/core/ledger.hpp>

namespace hoist {

namespace {

// Links whose transfers are counted one by one; a drive's counts are sums over many transfers.
std::optional<TraceRow> row_of(Link link) {
  switch (link) {
    case Link::host_to_device:
      return TraceRow::host_to_device;
    case Link::device_to_host:
      return TraceRow::device_to_host;
    case Link::wire:
      return TraceRow::wire;
    case Link::nvme_read:
    case Link::nvme_write:
      return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

const char* link_name(Link link) {
  constexpr std::array kNames{"nvme_read", "nvme_write", "host_to_device", "device_to_host", "wire"};
  return kNames[static_cast<std::size_t>(link)];
}

const char* wait_cause_name(WaitCause cause) {
  constexpr std::array kNames{"nvme", "host_to_device", "device_to_host", "optimizer", "comm", "none"};
  return kNames[static_cast<std::size_t>(cause)];
}

void Ledger::count(Link link, std::uint64_t bytes, Nanoseconds busy, Account account) {
  Cell& cell = cells_[static_cast<std::size_t>(account)][static_cast<std::size_t>(link)];
  cell.bytes.fetch_add(bytes, std::memory_order_relaxed);
  cell.busy_ns.fetch_add(busy.count(), std::memory_order_relaxed);
  Trace* const trace = trace_.load(std::memory_order_relaxed);
  if (trace == nullptr) return;
  const auto row = row_of(link);
  if (!row) return;
  const TimePoint now = Clock::now();
  trace->add(*row, link_name(link), now - busy, now, bytes);
}

void Ledger::waited(WaitCause cause, Nanoseconds duration) {
  if (current_account() == Account::outside_steps) return;
  waits_[static_cast<std::size_t>(cause)].fetch_add(duration.count(), std::memory_order_relaxed);
  Trace* const trace = trace_.load(std::memory_order_relaxed);
  if (trace == nullptr) return;
  // The update is work, although the program waits for it.
  const TraceRow row = cause == WaitCause::optimizer ? TraceRow::optimizer : TraceRow::waiting;
  const TimePoint now = Clock::now();
  trace->add(row, wait_cause_name(cause), now - duration, now);
}

Ledger::LinkTotals Ledger::totals(Link link, Account account) const {
  const Cell& cell = cells_[static_cast<std::size_t>(account)][static_cast<std::size_t>(link)];
  return {cell.bytes.load(std::memory_order_relaxed), Nanoseconds(cell.busy_ns.load(std::memory_order_relaxed))};
}

Nanoseconds Ledger::waited(WaitCause cause) const {
  return Nanoseconds(waits_[static_cast<std::size_t>(cause)].load(std::memory_order_relaxed));
}

}  // namespace hoist
