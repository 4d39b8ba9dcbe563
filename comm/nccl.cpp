// SPDX-License-Identifier: Apache-2.0
// comm/nccl.cpp - the data plane over NCCL; the control plane is another given communicator.
//
// NCCL keeps the order of one communicator's operations across streams itself. It adds in the wire type and in an
// order of its own, so bits differ from the CPU backends; they are the same from run to run at equal world size and
// topology. A kernel that waits for a rank that will not come ends only when this rank's communicator is aborted. With
// several ranks, a thread does that when the control plane knows of a rank that gave up, when NCCL reports an error of
// the network, and when a kernel, once those before it have ended, takes longer than the time-out. NCCL wants one
// thread at a time in a communicator, that one included. So communicators do not block: a call that NCCL has only begun
// is polled, and gives the communicator up itself when it is told to meanwhile. That has not yet run on several GPUs.
//
// Threading  As Communicator; the CUDA device is that of the options, else the one current on the thread that makes it.
//            One thread of its own, with several ranks.
// Memory     In place, no scratch.
// Errors     Every return code and NCCL's asynchronous error become CommError; the communicator is aborted then. The
//            other ranks learn it through the control plane.
#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <nccl.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/comm/detail/host_communicator.hpp>
#include <hoist/comm/detail/nccl_transport.hpp>
#include <hoist/comm/detail/scale_split.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/deadline.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/thread.hpp>

namespace hoist::comm {

namespace {

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return ncclBfloat16;
    case DType::fp16:
      return ncclFloat16;
    case DType::fp32:
      return ncclFloat32;
  }
  return ncclFloat32;
}

