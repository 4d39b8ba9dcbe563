// SPDX-License-Identifier: Apache-2.0
// comm/nccl_transport.cpp - blocking exchanges between hosts over NCCL.
//
// The communicator does not block: every call is polled, so that a missing rank causes a CommError. Bytes pass
// through a small buffer of pinned host memory, which kernels of NCCL read and write in place.
//
// On GPUs it has run with one rank only.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include <cuda_runtime.h>
#include <fmt/format.h>
#include <nccl.h>

#include <hoist/comm/detail/nccl_transport.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/deadline.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>

namespace hoist::comm::detail {

namespace {

constexpr std::uint64_t kStagingBytes = 64 * kKiB;
constexpr const char* kEndpointVariable = "NCCL_COMM_ID";

// Sets NCCL's bootstrap variable while NCCL reads it. A value that is already in the environment wins.
class Endpoint {
 public:
  explicit Endpoint(const std::string& endpoint) : set_(std::getenv(kEndpointVariable) == nullptr) {
    if (set_) ::setenv(kEndpointVariable, endpoint.c_str(), 1);
  }
  ~Endpoint() {
    if (set_) ::unsetenv(kEndpointVariable);
  }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

 private:
  const bool set_;
};

class NcclTransport final : public Transport {
 public:
  NcclTransport(int rank, int size, int device_ordinal, std::chrono::milliseconds timeout)
      : rank_(rank), size_(size), device_ordinal_(device_ordinal), timeout_(timeout) {}

  ~NcclTransport() override {
    if (communicator_ == nullptr && stream_ == nullptr && staging_ == nullptr) return;
    try {
      const CurrentDevice current(device_ordinal_);
      if (communicator_ != nullptr) ncclCommAbort(communicator_);  // nothing is in flight; does not wait for others
      if (stream_ != nullptr) cudaStreamDestroy(stream_);
      if (staging_ != nullptr) cudaFreeHost(staging_);
    } catch (const CommError&) {  // the device is lost with everything on it
    }
  }

