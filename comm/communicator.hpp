// SPDX-License-Identifier: Apache-2.0
// comm/communicator.hpp - collectives over the ranks of a job. Start here.
//
// Two planes. Data: grouped, in place, ordered on a device stream. Control: small, blocking, between hosts; used for
// norms, agreement and commits. Both are collective: every rank makes the same calls in the same order.
//
// Threading  One thread at a time per plane and communicator; duplicate() gives an independent one for another thread.
//            Operations keep their order when they are enqueued on different streams. abort() and broken() from any
//            thread.
// Memory     `scratch` is handed in at creation (it counts against the device budget). A call on the data plane
//            allocates a few small objects (tests/zero/allocation_test.cpp counts them).
// Errors     CommError naming rank, operation, its subject and the missing ranks; on the data plane through the
//            stream's error. Afterwards the communicator can only be destroyed. A call that breaks the contract throws
//            UsageError and changes nothing.
// Main path  all_gather(pieces, stream) -> one grouped operation in stream order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <hoist/core/dtype.hpp>
#include <hoist/core/ledger.hpp>
#include <hoist/platform/stream.hpp>

namespace hoist::comm {

// A buffer of [rank, shard] in device memory: `size()` equal pieces, one for each rank. Before the operation, this
// rank's piece holds its own bytes.
struct GatherPiece {
  std::byte* data = nullptr;      // size() * shard_bytes
  std::uint64_t shard_bytes = 0;  // may be 0
  // Names the owner of these bytes in errors; equal on all ranks. Every backend but NCCL compares it between ranks.
  // Outlives the operation.
  std::string_view what{};
};

// A buffer of [rank, shard] elements, every rank's full contribution. Afterwards this rank's own piece holds
// scale * the sum over ranks; the other pieces are undefined.
struct ReducePiece {
  std::byte* data = nullptr;  // size() * shard_elements, aligned to an element
  DType dtype = DType::bf16;
  std::uint64_t shard_elements = 0;  // may be 0
  float scale = 1.0f;
  std::string_view what{};  // as GatherPiece's
};

struct CommunicatorOptions {
  // Device memory for staging reductions, per communicator that reduces; at least 64 KiB when size() > 1. Self and
  // NCCL use none.
  std::span<std::byte> scratch{};
  // If given, counts on Link::wire the bytes that this rank sends on the data plane: (size - 1) * shard bytes. Busy
  // time includes waiting for slower ranks, which cannot be separated from the transfer; NCCL reports none.
  // Control-plane bytes are not counted.
  Ledger* ledger = nullptr;
  // A rank that does not join within this time is an error. Time in which this process was stopped does not count.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  int device_ordinal = -1;  // NCCL: the CUDA device; -1: the calling thread's current one
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string_view name() const = 0;  // "self", "threads", "mpi", "nccl", or the program's

  // Data plane. One grouped operation per call. `pieces` is copied before the call returns.
  virtual void all_gather(std::span<const GatherPiece> pieces, platform::Stream& stream) = 0;
  // 16-bit types: an all-to-all of shards, then an fp32 sum in rank order, scaled and rounded once (to_bf16's rule):
  // the bytes of a reduce-scatter, a fixed order, and the same bits on every CPU backend. NCCL sums in the wire type,
  // in its own order.
  virtual void reduce_scatter(std::span<const ReducePiece> pieces, platform::Stream& stream) = 0;

  // Control plane. Blocking.
  // all[r * mine.size(), ...) = rank r's `mine`. Pre: all.size() == size() * mine.size().
  virtual void exchange(std::span<const std::byte> mine, std::span<std::byte> all) = 0;
  virtual void broadcast_host(std::span<std::byte> bytes, int root) = 0;
  virtual void barrier() = 0;

  // [collective] An independent communicator over the same ranks, with a control plane only. Errors of its data plane:
  // UsageError.
  virtual std::unique_ptr<Communicator> duplicate() = 0;

