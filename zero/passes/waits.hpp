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
  Nanoseconds elapsed() const { return Clock::now() - began_; }
  Nanoseconds updating() const;  // how long the update's arithmetic ran
  // Counts so much of it: as the arithmetic as far as that ran, else as UpdateQueue::beside_updating().
  void count_into(Ledger& ledger, Nanoseconds waited) const;

 private:
  const UpdateQueue& updates_;
  const TimePoint began_;
  const Nanoseconds busy_before_;
};

// Until the executor has submitted something that `stream` will use. Updates and the drive hold the executor up, and
// sums of gradients for which it lacks buffers, which count as updates; counted is how long the stream was idle
// meanwhile.
void await_submitted(const Completion& submitted, StreamRef stream, const UpdateQueue& updates, Ledger& ledger);

}  // namespace hoist::detail
