// SPDX-License-Identifier: Apache-2.0
// core/ledger.hpp - counts the bytes and busy time of each link, and what a step waited for.
//
// Threading  Every member may be called from any thread.
// Main path  a transfer ends -> count(link, bytes, busy). Bytes moved outside steps (start-up, digests, state access,
//            redone work) go to a second account. Code that does such work first drains the transfers of earlier steps
//            and holds a Ledger::OutsideSteps meanwhile.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include <hoist/core/clock.hpp>
#include <hoist/core/trace.hpp>

namespace hoist {

enum class Link : std::uint8_t { nvme_read, nvme_write, host_to_device, device_to_host, wire };
inline constexpr std::size_t kLinkCount = 5;
const char* link_name(Link link);

// The cause of a wait of the program or the compute stream.
enum class WaitCause : std::uint8_t { nvme, host_to_device, device_to_host, optimizer, comm, none };
inline constexpr std::size_t kWaitCauseCount = 6;
const char* wait_cause_name(WaitCause cause);

class Ledger {
 public:
  enum class Account : std::uint8_t { steps, outside_steps };
  struct LinkTotals {
    std::uint64_t bytes = 0;
    Nanoseconds busy{0};
  };

  // Without an account, bytes go to that of the moment: an OutsideSteps would also take what other threads count then.
  void count(Link link, std::uint64_t bytes, Nanoseconds busy) { count(link, bytes, busy, current_account()); }
  void count(Link link, std::uint64_t bytes, Nanoseconds busy, Account account);
  void waited(WaitCause cause, Nanoseconds duration);

  // From now on, also draws counts and waits into this trace; null stops that. Store transfers draw themselves.
  void trace_to(Trace* trace) { trace_ = trace; }

  Account current_account() const { return outside_depth_ > 0 ? Account::outside_steps : Account::steps; }
  LinkTotals totals(Link link, Account account = Account::steps) const;
  Nanoseconds waited(WaitCause cause) const;  // inside steps

  // While alive, counts go to the `outside_steps` account. Nests.
  class OutsideSteps {
   public:
    explicit OutsideSteps(Ledger& ledger) : ledger_(ledger) { ledger_.outside_depth_.fetch_add(1); }
    ~OutsideSteps() { ledger_.outside_depth_.fetch_sub(1); }
    OutsideSteps(const OutsideSteps&) = delete;
    OutsideSteps& operator=(const OutsideSteps&) = delete;

   private:
    Ledger& ledger_;
  };

 private:
  struct Cell {
    std::atomic<std::uint64_t> bytes{0};
    std::atomic<std::int64_t> busy_ns{0};
  };
  std::array<std::array<Cell, kLinkCount>, 2> cells_;
  std::array<std::atomic<std::int64_t>, kWaitCauseCount> waits_{};
  std::atomic<int> outside_depth_{0};
  std::atomic<Trace*> trace_{nullptr};
};

}  // namespace hoist
