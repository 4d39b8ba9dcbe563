// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include <hoist/optim_cpu/reference.hpp>

namespace hoist::optim {

namespace {

void adam(const OptimizerOptions& options, std::uint64_t step, double gradient, ReferenceState& state) {
  auto& [master, moment1, moment2] = state;
  moment1 = options.beta1 * moment1 + (1 - options.beta1) * gradient;
  moment2 = options.beta2 * moment2 + (1 - options.beta2) * gradient * gradient;
  double corrected1 = moment1;
  double corrected2 = moment2;
  if (options.bias_correction) {
    corrected1 /= 1 - std::pow(options.beta1, static_cast<double>(step));
    corrected2 /= 1 - std::pow(options.beta2, static_cast<double>(step));
  }
  master -= options.learning_rate * corrected1 / (std::sqrt(corrected2) + options.epsilon);
}

void adagrad(const OptimizerOptions& options, std::uint64_t step, double gradient, ReferenceState& state) {
  const double rate = options.learning_rate / (1 + static_cast<double>(step - 1) * options.learning_rate_decay);
  state.moment2 += gradient * gradient;
  state.master -= rate * gradient / (std::sqrt(state.moment2) + options.epsilon);
}

void lion(const OptimizerOptions& options, double gradient, ReferenceState& state) {
  const double direction = options.beta1 * state.moment1 + (1 - options.beta1) * gradient;
  state.master -= std::isnan(direction) ? direction : options.learning_rate * ((direction > 0) - (direction < 0));
  state.moment1 = options.beta2 * state.moment1 + (1 - options.beta2) * gradient;
}

void sgd(const OptimizerOptions& options, std::uint64_t step, double gradient, ReferenceState& state) {
  double direction = gradient;
  if (options.momentum != 0) {
    state.moment1 = step == 1 ? gradient : options.momentum * state.moment1 + (1 - options.dampening) * gradient;
    direction = options.nesterov ? gradient + options.momentum * state.moment1 : state.moment1;
  }
  state.master -= options.learning_rate * direction;
}

}  // namespace

void reference_update(const OptimizerOptions& options, std::uint64_t step, double gradient, ReferenceState& state) {
  if (options.kind == OptimizerKind::adamw || options.kind == OptimizerKind::lion) {
    state.master *= 1 - options.learning_rate * options.weight_decay;
  } else if (options.weight_decay != 0) {
    gradient += options.weight_decay * state.master;
  }
  switch (options.kind) {
    case OptimizerKind::adamw:
    case OptimizerKind::adam:
      return adam(options, step, gradient, state);
    case OptimizerKind::adagrad:
      return adagrad(options, step, gradient, state);
    case OptimizerKind::lion:
      return lion(options, gradient, state);
    case OptimizerKind::sgd:
      return sgd(options, step, gradient, state);
  }
}

}  // namespace hoist::optim
