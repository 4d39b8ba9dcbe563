// SPDX-License-Identifier: Apache-2.0
#include <hoist/core/ledger.hpp>

namespace hoist {

const char* link_name(Link link) {
  constexpr std::array kNames{"nvme_read", "nvme_write", "host_to_device", "device_to_host", "wire"};
  return kNames[static_cast<std::size_t>(link)];
}

const char* wait_cause_name(WaitCause cause) {
  constexpr std::array kNames{"nvme", "host_to_device", "optimizer", "comm", "none"};
  return kNames[static_cast<std::size_t>(cause)];
}

void Ledger::count(Link link, std::uint64_t bytes, Nanoseconds busy) {
  Cell& cell = cells_[apart_depth_.load(std::memory_order_relaxed) > 0 ? 1 : 0][static_cast<std::size_t>(link)];
  cell.bytes.fetch_add(bytes, std::memory_order_relaxed);
  cell.busy_ns.fetch_add(busy.count(), std::memory_order_relaxed);
}

void Ledger::waited(WaitCause cause, Nanoseconds duration) {
  if (apart_depth_.load(std::memory_order_relaxed) > 0) return;
  waits_[static_cast<std::size_t>(cause)].fetch_add(duration.count(), std::memory_order_relaxed);
}

Ledger::LinkTotals Ledger::totals(Link link, Account account) const {
  const Cell& cell = cells_[static_cast<std::size_t>(account)][static_cast<std::size_t>(link)];
  return {cell.bytes.load(std::memory_order_relaxed), Nanoseconds(cell.busy_ns.load(std::memory_order_relaxed))};
}

Nanoseconds Ledger::waited(WaitCause cause) const {
  return Nanoseconds(waits_[static_cast<std::size_t>(cause)].load(std::memory_order_relaxed));
}

}  // namespace hoist
