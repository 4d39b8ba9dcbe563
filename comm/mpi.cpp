// SPDX-License-Identifier: Apache-2.0
// comm/mpi.cpp - ranks that are processes of an MPI job.
//
// Every operation is started without blocking and polled, so that a missing rank causes a CommError after the time-out
// instead of a hang. A liveness probe among the waiting ranks names the missing one, and carries a rank's failure to
// the others (detail/mpi_liveness_probe.hpp). After a failure MPI is not called again in this process
// (detail/mpi_process.hpp).
//
// Threading  MPI_THREAD_MULTIPLE; each transport has a communicator of its own.
// Memory     The lists of an operation's messages and requests are kept for the next one.
// Errors     Return codes become CommError (MPI_ERRORS_RETURN on every communicator of hoist).
#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <mpi.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/comm/detail/host_communicator.hpp>
#include <hoist/comm/detail/mpi_liveness_probe.hpp>
#include <hoist/comm/detail/mpi_process.hpp>
#include <hoist/comm/detail/mpi_transport.hpp>
#include <hoist/comm/mpi.hpp>
#include <hoist/core/deadline.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>

namespace hoist::comm {

namespace {

using detail::breakage;
using detail::may_call_mpi;
using detail::mpi_error_text;

// Never destroyed, like the breakage.
detail::LivenessProbes& probes() {
  static auto* const instance = new detail::LivenessProbes;
  return *instance;
}

// The world's probe; all ranks make it together with its first transport, and it stays.
std::shared_ptr<detail::LivenessProbe>& probe_of_world() {
  static auto* const instance = new std::shared_ptr<detail::LivenessProbe>;
  return *instance;
}

// Takes ownership of `communicator`.
std::shared_ptr<detail::LivenessProbe> make_probe(MPI_Comm communicator) {
  const std::shared_ptr<detail::LivenessProbe> made(new detail::LivenessProbe(communicator),
                                                    [](detail::LivenessProbe* ended) {
                                                      const detail::MpiCall call;
                                                      if (may_call_mpi()) delete ended;
                                                    });
  probes().add(made);
  return made;
}

// An operation, and what it is about.
struct Doing {
  const char* operation;
  std::string_view subject{};
  std::uint64_t bytes = 0;  // of an exchange, to each rank
  std::string text() const {
    return fmt::format("{}{}{}", operation, subject.empty() ? "" : fmt::format(" of '{}'", subject),
                       bytes == 0 ? "" : fmt::format(" ({} bytes)", bytes));
  }
};

// Chooses what to do between polls, `quiet` after the last message. MPI moves data only while it is called, about 100
// KiB a call: with pauses of 50 us an exchange of 8 MiB between two ranks takes 20 times as long. So a rank does not
// pause while messages come. Later it lets others have the core, and then sleeps a thousandth of the time it has
// waited.
void pause(Nanoseconds quiet) {
  constexpr std::chrono::milliseconds kSpin{1};   // a message of 1 MiB takes 0.1 ms at 10 GB/s
  constexpr std::chrono::milliseconds kYield{5};  // a rank that computes elsewhere is later than this
  constexpr Nanoseconds kSleepMin = std::chrono::microseconds(50);
  constexpr Nanoseconds kSleepMax = std::chrono::microseconds(500);
  if (quiet < kSpin) return;
  if (quiet < kYield) return std::this_thread::yield();
  std::this_thread::sleep_for(std::clamp(quiet / 1000, kSleepMin, kSleepMax));
}

class MpiTransport final : public Transport {
 public:
  enum class Ownership : std::uint8_t { taken, borrowed };
  // `liveness_probe`: over the same ranks; null only while the probe itself is being made.
  MpiTransport(MPI_Comm communicator, std::shared_ptr<detail::LivenessProbe> liveness_probe,
               const detail::MpiTransportOptions& options, Ownership ownership = Ownership::taken)
      : communicator_(communicator), ownership_(ownership), probe_(std::move(liveness_probe)), options_(options) {
    if (ownership_ == Ownership::taken) MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
    int* tag_max = nullptr;
    int there = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&tag_max), &there);
    if (there != 0) tag_count_ = static_cast<std::uint64_t>(*tag_max) + 1;
    MPI_Comm_rank(communicator_, &rank_);
    MPI_Comm_size(communicator_, &size_);
  }

