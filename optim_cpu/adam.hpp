// SPDX-License-Identifier: Apache-2.0
// optim_cpu/adam.hpp - AdamW and Adam on one tile, in one pass over memory. Start here.
//
// The formula is PyTorch's (torch.optim.AdamW, torch.optim.Adam with L2), in fp32 with exact division and square root
// and without fused multiply-add, so that every instruction set gives the same bits. Sources: Kingma & Ba,
// arXiv 1412.6980; Loshchilov & Hutter, arXiv 1711.05101. Every operation below rounds to nearest even, once, in the
// order the parentheses say; g, p, m, v are one parameter's gradient, master and moments, the rest AdamCoefficients:
//
//   g = g * gradient_scale
//   adam:   g = g + (l2 * p)
//   adamw:  p = p * decay_factor
//   m = (beta1 * m) + (one_minus_beta1 * g)
//   v = (beta2 * v) + ((one_minus_beta2 * g) * g)
//   p = p - ((step_size * m) / ((sqrt(v) / root_bias2) + epsilon))
//   stored: p; m and v, each as +0 when its magnitude is below 2^-126
//
// The bits of a NaN are the one thing left open (no state that holds one is ever committed).
//
// Denormals: arithmetic keeps them (the kernels clear flush-to-zero and denormals-are-zero for their own duration,
// whatever the host program's setting), but a moment is stored as zero when its magnitude is below 2^-126. Otherwise
// moments of idle parameters decay into denormals, which many processors handle far more slowly, and stay there. A GPU kernel
// compiled without flush-to-zero gives the same bits by the same rule.
//
// Threading  Pure functions of their arguments; any thread.
// Memory     No allocation. Pointers need the alignment of their element type only.
// Errors     None; a non-finite gradient is the caller's to find first (see norm.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <hoist/core/dtype.hpp>

namespace hoist::optim {

enum class AdamVariant : std::uint8_t { adamw, adam };  // decoupled weight decay | L2 added to the gradient

struct AdamOptions {
  AdamVariant variant = AdamVariant::adamw;
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.01;
  bool bias_correction = true;
};

// What one update of step `step` (counted from 1) needs, derived once in double and rounded once.
struct AdamCoefficients {
  AdamCoefficients(const AdamOptions& options, std::uint64_t step, double gradient_scale);

  AdamVariant variant;
  float gradient_scale;  // unscale times clip factor
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float epsilon;
  float step_size;     // learning_rate / (1 - beta1^step)
  float root_bias2;    // sqrt(1 - beta2^step): the denominator is sqrt(v) / root_bias2 + epsilon
  float decay_factor;  // adamw: 1 - learning_rate * weight_decay
  float l2;            // adam: weight_decay
};

// A tile whose master is split: master = join_master(weight, remainder). All arrays have `count` elements.
struct SplitTile {
  bf16* weight = nullptr;  // read and written
  std::int16_t* remainder = nullptr;
  float* moment1 = nullptr;
  float* moment2 = nullptr;
  const void* gradient = nullptr;  // of `gradient_dtype`
  DType gradient_dtype = DType::bf16;
  std::size_t count = 0;
};

// A tile whose weights are fp32: they are the master.
struct WholeTile {
  float* weight = nullptr;
  float* moment1 = nullptr;
  float* moment2 = nullptr;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::fp32;
  std::size_t count = 0;
};

// Returns false when a master or moment came out that may not be committed (core/dtype.hpp master_is_committable, or
// a non-finite moment); the tile is written all the same.
[[nodiscard]] bool adam_update(const AdamCoefficients& coefficients, const SplitTile& tile);
[[nodiscard]] bool adam_update(const AdamCoefficients& coefficients, const WholeTile& tile);

// The instruction sets this machine can run, best first ("AVX3", "AVX2", ...), and the one in use.
std::vector<std::string> supported_instruction_sets();
std::string active_instruction_set();
// Tests: makes every following call use the named set; empty restores the best. Not thread-safe against updates.
void force_instruction_set(const std::string& name);

}  // namespace hoist::optim
