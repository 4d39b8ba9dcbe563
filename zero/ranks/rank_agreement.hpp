// SPDX-License-Identifier: Apache-2.0
// zero/ranks/rank_agreement.hpp - steps that all ranks take, or none: a rank that fails alone tells the others why.
//
// Two sets of ranks. The sharding group partitions one model's state. The job is all sharding groups of a tensor- or
// pipeline-parallel run (Runtime::norm_group()): its commits are one, and so is the start of its engines. With one
// group both are the same.
//
// Threading  The program's thread.
// Errors     A part's own error on the rank where it failed; a CommError that names that rank on all others.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/zero/layout/unit_table.hpp>
#include <hoist/zero/options.hpp>
#include <hoist/zero/ranks/abort_notifier.hpp>
#include <hoist/zero/runtime.hpp>

namespace hoist::detail {

// While it lives, this rank waits for the others: the ledger counts the time (WaitCause::comm). Nothing with one rank.
class RankWait {
 public:
  RankWait(Runtime& runtime, const comm::Communicator& ranks);
  ~RankWait();
  RankWait(const RankWait&) = delete;
  RankWait& operator=(const RankWait&) = delete;

 private:
  Ledger* const ledger_;
  const TimePoint began_;
};

class RankAgreement {
 public:
  RankAgreement(Runtime& runtime, AbortNotifier& notifier) : runtime_(runtime), notifier_(notifier) {}

  Runtime& runtime() const { return runtime_; }
  comm::Communicator& group() const { return runtime_.communicator(); }
  comm::Communicator& job() const { return runtime_.norm_group(); }
  bool has_several_groups() const { return runtime_.has_several_groups(); }
  std::string name_in_job(int rank) const;

  // [C] Runs a part that may fail on one rank alone; `what` completes "rank 3 could not ...".
  void run_in_group(const char* what, const std::function<void()>& part) const { run(group(), what, part); }
  // [J] The same for all ranks of the job.
  void run_in_job(const char* what, const std::function<void()>& part) const { run(job(), what, part); }

  // [J] Runs a check that may refuse what this rank's program passed. When one rank's does, every rank throws a
  // UsageError that says so, and the engines stay usable. `what` as above.
  void check_in_job(const char* what, const std::function<void()>& check) const;

  // [J] Every rank makes this call, which is of the whole job.
  void agree_on_call(std::string_view call) const;
  // [C] Every rank makes the same model, by `call`, with options that lead to the same collectives.
  // Otherwise ranks would train parts of different models as one, or wait for each other on the way.
  void agree_on_model(std::string_view call, const UnitTable& table, const EngineOptions& options,
                      std::span<const GroupOptions> groups) const;
  // [J] Every sharding group keeps commits by the same rules. `check_model` throws unless this rank's model can be
  // trained. The next exchanges are between all ranks of the job, where one group cannot turn back alone.
  void compare_groups(const EngineOptions& options, const std::function<void()>& check_model) const;
  // [J] All ranks begin, or continue by `call`, at the same step and with the same loss scale.
  void agree_on_beginning(const char* call, const InitialState& state) const;
  // [J] A random number that joins the stores that are made together: equal in a sharding group, partly in the job.
  // `former`: that of a store which they take over from.
  std::uint64_t agree_on_run(std::optional<std::uint64_t> former) const;
  // [C] The smallest of a number that every rank has.
  std::uint64_t smallest(std::uint64_t mine) const;
  bool all_true_in_job(bool mine) const;  // [J] whether it is true on every rank
  // How often ranks at work meet (JobBarrier): well within the time after which a communicator gives a rank up.
  Nanoseconds meeting_interval() const;

 private:
  void run(comm::Communicator& ranks, const char* what, const std::function<void()>& part) const;

  Runtime& runtime_;
  AbortNotifier& notifier_;
};

// Where all ranks of the job tell each other how a piece of work ended.
//
// Threading  One thread at a time, on every rank in the same order; close() on any thread.
class JobBarrier {
 public:
  // `channel`: over all ranks of the job, for this object alone. `what` completes "rank 3 could not ...". `interval`:
  // for work that may take longer than one rank waits for another. While it goes on, every rank calls meet_when_due()
  // at least once in each interval, by itself or by a MeetingThread, until agree() or tell().
  JobBarrier(std::unique_ptr<comm::Communicator> channel, const RankAgreement& ranks, const char* what,
             Nanoseconds interval = {})
      : channel_(std::move(channel)), ranks_(ranks), what_(what), interval_(interval) {}

  // The work begins, at about the same time on all ranks.
  void begin() { next_meeting_ = Clock::now() + interval_; }
  TimePoint next_meeting() const { return next_meeting_; }
  // [J] Meets the other ranks if it is time to, and may wait for them. Returns false if the work of one of them has
  // failed: agree() says why.
  bool meet_when_due();
  // [J] This rank's work ended with `problem`, or (null) well. CommError if that of another rank failed.
  void agree(const std::exception_ptr& problem);
  // [J] The same for a rank whose error is thrown elsewhere.
  void tell(const std::exception_ptr& problem) noexcept;
  std::uint64_t largest(std::uint64_t mine);  // [J] of a number that every rank has
  // The other ranks cannot be reached, or have the error in another way: tell() does nothing any more.
  void close() noexcept { closed_ = true; }

 private:
  enum class State : std::uint8_t { working, well, failed };
  std::vector<State> meet(State mine);

  const std::unique_ptr<comm::Communicator> channel_;
  const RankAgreement& ranks_;
  const char* const what_;
  const Nanoseconds interval_{0};  // 0: no rank waits long
  TimePoint next_meeting_;
  std::atomic<bool> closed_{false};
};

// While it lives, a thread meets the other ranks at their barrier, for work that may wait for a drive longer than the
// other ranks wait for this one. No other thread uses the barrier meanwhile.
class MeetingThread {
 public:
  // After JobBarrier::begin(). Nothing to do with one rank.
  MeetingThread(JobBarrier& barrier, const RankAgreement& ranks);
  ~MeetingThread() { end(); }
  MeetingThread(const MeetingThread&) = delete;
  MeetingThread& operator=(const MeetingThread&) = delete;
  // Waits for the meeting under way. From here on the caller uses the barrier. Any thread may call it, one at a time.
  void end() noexcept;
  // False if the work of another rank has failed: agree() says why. Errors: CommError of a meeting.
  bool others_are_well() const;

 private:
  void meet();

  JobBarrier& barrier_;
  mutable Mutex mutex_;
  ConditionVariable wake_;
  bool ended_ HOIST_GUARDED_BY(mutex_) = false;
  bool others_are_well_ HOIST_GUARDED_BY(mutex_) = true;
  std::exception_ptr error_ HOIST_GUARDED_BY(mutex_);
  std::thread thread_;
};

// A hash by which ranks compare names and rules.
std::uint64_t text_hash(std::string_view text);

// The part of agree_on_run()'s number that all sharding groups have alike.
std::uint64_t job_part(std::uint64_t run);

// Whether stores with these numbers, with or without a rank added, are of one training: one has taken over from the
// other, or both from a third.
bool are_of_one_training(std::uint64_t a, std::uint64_t b);

}  // namespace hoist::detail
