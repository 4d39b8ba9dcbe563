// SPDX-License-Identifier: Apache-2.0
// How the CUDA device behaves among a program's own threads, GPUs and graphs, over a runtime without a GPU.
#include <functional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/ledger.hpp>
#include <hoist/platform/detail/backends.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/platform/gpu_memory.hpp>

#include "fake_cuda_runtime.hpp"

namespace hoist::platform::cuda_fake_runtime_test {
namespace {

namespace cuda = test::fake_cuda;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kGpu = 1;

// A thread that has never heard of CUDA.
void on_new_thread(const std::function<void()>& work) { std::thread(work).join(); }

class CudaFakeRuntime : public testing::Test {
 protected:
  CudaFakeRuntime() {
    cuda::reset();
    on_new_thread([&] {
      device_ = detail::create_cuda_device(
          {.kind = DeviceKind::cuda, .memory_bytes = 1 << 20, .ordinal = kGpu, .ledger = &ledger_});
      stream_ = device_->create_stream("stream");
    });
  }
  ~CudaFakeRuntime() override {
    cuda::let_go();
    on_new_thread([&] { stream_.reset(); });
    on_new_thread([&] { device_.reset(); });
  }

  void copy() { stream_->copy(device_->memory().data(), host_.data(), host_.size(), CopyKind::host_to_device); }

