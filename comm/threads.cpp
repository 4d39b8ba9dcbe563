// SPDX-License-Identifier: Apache-2.0
// comm/threads.cpp - ranks that are threads of one process.
//
// A Channel is a rendezvous: every rank offers its buffers, all meet, each copies directly out of the others' memory,
// and no rank leaves before all have copied. Only the first half can fail (a rank is missing, leaves, or the group is
// aborted); once all have met, every rank is in a bounded copy, so the second half always ends and no rank can free
// memory that another still reads.
//
// Threading  A channel is used by one thread per rank at a time; abort and leaving may come from any thread.
#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include <fmt/format.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/comm/detail/host_communicator.hpp>
#include <hoist/comm/transport.hpp>
#include <hoist/core/deadline.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist::comm {

namespace {

enum class MeetingKind : std::uint8_t { join, all_gather, exchange, broadcast, barrier, duplicate, split };

const char* operation_name(MeetingKind operation) {
  switch (operation) {
    case MeetingKind::join:
      return "join";
    case MeetingKind::all_gather:
      return "all_gather";
    case MeetingKind::exchange:
      return "exchange";
    case MeetingKind::broadcast:
      return "broadcast";
    case MeetingKind::barrier:
      return "barrier";
    case MeetingKind::duplicate:
      return "duplicate";
    case MeetingKind::split:
      return "split";
  }
  return "?";
}

// A rank's offer at a meeting. Everything except `payload` must be equal on all ranks.
struct Offer {
  MeetingKind operation = MeetingKind::barrier;
  std::uint64_t part_count = 0;
  std::uint64_t total_bytes = 0;
  int root = 0;
  const void* payload = nullptr;  // meaning depends on the operation; read by peers during the meeting
  std::string_view what{};        // of the first part, for errors
  std::uint64_t parts_hash = 0;

  bool matches(const Offer& other) const {
    return operation == other.operation && part_count == other.part_count && total_bytes == other.total_bytes &&
           root == other.root && parts_hash == other.parts_hash;
  }
  std::string text() const {
    return fmt::format("{} of {}{} bytes in {} parts{}", operation_name(operation),
                       what.empty() ? "" : fmt::format("'{}', ", what), total_bytes, part_count,
                       operation == MeetingKind::broadcast ? fmt::format(" from rank {}", root) : "");
  }
  std::string name() const {
    return what.empty() ? operation_name(operation) : fmt::format("{} of '{}'", operation_name(operation), what);
  }
};

// `total_bytes` is still to be counted.
template <typename Part>
Offer offer_of(MeetingKind operation, std::span<const Part> parts) {
  return {operation, parts.size(), 0, 0, parts.data(), subject_of(parts), call_hash(operation_name(operation), parts)};
}

class Channel {
 public:
  explicit Channel(int size) : offers_(static_cast<std::size_t>(size)), here_(static_cast<std::size_t>(size), false) {}

  int size() const { return static_cast<int>(offers_.size()); }

  // Meets all ranks, then calls take(peer, payload) for each in rank order.
  template <typename Take>
  void meet(int rank, const Offer& offer, std::chrono::milliseconds timeout, const Take& take) {
    arrive(rank, offer, timeout);
    // Between here and depart() the offers do not change, so reading them needs no lock.
    const std::string mismatch = find_mismatch();
    if (mismatch.empty()) {
      for (int peer = 0; peer < size(); ++peer) take(peer, offers_[static_cast<std::size_t>(peer)].payload);
    }
    depart();
    if (!mismatch.empty()) {
      fail(mismatch);
      throw CommError(mismatch);
    }
  }

  // Every present and future wait gets a CommError with this reason. The first reason stays.
  void fail(const std::string& reason) {
    const MutexLock lock(mutex_);
    if (failure_.empty()) failure_ = reason;
    changed_.notify_all();
  }

  std::string failure() const {
    const MutexLock lock(mutex_);
    return failure_;
  }

 private:
  void arrive(int rank, const Offer& offer, std::chrono::milliseconds timeout) {
    MutexLock lock(mutex_);
    throw_if_failed(rank, offer);
    offers_[static_cast<std::size_t>(rank)] = offer;
    here_[static_cast<std::size_t>(rank)] = true;
    const std::uint64_t meeting = meeting_;
    if (++arrived_ == size()) {
      arrived_ = 0;
      std::fill(here_.begin(), here_.end(), false);
      ++meeting_;
      changed_.notify_all();
      return;
    }
    const auto decided = [&]() HOIST_REQUIRES(mutex_) { return meeting_ != meeting || !failure_.empty(); };
    for (Deadline deadline(timeout); !decided() && !deadline.is_over();) changed_.wait_for(lock, deadline.next_look());
    if (meeting_ != meeting) return;  // it took place; later events do not matter
    if (!decided()) {
      failure_ = fmt::format("{} did not come to {} within {} ms, where rank {} waited", absent_ranks(), offer.text(),
                             timeout.count(), rank);
      changed_.notify_all();
    }
    throw_if_failed(rank, offer);
  }

