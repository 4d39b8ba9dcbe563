// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/optim_cpu/optimizer.hpp>

namespace hoist::optim {

std::string_view optimizer_name(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::adamw:
      return "AdamW";
    case OptimizerKind::adam:
      return "Adam";
    case OptimizerKind::adagrad:
      return "Adagrad";
    case OptimizerKind::lion:
      return "Lion";
    case OptimizerKind::sgd:
      return "SGD";
  }
  return "";
}

OptimizerOptions default_options(OptimizerKind kind) {
  OptimizerOptions options{.kind = kind};
  if (kind != OptimizerKind::adamw) options.weight_decay = 0;
  if (kind == OptimizerKind::adagrad) {
    options.learning_rate = 1e-2;
    options.epsilon = 1e-10;
  }
  if (kind == OptimizerKind::lion) {
    options.learning_rate = 1e-4;
    options.beta2 = 0.99;
  }
  return options;
}

namespace {

void require(bool holds, std::string_view setting, double value, std::string_view allowed) {
  if (!holds) throw UsageError(fmt::format("the optimizer's {} is {}; it has to be {}", setting, value, allowed));
}

void require_positive_or_zero(std::string_view setting, double value) {
  require(std::isfinite(value) && value >= 0, setting, value, "a finite number of at least 0");
}

template <typename Enum>
void require_known(std::string_view setting, Enum last, Enum value) {
  if (value > last)
    throw UsageError(
        fmt::format("the optimizer's {} is {}, which is not a valid value", setting, static_cast<unsigned>(value)));
}

}  // namespace

void check(const OptimizerOptions& options) {
  require_known("kind", OptimizerKind::sgd, options.kind);
  require_known("type of moments", MomentType::fp8, options.moments);
  require_known("type of the remainder", RemainderType::int8, options.remainder);
  require_positive_or_zero("learning rate", options.learning_rate);
  require_positive_or_zero("weight decay", options.weight_decay);
  require_positive_or_zero("epsilon", options.epsilon);
  require(options.beta1 >= 0 && options.beta1 < 1, "beta1", options.beta1, "from 0 to below 1");
  require(options.beta2 >= 0 && options.beta2 < 1, "beta2", options.beta2, "from 0 to below 1");
  require_positive_or_zero("momentum", options.momentum);
  require(std::isfinite(options.dampening), "dampening", options.dampening, "a finite number");
  require_positive_or_zero("learning rate decay", options.learning_rate_decay);
  require(options.initial_accumulator >= 0 && options.initial_accumulator <= std::numeric_limits<float>::max(),
          "initial accumulator value", options.initial_accumulator, "from 0 to the largest fp32 number");
  const bool plain_momentum = options.momentum > 0 && options.dampening == 0;
  if (options.kind == OptimizerKind::sgd && options.nesterov && !plain_momentum)
    throw UsageError("Nesterov's momentum needs a momentum above 0 and no dampening");
}

OptimizerState state_of(const OptimizerOptions& options) {
  switch (options.kind) {
    case OptimizerKind::adamw:
    case OptimizerKind::adam:
      return OptimizerState::adam;
    case OptimizerKind::adagrad:
      return OptimizerState::adagrad;
    case OptimizerKind::lion:
      return OptimizerState::lion;
    case OptimizerKind::sgd:
      return options.momentum != 0 ? OptimizerState::momentum : OptimizerState::none;
  }
  return OptimizerState::none;
}

// An optimizer without moments has no moment type.
StateForm state_form(const OptimizerOptions& options) {
  const OptimizerState state = state_of(options);
  return {.state = state,
          .moments = state == OptimizerState::none ? MomentType::fp32 : options.moments,
          .remainder = options.remainder};
}

std::string_view state_name(OptimizerState state) {
  switch (state) {
    case OptimizerState::none:
      return "none";
    case OptimizerState::momentum:
      return "momentum";
    case OptimizerState::lion:
      return "lion";
    case OptimizerState::adagrad:
      return "adagrad";
    case OptimizerState::adam:
      return "adam";
  }
  return "";
}

}  // namespace hoist::optim
