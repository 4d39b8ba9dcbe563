// SPDX-License-Identifier: Apache-2.0
// optim_cpu/optimizer.hpp - the optimizers, their settings, and the state that they keep for each parameter.
//
// One struct for all of them; a comment names the optimizers that use a member. docs/optimizers.md has the formulas.
//
// Threading  Plain data and pure functions.
// Errors     check() throws UsageError naming the setting.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include <hoist/core/dtype.hpp>

namespace hoist::optim {

enum class OptimizerKind : std::uint8_t {
  adamw,    // Adam with decoupled weight decay
  adam,     // Adam, weight decay added to the gradient (L2)
  adagrad,  // L2
  lion,     // decoupled weight decay
  sgd,      // L2; with momentum or without
};
std::string_view optimizer_name(OptimizerKind kind);  // "AdamW", as in configurations

struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::adamw;
  double learning_rate = 1e-3;
  double beta1 = 0.9;     // adamw, adam, lion
  double beta2 = 0.999;   // adamw, adam, lion
  double epsilon = 1e-8;  // adamw, adam, adagrad
  double weight_decay = 0.01;
  bool bias_correction = true;                     // adamw, adam
  double momentum = 0;                             // sgd; with 0 no moment is stored
  double dampening = 0;                            // sgd with momentum
  bool nesterov = false;                           // sgd with momentum and no dampening
  double learning_rate_decay = 0;                  // adagrad
  double initial_accumulator = 0;                  // adagrad: initial value of the sum of squares
  MomentType moments = MomentType::fp32;           // docs/optimizers.md explains the rounding of the others
  RemainderType remainder = RemainderType::int16;  // beside bf16 weights. int8: masters of 24 bits
  std::uint64_t rounding_seed = 0;                 // of bf16 and fp8 moments, and of masters of 24 bits
};

// PyTorch's defaults (Lion's: its paper's; a configuration has DeepSpeed's), which differ by kind.
OptimizerOptions default_options(OptimizerKind kind);

// Errors: UsageError for an unusable setting.
void check(const OptimizerOptions& options);

// The state of every parameter from step to step, beside its master. Optimizers with the same state can continue each
// other.
enum class OptimizerState : std::uint8_t {
  none,      // SGD without momentum
  momentum,  // SGD: a running sum of gradients, the first moment
  lion,      // a mean of gradients, the first moment
  adagrad,   // a sum of squared gradients, the second moment
  adam,      // AdamW and Adam: a mean of gradients and one of their squares
};
inline constexpr std::array kOptimizerStates{OptimizerState::none, OptimizerState::momentum, OptimizerState::lion,
                                             OptimizerState::adagrad, OptimizerState::adam};
OptimizerState state_of(const OptimizerOptions& options);
std::string_view state_name(OptimizerState state);

constexpr bool has_moment1(OptimizerState state) {
  return state == OptimizerState::adam || state == OptimizerState::lion || state == OptimizerState::momentum;
}
constexpr bool has_moment2(OptimizerState state) {
  return state == OptimizerState::adam || state == OptimizerState::adagrad;
}
constexpr unsigned moment_count(OptimizerState state) {
  return (has_moment1(state) ? 1u : 0u) + (has_moment2(state) ? 1u : 0u);
}

// The types of that state.
struct StateForm {
  OptimizerState state = OptimizerState::adam;
  MomentType moments = MomentType::fp32;
  RemainderType remainder = RemainderType::int16;  // of bf16 weights

  friend constexpr bool operator==(const StateForm&, const StateForm&) = default;
};
StateForm state_form(const OptimizerOptions& options);

}  // namespace hoist::optim