std::string nccl_text(std::string_view what, int rank, int size, ncclResult_t code, ncclComm_t communicator) {
  const char* const detail = ncclGetLastError(communicator);
  return fmt::format("nccl: {} on rank {} of {} failed: {} ({}){}{}; NCCL_DEBUG=WARN says more", what, rank, size,
                     ncclGetErrorString(code), static_cast<int>(code), detail != nullptr && *detail != '\0' ? ": " : "",
                     detail != nullptr ? detail : "");
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const ncclUniqueId& id, std::unique_ptr<Communicator> control, const CommunicatorOptions& options)
      : rank_(control->rank()),
        size_(control->size()),
        device_ordinal_(detail::device_of(options.device_ordinal)),
        timeout_(options.timeout),
        control_(std::move(control)),
        ledger_(options.ledger) {
    // NCCL's start-up waits for all ranks without a time-out of ours: first see that they are there.
    control_->barrier();
    const detail::CurrentDevice current(device_ordinal_);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    if (size_ > 1) watcher_ = start_joining_thread("hoist-nccl", [this](const std::stop_token& stop) { watch(stop); });
    const MutexLock lock(mutex_);
    try {
      settle("ncclCommInitRank", ncclCommInitRankConfig(&communicator_, size_, id, rank_, &config));
    } catch (...) {
      give_up();
      throw;
    }
  }

  ~NcclCommunicator() override {
    if (watcher_.joinable()) {
      watcher_.request_stop();
      watcher_.join();
    }
    const MutexLock lock(mutex_);
    if (communicator_ == nullptr) return;
    if (finalize()) {
      ncclCommDestroy(communicator_);
    } else {
      give_up();
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view name() const override { return "nccl"; }

  void all_gather(std::span<const GatherPiece> pieces, platform::Stream& stream) override {
    constexpr std::string_view kWhat = "all_gather";
    detail::check_pieces(pieces);
    const MutexLock lock(mutex_);
    const cudaStream_t cuda = begin(kWhat, stream);
    std::uint64_t shard_bytes = 0;
    grouped(kWhat, [&](const Note& note) HOIST_REQUIRES(mutex_) {
      for (const GatherPiece& piece : pieces) {
        if (piece.shard_bytes == 0) continue;
        shard_bytes += piece.shard_bytes;
        const std::byte* const own = piece.data + static_cast<std::uint64_t>(rank_) * piece.shard_bytes;
        note(ncclAllGather(own, piece.data, piece.shard_bytes, ncclInt8, communicator_, cuda));
      }
    });
    follow(kWhat, stream);
    count(peers() * shard_bytes);
  }

  void reduce_scatter(std::span<const ReducePiece> pieces, platform::Stream& stream) override {
    constexpr std::string_view kWhat = "reduce_scatter";
    detail::check_pieces(pieces);
    const MutexLock lock(mutex_);
    const cudaStream_t cuda = begin(kWhat, stream);
    std::uint64_t shard_bytes = 0;
    grouped(kWhat, [&](const Note& note) HOIST_REQUIRES(mutex_) {
      for (const ReducePiece& piece : pieces) {
        if (piece.shard_elements == 0) continue;
        shard_bytes += piece.shard_elements * dtype_bytes(piece.dtype);
        reduce_one(piece, cuda, note);
      }
    });
    follow(kWhat, stream);
    for (const ReducePiece& piece : pieces) {
      const float after = detail::split_scale(piece.dtype, piece.scale).after_sum;
      if (after == 1.0f || piece.shard_elements == 0) continue;
      stream.scale_into(own_shard(piece), piece.dtype, own_shard(piece), piece.dtype, piece.shard_elements, after,
                        platform::Stream::Combine::overwrite);
    }
    count(peers() * shard_bytes);
  }

  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) override { control_->exchange(mine, all); }
  void broadcast_host(std::span<std::byte> bytes, int root) override { control_->broadcast_host(bytes, root); }
  void barrier() override { control_->barrier(); }

  std::unique_ptr<Communicator> duplicate() override { return control_->duplicate(); }

  std::unique_ptr<Communicator> split(int ranks) override {
    detail::check_split(ranks, size_);
    return make_nccl_over(control_->split(ranks), options());
  }
  std::uint64_t sent_bytes() const override { return sent_bytes_.load(std::memory_order_relaxed); }

  void abort(std::string_view why) noexcept override {
    control_->abort(why);
    try {
      end(fmt::format("rank {} failed: {}", rank_, why));
      wake_.notify_all();
    } catch (...) {  // no memory for the text: the control plane has ended anyway
    }
  }
  std::optional<std::string> broken() override { return control_->broken(); }

 private:
  CommunicatorOptions options() const {
    CommunicatorOptions options;
    options.ledger = ledger_;
    options.timeout = timeout_;
    options.device_ordinal = device_ordinal_;
    return options;
  }

  static constexpr std::chrono::milliseconds kWatchPeriod{50};
  static constexpr std::chrono::microseconds kPollInterval{20};
  static constexpr std::chrono::milliseconds kLastMessagesMax{200};

  // Waits for the mutex no longer than a call takes to notice `ending_`.
  void watch(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      {
        MutexLock lock(watch_mutex_);
        wake_.wait_for(lock, stop, kWatchPeriod, [&] { return ending_.load(); });
      }
      // The control plane last: it may itself wait for a host that is gone.
      std::optional<std::string> own;
      if (!ending_) {
        try {
          own = failure();
        } catch (const std::exception& error) {  // a lost GPU
          own = error.what();
        }
        const std::optional<std::string> why = own ? own : control_->broken();
        if (!why) continue;
        end(*why);
      }
      {
        const MutexLock lock(mutex_);
        give_up();
      }
      if (own) control_->abort(*own);
      return;
    }
  }

  // Looks at the collectives on the GPU. The host may be waiting for one of them, and then makes no call that would.
  std::optional<std::string> failure() {
    if (const std::optional<std::string_view> what = overdue()) return missing_text(*what);
    if (!mutex_.try_lock()) return std::nullopt;  // a call is under way, and looks itself
    const MutexLock lock(mutex_, std::adopt_lock);
    if (communicator_ == nullptr) return std::nullopt;
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(communicator_, &state);
    const ncclResult_t code = asked == ncclSuccess ? state : asked;
    if (code == ncclSuccess || code == ncclInProgress) return std::nullopt;
    return nccl_text("the data plane", rank_, size_, code, communicator_);
  }

  // The oldest collective that has not ended, if its time is over. That begins when the ones before it have ended.
  std::optional<std::string_view> overdue() {
    const MutexLock lock(watch_mutex_);
    for (; !enqueued_.empty() && enqueued_.front().end.reached(); enqueued_.pop_front()) head_time_.restart();
    if (enqueued_.empty() || !head_time_.is_over()) return std::nullopt;
    return enqueued_.front().what;
  }
  void follow(std::string_view what, platform::Stream& stream) {
    if (size_ == 1) return;
    platform::StreamEvent end = stream.record();
    const MutexLock lock(watch_mutex_);
    if (enqueued_.empty()) head_time_.restart();
    enqueued_.push_back({what, std::move(end)});
  }
  std::string missing_text(std::string_view what) const {
    return fmt::format(
        "nccl: {} on rank {} of {} failed: not all ranks took part within {} ms; look for a rank that ended or hangs",
        what, rank_, size_, timeout_.count());
  }

  // The communicator is unusable: the thread that holds the mutex, or the next one, gives it up. The first reason
  // counts.
  void end(std::string why) {
    const MutexLock lock(watch_mutex_);
    if (ending_) return;
    reason_ = std::move(why);
    ending_ = true;
  }
  std::string reason() {
    const MutexLock lock(watch_mutex_);
    return reason_;
  }

  // Kernels that wait for others end.
  void give_up() HOIST_REQUIRES(mutex_) {
    if (communicator_ != nullptr) ncclCommAbort(std::exchange(communicator_, nullptr));
  }

  // Waits for the enqueued work; false if it will not end because another rank is gone, by the control plane's
  // knowledge or by the time-out.
  bool finalize() noexcept HOIST_REQUIRES(mutex_) {
    try {
      Deadline deadline(timeout_);
      bool others_gone = false;
      ncclResult_t state = ncclCommFinalize(communicator_);
      while (state == ncclInProgress && !deadline.is_over()) {
        if (!others_gone && control_->broken()) {  // or they ended in order, a moment before this one
          others_gone = true;
          deadline = Deadline(std::min<Nanoseconds>(kLastMessagesMax, timeout_));
        }
        std::this_thread::sleep_for(kPollInterval);
        if (const ncclResult_t asked = ncclCommGetAsyncError(communicator_, &state); asked != ncclSuccess)
          state = asked;
      }
      return state == ncclSuccess;
    } catch (...) {  // no memory for another rank's reason
      return false;
    }
  }

  std::uint64_t peers() const { return static_cast<std::uint64_t>(size_ - 1); }
  std::byte* own_shard(const ReducePiece& piece) const {
    return piece.data + static_cast<std::uint64_t>(rank_) * piece.shard_elements * dtype_bytes(piece.dtype);
  }

  // Refuses streams without a CUDA handle, and work on a communicator that has failed since the last call.
  cudaStream_t begin(std::string_view what, platform::Stream& stream) HOIST_REQUIRES(mutex_) {
    auto* const native = static_cast<cudaStream_t>(stream.native());
    if (native == nullptr) {
      throw UsageError(
          fmt::format("nccl: {} needs a stream of a CUDA device, but '{}' is not one", what, stream.name()));
    }
    if (communicator_ == nullptr) throw_ended(what);
    settle(what, ncclSuccess);
    return native;
  }

  // One launch for all of `body`, which records its calls' results. An opened group is always closed, or this thread's
  // next one would nest in it.
  using Note = std::function<void(ncclResult_t)>;
  template <typename Body>
  void grouped(std::string_view what, const Body& body) HOIST_REQUIRES(mutex_) {
    check(what, ncclGroupStart());
    ncclResult_t failed = ncclSuccess;  // the first
    body([&failed](ncclResult_t code) {
      if (failed == ncclSuccess && code != ncclInProgress) failed = code;
    });
    const ncclResult_t ended = ncclGroupEnd();
    check(what, failed);
    settle(what, ended);
  }

  void reduce_one(const ReducePiece& piece, cudaStream_t cuda, const Note& note) HOIST_REQUIRES(mutex_) {
    const ncclDataType_t type = nccl_type(piece.dtype);
    const detail::ScaleSplit scale = detail::split_scale(piece.dtype, piece.scale);
    ncclRedOp_t operation = ncclSum;
    if (scale.before_sum != 1.0f) {
      // The factor is read at once, in the type of the data.
      std::uint32_t factor = detail::encode_scale(piece.dtype, scale.before_sum);
      const ncclResult_t made =
          ncclRedOpCreatePreMulSum(&operation, &factor, type, ncclScalarHostImmediate, communicator_);
      note(made);
      if (made != ncclSuccess && made != ncclInProgress) return;
    }
    note(ncclReduceScatter(piece.data, own_shard(piece), piece.shard_elements, type, operation, communicator_, cuda));
    if (operation != ncclSum) note(ncclRedOpDestroy(operation, communicator_));
  }

  // The other ranks, whose kernels may wait for this one, learn of an error that only this rank has.
  void check(std::string_view what, ncclResult_t code) HOIST_REQUIRES(mutex_) {
    if (code != ncclSuccess) fail(nccl_text(what, rank_, size_, code, communicator_));
  }
  [[noreturn]] void fail(const std::string& text) HOIST_REQUIRES(mutex_) {
    end(text);
    control_->abort(text);
    give_up();
    throw CommError(text);
  }

  // Returns when NCCL has accepted a call that it may have only begun. Also throws NCCL's asynchronous errors, and if
  // the communicator ends meanwhile.
  void settle(std::string_view what, ncclResult_t code) HOIST_REQUIRES(mutex_) {
    Deadline deadline(timeout_);
    for (bool asked = false; code == ncclInProgress || (code == ncclSuccess && !asked); asked = true) {
      if (asked) std::this_thread::sleep_for(kPollInterval);
      if (deadline.is_over()) fail(missing_text(what));
      if (ending_) {
        give_up();
        throw_ended(what);
      }
      check(what, ncclCommGetAsyncError(communicator_, &code));
    }
    check(what, code);
  }

  [[noreturn]] void throw_ended(std::string_view what) {
    throw CommError(fmt::format("nccl: {} on rank {} of {} failed: {}", what, rank_, size_, reason()));
  }

  // The host does not know when a kernel ran, so bytes are counted when enqueued, without busy time.
  void count(std::uint64_t bytes) {
    sent_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    if (ledger_ != nullptr) ledger_->count(Link::wire, bytes, Nanoseconds(0));
  }

  const int rank_;
  const int size_;
  const int device_ordinal_;
  const std::chrono::milliseconds timeout_;
  std::unique_ptr<Communicator> control_;
  Ledger* const ledger_;
  std::atomic<std::uint64_t> sent_bytes_{0};
  Mutex mutex_;  // of the communicator: a call, or its end
  ncclComm_t communicator_ HOIST_GUARDED_BY(mutex_) = nullptr;
  Mutex watch_mutex_;
  std::condition_variable_any wake_;
  std::string reason_ HOIST_GUARDED_BY(watch_mutex_);  // why it is aborted
  struct Enqueued {
    std::string_view what;  // a constant
    platform::StreamEvent end;
  };
  std::deque<Enqueued> enqueued_ HOIST_GUARDED_BY(watch_mutex_);  // not known to have ended
  Deadline head_time_ HOIST_GUARDED_BY(watch_mutex_){timeout_};   // of the first
  std::atomic<bool> ending_{false};                               // set under watch_mutex_
  std::jthread watcher_;
};