  // [collective] A communicator over this rank's group of `ranks` consecutive ranks: ranks 0 to ranks - 1 are one, and
  // so on. It has no scratch: control plane and, unless this is a duplicate, all_gather only. It shares the ledger;
  // sent_bytes() counts it separately. Errors: UsageError if `ranks` does not divide size(), or the program's own
  // channels cannot be split.
  virtual std::unique_ptr<Communicator> split(int ranks) = 0;
  // Bytes that this rank has sent on this communicator's data plane, as the ledger counts them.
  virtual std::uint64_t sent_bytes() const = 0;

  // This rank cannot continue, because of its drive, its memory or its program. Present and future calls of all ranks,
  // on this communicator and its duplicates, fail with a CommError that names this rank and `why`. For the others it is
  // as if this rank had died, except that they learn it at once, with the reason; a protocol that survives a death also
  // survives this. The first call counts. NCCL: through the control plane given to it; over NCCL alone (make_nccl_at)
  // the others learn only what NCCL notices. A channel of the program's own: as its Transport does. Self: nothing.
  // Cost: does not wait for others; MPI takes up to 100 ms to see its messages off.
  virtual void abort(std::string_view why) noexcept = 0;
  // The reason why all of this communicator's calls fail from now on, if another rank aborted or gave up and this one
  // can learn of it without waiting. For threads that wait for something else meanwhile.
  virtual std::optional<std::string> broken() = 0;

 protected:
  Communicator() = default;
};

// [collective] The value of every rank, by rank.
template <typename Value>
std::vector<Value> values_of_all(Communicator& communicator, const Value& mine) {
  static_assert(std::is_trivially_copyable_v<Value>);
  std::vector<Value> all(static_cast<std::size_t>(communicator.size()));
  communicator.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

// One rank.
std::unique_ptr<Communicator> make_self(const CommunicatorOptions& options = {});

// Ranks that are threads of this process. Every thread calls join() once with its own rank and options; join blocks
// until all have. A rank that threw before joining calls the group's abort(), which fails the others' calls with its
// reason, and one that has joined its communicator's; a rank whose communicator is destroyed while others wait for it
// fails them too. No rank hangs. Each rank needs its own streams: an operation holds its stream's worker until all
// ranks have joined.
class ThreadGroup {
 public:
  explicit ThreadGroup(int size);
  ~ThreadGroup();
  std::unique_ptr<Communicator> join(int rank, const CommunicatorOptions& options = {});
  void abort(const std::string& why);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

// Ranks started by mpirun or srun. Initialises MPI (MPI_THREAD_MULTIPLE) if the program has not, and then also
// finalises it at process exit, unless the process exits with an error or still uses it. Throws CommError with the
// remedy if this build has no MPI, or if a launcher (comm/launch.hpp) announced several ranks that MPI does not see:
// each would otherwise train alone. Sub-communicators: comm/mpi.hpp.
std::unique_ptr<Communicator> make_mpi(const CommunicatorOptions& options = {});

// [collective] Over NCCL, for the ranks of `control`, a communicator between the hosts (MPI or self), which also makes
// the control-plane calls. Streams must belong to the device of the options.
std::unique_ptr<Communicator> make_nccl_over(std::unique_ptr<Communicator> control,
                                             const CommunicatorOptions& options = {});
// Over NCCL alone, without MPI: ranks find each other at `endpoint` ("host:port") by NCCL's own bootstrap
// (NCCL_COMM_ID; set while this runs, unless the environment has one, which then wins). Rank 0 listens there. The
// control plane is NCCL too, over 64 KiB of pinned host memory. On GPUs it has run with one rank only.
std::unique_ptr<Communicator> make_nccl_at(const std::string& endpoint, int rank, int size,
                                           const CommunicatorOptions& options = {});

// Whether the backend was compiled in.
bool have_mpi();
bool have_nccl();

}  // namespace hoist::comm
