// SPDX-License-Identifier: Apache-2.0
// tests/python/accelerator/ranks.hpp - collectives of torch.distributed over the test device's tensors.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

// What NCCL is for a GPU's tensors, with the collectives that tests and DistributedDataParallel use: it copies tensors
// to the CPU, and gloo exchanges the copies.
c10::intrusive_ptr<c10d::Backend> staged_by(const c10::intrusive_ptr<c10d::Backend>& gloo);