  void connect(const std::string& endpoint) {
    const CurrentDevice current(device_ordinal_);
    const Endpoint meet(endpoint);
    ncclUniqueId id{};
    check("ncclGetUniqueId", ncclGetUniqueId(&id));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    check("ncclCommInitRank", ncclCommInitRankConfig(&communicator_, size_, id, rank_, &config));
    take_buffers();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_gather(std::span<const GatherPiece>) override { HOIST_ASSERT(false, "no data plane over this channel"); }

  void exchange_shards(std::span<const ShardExchange> parts) override {
    for (const ShardExchange& part : parts) {
      HOIST_ASSERT(part.stride_bytes == 0, "no data plane over this channel");
      pieces_of(part.chunk_bytes, [&](std::uint64_t first, std::uint64_t bytes) {
        gather("exchange", part.source + first, bytes);
        for (std::uint64_t r = 0; r < ranks(); ++r)
          std::memcpy(part.received + r * part.chunk_bytes + first, received() + r * bytes, bytes);
      });
    }
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    constexpr const char* kWhat = "broadcast";
    require_communicator(kWhat);
    const CurrentDevice current(device_ordinal_);
    pieces_of(bytes.size(), [&](std::uint64_t first, std::uint64_t count) {
      std::memcpy(staging_, bytes.data() + first, count);
      check(kWhat, ncclBroadcast(staging_, staging_, count, ncclInt8, root, communicator_, stream_));
      finish(kWhat);
      std::memcpy(bytes.data() + first, staging_, count);
    });
  }

  void barrier() override {
    const std::byte mine{};
    gather("barrier", &mine, 1);
  }

  std::unique_ptr<Transport> duplicate() override { return split_off(0, rank_, size_); }
  std::unique_ptr<Transport> split(int ranks) override { return split_off(rank_ / ranks, rank_ % ranks, ranks); }

 private:
  std::uint64_t ranks() const { return static_cast<std::uint64_t>(size_); }
  // The staging memory: the sent bytes, then [rank, piece] of the received ones.
  std::uint64_t piece_bytes_max() const { return std::max<std::uint64_t>(64, kStagingBytes / 2 / ranks()); }
  std::byte* received() const { return staging_ + piece_bytes_max(); }

  // A channel over the ranks that name the same group.
  std::unique_ptr<Transport> split_off(int group, int rank, int size) {
    constexpr const char* kWhat = "ncclCommSplit";
    require_communicator(kWhat);
    const CurrentDevice current(device_ordinal_);
    auto part = std::make_unique<NcclTransport>(rank, size, device_ordinal_, timeout_);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    // It may say success when it has only begun. A thread of NCCL's stores the new communicator, also where the split
    // fails; what give_up() aborts first, this communicator, joins that thread before `part` ends.
    const ncclResult_t begun = ncclCommSplit(communicator_, group, rank, &part->communicator_, &config);
    check(kWhat, begun == ncclSuccess ? ncclInProgress : begun);
    for (Deadline deadline(timeout_); std::atomic_ref(part->communicator_).load() == nullptr;) pause(kWhat, deadline);
    part->check(kWhat, ncclInProgress);
    part->take_buffers();
    return part;
  }

  void take_buffers() {
    cuda("cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    void* memory = nullptr;
    cuda("cudaHostAlloc", cudaHostAlloc(&memory, (1 + ranks()) * piece_bytes_max(), cudaHostAllocPortable));
    staging_ = static_cast<std::byte*>(memory);
  }

  template <typename Body>
  void pieces_of(std::uint64_t bytes, const Body& body) {
    for (std::uint64_t first = 0; first < bytes; first += piece_bytes_max())
      body(first, std::min(piece_bytes_max(), bytes - first));
  }

  // A communicator that was given up is not used again.
  void require_communicator(const char* what) {
    if (communicator_ == nullptr) give_up(what, "the communicator failed earlier");
  }

  void gather(const char* what, const std::byte* mine, std::uint64_t bytes) {
    require_communicator(what);
    const CurrentDevice current(device_ordinal_);
    std::memcpy(staging_, mine, bytes);
    check(what, ncclAllGather(staging_, received(), bytes, ncclInt8, communicator_, stream_));
    finish(what);
  }

  // Waits for a call that has only begun.
  void check(const char* what, ncclResult_t code) {
    for (Deadline deadline(timeout_); code == ncclInProgress && communicator_ != nullptr;) {
      if (const ncclResult_t asked = ncclCommGetAsyncError(communicator_, &code); asked != ncclSuccess) code = asked;
      if (code == ncclInProgress) pause(what, deadline);
    }
    if (code == ncclSuccess) return;
    give_up(what, fmt::format("{}; NCCL_DEBUG=WARN says more", ncclGetErrorString(code)));
  }

  void finish(const char* what) {
    Deadline deadline(timeout_);
    while (true) {
      const cudaError_t state = cudaStreamQuery(stream_);
      if (state == cudaSuccess) return;
      static_cast<void>(cudaGetLastError());  // the runtime also remembers "not ready" for the thread's next query
      if (state != cudaErrorNotReady) cuda(what, state);
      ncclResult_t asynchronous = ncclSuccess;
      check(what, ncclCommGetAsyncError(communicator_, &asynchronous));
      check(what, asynchronous);
      pause(what, deadline);
    }
  }

  void pause(const char* what, Deadline& deadline) {
    if (deadline.is_over()) {
      give_up(what,
              fmt::format("not all ranks came within {} ms; look for a rank that ended or hangs", timeout_.count()));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  void cuda(const char* what, cudaError_t code) {
    if (code != cudaSuccess) give_up(what, cudaGetErrorString(code));
  }

  [[noreturn]] void give_up(const char* what, const std::string& problem) {
    if (communicator_ != nullptr) ncclCommAbort(std::exchange(communicator_, nullptr));
    throw CommError(fmt::format("nccl: {} on rank {} of {} failed: {}", what, rank_, size_, problem));
  }

  const int rank_;
  const int size_;
  const int device_ordinal_;
  const std::chrono::milliseconds timeout_;
  ncclComm_t communicator_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::byte* staging_ = nullptr;
};

}  // namespace

int device_of(int ordinal) {
  if (ordinal >= 0) return ordinal;
  int current = -1;
  if (const cudaError_t code = cudaGetDevice(&current); code != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    throw CommError(fmt::format("nccl: no CUDA device: {}", cudaGetErrorString(code)));
  }
  return current;
}

CurrentDevice::CurrentDevice(int ordinal) {
  try {
    gpu_.emplace(ordinal);
  } catch (const DeviceError& error) {
    throw CommError(fmt::format("nccl: CUDA device {}: {}", ordinal, error.what()));
  }
}

std::unique_ptr<Transport> make_nccl_transport(const NcclRendezvous& rendezvous) {
  auto transport = std::make_unique<NcclTransport>(rendezvous.rank, rendezvous.size,
                                                   device_of(rendezvous.device_ordinal), rendezvous.timeout);
  transport->connect(rendezvous.endpoint);
  return transport;
}

}  // namespace hoist::comm::detail
