// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <hoist/zero/predict/activations.hpp>

namespace hoist {

ActivationBytes activation_bytes(const Model& model, double tokens_kept, double micro_batch_tokens) {
  constexpr double kKeptBytes = 2, kWorkingBytes = 34, kParametersPerWidth = 12;
  double widths = 0, widest = 0;
  for (const ModelUnit& unit : model.units()) {
    double parameters = 0;
    for (const ParameterId id : unit.parameters)
      parameters += static_cast<double>(element_count(model.parameters()[id.index]));
    const double width = std::sqrt(parameters / kParametersPerWidth);
    widths += width;
    widest = std::max(widest, width);
  }
  const auto bytes = [](double count) {
    constexpr double kMost = 0x1p61;  // more than any machine, and a sum of some of them is still a number
    return static_cast<std::uint64_t>(std::min(count, kMost));
  };
  return {bytes(kKeptBytes * widths * tokens_kept), bytes(kWorkingBytes * widest * micro_batch_tokens)};
}

TokenOperations operations_per_token(const Model& model) {
  double parameters = 0, trained = 0;
  for (const ParameterSpec& spec : model.parameters()) {
    const auto elements = static_cast<double>(element_count(spec));
    parameters += elements;
    if (spec.trainable) trained += elements;
  }
  return {.all = 6 * parameters + 2 * trained, .forward = 2 * parameters};
}

std::uint64_t assumed_layers(std::uint64_t parameters) {
  constexpr double kWidthPerLayer = 128;
  const double layers = std::cbrt(static_cast<double>(parameters) / (12 * kWidthPerLayer * kWidthPerLayer));
  return static_cast<std::uint64_t>(std::max(std::round(layers), 1.0));
}

}  // namespace hoist