ncclUniqueId new_id() {
  ncclUniqueId id{};
  if (const ncclResult_t code = ncclGetUniqueId(&id); code != ncclSuccess)
    throw CommError(nccl_text("ncclGetUniqueId", 0, 1, code, nullptr));
  return id;
}

}  // namespace

std::unique_ptr<Communicator> make_nccl_over(std::unique_ptr<Communicator> control,
                                             const CommunicatorOptions& options) {
  HOIST_ASSERT(control != nullptr, "NCCL without a control plane");
  ncclUniqueId id{};
  try {
    if (control->rank() == 0) id = new_id();
  } catch (const std::exception& error) {  // the others wait for the id
    control->abort(error.what());
    throw;
  }
  control->broadcast_host(std::as_writable_bytes(std::span(&id, 1)), 0);
  return std::make_unique<NcclCommunicator>(id, std::move(control), options);
}

std::unique_ptr<Communicator> make_nccl_at(const std::string& endpoint, int rank, int size,
                                           const CommunicatorOptions& options) {
  detail::check_rank("make_nccl_at", rank, size);
  std::shared_ptr<Transport> transport = detail::make_nccl_transport({.endpoint = endpoint,
                                                                      .rank = rank,
                                                                      .size = size,
                                                                      .device_ordinal = options.device_ordinal,
                                                                      .timeout = options.timeout});
  auto control = std::make_unique<detail::HostCommunicator>("nccl", nullptr, transport, CommunicatorOptions{});
  return make_nccl_over(std::move(control), options);
}

}  // namespace hoist::comm
