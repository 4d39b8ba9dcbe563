// SPDX-License-Identifier: Apache-2.0
// examples/embed on devices whose memory the CPU may not touch: a GPU, and the host device that behaves like one. It
// ends in the same bits as on a device whose memory the CPU may read.
#include <gtest/gtest.h>

#include <hoist/examples/embed/autoencoder.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::embed_device_test {
namespace {

embed::Outcome trained(platform::DeviceKind device, const platform::HostDeviceOptions& host) {
  const test::TempDirectory directory;
  return embed::train({.device = device,
                       .host_device = host,
                       .device_memory_bytes = 4 * kMiB,
                       .pinned_memory_bytes = 32 * kMiB,
                       .communicator = CommunicatorKind::self},
                      directory / "store");
}

void expect_same(const embed::Outcome& outcome, const embed::Outcome& expected) {
  EXPECT_EQ(outcome.loss_before, expected.loss_before);
  EXPECT_EQ(outcome.loss_after, expected.loss_after);
  EXPECT_EQ(outcome.weight, expected.weight);
  EXPECT_EQ(outcome.committed_step, expected.committed_step);
}

TEST(EmbedDevice, ADeviceApartFromTheCpuEndsInTheSameBits) {
  const embed::Outcome expected = trained(platform::DeviceKind::host, {});
  EXPECT_LT(expected.loss_after, 0.8 * expected.loss_before) << "there is nothing to compare";
  EXPECT_EQ(expected.committed_step, 60u);
  for (const std::uint64_t chaos : {0u, 1u, 2u}) {
    SCOPED_TRACE(chaos);
    expect_same(trained(platform::DeviceKind::host, {.chaos_seed = chaos, .host_accessible = false}), expected);
  }
}

TEST(CudaEmbed, AGpuEndsInTheSameBits) {
  std::string why;
  if (platform::cuda_device_count(&why) == 0) GTEST_SKIP() << why;
  expect_same(trained(platform::DeviceKind::cuda, {}), trained(platform::DeviceKind::host, {}));
}

}  // namespace
}  // namespace hoist::embed_device_test
