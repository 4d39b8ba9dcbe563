// SPDX-License-Identifier: Apache-2.0
// zero/passes/waits.hpp - waiting, and the cause that the ledger counts it under.
//
// A wait for units that are read, updated or written is a wait for the update's arithmetic as long as that runs, and
// otherwise for the drive.
//
// Threading  The program's thread.
// Errors     What is waited for fails with its own.
#pragma once

#include <hoist/core/completion.hpp>
#include <hoist/core/ledger.hpp>
#include <hoist/platform/stream.hpp>
#include <hoist/zero/update/update_queue.hpp>

namespace hoist::detail {

// From its construction on: how long some waiting took, and what of it was the update's arithmetic.
class UpdateWait {
 public:
  explicit UpdateWait(const UpdateQueue& updates);
  UpdateWait() : began_(Clock::now()) {}  // all of it is the drive's
  Nanoseconds elapsed() const { return Clock::now() - began_; }
  Nanoseconds updating() const;  // how long the update's arithmetic ran
  // Counts so much of it: as the arithmetic as far as that ran, else as `rest`.
  void count_into(Ledger& ledger, Nanoseconds waited, WaitCause rest = WaitCause::nvme) const;

 private:
  const UpdateQueue* updates_ = nullptr;
  const TimePoint began_;
  const Nanoseconds busy_before_{0};
};

// Until the executor has submitted something that `stream` will use. Only updates and the drive hold the executor up;
// counted is how long the stream was idle meanwhile.
void await_submitted(const Completion& submitted, StreamRef stream, const UpdateQueue& updates, Ledger& ledger);

}  // namespace hoist::detail
