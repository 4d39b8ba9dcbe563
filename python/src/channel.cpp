// SPDX-License-Identifier: Apache-2.0
#include "channel.hpp"

#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>

#include "interruption.hpp"

namespace hoist::python {

namespace nb = nanobind;

namespace {

nb::object tensor_of(const std::byte* data, std::uint64_t bytes) {
  const std::size_t extent = bytes;
  return nb::cast(
      nb::ndarray<nb::pytorch, std::uint8_t, nb::device::cpu>(const_cast<std::byte*>(data), 1, &extent, nb::handle()),
      nb::rv_policy::reference);
}

class PythonChannel final : public comm::Transport {
 public:
  explicit PythonChannel(nb::object channel)
      : channel_(std::move(channel)),
        rank_(nb::cast<int>(channel_.attr("rank"))),
        size_(nb::cast<int>(channel_.attr("size"))) {}

  ~PythonChannel() override {
    ask([&] { channel_.attr("close")(); });
    if (!nb::is_alive()) {  // the interpreter took the object with it
      channel_.release();
      return;
    }
    const nb::gil_scoped_acquire acquire;
    channel_.reset();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_gather(std::span<const comm::GatherPiece> pieces) override {
    call(described("all_gather", pieces, &comm::GatherPiece::shard_bytes), [&](const nb::str& what) {
      Messages messages;
      for (const comm::GatherPiece& piece : pieces) {
        const std::byte* const own = piece.data + static_cast<std::uint64_t>(rank_) * piece.shard_bytes;
        for_each_peer([&](int peer) {
          messages.add(peer, own, piece.data + static_cast<std::uint64_t>(peer) * piece.shard_bytes, piece.shard_bytes);
        });
      }
      exchange(what, messages);
    });
  }

  void exchange_shards(std::span<const comm::ShardExchange> parts) override {
    call(described("exchange", parts, &comm::ShardExchange::chunk_bytes), [&](const nb::str& what) {
      Messages messages;
      for (const comm::ShardExchange& part : parts) {
        for_each_peer([&](int peer) {
          const auto p = static_cast<std::uint64_t>(peer);
          messages.add(peer, part.source + p * part.stride_bytes, part.received + p * part.chunk_bytes,
                       part.chunk_bytes);
        });
      }
      exchange(what, messages);
    });
    const auto me = static_cast<std::uint64_t>(rank_);
    for (const comm::ShardExchange& part : parts) {
      if (part.chunk_bytes == 0) continue;
      std::memmove(part.received + me * part.chunk_bytes, part.source + me * part.stride_bytes, part.chunk_bytes);
    }
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    if (bytes.empty()) return;
    call(fmt::format("broadcast of {} bytes from rank {}", bytes.size(), root),
         [&](const nb::str& what) { channel_.attr("broadcast")(what, tensor_of(bytes.data(), bytes.size()), root); });
  }

  void barrier() override {
    call("barrier", [&](const nb::str& what) { channel_.attr("barrier")(what); });
  }

  std::unique_ptr<Transport> duplicate() override {
    std::unique_ptr<Transport> copy;
    call("duplicate", [&](const nb::str&) { copy = std::make_unique<PythonChannel>(channel_.attr("duplicate")()); });
    return copy;
  }

  std::unique_ptr<Transport> split(int ranks) override {
    std::unique_ptr<Transport> group;
    call("split", [&](const nb::str&) { group = std::make_unique<PythonChannel>(channel_.attr("split")(ranks)); });
    return group;
  }

  void abort(std::string_view why) noexcept override {
    ask([&] { channel_.attr("abort")(nb::str(why.data(), why.size())); });
  }

  std::optional<std::string> broken() override {
    std::optional<std::string> reason;
    ask([&] {
      if (const nb::object why = channel_.attr("why")(); !why.is_none()) reason = nb::cast<std::string>(why);
    });
    return reason;
  }

 private:
  // Both ranks of a pair add messages in the same order: that matches a send with its receive.
  struct Messages {
    nb::list sends;
    nb::list receives;
    void add(int peer, const std::byte* source, std::byte* target, std::uint64_t bytes) {
      if (bytes == 0) return;
      sends.append(nb::make_tuple(peer, tensor_of(source, bytes)));
      receives.append(nb::make_tuple(peer, tensor_of(target, bytes)));
    }
  };

  template <typename Visit>
  void for_each_peer(const Visit& visit) const {
    for (int step = 1; step < size_; ++step) visit((rank_ + step) % size_);
  }

  void exchange(const nb::str& what, const Messages& messages) {
    if (nb::len(messages.sends) > 0) channel_.attr("exchange")(what, messages.sends, messages.receives);
  }

  // All that ranks must have in common to make one call together: its operation, and the owner and bytes of each part.
  template <typename Part>
  static std::string described(const char* operation, std::span<const Part> parts, std::uint64_t Part::*bytes) {
    std::string text = operation;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const Part& part = parts[i];
      if (!part.what.empty() && (i == 0 || parts[i - 1].what != part.what)) text += fmt::format(" of '{}'", part.what);
      text += fmt::format(" {}", part.*bytes);
    }
    return text + " bytes";
  }

