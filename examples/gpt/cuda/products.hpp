// SPDX-License-Identifier: Apache-2.0
// examples/gpt/cuda/products.hpp - matrix products on a card by cuBLASLt: 16-bit operands, sums in fp32.
//
// The algorithm of a product is chosen once for its shape and types, from what the library suggests for the card; which
// is the same in every run. Algorithms that add up parts by atomic operations, in an order of their own, are excluded.
//
// Threading  One thread at a time.
// Memory     Works in the workspace it is given, which one stream at a time uses.
// Errors     DeviceError with cuBLASLt's status.
#pragma once

#include <compare>
#include <cstddef>
#include <map>
#include <memory>
#include <span>

#include <cuda_runtime_api.h>

#include "../card/arguments.hpp"
#include "cublas_lt.hpp"

namespace hoist::gpt::card {

class Products {
 public:
  // NVIDIA's recommendation for Hopper.
  static constexpr std::uint64_t kWorkspaceBytes = std::uint64_t{32} << 20;

  Products();
  ~Products();
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

  void use_workspace(std::span<std::byte> workspace) { workspace_ = workspace; }
  // Enqueues the product. Pre: its card is current, and all operands are aligned to 16 bytes.
  void multiply(const Product& product, cudaStream_t stream);

 private:
  // The properties of a product that decide how it is computed.
  struct Shape {
    std::uint64_t m, n, k;
    bool transposed_a, transposed_b, add;
    DType dtype, d_dtype;
    friend auto operator<=>(const Shape&, const Shape&) = default;
  };
  struct Plan;
  const Plan& plan_for(const Product& product);

  const CublasLt& lt_;
  cublasLtHandle_t handle_ = nullptr;
  std::span<std::byte> workspace_;
  std::map<Shape, std::unique_ptr<Plan>> plans_;
};

}  // namespace hoist::gpt::card
