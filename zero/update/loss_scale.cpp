// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/update/loss_scale.hpp>

namespace hoist {

namespace {

constexpr double kFactor = 2;

std::string problem_of_scale(double scale) {
  if (scale > 0 && scale <= kLossScaleMax) return {};
  return fmt::format("{} is not a loss scale: it must be above 0 and at most 2^64", scale);
}

void refuse(bool wrong, const char* key, const std::string& problem) {
  if (wrong) throw ConfigError(key, problem);
}

}  // namespace

void check(const LossScaleOptions& options) {
  const auto refuse_scale = [](const char* key, double scale) {
    const std::string problem = problem_of_scale(scale);
    refuse(!problem.empty(), key, problem);
  };
  refuse_scale("fp16.loss_scale", options.scale);
  if (!options.dynamic) return;
  refuse(options.window < 1, "fp16.loss_scale_window", "is 0; a scale that doubles at every step has no meaning");
  refuse(options.hysteresis < 1, "fp16.hysteresis", "is 0, with which the scale would never be lowered; at least 1");
  refuse_scale("fp16.min_loss_scale", options.scale_min);
  refuse(options.scale < options.scale_min, "fp16.initial_scale_power",
         fmt::format("the first scale {} is below min_loss_scale {}", options.scale, options.scale_min));
}

LossScaler::LossScaler(const LossScaleOptions& options)
    : options_(options),
      state_{.scale = static_cast<double>(static_cast<float>(options.scale)), .hysteresis_left = options.hysteresis} {}

std::string LossScaler::problem_of(const State& state) {
  if (std::string problem = problem_of_scale(state.scale); !problem.empty()) return problem;
  return state.hysteresis_left < 1 ? "no overflow is left until the loss scale is lowered: at least 1" : "";
}

void LossScaler::restore(const State& state) {
  if (!options_.dynamic) return;
  state_ = state;
  state_.scale = std::max(state_.scale, options_.scale_min);
  state_.hysteresis_left = std::min(state_.hysteresis_left, options_.hysteresis);
}

void LossScaler::update(bool overflow) {
  if (!options_.dynamic) return;
  if (overflow) {
    if (options_.hysteresis == 1 || state_.hysteresis_left == 1) {
      if (state_.scale == options_.scale_min) {
        throw Error(
            fmt::format("a gradient is not finite at the smallest loss scale, {}, so that it cannot be lowered any "
                        "more: lower the learning rate, look for a loss that is not finite, or lower "
                        "fp16.min_loss_scale, and continue from the last commit",
                        options_.scale_min));
      }
      state_.scale = std::max(state_.scale / kFactor, options_.scale_min);
    } else {
      --state_.hysteresis_left;
    }
    state_.steps_without_overflow = 0;
    return;
  }
  if (options_.consecutive_hysteresis) state_.hysteresis_left = options_.hysteresis;
  // The step that completes the window is the one after it, as in DeepSpeed.
  if (state_.steps_without_overflow > 0 && state_.steps_without_overflow % options_.window == 0) {
    state_.hysteresis_left = options_.hysteresis;
    state_.scale = std::min(state_.scale * kFactor, kLossScaleMax);
  }
  ++state_.steps_without_overflow;
}

// --- in a commit -----------------------------------------------------------------------------------------------------

namespace {

static_assert(std::endian::native == std::endian::little, "commits are little-endian");
constexpr std::array<char, 8> kMark{'h', 'o', 'i', 's', 't', 'L', 'S', '1'};

// Every byte has its place; docs/format.md.
struct Stored {
  std::array<char, 8> mark{};
  double scale = 0;
  std::uint64_t steps_without_overflow = 0;
  std::uint32_t hysteresis_left = 0;
  std::uint32_t zero = 0;
};

}  // namespace

void store_loss_scaler(const LossScaler::State& state, std::span<std::byte, kLossScalerBytes> target) {
  const Stored stored{.mark = kMark,
                      .scale = state.scale,
                      .steps_without_overflow = state.steps_without_overflow,
                      .hysteresis_left = state.hysteresis_left};
  std::ranges::fill(target, std::byte{0});
  std::memcpy(target.data(), &stored, sizeof(stored));
}

std::optional<LossScaler::State> load_loss_scaler(std::span<const std::byte, kLossScalerBytes> source) {
  Stored stored;
  std::memcpy(&stored, source.data(), sizeof(stored));
  const LossScaler::State state{.scale = stored.scale,
                                .steps_without_overflow = stored.steps_without_overflow,
                                .hysteresis_left = stored.hysteresis_left};
  return stored.mark == kMark && LossScaler::problem_of(state).empty() ? std::optional(state) : std::nullopt;
}

}  // namespace hoist
