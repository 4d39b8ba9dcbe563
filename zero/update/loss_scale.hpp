// SPDX-License-Identifier: Apache-2.0
// zero/update/loss_scale.hpp - what a loss is multiplied by so that small gradients do not vanish in fp16.
//
// The rule is DeepSpeed's (deepspeed/runtime/fp16/loss_scaler.py, 0.19.8: DynamicLossScaler; the idea: Micikevicius et
// al., arXiv 1710.03740). The scale halves when a gradient overflows, once `hysteresis` overflows have been borne, and
// doubles after `window` steps without one. Two differences: it stops at kLossScaleMax, where DeepSpeed's goes on, and
// a fixed scale is rounded to a float, since a loss is multiplied by it as one.
//
// Threading  A plain value.
// Errors     check() throws ConfigError naming the key; update() Error where the scale cannot be lowered any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace hoist {

// Beyond it fp16 gradients could only come from numbers below 2^-48; its reciprocal is a normal float by far.
inline constexpr double kLossScaleMax = 0x1.0p64;

struct LossScaleOptions {
  bool dynamic = false;
  double scale = 1;                     // fixed, or the one to begin with; 1 is no scaling
  std::uint64_t window = 1000;          // steps without an overflow until it doubles
  std::uint32_t hysteresis = 2;         // overflows until it halves; the first ones only count down
  bool consecutive_hysteresis = false;  // every step without an overflow starts the count anew, not only a doubling
  double scale_min = 1;
};
// Errors: ConfigError.
void check(const LossScaleOptions& options);

class LossScaler {
 public:
  // The state that changes from step to step. It is the same on all ranks, as they agree on every overflow.
  struct State {
    double scale = 1;
    std::uint64_t steps_without_overflow = 0;  // since the last one, or the start
    std::uint32_t hysteresis_left = 1;
    friend bool operator==(const State&, const State&) = default;
  };

  // Pre: check(options).
  explicit LossScaler(const LossScaleOptions& options);

  double scale() const { return state_.scale; }
  bool is_dynamic() const { return options_.dynamic; }
  const State& state() const { return state_; }
  // The problem with a state of the program's; nothing if update() can have made it.
  static std::string problem_of(const State& state);
  // Goes on from what a commit holds. The configuration's window, limits and hysteresis count from here on; a fixed
  // scale is the configuration's in any case.
  void restore(const State& state);
  // A step's gradients were finite, or were not. Errors: Error, the state unchanged, for an overflow at the smallest
  // scale, where DeepSpeed ends the run as well.
  void update(bool overflow);

 private:
  LossScaleOptions options_;
  State state_;
};

// A scaler's state as it stands in a commit.
inline constexpr std::size_t kLossScalerBytes = 64;
void store_loss_scaler(const LossScaler::State& state, std::span<std::byte, kLossScalerBytes> target);
// Nothing where none was stored: a commit of a version before this one.
std::optional<LossScaler::State> load_loss_scaler(std::span<const std::byte, kLossScalerBytes> source);

}  // namespace hoist
