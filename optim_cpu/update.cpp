// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include <fmt/ranges.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/float_environment.hpp>
#include <hoist/optim_cpu/update.hpp>

// clang-format off: the first include compiles the kernels for every dynamic target, the second for the baseline.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hoist/optim_cpu/detail/packed-inl.h"
#include <hwy/foreach_target.h>

#include <hoist/optim_cpu/detail/packed-inl.h>
// clang-format on

namespace hoist::optim {

HWY_EXPORT(update_split);
HWY_EXPORT(update_whole);
HWY_EXPORT(update_fp16);
HWY_EXPORT(instruction_set);

namespace {

// base^exponent by squaring. Not std::pow: the C library chooses its code, and with it the last bit, by the machine.
double power(double base, std::uint64_t exponent) {
  double result = 1;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

Formula formula_of(const OptimizerOptions& options) {
  switch (options.kind) {
    case OptimizerKind::adamw:
      return Formula::adamw;
    case OptimizerKind::adam:
      return Formula::adam;
    case OptimizerKind::adagrad:
      return Formula::adagrad;
    case OptimizerKind::lion:
      return Formula::lion;
    case OptimizerKind::sgd:
      return options.momentum != 0 ? Formula::momentum : Formula::sgd;
  }
  return Formula::adamw;
}

}  // namespace

UpdateCoefficients::UpdateCoefficients(const OptimizerOptions& options, std::uint64_t step, double scale) {
  formula = formula_of(options);
  HOIST_ASSERT(step >= 1, "steps are counted from 1");
  const FloatEnvironment environment;
  const bool corrects = formula == Formula::adamw || formula == Formula::adam ? options.bias_correction : false;
  const double bias1 = corrects ? 1.0 - power(options.beta1, step) : 1.0;
  const double bias2 = corrects ? 1.0 - power(options.beta2, step) : 1.0;
  double rate = options.learning_rate / bias1;
  double kept = options.beta1, added = 1.0 - options.beta1;
  if (formula == Formula::adagrad) rate /= 1.0 + static_cast<double>(step - 1) * options.learning_rate_decay;
  if (formula == Formula::momentum) {
    kept = options.momentum;
    added = step == 1 ? 1.0 : 1.0 - options.dampening;
  }
  gradient_scale = static_cast<float>(scale);
  beta1 = static_cast<float>(kept);
  one_minus_beta1 = static_cast<float>(added);
  beta2 = static_cast<float>(options.beta2);
  one_minus_beta2 = static_cast<float>(1.0 - options.beta2);
  epsilon = static_cast<float>(options.epsilon);
  step_size = static_cast<float>(rate);
  root_bias2 = static_cast<float>(std::sqrt(bias2));
  decay_factor = static_cast<float>(1.0 - options.learning_rate * options.weight_decay);
  l2 = static_cast<float>(options.weight_decay);
  gradient_part = options.nesterov ? 1.0f : 0.0f;
  moment_part = options.nesterov ? static_cast<float>(options.momentum) : 1.0f;
}

bool update_tile(const UpdateCoefficients& coefficients, const SplitTile& tile) {
  const FloatEnvironment environment;
  return HWY_DYNAMIC_DISPATCH(update_split)(coefficients, tile);
}

bool update_tile(const UpdateCoefficients& coefficients, const WholeTile& tile) {
  const FloatEnvironment environment;
  return HWY_DYNAMIC_DISPATCH(update_whole)(coefficients, tile);
}

bool update_tile(const UpdateCoefficients& coefficients, const Fp16Tile& tile) {
  const FloatEnvironment environment;
  return HWY_DYNAMIC_DISPATCH(update_fp16)(coefficients, tile);
}

namespace {

// Highway's bits of the compiled instruction sets that this machine has, best first. Queried once, before
// force_instruction_set can narrow the answer.
const std::vector<std::int64_t>& usable_targets() {
  static const std::vector<std::int64_t> targets = hwy::SupportedAndGeneratedTargets();
  return targets;
}

}  // namespace

std::vector<std::string> supported_instruction_sets() {
  std::vector<std::string> names;
  for (const std::int64_t target : usable_targets()) names.emplace_back(hwy::TargetName(target));
  return names;
}

std::string active_instruction_set() { return HWY_DYNAMIC_DISPATCH(instruction_set)(); }

void force_instruction_set(const std::string& name) {
  std::int64_t chosen = 0;  // Highway: the machine's best again
  if (!name.empty()) {
    for (const std::int64_t target : usable_targets()) {
      if (name == hwy::TargetName(target)) chosen = target;
    }
    if (chosen == 0) {
      throw UsageError(fmt::format("instruction set '{}' is not available here; this machine has {}", name,
                                   fmt::join(supported_instruction_sets(), ", ")));
    }
  }
  hwy::SetSupportedTargetsForTest(chosen);
}

}  // namespace hoist::optim
