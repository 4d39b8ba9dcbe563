// SPDX-License-Identifier: Apache-2.0
// The kernels allocate nothing: the caller hands in every buffer.
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/tests/zero/counting_new.hpp>

#include "kernels.hpp"

namespace hoist::gpt::allocation_test {
namespace {

constexpr Index kRows = 128, kWidth = 64, kClasses = 64;

// The buffers of one call of each kernel, and the calls.
class Kernels {
 public:
  Kernels() { use_own_threads(); }

  void run_all() {
    const KernelContext context{.pool = pool_, .rows = kRows, .panel = panel_.data()};
    const Linear linear{.weight = {weight_.data(), DType::fp32, kWidth, kWidth}, .bias = bias_.data()};
    linear_forward(context, {.x = x_.data(), .layer = linear, .y = y_.data()});
    linear_backward(context, {.x = x_.data(),
                              .dy = y_.data(),
                              .layer = linear,
                              .gradient = {{gradient_.data(), DType::fp32, kWidth, kWidth}, bias_.data()},
                              .dx = dx_.data()});
    const Norm norm{.weight = bias_.data(), .bias = bias_.data(), .width = kWidth};
    const NormStatistics statistics{.mean = mean_.data(), .inverse_dev = deviation_.data()};
    norm_forward(context, {.x = x_.data(), .layer = norm, .statistics = statistics, .y = y_.data()});
    norm_backward(context, {.x = x_.data(),
                            .dy = y_.data(),
                            .layer = norm,
                            .statistics = statistics,
                            .gradient = {bias_.data(), bias_.data()},
                            .dx = dx_.data()});
    gelu_forward(pool_, x_.data(), kRows * kWidth, y_.data());
    gelu_backward(pool_, x_.data(), y_.data(), kRows * kWidth, dx_.data());
    run_attention();
    const EmbeddingShape shape{.batch = 4, .context = kRows / 4};
    const Matrix matrix{weight_.data(), DType::fp32, kClasses, kWidth};
    const GradientMatrix gradient{gradient_.data(), DType::fp32, kClasses, kWidth};
    embedding_forward(pool_, shape, tokens_.data(), matrix, matrix, x_.data());
    embedding_backward(pool_, shape, tokens_.data(), dx_.data(), gradient, gradient, panel_.data());
    (void)cross_entropy(pool_, kRows, kClasses, tokens_.data(), y_.data(), mean_.data());
  }

 private:
  using Floats = std::vector<float>;

  void run_attention() {
    const AttentionShape shape{.batch = 4, .context = kRows / 4, .heads = 2, .head_width = kWidth / 2};
    attention_forward(pool_, shape, qkv_.data(), probabilities_.data(), y_.data());
    attention_backward(pool_, shape,
                       {.qkv = qkv_.data(),
                        .probabilities = probabilities_.data(),
                        .dy = y_.data(),
                        .scratch = scratch_.data(),
                        .dqkv = dqkv_.data()});
  }

  UpdatePool pool_{{.threads = 2}};
  Floats x_ = Floats(kRows * kWidth, 0.5f), y_ = x_, dx_ = x_;
  Floats weight_ = Floats(kWidth * kWidth, 0.01f), gradient_ = weight_, panel_ = weight_;
  Floats bias_ = Floats(kWidth), mean_ = Floats(kRows), deviation_ = mean_;
  Floats qkv_ = Floats(kRows * kWidth * 3, 0.1f), dqkv_ = qkv_;
  Floats probabilities_ = Floats(4 * 2 * (kRows / 4) * (kRows / 4)), scratch_ = probabilities_;
  std::vector<std::uint8_t> tokens_ = std::vector<std::uint8_t>(kRows, 7);
};

TEST(KernelAllocations, AreNone) {
  Kernels kernels;
  kernels.run_all();  // threads start, and OpenBLAS takes its buffers
  const std::uint64_t before = test::allocation_count();
  for (int i = 0; i < 5; ++i) kernels.run_all();
  EXPECT_EQ(test::allocation_count() - before, 0u);
}

}  // namespace
}  // namespace hoist::gpt::allocation_test
