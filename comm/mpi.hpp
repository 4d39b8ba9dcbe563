// SPDX-License-Identifier: Apache-2.0
// comm/mpi.hpp - for programs with their own MPI communicators: hoist inside a tensor- or pipeline-parallel job.
//
// Includes mpi.h, which no other header of hoist does. Only if hoist was built with MPI (have_mpi()).
#pragma once

#include <memory>

#include <mpi.h>

#include <hoist/comm/communicator.hpp>

namespace hoist::comm {

// [collective over `ranks`] Over the ranks of the program's communicator. hoist duplicates it, so the program's
// messages do not mix with hoist's, and the program may free it. MPI must have been initialised with
// MPI_THREAD_MULTIPLE. Errors: CommError, UsageError for MPI_COMM_NULL or an inter-communicator.
std::unique_ptr<Communicator> make_mpi_over(MPI_Comm ranks, const CommunicatorOptions& options = {});

}  // namespace hoist::comm
