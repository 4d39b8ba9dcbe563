// SPDX-License-Identifier: Apache-2.0
// The update kernels for a Python script: plain functions over plain arrays, so that PyTorch's and DeepSpeed's
// optimizers and ours can work on the same memory in turn (compare_deepspeed_adam.py).
//
// Threading  One caller at a time for each pool.
// Errors     shim_update returns 0 if a state came out that may not be committed.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include <hoist/optim_cpu/update.hpp>
#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/tiers/record_layout.hpp>

namespace {

using namespace hoist;
using namespace hoist::optim;

constexpr std::size_t kTile = tiers::kTileElements;

}  // namespace

extern "C" {

// Fields as in OptimizerOptions; `kind` is OptimizerKind's number.
struct ShimOptimizer {
  int kind;
  double learning_rate, beta1, beta2, epsilon, weight_decay;
  double momentum, dampening;
  int nesterov;
  double learning_rate_decay;
};

void* shim_pool(unsigned threads) { return new UpdatePool({.threads = threads}); }

// `weight` is fp32 (whole), bf16 with the remainder of its fp32 master (split), or fp16 beside its fp32 master; the
// other two of the three are null. `gradient_dtype` is DType's number. Moments that the optimizer has not may be null.
int shim_update(void* pool, const ShimOptimizer* optimizer, std::uint64_t step, double gradient_scale, void* weight,
                std::int16_t* remainder, float* master, float* moment1, float* moment2, const void* gradient,
                int gradient_dtype, std::size_t count) {
  const OptimizerOptions options{.kind = static_cast<OptimizerKind>(optimizer->kind),
                                 .learning_rate = optimizer->learning_rate,
                                 .beta1 = optimizer->beta1,
                                 .beta2 = optimizer->beta2,
                                 .epsilon = optimizer->epsilon,
                                 .weight_decay = optimizer->weight_decay,
                                 .momentum = optimizer->momentum,
                                 .dampening = optimizer->dampening,
                                 .nesterov = optimizer->nesterov != 0,
                                 .learning_rate_decay = optimizer->learning_rate_decay};
  const UpdateCoefficients coefficients(options, step, gradient_scale);
  const auto dtype = static_cast<DType>(gradient_dtype);
  std::atomic<bool> committable{true};
  static_cast<UpdatePool*>(pool)->run((count + kTile - 1) / kTile, [&](std::size_t k) {
    const std::size_t first = k * kTile;
    const auto at = [&](float* array) { return array == nullptr ? nullptr : array + first; };
    const TileState state{.moment1 = at(moment1),
                          .moment2 = at(moment2),
                          .gradient = static_cast<const std::byte*>(gradient) + first * dtype_bytes(dtype),
                          .gradient_dtype = dtype,
                          .count = std::min(kTile, count - first)};
    const bool sound =
        remainder != nullptr
            ? update_tile(coefficients, SplitTile{state, static_cast<bf16*>(weight) + first, remainder + first})
        : master != nullptr
            ? update_tile(coefficients, Fp16Tile{state, static_cast<std::uint16_t*>(weight) + first, master + first})
            : update_tile(coefficients, WholeTile{state, static_cast<float*>(weight) + first});
    if (!sound) committable = false;
  });
  return committable ? 1 : 0;
}

}  // extern "C"
