// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/zero/passes/waits.hpp>

namespace hoist::detail {

namespace {

Nanoseconds busy_time(const UpdateQueue* deferred) { return deferred == nullptr ? Nanoseconds(0) : deferred->busy(); }

}  // namespace

UpdateWait::UpdateWait(const UpdateQueue* deferred)
    : updates_(deferred), began_(Clock::now()), busy_before_(busy_time(deferred)) {}

void UpdateWait::book(Ledger& ledger, Nanoseconds waited) const {
  waited = std::max(waited, Nanoseconds(0));
  const Nanoseconds updating = std::min(waited, busy_time(updates_) - busy_before_);
  if (updating.count() > 0) ledger.waited(WaitCause::optimizer, updating);
  ledger.waited(WaitCause::nvme, waited - updating);
}

void await_submitted(const Completion& submitted, StreamRef stream, const UpdateQueue* deferred, Ledger& ledger) {
  if (submitted.done()) return submitted.wait();  // rethrows
  const Nanoseconds idle_before = stream->idle_time();
  const UpdateWait wait(deferred);
  submitted.wait();
  wait.book(ledger, stream->idle_time() - idle_before);
}

}  // namespace hoist::detail
