// SPDX-License-Identifier: Apache-2.0
// platform/update_arrays.hpp - the arguments of Stream::update. Few includes, because nvcc reads it too.
#pragma once

#include <cstddef>
#include <cstdint>

#include <hoist/core/dtype.hpp>
#include <hoist/core/update_formula.hpp>

namespace hoist::platform {

// The arrays of one optimizer update, in device memory. They are aligned to their element; if all are aligned to 16
// bytes, as a store's tiles are, a GPU moves 16 bytes at a time.
struct UpdateArrays {
  std::byte* weights = nullptr;
  DType weights_dtype = DType::bf16;
  std::byte* master = nullptr;   // bf16 weights: the remainders; fp16: the fp32 masters; fp32 weights are the masters
  std::byte* moment1 = nullptr;  // those that the formula has
  std::byte* moment2 = nullptr;
  DType moment_dtype = DType::fp32;  // or bf16
  const std::byte* gradient = nullptr;
  DType gradient_dtype = DType::bf16;
  std::uint64_t count = 0;
  // Weights and gradient are contiguous. State (master and moments) may be in tiles: the state of every tile_elements
  // elements begins tile_stride_bytes after the one before. 0: contiguous, too.
  std::uint64_t tile_elements = 0;
  std::uint64_t tile_stride_bytes = 0;
  Rounding rounding{};  // of bf16 moments
  // Set to refused_value if a resulting master or moment may not be committed. Never cleared here; may be null.
  std::uint32_t* refused = nullptr;
  std::uint32_t refused_value = 1;
};

}  // namespace hoist::platform
