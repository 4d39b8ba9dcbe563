// SPDX-License-Identifier: Apache-2.0
// comm/mpi.hpp - for programs that have MPI communicators of their own: hoist inside a tensor- or pipeline-parallel
// job.
//
// Includes mpi.h, which no other header of hoist does. Only where hoist was built with MPI (have_mpi()).
#pragma once

#include <memory>

#include <mpi.h>

#include <hoist/comm/communicator.hpp>

namespace hoist::comm {

// [collective over `ranks`] Over the ranks of a communicator of the program's, which is duplicated: nothing the program
// does with it mixes with hoist's messages, and it may be freed. MPI must have been initialised with
// MPI_THREAD_MULTIPLE. Errors: CommError, UsageError for MPI_COMM_NULL or an inter-communicator.
std::unique_ptr<Communicator> make_mpi_over(MPI_Comm ranks, const CommunicatorOptions& options = {});

}  // namespace hoist::comm
