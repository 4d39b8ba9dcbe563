// SPDX-License-Identifier: Apache-2.0
// platform/detail/cuda_core.hpp - shared by the streams and events of one GPU: the stock of events, and the polling
// thread.
//
// No CUDA call is ever made from a CUDA host callback (it may deadlock the driver), so no callbacks are used: one
// thread polls the events that have a waiting completion. It sleeps while there are none.
//
// Threading  Any thread.
// Memory     Shared by the device, its streams and its events; the last one alive frees it. The device stops the
//            thread.
// Errors     DeviceError with the call's name, CUDA's code and a remedy.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <variant>
#include <vector>

#include <cuda_runtime_api.h>

#include <hoist/core/completion.hpp>
#include <hoist/core/ledger.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/platform/cuda_check.hpp>

namespace hoist::platform::detail {

std::exception_ptr cuda_error(cudaError_t code, const char* call);

// Calls with the GPU current, for destructors. A GPU that cannot be selected is lost with everything on it.
template <typename Calls>
void with_gpu(int ordinal, const Calls& calls) noexcept {
  try {
    const CurrentGpu gpu(ordinal);
    calls();
  } catch (const std::exception& error) {
    log_error("an object of GPU {} was not released: {}", ordinal, error.what());
  }
}

class CudaCore;

// An event from the GPU's stock, returned at destruction.
class PooledEvent {
 public:
  enum class Timing : std::uint8_t { off, on };
  PooledEvent(std::shared_ptr<CudaCore> core, Timing timing);
  ~PooledEvent();
  PooledEvent(PooledEvent&& other) noexcept;
  PooledEvent& operator=(PooledEvent&&) = delete;
  PooledEvent(const PooledEvent&) = delete;

  cudaEvent_t get() const { return event_; }

 private:
  std::shared_ptr<CudaCore> core_;
  cudaEvent_t event_ = nullptr;
  Timing timing_;
};

// The use of the time between two events: it counts for a link, for a wait, or goes to a function.
struct Measure {
  struct Transfer {
    Link link;
    std::uint64_t bytes;
  };
  PooledEvent start;
  PooledEvent end;
  using Meaning = std::variant<Transfer, WaitCause, std::function<void(Nanoseconds)>>;
  Meaning meaning;
};

class CudaCore {
 public:
  CudaCore(int ordinal, Ledger* ledger);
  ~CudaCore();
  CudaCore(const CudaCore&) = delete;
  CudaCore& operator=(const CudaCore&) = delete;

  int ordinal() const { return ordinal_; }
  Ledger* ledger() const { return ledger_; }

  // Done when `event` is reached. `keep` keeps the event's owner alive until then.
  Completion completion(cudaEvent_t event, std::shared_ptr<const void> keep);
  // `stream` is that of both events, so that measures end in the order of the calls.
  void measure(cudaStream_t stream, Measure measure);
  // Counts the measures whose end has been reached; returns the number of the others. Pre: the GPU is current.
  std::size_t collect();
  // Ends the thread once all requested events and the ends of all measures have been reached.
  void stop() noexcept;

 private:
  friend class PooledEvent;
  struct Request {
    cudaEvent_t event;
    std::shared_ptr<const void> keep;
    Promise promise;
  };
  cudaEvent_t take_event(PooledEvent::Timing timing);
  void put_event(cudaEvent_t event, PooledEvent::Timing timing) noexcept;
  void poll();
  std::size_t poll_once();  // the number of pending requests and measures
  void count(const Measure& measure) const;

  const int ordinal_;
  Ledger* const ledger_;
  Mutex stock_mutex_;
  std::vector<cudaEvent_t> stock_[2] HOIST_GUARDED_BY(stock_mutex_);  // by Timing

  Mutex measures_mutex_;
  std::unordered_map<cudaStream_t, std::deque<Measure>> measures_ HOIST_GUARDED_BY(measures_mutex_);

  Mutex mutex_;
  ConditionVariable changed_;
  std::vector<Request> arrived_ HOIST_GUARDED_BY(mutex_);
  bool measures_arrived_ HOIST_GUARDED_BY(mutex_) = false;
  bool stopping_ HOIST_GUARDED_BY(mutex_) = false;
  std::vector<Request> requests_;  // the thread's own
  std::thread thread_;
};

}  // namespace hoist::platform::detail
