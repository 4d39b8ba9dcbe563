// SPDX-License-Identifier: Apache-2.0
// Properties that only a GPU has.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <hoist/platform/device.hpp>

namespace hoist::platform::cuda_device_test {
namespace {

TEST(CudaDevice, KnowsThatAStreamIsBeingCaptured) {
  std::string why;
  if (cuda_device_count(&why) == 0) GTEST_SKIP() << "no CUDA GPU: " << why;
  const auto device = Device::create({.kind = DeviceKind::cuda, .memory_bytes = 1 << 20});
  const auto owned = device->create_stream("owned");
  const auto borrowed = device->borrow_stream(owned->native(), "borrowed");
  auto* const native = static_cast<cudaStream_t>(owned->native());
  EXPECT_FALSE(borrowed->capturing());
  ASSERT_EQ(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_TRUE(borrowed->capturing());
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(native, &graph), cudaSuccess);
  EXPECT_FALSE(borrowed->capturing());
  if (graph != nullptr) {
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
}

}  // namespace
}  // namespace hoist::platform::cuda_device_test
