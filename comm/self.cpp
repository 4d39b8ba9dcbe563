// SPDX-License-Identifier: Apache-2.0
// comm/self.cpp - one rank. Nothing crosses a wire; a reduction only scales.
#include <cstring>

#include <hoist/comm/communicator.hpp>
#include <hoist/comm/detail/host_communicator.hpp>

namespace hoist::comm {

namespace {

class SelfCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string_view name() const override { return "self"; }

  void all_gather(std::span<const GatherPiece> pieces, platform::Stream&) override { detail::check_pieces(pieces); }
  void reduce_scatter(std::span<const ReducePiece> pieces, platform::Stream& stream) override {
    detail::check_pieces(pieces);
    detail::scale_own(pieces, stream);
  }
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) override {
    detail::check_exchange(mine, all, 1);
    if (!mine.empty()) std::memmove(all.data(), mine.data(), mine.size());
  }
  void broadcast_host(std::span<std::byte>, int root) override { detail::check_rank("broadcast_host", root, 1); }
  void barrier() override {}
  std::unique_ptr<Communicator> duplicate() override { return std::make_unique<SelfCommunicator>(); }
  std::unique_ptr<Communicator> split(int ranks) override {
    detail::check_split(ranks, 1);
    return duplicate();
  }
  std::uint64_t sent_bytes() const override { return 0; }
  void abort(std::string_view) noexcept override {}
  std::optional<std::string> broken() override { return std::nullopt; }
};

}  // namespace

std::unique_ptr<Communicator> make_self(const CommunicatorOptions&) { return std::make_unique<SelfCommunicator>(); }

}  // namespace hoist::comm
