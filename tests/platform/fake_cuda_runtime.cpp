// SPDX-License-Identifier: Apache-2.0
#include "fake_cuda_runtime.hpp"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <cuda.h>

#include <hoist/core/units.hpp>
#include <hoist/platform/detail/cuda_kernels.hpp>

struct CUevent_st {
  bool recorded = false;
};
struct CUstream_st {};

namespace hoist::test::fake_cuda {
namespace {

struct Machine {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<int> contexts;
  bool held = false;
  bool captured_elsewhere = false;
  bool capture_broken = false;
  std::map<cudaDeviceAttr, int> attributes;
  cudaError_t no_gpu = cudaSuccess;
  int driver_version = 0;
  cudaError_t kernels = cudaSuccess;
};
Machine machine;

thread_local int chosen = 0;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t answer(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

// Every call with a context begins with this.
void enter() { machine.contexts.insert(chosen); }

// The same of calls that a capture does not see.
bool breaks_a_capture() {
  if (!machine.captured_elsewhere || mode != cudaStreamCaptureModeGlobal) return false;
  machine.capture_broken = true;
  return true;
}

template <typename Call>
cudaError_t with_context(const Call& call) {
  std::unique_lock lock(machine.mutex);
  enter();
  return answer(call(lock));
}

template <typename Call>
cudaError_t unsafe(const Call& call) {
  return with_context([&](std::unique_lock<std::mutex>& lock) {
    return breaks_a_capture() ? cudaErrorStreamCaptureUnsupported : call(lock);
  });
}

cudaError_t wait_until_reached(std::unique_lock<std::mutex>& lock) {
  machine.changed.wait(lock, [] { return !machine.held; });
  return cudaSuccess;
}

CUresult primary_context_state(CUdevice gpu, unsigned* flags, int* active) {
  const std::lock_guard lock(machine.mutex);
  *flags = 0;
  *active = machine.contexts.contains(gpu) ? 1 : 0;
  return CUDA_SUCCESS;
}

cudaError_t entry_point(const char* name, void** function, cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(name, "cuDevicePrimaryCtxGetState") == 0;
  *function = known ? reinterpret_cast<void*>(&primary_context_state) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // namespace

void reset() {
  const std::lock_guard lock(machine.mutex);
  machine.contexts.clear();
  machine.attributes.clear();
  machine.no_gpu = machine.kernels = cudaSuccess;
  machine.held = machine.captured_elsewhere = machine.capture_broken = false;
  machine.changed.notify_all();
}
std::set<int> contexts() {
  const std::lock_guard lock(machine.mutex);
  return machine.contexts;
}
void hold() {
  const std::lock_guard lock(machine.mutex);
  machine.held = true;
}
void let_go() {
  const std::lock_guard lock(machine.mutex);
  machine.held = false;
  machine.changed.notify_all();
}
void set_attribute(cudaDeviceAttr attribute, int value) {
  const std::lock_guard lock(machine.mutex);
  machine.attributes[attribute] = value;
}
void have_no_gpu(cudaError_t code, int driver_version) {
  const std::lock_guard lock(machine.mutex);
  machine.no_gpu = code;
  machine.driver_version = driver_version;
}
void refuse_kernels(cudaError_t code) {
  const std::lock_guard lock(machine.mutex);
  machine.kernels = code;
}
void begin_capture_elsewhere() {
  const std::lock_guard lock(machine.mutex);
  machine.captured_elsewhere = true;
  machine.capture_broken = false;
}
bool end_capture_elsewhere() {
  const std::lock_guard lock(machine.mutex);
  machine.captured_elsewhere = false;
  return !machine.capture_broken;
}

}  // namespace hoist::test::fake_cuda

using namespace hoist::test::fake_cuda;

extern "C" {

// --- GPUs and errors -------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  const std::lock_guard lock(machine.mutex);
  *count = machine.no_gpu == cudaSuccess ? kGpus : 0;
  return answer(machine.no_gpu);
}
cudaError_t cudaDriverGetVersion(int* version) {
  const std::lock_guard lock(machine.mutex);
  *version = machine.driver_version;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* gpu) {
  *gpu = chosen;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int gpu) {
  if (gpu < 0 || gpu >= kGpus) return answer(cudaErrorInvalidDevice);
  const std::lock_guard lock(machine.mutex);
  chosen = gpu;
  enter();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "a model of a GPU");
  return cudaSuccess;
}
// Makes no context.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int gpu) {
  if (gpu < 0 || gpu >= kGpus) return answer(cudaErrorInvalidDevice);
  const std::lock_guard lock(machine.mutex);
  *value = machine.attributes[attribute];
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t code) { return code == cudaErrorNotReady ? "not ready" : "an error"; }
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  return entry_point(name, function, found);
}
#else
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* found) {
  return entry_point(name, function, found);
}
#endif
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* wanted) {
  return with_context([&](auto&) {
    std::swap(mode, *wanted);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int bytes, int) {
  std::snprintf(id, static_cast<std::size_t>(bytes), "0000:17:00.0");
  return cudaSuccess;
}

// --- memory ----------------------------------------------------------------------------------------------------------

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total_bytes) {
  return with_context([&](auto&) {
    *free_bytes = *total_bytes = std::size_t{1} << 30;
    return cudaSuccess;
  });
}
cudaError_t cudaMalloc(void** block, std::size_t bytes) {
  return unsafe([&](auto&) {
    *block = std::aligned_alloc(4096, hoist::round_up(bytes, 4096));
    return cudaSuccess;
  });
}
cudaError_t cudaFree(void* block) {
  return unsafe([&](auto&) {
    std::free(block);
    return cudaSuccess;
  });
}
cudaError_t cudaHostRegister(void*, std::size_t, unsigned) {
  return unsafe([](auto&) { return cudaSuccess; });
}
cudaError_t cudaHostUnregister(void*) {
  return unsafe([](auto&) { return cudaSuccess; });
}
cudaError_t cudaHostAlloc(void** block, std::size_t bytes, unsigned) { return cudaMalloc(block, bytes); }
cudaError_t cudaFreeHost(void* block) { return cudaFree(block); }
cudaError_t cudaMemcpyAsync(void*, const void*, std::size_t, cudaMemcpyKind, cudaStream_t) {
  return with_context([](auto&) { return cudaSuccess; });
}
cudaError_t cudaMemsetAsync(void*, int, std::size_t, cudaStream_t) {
  return with_context([](auto&) { return cudaSuccess; });
}

// --- streams and events ----------------------------------------------------------------------------------------------

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return with_context([&](auto&) {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return cudaSuccess;
  });
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return unsafe([&](auto&) {
    *stream = new CUstream_st;
    return cudaSuccess;
  });
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return with_context([&](auto&) {
    delete stream;
    return cudaSuccess;
  });
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return unsafe(wait_until_reached); }
cudaError_t cudaStreamQuery(cudaStream_t) {
  return unsafe([](auto&) { return machine.held ? cudaErrorNotReady : cudaSuccess; });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return with_context([](auto&) { return cudaSuccess; });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return with_context([&](auto&) {
    *event = new CUevent_st;
    return cudaSuccess;
  });
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return with_context([&](auto&) {
    delete event;
    return cudaSuccess;
  });
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  return with_context([&](auto&) {
    event->recorded = true;
    return cudaSuccess;
  });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return unsafe([&](auto&) { return event->recorded && machine.held ? cudaErrorNotReady : cudaSuccess; });
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return unsafe(wait_until_reached); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}

}  // extern "C"

// The symbols that nvcc makes of cuda_kernels.cu.
namespace hoist::platform::detail {
cudaError_t launch_kernel(const ScaleArguments&, cudaStream_t) { return cudaSuccess; }
cudaError_t launch_kernel(const NormArguments&, cudaStream_t) { return cudaSuccess; }
cudaError_t launch_kernel(const UpdateArguments&, cudaStream_t) { return cudaSuccess; }
cudaError_t load_kernels() {
  return with_context([](auto&) { return machine.kernels; });
}
}  // namespace hoist::platform::detail