  // From any thread, also while another one is in a call. If abort() fails, the other ranks notice by their time-out.
  template <typename Question>
  void ask(const Question& question) noexcept {
    if (!nb::is_alive()) return;
    const nb::gil_scoped_acquire acquire;
    if (const std::string why = call_again_if_interrupted(question); !why.empty())
      log_warning("a channel of torch.distributed: {}", why);
  }

  // A channel that failed once refuses everything after.
  template <typename Work>
  void call(std::string_view what, const Work& work) {
    const nb::gil_scoped_acquire acquire;
    if (!failure_.empty()) throw CommError(failure_);
    try {
      work(nb::str(what.data(), what.size()));
    } catch (nb::python_error& error) {
      bool is_interruption = !error.matches(PyExc_RuntimeError);
      if (!is_interruption) {
        ask([&] {
          const nb::object raised = nb::module_::import_("hoist.signal_handlers").attr("raised")(error.value());
          is_interruption = nb::cast<bool>(raised);
        });
      }
      std::string text = nb::str(error.value()).c_str();
      if (is_interruption) text = fmt::format("{} {}", nb::str(error.type().attr("__name__")).c_str(), text);
      failure_ = fmt::format("torch.distributed: {} on rank {} of {} failed: {}", what, rank_, size_, text);
      if (is_interruption) {
        ask([&] { channel_.attr("interrupted")(error.value()); });
        keep_interruption(std::move(error));
      }
      throw CommError(failure_);
    }
  }

  nb::object channel_;
  const int rank_;
  const int size_;
  std::string failure_;
};

}  // namespace

MakeChannel channel_maker(nb::callable make) {
  return [make = std::move(make)] {
    const nb::gil_scoped_acquire acquire;
    nb::object channel = make();
    GroupChannel made{.local_ranks = nb::cast<int>(channel.attr("local_ranks")),
                      .local_index = nb::cast<int>(channel.attr("local_index")),
                      .local_rank = nb::cast<int>(channel.attr("local_rank"))};
    made.transport = std::make_shared<PythonChannel>(std::move(channel));
    return made;
  };
}

std::unique_ptr<comm::Communicator> join_over(const std::shared_ptr<comm::Transport>& control,
                                              platform::DeviceKind device, const comm::CommunicatorOptions& options) {
  const auto over_channel = [&](const comm::CommunicatorOptions& used) {
    return comm::make_over("torch.distributed", control->duplicate(), control, used);
  };
  if (device != platform::DeviceKind::cuda) return over_channel(options);
  return comm::make_nccl_over(over_channel({.timeout = options.timeout}), options);
}

}  // namespace hoist::python
