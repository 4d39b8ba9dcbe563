// SPDX-License-Identifier: Apache-2.0
#include "toy_kernels.hpp"

#include <cstring>

#include <hoist/core/rng.hpp>

namespace hoist::test {

namespace {

template <typename T>
T get(std::span<const std::byte> values, std::uint64_t i) {
  T value;
  std::memcpy(&value, values.data() + i * sizeof(T), sizeof(T));
  return value;
}

float element(std::span<const std::byte> values, DType dtype, std::uint64_t i) {
  if (dtype == DType::fp16) return fp16_to_float(get<std::uint16_t>(values, i));
  return dtype == DType::fp32 ? get<float>(values, i) : to_float(get<bf16>(values, i));
}

void set_element(std::span<std::byte> values, DType dtype, std::uint64_t i, float value) {
  const auto put = [&](auto stored) { std::memcpy(values.data() + i * sizeof(stored), &stored, sizeof(stored)); };
  if (dtype == DType::fp16) return put(float_to_fp16(value));
  dtype == DType::fp32 ? put(value) : put(to_bf16(value));
}

}  // namespace

double weighted_sum(std::span<const std::byte> values, DType dtype) {
  double sum = 0;
  const std::uint64_t count = values.size() / dtype_bytes(dtype);
  for (std::uint64_t i = 0; i < count; ++i) sum += element(values, dtype, i) * static_cast<double>(i % 7 + 1);
  return sum;
}

void fill_normal(std::uint64_t seed, std::uint64_t first, std::span<float> out) {
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(0.2 * random_normal(seed, first + i));
}

void add_gradient(std::span<const std::byte> weights, DType weights_dtype, std::span<std::byte> gradient,
                  DType gradient_dtype, std::uint64_t seed, float scale) {
  const std::uint64_t count = weights.size() / dtype_bytes(weights_dtype);
  for (std::uint64_t i = 0; i < count; ++i) {
    const float value = scale * (0.05f * element(weights, weights_dtype, i) +
                                 static_cast<float>(0.02 * (random_uniform(seed, i) - 0.5)));
    set_element(gradient, gradient_dtype, i, element(gradient, gradient_dtype, i) + value);
  }
}

}  // namespace hoist::test
