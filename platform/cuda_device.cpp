// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <vector>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/detail/backends.hpp>
#include <hoist/platform/detail/cuda_kernels.hpp>
#include <hoist/platform/detail/cuda_stream.hpp>
#include <hoist/platform/gpu_memory.hpp>

namespace hoist::platform {

namespace {

std::string why_there_is_none(cudaError_t code) {
  if (code == cudaErrorInitializationError)
    return "CUDA does not start; where the process was forked after CUDA had been used, start it by spawn instead";
  int driver = 0;
  if (code != cudaErrorInsufficientDriver || cudaDriverGetVersion(&driver) != cudaSuccess)
    return cudaGetErrorString(code);
  if (driver == 0) return "no NVIDIA driver is installed";
  return fmt::format("the NVIDIA driver is one for CUDA {}.{}, and hoist was built with CUDA {}.{}", driver / 1000,
                     driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

}  // namespace

int cuda_device_count(std::string* why) {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    if (why != nullptr) *why = why_there_is_none(code);
    return 0;
  }
  if (count == 0 && why != nullptr) *why = "the driver lists no GPU";
  return count;
}

std::string cuda_bus_id(int ordinal) {
  std::array<char, 32> id{};
  if (cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), ordinal) == cudaSuccess) return id.data();
  static_cast<void>(cudaGetLastError());
  return {};
}

namespace detail {

namespace {

void expect_gpu(int ordinal) {
  std::string why;
  const int count = cuda_device_count(&why);
  if (ordinal >= 0 && ordinal < count) return;
  if (count > 0) why = fmt::format("this process sees {}, numbered from 0", counted(count, "GPU"));
  throw DeviceError(fmt::format("opening CUDA device {}", ordinal), 0, why,
                    "check that nvidia-smi lists the GPU and CUDA_VISIBLE_DEVICES does not hide it, or choose the host "
                    "device");
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const DeviceOptions& options) : options_(options) {
    expect_gpu(options_.ordinal);
    const CurrentGpu gpu(options_.ordinal);
    cuda_check(cudaGetDeviceProperties(&properties_, options_.ordinal), "cudaGetDeviceProperties");
    cuda_check(cudaDeviceGetStreamPriorityRange(nullptr, &highest_priority_), "cudaDeviceGetStreamPriorityRange");
    cuda_check(load_kernels(), "loading the GPU's code of hoist's kernels");
    core_ = std::make_shared<CudaCore>(options_.ordinal, options_.ledger);
    take_memory();
  }

  ~CudaDevice() override {
    HOIST_ASSERT(streams_alive_ == 0, "{} streams outlive their device: they end before their Runtime",
                 streams_alive_.load());
    core_->stop();
    with_gpu(options_.ordinal, [&] {
      const MutexLock lock(mutex_);
      for (const std::span<std::byte> bytes : registered_)
        log_failure(cudaHostUnregister(bytes.data()), "cudaHostUnregister");
      if (!memory_.empty()) log_failure(cudaFree(memory_.data()), "cudaFree");
    });
  }

  DeviceKind kind() const override { return DeviceKind::cuda; }

  std::string description() const override {
    return fmt::format("{}, {}, sm_{}{}", properties_.name, format_bytes(properties_.totalGlobalMem), properties_.major,
                       properties_.minor);
  }

  std::span<std::byte> memory() override { return memory_; }
  bool host_accessible() const override { return false; }
  void released(std::span<std::byte>) override {}
  void acquired(std::span<std::byte>) override {}