  ~MpiTransport() override {
    const detail::MpiCall call;
    if (ownership_ == Ownership::taken && may_call_mpi()) MPI_Comm_free(&communicator_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  // In place: what a rank receives lies where its own shard does.
  void all_gather(std::span<const GatherPiece> pieces) override {
    parts_.clear();
    for (const GatherPiece& piece : pieces) {
      const std::byte* const own = piece.data + static_cast<std::uint64_t>(rank_) * piece.shard_bytes;
      parts_.push_back({own, /*stride_bytes=*/0, piece.shard_bytes, piece.data, piece.what});
    }
    exchange("all_gather", parts_);
  }

  void exchange_shards(std::span<const ShardExchange> parts) override { exchange("exchange", parts); }

  void broadcast(std::span<std::byte> bytes, int root) override {
    constexpr Doing kDoing{"broadcast"};
    const detail::MpiCall call;
    refuse_if_broken(kDoing);
    for (std::uint64_t first = 0; first < bytes.size(); first += options_.message_bytes_max) {
      const auto count = static_cast<int>(std::min<std::uint64_t>(options_.message_bytes_max, bytes.size() - first));
      check(MPI_Ibcast(bytes.data() + first, count, MPI_BYTE, root, communicator_, new_request()), kDoing);
    }
    finish(kDoing);
  }

  void barrier() override {
    constexpr Doing kDoing{"barrier"};
    const detail::MpiCall call;
    refuse_if_broken(kDoing);
    check(MPI_Ibarrier(communicator_, new_request()), kDoing);
    finish(kDoing);
  }

  std::unique_ptr<Transport> duplicate() override {
    return std::make_unique<MpiTransport>(duplicate_communicator(), probe_, options_);
  }

  // MPI_Comm_split always blocks, so the barrier first checks that all ranks are there.
  std::unique_ptr<Transport> split(int ranks) override {
    constexpr Doing kDoing{"split"};
    const detail::MpiCall call;
    barrier();
    MPI_Comm group = MPI_COMM_NULL;
    check(MPI_Comm_split(communicator_, rank_ / ranks, rank_, &group), kDoing);
    MpiTransport bare(group, nullptr, options_, Ownership::borrowed);
    auto liveness_probe = make_probe(bare.duplicate_communicator());
    return std::make_unique<MpiTransport>(group, std::move(liveness_probe), options_);
  }

  // Messages first: once it is reported, this process calls MPI no more.
  void abort(std::string_view why) noexcept override {
    const detail::MpiCall call;
    if (!may_call_mpi()) return;
    try {
      probes().tell(detail::LivenessProbe::News::failed, why);
      breakage().report(fmt::format("{} failed: {}", probe_->name_of(rank_), why));
    } catch (...) {  // no memory for the text: the others notice by waiting
    }
  }

  std::optional<std::string> broken() override {
    const detail::MpiCall call;
    std::string reason = breakage().reason();
    if (!reason.empty()) return reason;
    if (!may_call_mpi()) return std::nullopt;
    return probes().serve("none of these calls");
  }

  MPI_Comm duplicate_communicator() {
    constexpr Doing kDoing{"duplicate"};
    const detail::MpiCall call;
    refuse_if_broken(kDoing);
    // Left behind on failure: MPI may still write the handle.
    auto copy = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
    MPI_Comm* const target = copy.release();
    check(MPI_Comm_idup(communicator_, target, new_request()), kDoing);
    finish(kDoing);
    copy.reset(target);
    return *copy;
  }

 private:
  static constexpr std::uint64_t kFirstBytes = 1 * kKiB;    // sent at once, without a handshake
  static constexpr std::uint64_t kMessageBytes = 1 * kMiB;  // shorter ones cost more than 5 %
  static constexpr std::size_t kUnderWay = 2;               // messages to a rank, and from it: one always moves
  static constexpr int kPollsAPause = 4;                    // a message is complete some calls after it has come
  static constexpr std::chrono::milliseconds kQuiet{50};    // others are late for their own reasons
  static constexpr std::chrono::seconds kAnswerTime{5};     // for ranks that poll at least every 500 us

  MPI_Request* new_request() { return &requests_.emplace_back(MPI_REQUEST_NULL); }

  // One direction of an exchange with one rank: messages in the order of the parts, a few of which are under way.
  // Messages between two ranks on one communicator arrive in the order sent. Their tag stands for the call, so that one
  // of another call is recognised when it arrives.
  struct Lane {
    int peer = 0;
    bool sends = false;
    bool begun = false;
    std::size_t part = 0;
    std::uint64_t first = 0;  // in its chunk
  };

  // Receives stand before the first send, nearest higher rank first, so that not all ranks send to rank 0 at once.
  void exchange(const char* operation, std::span<const ShardExchange> parts) {
    const detail::MpiCall call;
    Doing doing{operation, subject_of(parts)};
    for (const ShardExchange& part : parts) doing.bytes += part.chunk_bytes;
    refuse_if_broken(doing);
    tag_ = static_cast<int>(call_hash(operation, parts) % tag_count_);
    lanes_.clear();
    for (const bool sends : {false, true})
      for (int step = 1; step < size_; ++step) lanes_.push_back({.peer = (rank_ + step) % size_, .sends = sends});
    requests_.assign(lanes_.size() * kUnderWay, MPI_REQUEST_NULL);
    message_bytes_.resize(requests_.size());
    const auto start = [&](std::size_t request) {
      return start_next(lanes_[request / kUnderWay], parts, request, doing);
    };
    const auto start_again = [&](std::size_t request, const MPI_Status& ended) {
      if (const Lane& lane = lanes_[request / kUnderWay]; !lane.sends)
        check_received(ended, message_bytes_[request], lane.peer, doing);
      return start(request);
    };
    std::size_t started = 0;
    for (std::size_t i = 0; i < requests_.size(); ++i)
      if (start(i)) ++started;
    const auto me = static_cast<std::uint64_t>(rank_);
    for (const ShardExchange& part : parts) {
      const std::byte* const source = part.source + me * part.stride_bytes;
      std::byte* const target = part.received + me * part.chunk_bytes;
      if (part.chunk_bytes > 0 && source != target) std::memmove(target, source, part.chunk_bytes);
    }
    finish(doing, started, start_again);
    lanes_.clear();
  }

  void check_received(const MPI_Status& status, int bytes, int peer, const Doing& doing) {
    int received = 0;
    MPI_Get_count(&status, MPI_BYTE, &received);
    if (status.MPI_TAG != tag_ || received != bytes) give_up_diverged(peer, doing);
  }

  // Starts the lane's next message; false if there is none. The first is short: when it arrives, the rank has come, and
  // this one stops sleeping.
  bool start_next(Lane& lane, std::span<const ShardExchange> parts, std::size_t request, const Doing& doing) {
    for (; lane.part < parts.size() && lane.first == parts[lane.part].chunk_bytes; ++lane.part) lane.first = 0;
    if (lane.part == parts.size()) return false;
    const ShardExchange& part = parts[lane.part];
    const auto peer = static_cast<std::uint64_t>(lane.peer);
    const std::uint64_t longest = std::min(lane.begun ? kMessageBytes : kFirstBytes, options_.message_bytes_max);
    const auto bytes = static_cast<int>(std::min(longest, part.chunk_bytes - lane.first));
    const std::byte* const source = part.source + peer * part.stride_bytes + lane.first;
    std::byte* const target = part.received + peer * part.chunk_bytes + lane.first;
    check(lane.sends ? MPI_Isend(source, bytes, MPI_BYTE, lane.peer, tag_, communicator_, &requests_[request])
                     : MPI_Irecv(target, bytes, MPI_BYTE, lane.peer, MPI_ANY_TAG, communicator_, &requests_[request]),
          doing);
    message_bytes_[request] = bytes;
    lane.first += static_cast<std::uint64_t>(bytes);
    lane.begun = true;
    return true;
  }

  // All started requests, and none after them.
  void finish(const Doing& doing) {
    finish(doing, requests_.size(), [](std::size_t, const MPI_Status&) { return false; });
  }

  // Polls until `left` requests have ended, and those that start_again(its index, how it ended) starts in their places.
  // The time-out counts from the last end on.
  template <typename StartAgain>
  void finish(const Doing& doing, std::size_t left, const StartAgain& start_again) {
    Deadline deadline(options_.timeout);
    const Nanoseconds quiet = std::min<Nanoseconds>(kQuiet, options_.timeout / 4);
    statuses_.resize(requests_.size());
    ended_.resize(requests_.size());
    for (int polls = 1; left > 0; ++polls) {
      if (breakage().there()) refuse_if_broken(doing);
      int count = 0;
      const int code =
          MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, ended_.data(), statuses_.data());
      const auto ended = static_cast<std::size_t>(std::max(count, 0));
      if (code == MPI_ERR_IN_STATUS) check_statuses(ended, doing);
      check(code, doing);
      if (ended > 0) {
        left -= ended;
        for (std::size_t i = 0; i < ended; ++i)
          if (start_again(static_cast<std::size_t>(ended_[i]), statuses_[i])) ++left;
        deadline.restart();
      } else if (polls % kPollsAPause == 0) {
        const Nanoseconds waited = deadline.waited();
        if (waited > quiet) look_around(doing, waited);
        pause(waited);
      }
    }
    requests_.clear();
  }

  // During a long wait: answers other ranks' questions, asks them, and finally gives up.
  void look_around(const Doing& doing, Nanoseconds waited) {
    if (const auto verdict = probes().serve(doing.text())) give_up(doing, *verdict);
    if (!probe_) {
      if (waited <= options_.timeout) return;
      give_up(doing, fmt::format("not all ranks came within {} ms; look for a rank that ended or hangs",
                                 options_.timeout.count()));
    }
    const Nanoseconds answer_time = std::min<Nanoseconds>(options_.timeout / 3, kAnswerTime);
    if (waited <= options_.timeout) {
      // Another thread's question of a moment ago is this one's too: a new question forgets the answers.
      if (waited > options_.timeout - answer_time) probe_->ask(2 * answer_time);
      return;
    }
    const std::string findings = probe_->findings(options_.timeout);
    // First: once it is reported, other threads of this process leave their waits, and their memory with them.
    probes().tell(detail::LivenessProbe::News::gave_up, findings);
    give_up(doing, findings);
  }

  void check_statuses(std::size_t ended, const Doing& doing) {
    for (std::size_t i = 0; i < ended; ++i) {
      int error_class = MPI_SUCCESS;
      MPI_Error_class(statuses_[i].MPI_ERROR, &error_class);
      if (error_class == MPI_ERR_TRUNCATE)
        give_up_diverged(lanes_.empty() ? rank_ : lanes_[static_cast<std::size_t>(ended_[i]) / kUnderWay].peer, doing);
      check(statuses_[i].MPI_ERROR, doing);
    }
  }

  // A message that `peer` sent in another call has come. It answers which call that is, since this rank's message has
  // reached it, or it waits for one. `peer` is this rank where MPI does not say who sent the message.
  [[noreturn]] void give_up_diverged(int peer, const Doing& doing) {
    std::optional<std::string> theirs;
    if (probe_ && peer != rank_) {
      probe_->ask(Nanoseconds(0));
      for (Deadline deadline(kAnswerTime); !theirs && !deadline.is_over(); std::this_thread::yield()) {
        if (const auto verdict = probes().serve(doing.text())) give_up(doing, *verdict);
        theirs = probe_->answer_of(peer);
      }
    }
    const std::string problem = fmt::format(
        "the ranks have diverged: {} is at {}, {} at {}; every rank must make the same calls in the same order",
        name_of(rank_), doing.text(), peer == rank_ ? "another rank" : name_of(peer), theirs.value_or("another call"));
    probes().tell(detail::LivenessProbe::News::gave_up, problem);
    give_up(doing, problem);
  }

  std::string name_of(int rank) const { return probe_ ? probe_->name_of(rank) : fmt::format("rank {}", rank); }

  // An error that only this rank has is told to the others, which would wait for it.
  void check(int code, const Doing& doing) {
    if (code == MPI_SUCCESS) return;
    const std::string problem = mpi_error_text(code);
    probes().tell(detail::LivenessProbe::News::failed, failure_text(doing, problem));
    give_up(doing, problem);
  }

  std::string failure_text(const Doing& doing, const std::string& problem) const {
    return fmt::format("mpi: {} on rank {} of {} failed: {}", doing.text(), rank_, size_, problem);
  }

  [[noreturn]] void give_up(const Doing& doing, const std::string& problem) {
    const std::string text = failure_text(doing, problem);
    breakage().report(text);
    throw CommError(text);
  }

  void refuse_if_broken(const Doing& doing) const {
    const std::string reason = detail::reason_not_to_call_mpi();
    if (reason.empty()) return;
    throw CommError(fmt::format("mpi: {} on rank {} of {} was refused, because this process has given MPI up: {}",
                                doing.text(), rank_, size_, reason));
  }

  const detail::MpiUser user_;
  MPI_Comm communicator_;
  const Ownership ownership_;
  const std::shared_ptr<detail::LivenessProbe> probe_;
  const detail::MpiTransportOptions options_;
  int rank_ = 0;
  int size_ = 1;
  std::uint64_t tag_count_ = 32768;  // the least that MPI may have
  // The operation under way.
  int tag_ = 0;
  std::vector<ShardExchange> parts_;
  std::vector<Lane> lanes_;
  std::vector<MPI_Request> requests_;
  std::vector<int> message_bytes_;  // by request
  std::vector<MPI_Status> statuses_;
  std::vector<int> ended_;
};

}  // namespace

