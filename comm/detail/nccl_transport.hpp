// SPDX-License-Identifier: Apache-2.0
// comm/detail/nccl_transport.hpp - the control plane over NCCL, if nothing else connects the hosts.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include <hoist/comm/transport.hpp>
#include <hoist/platform/cuda_check.hpp>

namespace hoist::comm::detail {

// The CUDA device of CommunicatorOptions::device_ordinal; a negative ordinal means the calling thread's current device.
// Later calls come from other threads, which may have another current device. Errors: CommError.
int device_of(int ordinal);

// Makes a CUDA device the calling thread's current one for a while. Errors: CommError.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);

 private:
  std::optional<platform::CurrentGpu> gpu_;
};

struct NcclRendezvous {
  std::string endpoint;  // "host:port"
  int rank = 0;
  int size = 1;
  int device_ordinal = -1;
  std::chrono::milliseconds timeout{};
};

// [collective] Errors: CommError, also if not all ranks have joined within the time-out.
std::unique_ptr<Transport> make_nccl_transport(const NcclRendezvous& rendezvous);

}  // namespace hoist::comm::detail
