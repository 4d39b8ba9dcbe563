// SPDX-License-Identifier: Apache-2.0
// platform/update_arrays.hpp - what Stream::update works on. Light, since nvcc reads it too.
#pragma once

#include <cstddef>
#include <cstdint>

#include <hoist/core/dtype.hpp>
#include <hoist/core/update_formula.hpp>

namespace hoist::platform {

// What one optimizer update reads and writes, in device memory. Arrays are aligned to their element; where all of them
// are aligned to 16 bytes, as a store's tiles are, a card moves 16 bytes at a time.
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
  // Weights and gradient are contiguous. State (master and moments) may lie in tiles: that of every tile_elements
  // elements begins tile_stride_bytes after the one before. 0: contiguous, too.
  std::uint64_t tile_elements = 0;
  std::uint64_t tile_stride_bytes = 0;
  Rounding rounding{};  // of bf16 moments
  // Becomes refused_value when a master or moment came out that may not be committed. Never cleared here; null: nobody
  // wants to know.
  std::uint32_t* refused = nullptr;
  std::uint32_t refused_value = 1;
};

}  // namespace hoist::platform
