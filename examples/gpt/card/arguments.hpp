// SPDX-License-Identifier: Apache-2.0
// examples/gpt/card/arguments.hpp - what a card's kernels are given. Read by the C++ compiler and by nvcc.
//
// `void` is memory of activations: bf16 or fp16, aligned to 16 bytes, every row a multiple of 8 values. Statistics,
// norms and biases are fp32.
#pragma once

#include <cstdint>

#include <hoist/core/dtype.hpp>

namespace hoist::gpt::card {

// y = y (+ bias) (+ residual); gelu = GELU(y), where there is one. y[rows, columns].
struct FinishLinear {
  std::uint64_t rows = 0, columns = 0;
  void* y = nullptr;
  const float* bias = nullptr;
  const void* residual = nullptr;
  void* gelu = nullptr;
};

// dy null: out = GELU(x); else out = dy * GELU'(x).
struct Gelu {
  std::uint64_t count = 0;
  const void* x = nullptr;
  const void* dy = nullptr;
  void* out = nullptr;
};

// target = source, in fp32.
struct CastWeights {
  std::uint64_t count = 0;
  const float* source = nullptr;
  void* target = nullptr;
};

// x[rows, width] = token row + position row. Weights: fp32, or as activations.
struct Embed {
  std::uint64_t rows = 0, context = 0, width = 0;
  const std::uint8_t* tokens = nullptr;
  const void* token_weight = nullptr;
  const void* position_weight = nullptr;
  DType weight_dtype = DType::bf16;
  void* x = nullptr;
};

// out[rows, classes]: 1 in the token's column, else 0. A product with it adds up rows by token.
struct OneHot {
  std::uint64_t rows = 0, classes = 0;
  const std::uint8_t* tokens = nullptr;
  void* out = nullptr;
};

// gradient[context, width] += the sum over the batch of dx[batch, context, width], rounded once. fp32, or as
// activations.
struct PositionGradient {
  std::uint64_t batch = 0, context = 0, width = 0;
  const void* dx = nullptr;
  void* gradient = nullptr;
  DType gradient_dtype = DType::bf16;
};

struct NormForward {
  std::uint64_t rows = 0, width = 0;
  const void* x = nullptr;
  const float* weight = nullptr;
  const float* bias = nullptr;
  float* mean = nullptr;
  float* inverse_dev = nullptr;
  void* y = nullptr;
};

// dx += the derivative by x.
struct NormBackward {
  std::uint64_t rows = 0, width = 0;
  const void* dy = nullptr;
  const void* x = nullptr;
  const float* weight = nullptr;
  const float* mean = nullptr;
  const float* inverse_dev = nullptr;
  void* dx = nullptr;
};

// bias_gradient[columns] += the column sums of dy; with x also weight_gradient += those of dy * (x - mean) *
// inverse_dev. Two kernels: slices of rows, then over the slices in order. partial: partial_floats().
struct ColumnSums {
  std::uint64_t rows = 0, columns = 0;
  const void* dy = nullptr;
  const void* x = nullptr;
  const float* mean = nullptr;
  const float* inverse_dev = nullptr;
  float* partial = nullptr;  // [1 or 2][slices][columns]
  float* bias_gradient = nullptr;
  float* weight_gradient = nullptr;

  static constexpr std::uint64_t kSliceRows = 256;
  constexpr std::uint64_t slices() const { return (rows + kSliceRows - 1) / kSliceRows; }
  constexpr std::uint64_t partial_floats() const { return (x == nullptr ? 1 : 2) * slices() * columns; }
};

struct CrossEntropyRows {
  std::uint64_t rows = 0, classes = 0;
  const std::uint8_t* targets = nullptr;
  const float* logits = nullptr;
  void* gradient = nullptr;
  float* row_loss = nullptr;
  float scale = 1;  // of the gradient: loss scale / rows
};

// *mean = the mean of values[count].
struct Mean {
  std::uint64_t count = 0;
  const float* values = nullptr;
  double* mean = nullptr;
};

// Causal attention; qkv[batch * context, 3 * heads * head_width].
struct Attention {
  std::uint32_t batch = 0, context = 0, heads = 0, head_width = 0;
  const void* qkv = nullptr;
  void* y = nullptr;         // [batch * context, heads * head_width]; written forward, read backward
  float* log_sum = nullptr;  // [batch, heads, context]: log2 of the sum of exponentials; written forward
  const void* dy = nullptr;  // backward
  float* delta = nullptr;    // [batch, heads, context]: the dot products of dy and y
  void* dqkv = nullptr;
  constexpr std::uint64_t width() const { return static_cast<std::uint64_t>(heads) * head_width; }
  constexpr std::uint64_t statistics() const { return static_cast<std::uint64_t>(batch) * heads * context; }
};

// d[m, n] = op(a) op(b), or added to d; accumulated in fp32, rounded once to d's type. Row-major, without gaps.
struct Product {
  std::uint64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;  // [m, k]; transposed: [k, m]
  const void* b = nullptr;  // [k, n]; transposed: [n, k]
  bool transposed_a = false;
  bool transposed_b = false;
  bool add = false;
  DType dtype = DType::bf16;  // of a and b
  void* d = nullptr;
  DType d_dtype = DType::bf16;
};

}  // namespace hoist::gpt::card
