// SPDX-License-Identifier: Apache-2.0
// platform/detail/scale.hpp - Stream::scale_into on the CPU, one thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include <hoist/platform/stream.hpp>

namespace hoist::platform::detail {

struct ScaleArguments {
  std::byte* target;
  DType target_dtype;
  const std::byte* source;
  DType source_dtype;
  std::uint64_t count;
  float scale;
  Stream::Combine combine;
};

// Both pointers are aligned to their element.
void scale_on_host(const ScaleArguments& arguments);

}  // namespace hoist::platform::detail
