// SPDX-License-Identifier: Apache-2.0
// comm/detail/nccl_transport.hpp - the control plane over NCCL, where nothing else connects the hosts.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include <hoist/comm/transport.hpp>
#include <hoist/platform/cuda_check.hpp>

namespace hoist::comm::detail {

// Which CUDA device CommunicatorOptions::device_ordinal means; a negative one the calling thread's current device.
// Calls come from other threads later, which may have another one. Errors: CommError.
int device_of(int ordinal);

// Makes a CUDA device the calling thread's current one for a while. Errors: CommError.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);

 private:
  std::optional<platform::CurrentCard> card_;
};

struct NcclRendezvous {
  std::string endpoint;  // "host:port"
  int rank = 0;
  int size = 1;
  int device_ordinal = -1;
  std::chrono::milliseconds timeout{};
};

// [collective] Errors: CommError, also when not all ranks have come within the time-out.
std::unique_ptr<Transport> make_nccl_transport(const NcclRendezvous& rendezvous);

}  // namespace hoist::comm::detail
