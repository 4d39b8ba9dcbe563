// SPDX-License-Identifier: Apache-2.0
// platform/detail/backends.hpp - the implementations that Device::create chooses from.
#pragma once

#include <memory>

#include <hoist/platform/device.hpp>

namespace hoist::platform::detail {

std::unique_ptr<Device> create_host_device(const DeviceOptions& options);
#ifdef HOIST_HAVE_CUDA
std::unique_ptr<Device> create_cuda_device(const DeviceOptions& options);
#endif

}  // namespace hoist::platform::detail
