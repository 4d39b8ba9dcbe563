// SPDX-License-Identifier: Apache-2.0
// zero/passes/streams.hpp - the streams that an engine owns, beside the program's.
//
// Threading  The executor submits work; any thread may wait.
#pragma once

#include <memory>

#include <hoist/platform/stream.hpp>

namespace hoist::detail {

struct Streams {
  std::unique_ptr<platform::Stream> up;    // weights to device memory
  std::unique_ptr<platform::Stream> down;  // gradients and new secondary shards from it
  std::unique_ptr<platform::Stream> comm;  // collectives

  void synchronize() const {
    up->synchronize();
    comm->synchronize();
    down->synchronize();
  }
};

}  // namespace hoist::detail
