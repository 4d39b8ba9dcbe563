// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <optional>
#include <utility>

#include <cuda.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/platform/detail/cuda_core.hpp>

namespace hoist::platform {

namespace {

std::string remedy(cudaError_t code) {
  switch (code) {
    case cudaErrorInsufficientDriver:
      return "install a driver that is at least as new as the toolkit hoist was built with";
    case cudaErrorNoDevice:
      return "make a GPU visible (CUDA_VISIBLE_DEVICES, nvidia-smi) or choose the host device";
    case cudaErrorInvalidDevice:
      return "choose an ordinal that nvidia-smi lists";
    case cudaErrorMemoryAllocation:
      return "lower the budget or free memory held by other programs (nvidia-smi)";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "register each block once";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
      return "rebuild with CMAKE_CUDA_ARCHITECTURES naming this GPU";
    case cudaErrorDevicesUnavailable:
      return "another process has the GPU to itself, or its compute mode forbids new ones (nvidia-smi -q -d COMPUTE)";
    case cudaErrorAssert:
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorMisalignedAddress:
      return "a kernel that was enqueued earlier has failed, most often one of the program's, such as a lookup beyond "
             "the end of an embedding: CUDA_LAUNCH_BLOCKING=1 shows which. The GPU's context is lost: restart the "
             "process and resume from the last commit";
    case cudaErrorECCUncorrectable:
    case cudaErrorLaunchTimeout:
    case cudaErrorNvlinkUncorrectable:
      return "the GPU's context is lost; restart the process and resume from the last commit";
    default:
      return "see the CUDA documentation of this code; compute-sanitizer finds the kernel at fault";
  }
}

// Asked of the driver, found at run time: linking libcuda would keep the program from starting without a driver.
bool has_context(int ordinal) {
  void* function = nullptr;
  auto found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t code =
      cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &function, 7000, cudaEnableDefault, &found);
#else
  const cudaError_t code = cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &function, cudaEnableDefault, &found);
#endif
  if (code != cudaSuccess || found != cudaDriverEntryPointSuccess || function == nullptr) return false;
  using GetState = CUresult (*)(CUdevice, unsigned*, int*);
  unsigned flags = 0;
  int active = 0;
  return reinterpret_cast<GetState>(function)(ordinal, &flags, &active) == CUDA_SUCCESS && active != 0;
}

}  // namespace

void cuda_check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // consumes the error, so that other code's next call does not see it
  throw DeviceError(call, static_cast<int>(code), cudaGetErrorString(code), remedy(code));
}

