// SPDX-License-Identifier: Apache-2.0
// comm/transport.hpp - passes bytes between ranks on CPUs: one ordered channel over all of them.
//
// A communicator owns two, one per plane. Every call is collective and blocks until this rank's part is done and its
// buffers may be changed again. A program that has ranks and channels already (PyTorch's process groups) implements
// this, and gets a Communicator with the arithmetic, order and checks of the others by make_over().
//
// Threading  One thread at a time, not always the same.
// Memory     Buffers are the caller's; after a failure peers no longer touch them.
// Errors     CommError naming rank and operation. A channel that failed once refuses everything after.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/checksum.hpp>
#include <hoist/core/rng.hpp>

namespace hoist::comm {

// A part of an all-to-all. Rank r receives, from every rank q in rank order, `chunk_bytes` bytes that start at
// q.source + r * q.stride_bytes, into received + q * chunk_bytes. With a stride of 0 all ranks get the same bytes.
struct ShardExchange {
  const std::byte* source = nullptr;
  std::uint64_t stride_bytes = 0;
  std::uint64_t chunk_bytes = 0;
  std::byte* received = nullptr;  // size() * chunk_bytes
  std::string_view what{};        // as GatherPiece's
};

// The subject of a call, for errors: the name of its first part.
template <typename Part>
std::string_view subject_of(std::span<const Part> parts) {
  return parts.empty() ? std::string_view() : parts.front().what;
}

// Stands for a call's operation, and for the name and length of each of its parts: equal on all ranks, unless they have
// diverged.
template <typename Part>
std::uint64_t call_hash(std::string_view operation, std::span<const Part> parts) {
  std::uint64_t hash = checksum(std::as_bytes(std::span(operation)));
  for (const Part& part : parts) {
    hash = random_bits(hash, checksum(std::as_bytes(std::span(part.what))));
    if constexpr (std::is_same_v<Part, GatherPiece>)
      hash = random_bits(hash, part.shard_bytes);
    else
      hash = random_bits(hash, part.chunk_bytes);
  }
  return hash;
}

class Transport {
 public:
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  virtual void all_gather(std::span<const GatherPiece> pieces) = 0;
  virtual void exchange_shards(std::span<const ShardExchange> parts) = 0;
  virtual void broadcast(std::span<std::byte> bytes, int root) = 0;
  virtual void barrier() = 0;
  // Another channel over the same ranks.
  virtual std::unique_ptr<Transport> duplicate() = 0;
  // A channel over this rank's group of consecutive ranks; `ranks` divides size(). UsageError if the channel cannot be
  // split.
  virtual std::unique_ptr<Transport> split(int ranks);
  // As Communicator's, of this channel and all others over the same ranks; from any thread. A channel that cannot tell
  // the others does nothing; the others then wait as long as its own calls do.
  virtual void abort(std::string_view) noexcept {}
  virtual std::optional<std::string> broken() { return std::nullopt; }

 protected:
  Transport() = default;
};

// A communicator of two channels over the same ranks. `name` must be a literal.
std::unique_ptr<Communicator> make_over(std::string_view name, std::shared_ptr<Transport> data,
                                        std::shared_ptr<Transport> control, const CommunicatorOptions& options = {});

}  // namespace hoist::comm
