// SPDX-License-Identifier: Apache-2.0
// platform/stream.hpp - ordered work on a device, and points in it.
//
// Threading  One thread at a time enqueues on a stream; events may be waited for from any thread.
// Memory     Buffers named in an enqueued operation stay valid until an event recorded after it is reached.
// Errors     Enqueueing throws DeviceError. An error of enqueued work is kept: synchronize() and the event's
//            completion() deliver it, and the stream does nothing further. A stream that waits for an event of a failed
//            stream fails with the same error, because the event never happened.
// Main path  copy/launch -> worker (host) or driver (CUDA); record -> StreamEvent -> wait on another stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include <hoist/core/completion.hpp>
#include <hoist/core/dtype.hpp>
#include <hoist/core/ledger.hpp>

namespace hoist {
struct UpdateFactors;
}

namespace hoist::platform {

struct UpdateArrays;

// The link that a copy crosses, for the device's ledger. `local` stays inside one memory.
enum class CopyKind : std::uint8_t { host_to_device, device_to_host, local };

// A point in a stream. Not a Completion: it has no continuations. completion() returns a Completion that is done once
// the stream has reached the point.
// A default-constructed event has been reached.
class StreamEvent {
 public:
  class State {  // of a device that has events of its own
   public:
    virtual ~State() = default;
    virtual bool reached() const = 0;
    virtual void wait() const = 0;              // blocks the host; rethrows an error of the stream's work
    virtual Completion completion() const = 0;  // fulfilled by the polling thread
  };

  StreamEvent() = default;
  explicit StreamEvent(std::shared_ptr<State> state) : state_(std::move(state)) {}
  explicit StreamEvent(Completion passed) : passed_(std::move(passed)) {}  // host device: fulfilled by the worker
  bool reached() const { return state_ ? state_->reached() : passed_.done(); }
  void wait() const { state_ ? state_->wait() : passed_.wait(); }
  Completion completion() const { return state_ ? state_->completion() : passed_; }
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
  Completion passed_;
};

class Stream {
 public:
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  virtual std::string_view name() const = 0;
  virtual StreamEvent record() = 0;
  // Work enqueued after this call waits for the event. The ledger counts the waiting time under `cause`.
  virtual void wait(const StreamEvent& event, WaitCause cause) = 0;
  virtual void copy(std::byte* target, const std::byte* source, std::uint64_t bytes, CopyKind kind) = 0;
  virtual void fill(std::byte* target, std::uint8_t value, std::uint64_t bytes) = 0;
  // overwrite: target[i] = scale * source[i]; add: target[i] = target[i] + scale * source[i]. Product and sum are each
  // rounded to fp32 (never fused), the result once to the target's type (bf16 by to_bf16's rule). `count` is in
  // elements. Pre: both pointers aligned to their element; the ranges are the same memory or do not overlap.
  enum class Combine : std::uint8_t { overwrite, add };
  virtual void scale_into(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
                          std::uint64_t count, float scale, Combine combine) = 0;
  // For engines: partial[c] = the sum of the squares of chunk c of `source`, in one order on every device.
  // `partial` is device memory for divide_up(count, kNormChunkElements) sums.
  virtual void sums_of_squares(double* partial, const std::byte* source, DType dtype, std::uint64_t count) = 0;
  // For engines: one optimizer update, with the same bits on every device (formulas and rounding:
  // docs/optimizers.md).
  virtual void update(const UpdateFactors& factors, const UpdateArrays& arrays) = 0;
  // Runs `work` in stream order on the stream's worker. What it throws fails the stream; UsageError and BudgetError
  // become an Error (current_failure()). Host device only: a CUDA stream throws UsageError; it would stall the GPU.
  virtual void launch(std::string_view what, std::function<void()> work) = 0;
  // Blocks until everything enqueued so far is done; rethrows the first error. Never called by launched work or by a
  // completion's continuation: the stream would wait for itself.
  virtual void synchronize() = 0;
  // Begins to measure how long this stream has nothing to do. The returned function ends that and gives `count` the
  // result: at once on the host device; on CUDA later, on any thread, and never if the device has no ledger. It is
  // called once at most, while the stream lives. `count` must not call the device.
  using CountIdle = std::function<void(Nanoseconds idle)>;
  virtual std::function<void(CountIdle count)> watch_idle() = 0;
  // The driver's handle (cudaStream_t), null on the host device.
  virtual void* native() const = 0;
  // Whether work that is enqueued now becomes part of a CUDA graph instead of running.
  virtual bool capturing() const = 0;

 protected:
  Stream() = default;
};

// A borrowed stream, never null; the public API takes it.
class StreamRef {
 public:
  StreamRef(Stream& stream) : stream_(&stream) {}  // NOLINT(google-explicit-constructor): a reference by another name
  Stream* operator->() const { return stream_; }
  Stream& operator*() const { return *stream_; }

 private:
  Stream* stream_;
};

}  // namespace hoist::platform
