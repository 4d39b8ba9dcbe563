// SPDX-License-Identifier: Apache-2.0
// tests/platform/device_fixture.hpp - one fixture for every implementation of Device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/platform/device.hpp>

namespace hoist::platform {

struct Implementation {
  const char* name;
  DeviceKind kind;
  std::uint64_t chaos_seed;
};
inline void PrintTo(const Implementation& implementation, std::ostream* out) {
  *out << implementation.name << ", chaos seed " << implementation.chaos_seed;
}

inline auto all_implementations() {
  return ::testing::Values(
      Implementation{"host", DeviceKind::host, 0}, Implementation{"host_chaos", DeviceKind::host, 7},
      Implementation{"host_chaos_2", DeviceKind::host, 20240611}, Implementation{"cuda", DeviceKind::cuda, 0});
}

inline std::string implementation_name(const ::testing::TestParamInfo<Implementation>& info) { return info.param.name; }

using Bytes = std::vector<std::byte>;

inline Bytes pattern(std::size_t count, std::uint64_t seed) {
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>((i * 131 + seed * 17 + (i >> 8)) & 0xFF);
  return bytes;
}

class DeviceTest : public ::testing::TestWithParam<Implementation> {
 protected:
  static constexpr std::uint64_t kMemoryBytes = 1 << 20;

  void SetUp() override {
    std::string why;
    if (GetParam().kind == DeviceKind::cuda && cuda_device_count(&why) == 0) GTEST_SKIP() << "no CUDA GPU: " << why;
    device_ = Device::create({.kind = GetParam().kind,
                              .memory_bytes = kMemoryBytes,
                              .host = {.chaos_seed = GetParam().chaos_seed},
                              .ledger = &ledger_});
  }

  bool is_cuda() const { return GetParam().kind == DeviceKind::cuda; }
  std::byte* at(std::uint64_t offset) { return device_->memory().data() + offset; }

  Ledger ledger_;
  std::unique_ptr<Device> device_;
};

}  // namespace hoist::platform