  void depart() {
    MutexLock lock(mutex_);
    const std::uint64_t departure = departure_;
    if (++departed_ == size()) {
      departed_ = 0;
      ++departure_;
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return departure_ != departure; });
  }

  std::string find_mismatch() const {
    for (std::size_t peer = 1; peer < offers_.size(); ++peer) {
      if (!offers_[peer].matches(offers_[0])) {
        return fmt::format(
            "the ranks have diverged: rank {} called {} where rank 0 called {}; every rank must make the same calls in "
            "the same order",
            peer, offers_[peer].text(), offers_[0].text());
      }
    }
    return {};
  }

  std::string absent_ranks() const HOIST_REQUIRES(mutex_) {
    std::string list;
    for (std::size_t r = 0; r < here_.size(); ++r) {
      if (!here_[r]) list += fmt::format("{}{}", list.empty() ? "rank " : ", rank ", r);
    }
    return list;
  }

  void throw_if_failed(int rank, const Offer& offer) const HOIST_REQUIRES(mutex_) {
    if (failure_.empty()) return;
    throw CommError(fmt::format("threads: {} on rank {} of {} failed: {}", offer.name(), rank, size(), failure_));
  }

  mutable Mutex mutex_;
  ConditionVariable changed_;
  std::vector<Offer> offers_;                        // changed under mutex_; constant while a meeting takes place
  std::vector<bool> here_ HOIST_GUARDED_BY(mutex_);  // who has arrived at the meeting that is forming
  int arrived_ HOIST_GUARDED_BY(mutex_) = 0;
  int departed_ HOIST_GUARDED_BY(mutex_) = 0;
  std::uint64_t meeting_ HOIST_GUARDED_BY(mutex_) = 0;
  std::uint64_t departure_ HOIST_GUARDED_BY(mutex_) = 0;
  std::string failure_ HOIST_GUARDED_BY(mutex_);
};

}  // namespace

// The channels of a group, so that abort() reaches all of them, duplicates included.
struct ThreadGroup::Shared {
  explicit Shared(int size) : ranks(size), joined(static_cast<std::size_t>(size), false) {}

  std::shared_ptr<Channel> make_channel(int size) {
    auto channel = std::make_shared<Channel>(size);
    const MutexLock lock(mutex);
    if (!failure.empty()) channel->fail(failure);
    std::erase_if(channels, [](const std::weak_ptr<Channel>& c) { return c.expired(); });
    channels.push_back(channel);
    return channel;
  }

  void abort(const std::string& why) {
    std::vector<std::shared_ptr<Channel>> live;
    {
      const MutexLock lock(mutex);
      if (failure.empty()) failure = why;
      for (const auto& weak : channels) {
        if (auto channel = weak.lock()) live.push_back(std::move(channel));
      }
    }
    for (const auto& channel : live) channel->fail(why);
  }

  const int ranks;
  Mutex mutex;
  std::vector<std::weak_ptr<Channel>> channels HOIST_GUARDED_BY(mutex);
  std::vector<bool> joined HOIST_GUARDED_BY(mutex);
  std::string failure HOIST_GUARDED_BY(mutex);
  // Made with the group: where joining ranks meet, and the two planes they then use.
  std::shared_ptr<Channel> entrance, data, control;
};

