// SPDX-License-Identifier: Apache-2.0
// comm/detail/mpi_liveness_probe.hpp - finds the ranks of an MPI job that still answer, for a rank that waits in vain.
//
// A collective that does not end does not tell which rank it waits for. So a rank that has waited for most of its
// time-out asks all others in separate messages. A rank that waits in one of hoist's operations answers from there and
// names the operation. A silent rank has ended, hangs, or computes. The first rank that gives up tells the others why,
// and they stop with the same reason instead of each after its own time-out. A rank that fails by itself tells them,
// too.
//
// There is one probe for the world and one for each communicator that the program passed in. A failed process is
// unusable in all of them, so a rank that waits in one serves all, and an end of one is told in all (LivenessProbes).
//
// Threading  Any thread; of the waiting threads one at a time serves messages, the others continue.
// Memory     Messages of 1 KiB: a send ends without a matching receive.
// Errors     None: a message that cannot be sent or received counts as a missing answer.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <mpi.h>

#include <hoist/core/clock.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist::comm::detail {

class LivenessProbe {
 public:
  // Takes ownership of `communicator`, over all ranks in question and used for nothing else.
  explicit LivenessProbe(MPI_Comm communicator);
  ~LivenessProbe();  // pre: MPI may still be called
  LivenessProbe(const LivenessProbe&) = delete;
  LivenessProbe& operator=(const LivenessProbe&) = delete;

  // The name of a rank in errors: its number in the world, for every communicator.
  std::string name_of(int rank) const;
  // Receives and answers messages. Returns the reason once another rank has given up.
  std::optional<std::string> serve(std::string_view waits_for);
  // Asks all ranks and forgets earlier answers, unless that was done less than `pause` ago.
  void ask(Nanoseconds pause);
  // What that rank has answered since: the operation that it waits for.
  std::optional<std::string> answer_of(int rank) const;
  // The ranks that have not answered since, and the operations that the others wait for.
  std::string findings(std::chrono::milliseconds timeout) const;
  // Tells all ranks that this rank gives up waiting, or has failed itself; returns when the messages are in transit, or
  // after a moment.
  enum class News : std::uint8_t { gave_up, failed };
  void tell(News news, std::string_view why);

 private:
  enum class Kind : std::int32_t { question, answer, verdict, failure };
  struct Message {
    Kind kind = Kind::question;
    std::int32_t number = 0;  // of the question
    std::array<char, 1016> text{};
  };
  struct Sent {
    Message message;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  void send(int peer, Kind kind, int number, std::string_view text) HOIST_REQUIRES(mutex_);
  void clear_sent() HOIST_REQUIRES(mutex_);
  void take(int peer, const Message& message, std::string_view waits_for) HOIST_REQUIRES(mutex_);

  MPI_Comm communicator_;
  int rank_ = 0;
  int size_ = 1;
  std::vector<int> world_ranks_;
  mutable Mutex mutex_;
  std::deque<Sent> sent_ HOIST_GUARDED_BY(mutex_);  // addresses stay
  int question_ HOIST_GUARDED_BY(mutex_) = 0;
  std::optional<TimePoint> asked_ HOIST_GUARDED_BY(mutex_);
  std::vector<std::optional<std::string>> answers_ HOIST_GUARDED_BY(mutex_);  // to the last question, by rank
  std::optional<std::string> verdict_ HOIST_GUARDED_BY(mutex_);
};

// All probes of this process.
class LivenessProbes {
 public:
  void add(const std::shared_ptr<LivenessProbe>& liveness_probe);
  std::optional<std::string> serve(std::string_view waits_for);
  void tell(LivenessProbe::News news, std::string_view why);

 private:
  std::vector<std::shared_ptr<LivenessProbe>> live();
  Mutex mutex_;
  std::vector<std::weak_ptr<LivenessProbe>> all_ HOIST_GUARDED_BY(mutex_);
};

}  // namespace hoist::comm::detail
