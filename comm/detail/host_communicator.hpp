// SPDX-License-Identifier: Apache-2.0
// comm/detail/host_communicator.hpp - a Communicator made of two transports, shared by `threads` and `mpi`.
//
// Threading  As Communicator: one thread at a time per plane.
// Memory     Queued work shares ownership of the data transport, so a communicator may be destroyed while work waits.
// Errors     A transport's CommError becomes the stream's error; contract violations throw UsageError at the call.
// Main path  reduce_scatter -> Stream::launch -> [worker] ReduceRounds -> Transport::exchange_shards -> sum.
#pragma once

#include <atomic>
#include <memory>
#include <string_view>

#include <hoist/comm/communicator.hpp>
#include <hoist/comm/transport.hpp>

namespace hoist::comm::detail {

class HostCommunicator final : public Communicator {
 public:
  // `name` must be a literal. `data`: null without a data plane.
  HostCommunicator(std::string_view name, std::shared_ptr<Transport> data, std::shared_ptr<Transport> control,
                   const CommunicatorOptions& options);

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  std::string_view name() const override { return name_; }

  void all_gather(std::span<const GatherPiece> pieces, platform::Stream& stream) override;
  void reduce_scatter(std::span<const ReducePiece> pieces, platform::Stream& stream) override;

  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) override;
  void broadcast_host(std::span<std::byte> bytes, int root) override;
  void barrier() override;
  std::unique_ptr<Communicator> duplicate() override;
  std::unique_ptr<Communicator> split(int ranks) override;
  std::uint64_t sent_bytes() const override { return sent_bytes_->load(std::memory_order_relaxed); }
  void abort(std::string_view why) noexcept override { control_->abort(why); }
  std::optional<std::string> broken() override { return control_->broken(); }

 private:
  // Launches `work` after everything this communicator has enqueued so far, on whichever streams that was.
  template <typename Work>  // void(Transport&)
  void enqueue(std::string_view what, platform::Stream& stream, std::uint64_t sent_bytes, Work work);
  std::uint64_t peers() const { return static_cast<std::uint64_t>(size() - 1); }
  void require_data_plane(std::string_view what) const;

  std::string_view name_;
  CommunicatorOptions options_;
  std::shared_ptr<std::atomic<std::uint64_t>> sent_bytes_ = std::make_shared<std::atomic<std::uint64_t>>(0);
  std::shared_ptr<Transport> data_;
  std::shared_ptr<Transport> control_;
  platform::StreamEvent last_;               // end of the latest data-plane operation
  platform::Stream* last_stream_ = nullptr;  // compared, never followed
};

// Every backend's work for one rank: the sum of one value is the value, scaled and rounded once.
void scale_own(std::span<const ReducePiece> pieces, platform::Stream& stream);

// The checks that every backend makes first. UsageError.
void check_pieces(std::span<const GatherPiece> pieces);
void check_pieces(std::span<const ReducePiece> pieces);
void check_rank(std::string_view what, int rank, int size);
void check_split(int ranks, int size);
void check_exchange(std::span<const std::byte> mine, std::span<std::byte> all, int size);

}  // namespace hoist::comm::detail
