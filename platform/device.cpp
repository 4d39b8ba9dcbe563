// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/detail/backends.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/platform/gpu_memory.hpp>

namespace hoist::platform {

#ifndef HOIST_HAVE_CUDA
namespace {

DeviceError no_cuda(const char* doing) {
  return DeviceError(doing, 0, "this build has no CUDA support",
                     "configure with the CUDA Toolkit installed (HOIST_WITH_CUDA=ON says what is missing), or choose "
                     "the host device");
}

}  // namespace
#endif

std::unique_ptr<Device> Device::create(const DeviceOptions& options) {
  if (options.memory_bytes % kBlockAlignment != 0) {
    throw UsageError(fmt::format("a device budget is a multiple of {} bytes, {} is not; round it to {}",
                                 kBlockAlignment, options.memory_bytes,
                                 round_up(options.memory_bytes, kBlockAlignment)));
  }
  if (options.kind == DeviceKind::host) return detail::create_host_device(options);
#ifdef HOIST_HAVE_CUDA
  return detail::create_cuda_device(options);
#else
  throw no_cuda("opening a CUDA device");
#endif
}

#ifndef HOIST_HAVE_CUDA
int cuda_device_count(std::string* why) {
  if (why != nullptr) *why = "this build has no CUDA support";
  return 0;
}

std::string cuda_bus_id(int) { return {}; }

MemorySize cuda_memory(int) { throw no_cuda("asking for a GPU's memory"); }

GpuMemoryFacts cuda_memory_facts(int) { return {}; }
#endif

}  // namespace hoist::platform