  Ledger ledger_;
  std::vector<std::byte> host_ = std::vector<std::byte>(4096);
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

// A CUDA context takes some 500 MiB. A thread that does not choose its GPU makes one on GPU 0, so every rank would take
// them there.
TEST_F(CudaFakeRuntime, NoThreadMakesAContextOnAnotherGpu) {
  StreamEvent event;
  on_new_thread([&] { device_->register_host(host_); });
  on_new_thread([&] { copy(); });
  on_new_thread([&] { event = stream_->record(); });
  on_new_thread([&] { EXPECT_TRUE(event.reached()); });
  on_new_thread([&] { event.wait(); });
  on_new_thread([&] { event.completion().wait(); });
  on_new_thread([&] { stream_->wait(event, WaitCause::none); });
  on_new_thread([&] { stream_->fill(device_->memory().data(), 0, 64); });
  on_new_thread([&] { EXPECT_FALSE(stream_->capturing()); });
  on_new_thread([&] { stream_->synchronize(); });
  on_new_thread([&] { event = {}; });
  on_new_thread([&] { device_->unregister_host(host_); });
  on_new_thread([&] { stream_.reset(); });
  on_new_thread([&] { device_.reset(); });
  EXPECT_THAT(cuda::contexts(), ElementsAre(kGpu));
}

TEST_F(CudaFakeRuntime, AnEventMayOutliveItsDevice) {
  StreamEvent event = stream_->record();
  on_new_thread([&] { stream_.reset(); });
  on_new_thread([&] { device_.reset(); });
  on_new_thread([&] { event.completion().wait(); });
  on_new_thread([&] { event = {}; });  // this releases the last object that needs the GPU
  EXPECT_THAT(cuda::contexts(), ElementsAre(kGpu));
}

// In the default (global) capture mode, cudaEventQuery on any thread invalidates another thread's capture and returns
// an error.
TEST_F(CudaFakeRuntime, AGraphCanBeCapturedWhileCopiesAreUnderWay) {
  cuda::hold();
  StreamEvent event;
  Completion completion;
  on_new_thread([&] {
    copy();
    event = stream_->record();
    completion = event.completion();  // asked by a thread of the device
  });
  cuda::begin_capture_elsewhere();
  on_new_thread([&] { EXPECT_FALSE(event.reached()); });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_FALSE(completion.done());
  cuda::let_go();
  on_new_thread([&] { event.wait(); });
  EXPECT_TRUE(completion.wait_for(std::chrono::seconds(10)));
  on_new_thread([&] { stream_->synchronize(); });
  on_new_thread([&] { stream_.reset(); });
  EXPECT_TRUE(cuda::end_capture_elsewhere());
}

TEST(CudaMemoryFacts, AreTheRuntimes) {
  cuda::reset();
  EXPECT_FALSE(cuda_memory_facts(0).is_integrated);
  EXPECT_FALSE(cuda_memory_facts(0).uses_host_page_tables);
  cuda::set_attribute(cudaDevAttrPageableMemoryAccessUsesHostPageTables, 1);
  EXPECT_FALSE(cuda_memory_facts(0).is_integrated);
  EXPECT_TRUE(cuda_memory_facts(0).uses_host_page_tables);
  cuda::set_attribute(cudaDevAttrIntegrated, 1);
  EXPECT_TRUE(cuda_memory_facts(0).is_integrated);
  EXPECT_FALSE(cuda_memory_facts(cuda::kGpus).is_integrated) << "there is no such GPU";
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an error was left behind";
  EXPECT_TRUE(cuda::contexts().empty());
}

TEST_F(CudaFakeRuntime, WaitsWithoutACauseAreNotMeasured) {
  cuda::hold();
  const StreamEvent event = stream_->record();
  for (int i = 0; i < 4; ++i) stream_->wait(event, WaitCause::none);
  stream_->wait(event, WaitCause::comm);
  cuda::let_go();
  stream_->synchronize();
  stream_.reset();  // counts what is over
  EXPECT_EQ(ledger_.waited(WaitCause::none), Nanoseconds(0));
  EXPECT_GT(ledger_.waited(WaitCause::comm), Nanoseconds(0));
}

std::string error_of_a_device() {
  try {
    detail::create_cuda_device({.kind = DeviceKind::cuda, .memory_bytes = 1 << 20, .ordinal = kGpu});
    return "made";
  } catch (const DeviceError& error) {
    return error.what();
  }
}

TEST(CudaDevices, WithoutCodeForTheGpuNothingBegins) {
  cuda::reset();
  cuda::refuse_kernels(cudaErrorNoKernelImageForDevice);
  EXPECT_THAT(error_of_a_device(), HasSubstr("CMAKE_CUDA_ARCHITECTURES"));
  cuda::refuse_kernels(cudaErrorAssert);
  EXPECT_THAT(error_of_a_device(), HasSubstr("CUDA_LAUNCH_BLOCKING=1"));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an error was left behind";
  cuda::reset();
}

TEST(CudaDevices, ThatCannotBeUsedHaveTheirReason) {
  std::string why;
  const auto reason = [&](cudaError_t code, int driver) {
    cuda::have_no_gpu(code, driver);
    EXPECT_EQ(cuda_device_count(&why), 0);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an error was left behind";
    return why;
  };
  EXPECT_EQ(reason(cudaErrorInsufficientDriver, 0), "no NVIDIA driver is installed");
  EXPECT_THAT(reason(cudaErrorInsufficientDriver, 11040), HasSubstr("is one for CUDA 11.4"));
  EXPECT_THAT(reason(cudaErrorInitializationError, 12000), HasSubstr("forked"));
  cuda::reset();
}

TEST_F(CudaFakeRuntime, AThreadKeepsItsGpuItsModeAndItsErrors) {
  on_new_thread([&] {
    ASSERT_EQ(cudaSetDevice(2), cudaSuccess);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    ASSERT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    cuda::hold();
    copy();
    const StreamEvent event = stream_->record();
    EXPECT_FALSE(event.reached());
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "\"not ready\" was left behind";
    int gpu = -1;
    ASSERT_EQ(cudaGetDevice(&gpu), cudaSuccess);
    EXPECT_EQ(gpu, 2);
    ASSERT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
    EXPECT_EQ(mode, cudaStreamCaptureModeRelaxed);
    cuda::let_go();
  });
}

}  // namespace
}  // namespace hoist::platform::cuda_fake_runtime_test
