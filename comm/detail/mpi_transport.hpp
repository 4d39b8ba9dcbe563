// SPDX-License-Identifier: Apache-2.0
// comm/detail/mpi_transport.hpp - the MPI transport by itself, so that tests can cut its messages small.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include <hoist/comm/transport.hpp>

namespace hoist::comm::detail {

struct MpiTransportOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // MPI's counts are int; half of their range leaves a margin for an implementation's sums.
  std::uint64_t message_bytes_max = std::uint64_t{1} << 30;
};

// [collective over MPI_COMM_WORLD]
std::unique_ptr<Transport> make_mpi_transport(const MpiTransportOptions& options);

}  // namespace hoist::comm::detail