namespace detail {

std::unique_ptr<Transport> make_mpi_transport(const MpiTransportOptions& options) {
  initialize_mpi();
  require_announced_size();
  // Not by MPI_Comm_dup, which would wait for a dead rank without end.
  MpiTransport world(MPI_COMM_WORLD, probe_of_world(), options, MpiTransport::Ownership::borrowed);
  if (!probe_of_world()) probe_of_world() = make_probe(world.duplicate_communicator());
  return std::make_unique<MpiTransport>(world.duplicate_communicator(), probe_of_world(), options);
}

}  // namespace detail

namespace {

std::unique_ptr<Communicator> over(std::shared_ptr<Transport> control, const CommunicatorOptions& options) {
  std::shared_ptr<Transport> data = control->duplicate();
  return std::make_unique<detail::HostCommunicator>("mpi", std::move(data), std::move(control), options);
}

detail::MpiTransportOptions transport_options(const CommunicatorOptions& options) {
  return {.timeout = options.timeout};
}

}  // namespace

std::unique_ptr<Communicator> make_mpi(const CommunicatorOptions& options) {
  return over(detail::make_mpi_transport(transport_options(options)), options);
}

std::unique_ptr<Communicator> make_mpi_over(MPI_Comm ranks, const CommunicatorOptions& options) {
  detail::initialize_mpi();
  int between_groups = 0;
  if (ranks != MPI_COMM_NULL) MPI_Comm_test_inter(ranks, &between_groups);
  if (ranks == MPI_COMM_NULL || between_groups != 0)
    throw UsageError("make_mpi_over: needs a communicator over one group of ranks, this one among them");
  MpiTransport given(ranks, nullptr, transport_options(options), MpiTransport::Ownership::borrowed);
  auto liveness_probe = make_probe(given.duplicate_communicator());
  return over(std::make_unique<MpiTransport>(given.duplicate_communicator(), std::move(liveness_probe),
                                             transport_options(options)),
              options);
}

}  // namespace hoist::comm
