// SPDX-License-Identifier: Apache-2.0
// zero/ranks/abort_notifier.hpp - a rank that fails where the others would wait for ever tells them why.
//
// Most errors of one rank are exchanged at the next point where all ranks meet (RankAgreement::run_in_group,
// JobBarrier). After an error of a fetch, a reduction or the program's own work the ranks do not meet: the others wait
// in a collective that this rank will never join. Then the communicators are aborted (Communicator::abort). The others
// stop with a CommError that holds this rank's error. What the ranks were agreeing on ends as if this rank had died.
//
// Threading  Any thread.
// Errors     None of its own.
// Main path  executor task throws -> notify -> Communicator::abort.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <hoist/comm/agreement.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/platform/stream.hpp>
#include <hoist/zero/runtime.hpp>

namespace hoist::detail {

bool is_comm_error(const std::exception_ptr& error);
bool is_exchanged_error(const std::exception_ptr& error);

// [C] comm::first_problem() of the error that this rank caught; null: none.
std::optional<comm::Problem> first_problem(comm::Communicator& communicator, const std::exception_ptr& mine);

class AbortNotifier : public std::enable_shared_from_this<AbortNotifier> {
 public:
  explicit AbortNotifier(Runtime& runtime);

  // Tells the other ranks that this one has failed, each group once. `where`: the unit that was worked on, or empty.
  // The ranks of the sharding group know a CommError already, so it is told to the rest of the norm group only.
  void notify(const std::exception_ptr& error, std::string_view where = {}) noexcept;
  // If the work before `event` fails, tells the other ranks. No thread waits on the host for that collective, so no
  // other place would notice.
  void watch(const platform::StreamEvent& event, const std::string& unit);
  // The sharding group has been told in an exchange of its own. Later errors go to the norm group only.
  void told_in_exchange() noexcept;
  // All ranks of the norm group have been told in an exchange. Nothing is aborted: its communicators stay usable.
  void all_ranks_told() noexcept;
  // After its destruction the notifier no longer uses the runtime, which may then be destroyed.
  class Disarm {
   public:
    explicit Disarm(AbortNotifier& notifier) : notifier_(notifier) {}
    ~Disarm() { notifier_.disarm(); }
    Disarm(const Disarm&) = delete;
    Disarm& operator=(const Disarm&) = delete;

   private:
    AbortNotifier& notifier_;
  };

  // The error that this rank failed with first, if `error` is a CommError: aborting makes this rank's later calls fail
  // with the text that the others get. Otherwise `error`.
  std::exception_ptr cause_of(const std::exception_ptr& error) const;

 private:
  void disarm() noexcept;

  mutable Mutex mutex_;
  Runtime* runtime_ HOIST_GUARDED_BY(mutex_);  // null: disarmed
  bool sharding_group_told_ HOIST_GUARDED_BY(mutex_) = false;
  bool norm_group_told_ HOIST_GUARDED_BY(mutex_) = false;
  std::exception_ptr cause_ HOIST_GUARDED_BY(mutex_);
};

}  // namespace hoist::detail
