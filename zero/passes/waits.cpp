// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/zero/passes/waits.hpp>

namespace hoist::detail {

namespace {

void count(Ledger& ledger, Nanoseconds waited, Nanoseconds updating, WaitCause rest) {
  waited = std::max(waited, Nanoseconds(0));
  updating = std::min(waited, updating);
  if (updating.count() > 0) ledger.waited(WaitCause::optimizer, updating);
  ledger.waited(rest, waited - updating);
}

}  // namespace

UpdateWait::UpdateWait(const UpdateQueue& updates)
    : updates_(updates), began_(Clock::now()), busy_before_(updates.busy()) {}

Nanoseconds UpdateWait::updating() const { return updates_.busy() - busy_before_; }

void UpdateWait::count_into(Ledger& ledger, Nanoseconds waited) const {
  count(ledger, waited, updating(), updates_.beside_updating());
}

void await_submitted(const Completion& submitted, StreamRef stream, const UpdateQueue& updates, Ledger& ledger) {
  if (submitted.done()) return submitted.wait();  // rethrows
  const auto tell_idle = stream->watch_idle();
  const UpdateWait wait(updates);
  submitted.wait();
  tell_idle([&ledger, updating = wait.updating(), rest = updates.beside_updating()](Nanoseconds idle) {
    count(ledger, idle, updating, rest);
  });
}

}  // namespace hoist::detail
