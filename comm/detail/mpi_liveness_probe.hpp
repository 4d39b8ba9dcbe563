// SPDX-License-Identifier: Apache-2.0
// comm/detail/mpi_liveness_probe.hpp - who of an MPI job still answers, for the rank that waits in vain.
//
// A collective that does not end says nothing of whom it waits for. So a rank that has waited for most of its time-out
// asks all others, over messages of their own; whoever waits in an operation of ours answers from there and says what
// for. Who stays silent has ended, hangs, or computes. The first that gives up tells the others why, and they stop with
// the same reason instead of each after its own time-out; so does a rank that fails for a reason of its own.
//
// There is one for the world and one for each communicator that a program handed over. A process is beyond use in all
// of them at once, so whoever waits in one serves all, and what ends one is told in all (LivenessProbes).
//
// Threading  Any thread; of those that wait, one at a time is served, the others pass.
// Memory     Messages of 1 KiB: nothing has to be received for a send to end.
// Errors     None: a message that cannot be sent or received is an answer that does not come.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <mpi.h>

#include <hoist/core/clock.hpp>

namespace hoist::comm::detail {

class LivenessProbe {
 public:
  // Takes `communicator` over: of all ranks that are called, used for nothing else.
  explicit LivenessProbe(MPI_Comm communicator);
  ~LivenessProbe();  // pre: MPI may still be called
  LivenessProbe(const LivenessProbe&) = delete;
  LivenessProbe& operator=(const LivenessProbe&) = delete;

  // How errors name a rank: by its number in the world, whichever communicator they are about.
  std::string name_of(int rank) const;
  // Receives and answers what has come. Returns why another rank gave up, once one has.
  std::optional<std::string> serve(std::string_view waits_for);
  // Asks everybody, unless that was done less than `pause` ago.
  void ask(Nanoseconds pause);
  // Who has not answered since, and what the others wait for.
  std::string findings(std::chrono::milliseconds timeout) const;
  // Tells everybody that this rank gives up waiting, or that it has failed itself; returns when the messages are on
  // their way, or after a moment.
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

  void send(int peer, Kind kind, int number, std::string_view text);
  void clear_sent();
  void take(int peer, const Message& message, std::string_view waits_for);

  MPI_Comm communicator_;
  int rank_ = 0;
  int size_ = 1;
  std::vector<int> world_ranks_;
  mutable std::mutex mutex_;
  std::deque<Sent> sent_;  // addresses stay
  int question_ = 0;
  std::optional<TimePoint> asked_;
  std::vector<std::optional<std::string>> answers_;  // to the last question, by rank
  std::optional<std::string> verdict_;
};

// All of this process.
class LivenessProbes {
 public:
  void add(const std::shared_ptr<LivenessProbe>& liveness_probe);
  std::optional<std::string> serve(std::string_view waits_for);
  void tell(LivenessProbe::News news, std::string_view why);

 private:
  std::vector<std::shared_ptr<LivenessProbe>> live();
  std::mutex mutex_;
  std::vector<std::weak_ptr<LivenessProbe>> all_;
};

}  // namespace hoist::comm::detail