namespace {

// The group that transports share.
struct GroupCalls {
  std::function<std::shared_ptr<Channel>(int ranks)> make_channel;
  std::function<void(const std::string& why)> abort;
};

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Channel> channel, int rank, int rank_in_world, std::chrono::milliseconds timeout,
                  GroupCalls group)
      : channel_(std::move(channel)),
        rank_(rank),
        rank_in_world_(rank_in_world),
        timeout_(timeout),
        group_(std::move(group)) {}

  // From now on a wait for this rank would never end.
  ~ThreadTransport() override { channel_->fail(fmt::format("rank {} has left", rank_in_world_)); }

  int rank() const override { return rank_; }
  int size() const override { return channel_->size(); }

  void all_gather(std::span<const GatherPiece> pieces) override {
    Offer offer = offer_of(MeetingKind::all_gather, pieces);
    for (const GatherPiece& piece : pieces) offer.total_bytes += piece.shard_bytes;
    channel_->meet(rank_, offer, timeout_, [&](int peer, const void* payload) {
      if (peer == rank_) return;
      const auto* const theirs = static_cast<const GatherPiece*>(payload);
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        const std::uint64_t at = static_cast<std::uint64_t>(peer) * pieces[i].shard_bytes;
        copy(pieces[i].data + at, theirs[i].data + at, pieces[i].shard_bytes);
      }
    });
  }

  void exchange_shards(std::span<const ShardExchange> parts) override {
    Offer offer = offer_of(MeetingKind::exchange, parts);
    for (const ShardExchange& part : parts) offer.total_bytes += part.chunk_bytes;
    channel_->meet(rank_, offer, timeout_, [&](int peer, const void* payload) {
      const auto* const theirs = static_cast<const ShardExchange*>(payload);
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const std::uint64_t bytes = parts[i].chunk_bytes;
        copy(parts[i].received + static_cast<std::uint64_t>(peer) * bytes,
             theirs[i].source + static_cast<std::uint64_t>(rank_) * theirs[i].stride_bytes, bytes);
      }
    });
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    const Offer offer{MeetingKind::broadcast, 1, bytes.size(), root, bytes.data()};
    channel_->meet(rank_, offer, timeout_, [&](int peer, const void* payload) {
      if (peer == root && peer != rank_) copy(bytes.data(), static_cast<const std::byte*>(payload), bytes.size());
    });
  }

  void barrier() override {
    channel_->meet(rank_, Offer{MeetingKind::barrier, 0, 0, 0, nullptr}, timeout_, [](int, const void*) {});
  }

  std::unique_ptr<Transport> duplicate() override { return part_of(MeetingKind::duplicate, size()); }
  std::unique_ptr<Transport> split(int ranks) override { return part_of(MeetingKind::split, ranks); }

  void abort(std::string_view why) noexcept override {
    try {
      group_.abort(fmt::format("rank {} failed: {}", rank_in_world_, why));
    } catch (...) {  // no memory for the text
      channel_->fail("a rank failed");
    }
  }

  std::optional<std::string> broken() override {
    std::string failure = channel_->failure();
    return failure.empty() ? std::nullopt : std::optional(std::move(failure));
  }

 private:
  // The first rank of each group of consecutive ranks makes its channel, and the others take theirs from it.
  std::unique_ptr<Transport> part_of(MeetingKind kind, int ranks) {
    const int first = rank_ - rank_ % ranks;
    std::shared_ptr<Channel> channel = rank_ == first ? group_.make_channel(ranks) : nullptr;
    const Offer offer{kind, static_cast<std::uint64_t>(ranks), 0, 0, &channel};
    std::shared_ptr<Channel> shared;
    channel_->meet(rank_, offer, timeout_, [&](int peer, const void* payload) {
      if (peer == first) shared = *static_cast<const std::shared_ptr<Channel>*>(payload);
    });
    return std::make_unique<ThreadTransport>(std::move(shared), rank_ - first, rank_in_world_, timeout_, group_);
  }

  static void copy(std::byte* target, const std::byte* source, std::uint64_t bytes) {
    if (bytes > 0) std::memcpy(target, source, bytes);
  }

  std::shared_ptr<Channel> channel_;
  const int rank_;
  const int rank_in_world_;  // names it when it has failed or left
  const std::chrono::milliseconds timeout_;
  const GroupCalls group_;
};

}  // namespace

ThreadGroup::ThreadGroup(int size) {
  if (size < 1) throw UsageError(fmt::format("a thread group needs at least one rank, not {}", size));
  shared_ = std::make_shared<Shared>(size);
  shared_->entrance = shared_->make_channel(size);
  shared_->data = shared_->make_channel(size);
  shared_->control = shared_->make_channel(size);
}

ThreadGroup::~ThreadGroup() = default;

std::unique_ptr<Communicator> ThreadGroup::join(int rank, const CommunicatorOptions& options) {
  detail::check_rank("join", rank, shared_->ranks);
  {
    const MutexLock lock(shared_->mutex);
    if (shared_->joined[static_cast<std::size_t>(rank)]) {
      throw UsageError(fmt::format("rank {} of a thread group of {} joined twice", rank, shared_->ranks));
    }
    shared_->joined[static_cast<std::size_t>(rank)] = true;
  }
  const GroupCalls calls{.make_channel = [shared = shared_](int ranks) { return shared->make_channel(ranks); },
                         .abort = [shared = shared_](const std::string& why) { shared->abort(why); }};
  auto communicator = std::make_unique<detail::HostCommunicator>(
      "threads", std::make_shared<ThreadTransport>(shared_->data, rank, rank, options.timeout, calls),
      std::make_shared<ThreadTransport>(shared_->control, rank, rank, options.timeout, calls), options);
  shared_->entrance->meet(rank, Offer{MeetingKind::join, 0, 0, 0, nullptr}, options.timeout, [](int, const void*) {});
  return communicator;
}

void ThreadGroup::abort(const std::string& why) { shared_->abort(why); }

}  // namespace hoist::comm
