// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/zero/passes/waits.hpp>

namespace hoist::detail {

UpdateWait::UpdateWait(const UpdateQueue& updates)
    : updates_(&updates), began_(Clock::now()), busy_before_(updates.busy()) {}

void UpdateWait::count_into(Ledger& ledger, Nanoseconds waited, WaitCause rest) const {
  waited = std::max(waited, Nanoseconds(0));
  const Nanoseconds updating = updates_ == nullptr ? Nanoseconds(0) : std::min(waited, updates_->busy() - busy_before_);
  if (updating.count() > 0) ledger.waited(WaitCause::optimizer, updating);
  ledger.waited(rest, waited - updating);
}

void await_submitted(const Completion& submitted, StreamRef stream, const UpdateQueue& updates, Ledger& ledger) {
  if (submitted.done()) return submitted.wait();  // rethrows
  const Nanoseconds idle_before = stream->idle_time();
  const UpdateWait wait(updates);
  submitted.wait();
  wait.count_into(ledger, stream->idle_time() - idle_before);
}

}  // namespace hoist::detail