  std::unique_ptr<Stream> create_stream(std::string name) override {
    const CurrentGpu gpu(options_.ordinal);
    cudaStream_t stream = nullptr;
    cuda_check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest_priority_),
               "cudaStreamCreateWithPriority");
    return wrap(std::move(name), stream, CudaStreamOptions::Owner::hoist);
  }

  std::unique_ptr<Stream> borrow_stream(void* native, std::string name) override {
    return wrap(std::move(name), static_cast<cudaStream_t>(native), CudaStreamOptions::Owner::embedder);
  }

  void register_host(std::span<std::byte> bytes) override {
    if (bytes.empty()) return;
    const CurrentGpu gpu(options_.ordinal);
    const cudaError_t code = cudaHostRegister(bytes.data(), bytes.size(), cudaHostRegisterPortable);
    if (code == cudaErrorMemoryAllocation || code == cudaErrorOperatingSystem) {
      static_cast<void>(cudaGetLastError());
      throw DeviceError(fmt::format("cudaHostRegister of {}", format_bytes(bytes.size())), static_cast<int>(code),
                        cudaGetErrorString(code),
                        "raise the limit of locked memory (ulimit -l) or lower the pinned memory budget");
    }
    cuda_check(code, "cudaHostRegister");
    MutexLock lock(mutex_);
    registered_.push_back(bytes);
  }

  void unregister_host(std::span<std::byte> bytes) noexcept override {
    if (bytes.empty()) return;
    MutexLock lock(mutex_);
    const auto found = std::find_if(registered_.begin(), registered_.end(), [&](const std::span<std::byte> known) {
      return known.data() == bytes.data() && known.size() == bytes.size();
    });
    HOIST_ASSERT(found != registered_.end(), "{} bytes at {} were never registered", bytes.size(),
                 static_cast<void*>(bytes.data()));
    registered_.erase(found);
    with_gpu(options_.ordinal, [&] { log_failure(cudaHostUnregister(bytes.data()), "cudaHostUnregister"); });
  }

 private:
  void take_memory() {
    if (options_.memory_bytes == 0) return;
    void* block = nullptr;
    const cudaError_t code = cudaMalloc(&block, options_.memory_bytes);
    if (code == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      throw BudgetError::machine({.tier = "device",
                                  .have_bytes = cuda_memory(options_.ordinal).free_bytes,
                                  .need_bytes = options_.memory_bytes,
                                  .key = "the device memory budget",
                                  .detail = fmt::format("the configured budget on {}", description())});
    }
    cuda_check(code, "cudaMalloc");
    memory_ = {static_cast<std::byte*>(block), options_.memory_bytes};
  }

  std::unique_ptr<Stream> wrap(std::string name, cudaStream_t stream, CudaStreamOptions::Owner owner) {
    return std::make_unique<CudaStream>(CudaStreamOptions{
        .name = std::move(name), .core = core_, .stream = stream, .owner = owner, .alive = &streams_alive_});
  }

  static void log_failure(cudaError_t code, const char* call) noexcept {
    if (code == cudaSuccess) return;
    log_error("{} failed: {}; the memory stays taken", call, cudaGetErrorString(code));
    static_cast<void>(cudaGetLastError());  // or the embedding program would find it after a call of its own
  }

  const DeviceOptions options_;
  cudaDeviceProp properties_{};
  int highest_priority_ = 0;
  std::shared_ptr<CudaCore> core_;
  std::span<std::byte> memory_;
  std::atomic<int> streams_alive_{0};
  Mutex mutex_;
  std::vector<std::span<std::byte>> registered_ HOIST_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Device> create_cuda_device(const DeviceOptions& options) {
  return std::make_unique<CudaDevice>(options);
}

}  // namespace detail

MemorySize cuda_memory(int ordinal) {
  detail::expect_gpu(ordinal);
  const CurrentGpu gpu(ordinal);
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  return {total_bytes, free_bytes};
}

GpuMemoryFacts cuda_memory_facts(int ordinal) {
  const auto has = [&](cudaDeviceAttr attribute) {
    int value = 0;
    if (cudaDeviceGetAttribute(&value, attribute, ordinal) == cudaSuccess) return value != 0;
    static_cast<void>(cudaGetLastError());
    return false;
  };
  return {.is_integrated = has(cudaDevAttrIntegrated),
          .uses_host_page_tables = has(cudaDevAttrPageableMemoryAccessUsesHostPageTables)};
}

}  // namespace hoist::platform
