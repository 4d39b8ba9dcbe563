// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <hoist/comm/detail/host_communicator.hpp>
#include <hoist/comm/host_collectives.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>

namespace hoist::comm::detail {

namespace {

constexpr std::uint64_t kScratchBytesMin = 64 * kKiB;

// [worker] One grouped reduction.
void reduce(Transport& transport, std::span<const ReducePiece> pieces, std::span<std::byte> scratch) {
  const auto rank = static_cast<std::uint64_t>(transport.rank());
  std::vector<ReduceChunk> round;
  std::vector<ShardExchange> parts;
  ReduceRounds rounds(pieces, transport.size(), scratch.size());
  while (rounds.next(round)) {
    parts.clear();
    for (const ReduceChunk& chunk : round) {
      const ReducePiece& piece = pieces[chunk.piece];
      const std::uint64_t element_bytes = dtype_bytes(piece.dtype);
      parts.push_back({piece.data + chunk.first_element * element_bytes, piece.shard_elements * element_bytes,
                       chunk.element_count * element_bytes, scratch.data() + chunk.scratch_offset_bytes, piece.what});
    }
    transport.exchange_shards(parts);
    // Only this rank's own shard is written, which no peer reads: the next round's sources are still whole.
    for (const ReduceChunk& chunk : round) {
      const ReducePiece& piece = pieces[chunk.piece];
      std::byte* const own =
          piece.data + (rank * piece.shard_elements + chunk.first_element) * dtype_bytes(piece.dtype);
      sum_in_rank_order(own, scratch.data() + chunk.scratch_offset_bytes, piece.dtype, transport.size(),
                        chunk.element_count, piece.scale);
    }
  }
}

}  // namespace

void scale_own(std::span<const ReducePiece> pieces, platform::Stream& stream) {
  for (const ReducePiece& piece : pieces) {
    if (piece.scale == 1.0f || piece.shard_elements == 0) continue;
    stream.scale_into(piece.data, piece.dtype, piece.data, piece.dtype, piece.shard_elements, piece.scale,
                      platform::Stream::Combine::overwrite);
  }
}

void check_pieces(std::span<const GatherPiece> pieces) {
  for (const GatherPiece& piece : pieces) {
    if (piece.data == nullptr && piece.shard_bytes > 0) {
      throw UsageError(fmt::format("all_gather: a piece of {} bytes per rank has no memory", piece.shard_bytes));
    }
  }
}

void check_pieces(std::span<const ReducePiece> pieces) {
  for (const ReducePiece& piece : pieces) {
    if (piece.data == nullptr && piece.shard_elements > 0) {
      throw UsageError(
          fmt::format("reduce_scatter: a piece of {} elements per rank has no memory", piece.shard_elements));
    }
  }
}

void check_rank(std::string_view what, int rank, int size) {
  if (rank < 0 || rank >= size)
    throw UsageError(fmt::format("{}: there is no rank {}, ranks are 0 to {}", what, rank, size - 1));
}

void check_split(int ranks, int size) {
  if (ranks < 1 || size % ranks != 0)
    throw UsageError(fmt::format("{} ranks cannot be cut into groups of {}", size, ranks));
}

void check_exchange(std::span<const std::byte> mine, std::span<std::byte> all, int size) {
  if (all.size() != mine.size() * static_cast<std::uint64_t>(size)) {
    throw UsageError(fmt::format("exchange: {} bytes from each of {} ranks need a target of {} bytes, not {}",
                                 mine.size(), size, mine.size() * static_cast<std::uint64_t>(size), all.size()));
  }
}

HostCommunicator::HostCommunicator(std::string_view name, std::shared_ptr<Transport> data,
                                   std::shared_ptr<Transport> control, const CommunicatorOptions& options)
    : name_(name), options_(options), data_(std::move(data)), control_(std::move(control)) {
  const std::uint64_t least = std::max(kScratchBytesMin, reduce_scratch_bytes_min(size()));
  if (size() > 1 && !options_.scratch.empty() && options_.scratch.size() < least) {
    throw UsageError(fmt::format("a communicator over {} ranks needs at least {} of scratch to reduce, {} were given",
                                 size(), format_bytes(least), format_bytes(options_.scratch.size())));
  }
}

template <typename Work>
void HostCommunicator::enqueue(std::string_view what, platform::Stream& stream, std::uint64_t sent_bytes, Work work) {
  // Peers pair operations by their order on the channel, so operations on two streams must not overtake each other.
  if (last_stream_ != nullptr && last_stream_ != &stream) stream.wait(last_, WaitCause::comm);
  stream.launch(what, [data = data_, ledger = options_.ledger, sent = sent_bytes_, sent_bytes, work = std::move(work)] {
    const TimePoint start = Clock::now();
    work(*data);
    sent->fetch_add(sent_bytes, std::memory_order_relaxed);
    if (ledger != nullptr) ledger->count(Link::wire, sent_bytes, Clock::now() - start);
  });
  last_ = stream.record();
  last_stream_ = &stream;
}

void HostCommunicator::require_data_plane(std::string_view what) const {
  if (data_ == nullptr) throw UsageError(fmt::format("{}: this communicator has no data plane", what));
}

void HostCommunicator::all_gather(std::span<const GatherPiece> pieces, platform::Stream& stream) {
  check_pieces(pieces);
  require_data_plane("all_gather");
  if (size() == 1) return;
  std::uint64_t shard_bytes = 0;
  for (const GatherPiece& piece : pieces) shard_bytes += piece.shard_bytes;
  enqueue("all_gather", stream, peers() * shard_bytes,
          [copy = std::vector(pieces.begin(), pieces.end())](Transport& transport) { transport.all_gather(copy); });
}

void HostCommunicator::reduce_scatter(std::span<const ReducePiece> pieces, platform::Stream& stream) {
  check_pieces(pieces);
  require_data_plane("reduce_scatter");
  if (size() == 1) return scale_own(pieces, stream);
  if (options_.scratch.empty()) {
    throw UsageError(
        "reduce_scatter: this communicator was made without scratch (as split() makes them) and cannot reduce");
  }
  std::uint64_t shard_bytes = 0;
  for (const ReducePiece& piece : pieces) shard_bytes += piece.shard_elements * dtype_bytes(piece.dtype);
  enqueue("reduce_scatter", stream, peers() * shard_bytes,
          [copy = std::vector(pieces.begin(), pieces.end()), scratch = options_.scratch](Transport& transport) {
            reduce(transport, copy, scratch);
          });
}

void HostCommunicator::exchange(std::span<const std::byte> mine, std::span<std::byte> all) {
  check_exchange(mine, all, size());
  const ShardExchange part{mine.data(), 0, mine.size(), all.data()};
  control_->exchange_shards({&part, 1});
}

void HostCommunicator::broadcast_host(std::span<std::byte> bytes, int root) {
  check_rank("broadcast_host", root, size());
  control_->broadcast(bytes, root);
}

void HostCommunicator::barrier() { control_->barrier(); }

std::unique_ptr<Communicator> HostCommunicator::duplicate() {
  std::shared_ptr<Transport> control = control_->duplicate();
  CommunicatorOptions options = options_;
  options.scratch = {};
  return std::make_unique<HostCommunicator>(name_, nullptr, std::move(control), options);
}

std::unique_ptr<Communicator> HostCommunicator::split(int ranks) {
  check_split(ranks, size());
  std::shared_ptr<Transport> control = control_->split(ranks);
  std::shared_ptr<Transport> data = data_ ? control->duplicate() : nullptr;
  CommunicatorOptions options = options_;
  options.scratch = {};
  return std::make_unique<HostCommunicator>(name_, std::move(data), std::move(control), options);
}

}  // namespace hoist::comm::detail

namespace hoist::comm {

std::unique_ptr<Transport> Transport::split(int ranks) {
  throw UsageError(
      fmt::format("the program's own channel over {} ranks cannot be split into groups of {}", size(), ranks));
}

std::unique_ptr<Communicator> make_over(std::string_view name, std::shared_ptr<Transport> data,
                                        std::shared_ptr<Transport> control, const CommunicatorOptions& options) {
  return std::make_unique<detail::HostCommunicator>(name, std::move(data), std::move(control), options);
}

}  // namespace hoist::comm
