// SPDX-License-Identifier: Apache-2.0
// examples/gpt/cuda/cuda_card.hpp - the operations of hoist-gpt on a CUDA card.
#pragma once

#include <memory>

#include "../operations.hpp"

namespace hoist::gpt {

// Errors: DeviceError where cuBLASLt cannot be loaded; else those of card::CardOperations.
std::unique_ptr<Operations> make_cuda_operations(Runtime& runtime, platform::Stream& stream,
                                                 const OperationsOptions& options);

}  // namespace hoist::gpt
