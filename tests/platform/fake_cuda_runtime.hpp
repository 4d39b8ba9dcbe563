// SPDX-License-Identifier: Apache-2.0
// tests/platform/fake_cuda_runtime.hpp - the calls of the CUDA runtime that platform/ and comm/ make, without a GPU.
//
// It moves no data and runs no kernel. What it keeps is what a machine of one GPU hides and one of eight does not:
// which GPU a thread has chosen and where contexts come to be, what a call leaves in the thread's last error, and
// which calls break the capture of a graph. By the CUDA programming guide (initialization, stream and event behaviour)
// and the reference of cudaThreadExchangeStreamCaptureMode. Every call but those that choose a GPU, or ask which one
// is chosen, is taken for one that needs a context: where the documentation leaves it open, that is the cautious
// reading.
#pragma once

#include <set>

#include <cuda_runtime_api.h>

namespace hoist::test::fake_cuda {

inline constexpr int kGpus = 8;

// Forgets everything. No device of ours is alive.
void reset();
// GPUs that have a context of this process.
std::set<int> contexts();
// Work enqueued from now on, and events recorded, are not reached until it opens again.
void hold();
void let_go();
// Every GPU reports this value of an attribute from now on, and 0 before.
void set_attribute(cudaDeviceAttr attribute, int value);
// From now on counting the GPUs fails with this code. 0: no driver; else as CUDA counts, such as 12040.
void have_no_gpu(cudaError_t code, int driver_version);
// Loading kernels fails with this code from now on.
void refuse_kernels(cudaError_t code);
// Another thread captures a graph in the global mode.
void begin_capture_elsewhere();
// False when a call has broken the capture.
bool end_capture_elsewhere();

}  // namespace hoist::test::fake_cuda