CurrentGpu::CurrentGpu(int ordinal) {
  int current = -1;
  cuda_check(cudaGetDevice(&current), "cudaGetDevice");
  if (current != ordinal) {
    cuda_check(cudaSetDevice(ordinal), "cudaSetDevice");
    // Selecting a GPU creates a context on it. A thread that never chose a GPU reports GPU 0; "restoring" that would
    // take memory on GPU 0 for every rank of the machine.
    if (has_context(current)) previous_ = current;
  }
  // Only now, because it would make a context, too.
  const cudaError_t code = cudaThreadExchangeStreamCaptureMode(&mode_);
  if (code != cudaSuccess && previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
  cuda_check(code, "cudaThreadExchangeStreamCaptureMode");
}

CurrentGpu::~CurrentGpu() {
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
  if (previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
}

namespace detail {

namespace {

// The longest delay of a completion. The kernel's default timer slack is as long, so a shorter sleep would gain
// nothing.
constexpr std::chrono::microseconds kPollInterval{50};

cudaError_t query(cudaEvent_t event) {
  const cudaError_t code = cudaEventQuery(event);
  if (code != cudaSuccess) static_cast<void>(cudaGetLastError());  // the runtime also remembers "not ready"
  return code;
}

void settle(Promise& promise, cudaError_t code, const char* call) {
  if (code == cudaSuccess) {
    promise.complete();
  } else {
    promise.fail(cuda_error(code, call));
  }
}

}  // namespace

std::exception_ptr cuda_error(cudaError_t code, const char* call) {
  try {
    cuda_check(code, call);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

PooledEvent::PooledEvent(std::shared_ptr<CudaCore> core, Timing timing)
    : core_(std::move(core)), event_(core_->take_event(timing)), timing_(timing) {}

PooledEvent::~PooledEvent() {
  if (event_ != nullptr) core_->put_event(event_, timing_);
}

PooledEvent::PooledEvent(PooledEvent&& other) noexcept
    : core_(std::move(other.core_)), event_(std::exchange(other.event_, nullptr)), timing_(other.timing_) {}

CudaCore::CudaCore(int ordinal, Ledger* ledger)
    : ordinal_(ordinal), ledger_(ledger), thread_(start_thread("hoist-cuda", [this] { poll(); })) {}

CudaCore::~CudaCore() {
  stop();
  with_gpu(ordinal_, [&] {
    for (const auto& stock : stock_) {
      for (cudaEvent_t event : stock)
        static_cast<void>(cudaEventDestroy(event));  // fails only after the context is lost
    }
  });
}

cudaEvent_t CudaCore::take_event(PooledEvent::Timing timing) {
  {
    MutexLock lock(stock_mutex_);
    auto& stock = stock_[static_cast<std::size_t>(timing)];
    if (!stock.empty()) {
      const cudaEvent_t event = stock.back();
      stock.pop_back();
      return event;
    }
  }
  const CurrentGpu gpu(ordinal_);
  cudaEvent_t event = nullptr;
  // Blocking: a thread that waits for a GPU must not take a core from the optimizer by spinning.
  const unsigned flags =
      timing == PooledEvent::Timing::on ? cudaEventDefault : cudaEventDisableTiming | cudaEventBlockingSync;
  cuda_check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreateWithFlags");
  return event;
}

void CudaCore::put_event(cudaEvent_t event, PooledEvent::Timing timing) noexcept {
  MutexLock lock(stock_mutex_);
  stock_[static_cast<std::size_t>(timing)].push_back(event);
}

Completion CudaCore::completion(cudaEvent_t event, std::shared_ptr<const void> keep) {
  Request request{event, std::move(keep), Promise()};
  Completion completion = request.promise.completion();
  {
    MutexLock lock(mutex_);
    if (!stopping_) {
      arrived_.push_back(std::move(request));
      changed_.notify_one();
      return completion;
    }
  }
  // The device is gone and has drained its streams, so this does not block for long.
  const CurrentGpu gpu(ordinal_);
  const cudaError_t code = cudaEventSynchronize(event);
  settle(request.promise, code, "cudaEventSynchronize");
  return completion;
}

void CudaCore::measure(cudaStream_t stream, Measure measure) {
  {
    MutexLock lock(measures_mutex_);
    measures_[stream].push_back(std::move(measure));
  }
  MutexLock lock(mutex_);
  measures_arrived_ = true;
  changed_.notify_one();
}

void CudaCore::stop() noexcept {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void CudaCore::poll() {
  std::optional<CurrentGpu> gpu;
  try {
    gpu.emplace(ordinal_);
  } catch (const std::exception& error) {
    log_error("the thread that polls GPU {} could not select it: {}", ordinal_, error.what());
  }
  std::size_t pending = 0;
  MutexLock lock(mutex_);
  for (;;) {
    const auto something = [&]() HOIST_REQUIRES(mutex_) { return stopping_ || measures_arrived_ || !arrived_.empty(); };
    if (pending == 0) {
      changed_.wait(lock, something);
    } else {
      changed_.wait_for(lock, kPollInterval, something);
    }
    const bool last = stopping_;
    for (Request& request : arrived_) requests_.push_back(std::move(request));
    arrived_.clear();
    measures_arrived_ = false;
    lock.unlock();
    pending = poll_once();
    if (last && pending == 0) return;
    if (last) std::this_thread::sleep_for(kPollInterval);
    lock.lock();
  }
}

std::size_t CudaCore::poll_once() {
  std::vector<cudaError_t> codes(requests_.size());
  for (std::size_t i = 0; i < requests_.size(); ++i) codes[i] = query(requests_[i].event);
  // After polling and before completing, so that the ledger already has a copy when its completion is done.
  std::size_t pending = collect();
  std::vector<Request> waiting;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (codes[i] == cudaErrorNotReady) {
      waiting.push_back(std::move(requests_[i]));
    } else {
      settle(requests_[i].promise, codes[i], "cudaEventQuery");
    }
  }
  requests_.swap(waiting);
  return pending + requests_.size();
}

std::size_t CudaCore::collect() {
  MutexLock lock(measures_mutex_);
  std::size_t pending = 0;
  for (auto& [stream, measures] : measures_) {
    for (; !measures.empty(); measures.pop_front()) {
      const cudaError_t code = query(measures.front().end.get());
      if (code == cudaErrorNotReady) break;
      if (code == cudaSuccess) count(measures.front());  // otherwise every wait for the stream reports the error
    }
    pending += measures.size();
  }
  std::erase_if(measures_, [](const auto& of_stream) { return of_stream.second.empty(); });
  return pending;
}

void CudaCore::count(const Measure& measure) const {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, measure.start.get(), measure.end.get()) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    milliseconds = 0;  // bytes count even if the time is unknown
  }
  const Nanoseconds elapsed(static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6));
  if (const auto* transfer = std::get_if<Measure::Transfer>(&measure.meaning)) {
    ledger_->count(transfer->link, transfer->bytes, elapsed);
  } else if (const auto* cause = std::get_if<WaitCause>(&measure.meaning)) {
    ledger_->waited(*cause, elapsed);
  } else {
    std::get<std::function<void(Nanoseconds)>>(measure.meaning)(elapsed);
  }
}

}  // namespace detail

}  // namespace hoist::platform
