// SPDX-License-Identifier: Apache-2.0
// python/src/host_stream.hpp - a stream of the host device that a PyTorch backend in CPU memory computes on.
//
// Such a backend launches its operators on this stream and gives it to the engine as its current stream, as CUDA's does
// with cudaStream_t. Tests have one: it shows a missing wait where there is no GPU.
//
// Threading  As platform/stream.hpp: one thread at a time launches.
#pragma once

#include <cstdint>
#include <memory>

#include <hoist/platform/device.hpp>

namespace hoist::python {

class HostStream {
 public:
  HostStream();

  platform::Stream& stream() { return *stream_; }
  // What a backend in C calls, with this stream's address first.
  static void launch(void* stream, void (*run)(void*), void* work);
  static void synchronize(void* stream);

 private:
  std::unique_ptr<platform::Device> device_;
  std::unique_ptr<platform::Stream> stream_;
};

}  // namespace hoist::python
