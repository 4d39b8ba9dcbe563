// SPDX-License-Identifier: Apache-2.0
// python/src/host_stream.hpp - a stream of the host device that a PyTorch backend in CPU memory computes on.
//
// Such a backend launches its operators on streams like this and gives the engine the current one, as CUDA's does with
// cudaStream_t. Tests have one: it shows a missing wait where there is no GPU.
//
// Threading  Any.
#pragma once

#include <atomic>
#include <memory>

#include <hoist/core/ledger.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/platform/device.hpp>

namespace hoist::python {

// The times of the stream's waits and kernels.
struct StreamTimes {
  Ledger waits;
  std::atomic<std::int64_t> kernels_ns{0};
  TimePoint begin{};  // of the kernel that runs
};

class TorchHostStream {
 public:
  TorchHostStream();

  platform::Stream& stream() { return *stream_; }
  const StreamTimes& times() const { return *times_; }
  // The functions that a backend in C calls, with a stream's address first. record() makes an event, which forget()
  // ends.
  static void launch(void* stream, void (*run)(void*), void* work);
  static void synchronize(void* stream);
  static void* record(void* stream);
  static void wait(void* stream, const void* event);
  static bool reached(const void* event);
  static void forget(void* event);

 private:
  std::unique_ptr<StreamTimes> times_;
  InOneProcess<platform::Device> device_;
  InOneProcess<platform::Stream> stream_;
};

}  // namespace hoist::python
