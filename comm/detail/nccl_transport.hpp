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

// Makes a CUDA device the calling thread's current one for a while; a negative ordinal leaves things as they are.
// Errors: CommError.
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
