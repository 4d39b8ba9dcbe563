// SPDX-License-Identifier: Apache-2.0
// python/src/channel.hpp - ranks that are PyTorch's: a Transport whose calls are made by Python
// (hoist.torch.ranks.distributed).
//
// The object has rank, size, local_ranks, local_index, local_rank, exchange(what, sends, receives),
// broadcast(what, tensor, root), barrier(what), duplicate(), split(ranks), abort(why), why() and close(). Sends and
// receives are lists of (rank, tensor of bytes). `what` describes the call; ranks that come together with different
// ones get an error.
//
// Threading  One thread at a time; abort() and why() on any. Each call takes the GIL, and PyTorch releases it while it
//            waits. A thread that waits for a collective in C++ must not hold the GIL.
// Memory     Tensors are views of the caller's memory; Python may use them only during the call.
// Errors     CommError with the Python exception's text, rank and operation. Python gets the exception itself where it
//            came from the program's handler of a signal and is no RuntimeError.
#pragma once

#include <functional>
#include <memory>

#include <nanobind/nanobind.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/comm/transport.hpp>
#include <hoist/platform/device.hpp>

namespace hoist::python {

struct GroupChannel {
  std::shared_ptr<comm::Transport> transport;
  // Where it is over the whole job: ranks that divide this machine's memory, and which of them this one is; and the
  // local rank, which chooses the GPU. Else 0, -1 and -1.
  int local_ranks = 0;
  int local_index = -1;
  int local_rank = -1;
};

// Makes a channel over all ranks of a group. Takes the GIL.
using MakeChannel = std::function<GroupChannel()>;
MakeChannel channel_maker(nanobind::callable make);

// A communicator over such a channel. On a CUDA device data goes over NCCL.
std::unique_ptr<comm::Communicator> join_over(const std::shared_ptr<comm::Transport>& control,
                                              platform::DeviceKind device, const comm::CommunicatorOptions& options);

}  // namespace hoist::python
