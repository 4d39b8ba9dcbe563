// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include <hoist/optim_cpu/reference.hpp>

namespace hoist::optim {

void reference_adam(const AdamOptions& options, std::uint64_t step, double gradient, ReferenceState& state) {
  auto& [master, moment1, moment2] = state;
  if (options.variant == AdamVariant::adam) {
    gradient += options.weight_decay * master;
  } else {
    master *= 1 - options.learning_rate * options.weight_decay;
  }
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

}  // namespace hoist::optim
