// SPDX-License-Identifier: Apache-2.0
// Products on a card, as far as no card is needed, and where there is one against plain loops.
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/platform/cuda_check.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/platform/elements.hpp>

#include "cuda/products.hpp"
#include "emulated_card.hpp"

namespace hoist::gpt::card {
namespace {

TEST(CublasLt, IsFoundWithEveryFunctionThatIsUsed) {
  const CublasLt& lt = CublasLt::load();
  EXPECT_NE(lt.matmul, nullptr);
  EXPECT_NO_THROW(lt.check(CUBLAS_STATUS_SUCCESS, "call"));
  try {
    lt.check(CUBLAS_STATUS_NOT_INITIALIZED, "cublasLtCreate");
    FAIL() << "no error";
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("cublasLtCreate"), testing::HasSubstr("nvidia-smi")));
  }
}

TEST(CublasLt, WithoutACardIsAnErrorWithTheRemedy) {
  if (platform::cuda_device_count() > 0) GTEST_SKIP() << "there is a CUDA card";
  EXPECT_THROW(Products(), DeviceError);
}

// Every product that the operations ask for, by its flags and types.
TEST(CudaProducts, AreThoseOfPlainLoops) {
  std::string why;
  if (platform::cuda_device_count(&why) == 0) GTEST_SKIP() << "no CUDA card: " << why;
  const auto device = platform::Device::create({.kind = platform::DeviceKind::cuda, .memory_bytes = 128 << 20});
  const auto stream = device->create_stream("compute");
  const platform::CurrentCard card(0);
  Products products;
  products.use_workspace({device->memory().data(), Products::kWorkspaceBytes});
  std::byte* const base = device->memory().data() + Products::kWorkspaceBytes;
  for (const auto& [transposed_a, transposed_b, add, d_dtype] :
       {std::tuple{false, true, false, DType::bf16}, std::tuple{false, true, false, DType::fp32},
        std::tuple{false, false, false, DType::bf16}, std::tuple{true, false, true, DType::bf16},
        std::tuple{true, false, true, DType::fp32}}) {
    SCOPED_TRACE(testing::Message() << transposed_a << transposed_b << add << dtype_name(d_dtype));
    Product p{.m = 200, .n = 136, .k = 264, .transposed_a = transposed_a, .transposed_b = transposed_b, .add = add};
    p.d_dtype = d_dtype;
    std::vector<std::uint16_t> a(p.m * p.k), b(p.k * p.n);
    std::vector<std::byte> expected(p.m * p.n * dtype_bytes(d_dtype)), found(expected.size());
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = to_bf16(static_cast<float>(random_normal(1, i))).bits;
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = to_bf16(static_cast<float>(random_normal(2, i))).bits;
    Product here = p;
    here.a = a.data();
    here.b = b.data();
    here.d = expected.data();
    p.a = base;
    p.b = base + (8 << 20);
    p.d = base + (16 << 20);
    const auto up = [&](const void* target, const auto& source) {
      platform::cuda_check(cudaMemcpy(const_cast<void*>(target), source.data(), source.size() * sizeof source[0],
                                      cudaMemcpyHostToDevice),
                           "cudaMemcpy");
    };
    up(p.a, a);
    up(p.b, b);
    up(p.d, expected);  // zeros
    EmulatedCard(*stream, DType::bf16).multiply(here);
    products.multiply(p, static_cast<cudaStream_t>(stream->native()));
    stream->synchronize();
    platform::cuda_check(cudaMemcpy(found.data(), p.d, found.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (std::size_t i = 0; i < p.m * p.n; ++i) {
      const auto value = [&](const std::vector<std::byte>& bytes) {
        return d_dtype == DType::fp32 ? reinterpret_cast<const float*>(bytes.data())[i]
                                      : platform::AsBf16::load(reinterpret_cast<const std::uint16_t*>(bytes.data())[i]);
      };
      ASSERT_NEAR(value(found), value(expected), 0.01 * std::abs(value(expected)) + 1e-2) << i;
    }
  }
}

}  // namespace
}  // namespace hoist::gpt::card
