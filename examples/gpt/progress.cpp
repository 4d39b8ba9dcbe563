// SPDX-License-Identifier: Apache-2.0
#include "progress.hpp"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include <hoist/core/units.hpp>

namespace hoist::gpt {
namespace {

constexpr std::size_t kRecentSteps = 10;  // averaged for speed and time left

std::string fill(const char* tier, const TierUse& use) {
  if (use.budget_bytes == 0) return {};
  return fmt::format("  {} {}/{}", tier, format_bytes(use.held_bytes), format_bytes(use.budget_bytes));
}

std::string duration(double seconds) {
  const auto whole = static_cast<std::uint64_t>(std::max(0.0, seconds) + 0.5);
  if (whole >= 3600) return fmt::format("{}h{:02}m", whole / 3600, whole % 3600 / 60);
  return whole >= 60 ? fmt::format("{}m{:02}s", whole / 60, whole % 60) : fmt::format("{}s", whole);
}

}  // namespace

double Progress::recent_seconds() const {
  if (recent_.empty()) return 0;
  return std::accumulate(recent_.begin(), recent_.end(), 0.0) / static_cast<double>(recent_.size());
}

std::string Progress::line(const StepRecord& step, const Tiers& tiers) const {
  const double seconds = recent_.empty() ? step.seconds : recent_seconds();
  const double speed = seconds > 0 ? static_cast<double>(options_.tokens_per_step) / seconds : 0;
  const double left = seconds * static_cast<double>(options_.last_step - std::min(step.step, options_.last_step));
  return fmt::format("step {}/{}  loss {:.3f}  {:.0f} tokens/s{}{}{}  {} left", step.step, options_.last_step,
                     step.loss, speed, fill("device", tiers.device), fill("pinned", tiers.pinned),
                     fill("NVMe", tiers.nvme), duration(left));
}

void Progress::show(const StepRecord& step, const Tiers& tiers, TimePoint now) {
  recent_.push_back(step.seconds);
  if (recent_.size() > kRecentSteps) recent_.pop_front();
  const bool edge = step.step == options_.first_step + 1 || step.step == options_.last_step;
  const std::chrono::seconds interval(options_.rewrite ? 1 : 5);
  if (!edge && now - shown_ < interval) return;
  shown_ = now;
  const std::string text = line(step, tiers);
  if (options_.rewrite) {
    std::fputs(fmt::format("\r{:<{}}", text, width_).c_str(), options_.out);
    width_ = text.size();
  } else {
    std::fputs((text + "\n").c_str(), options_.out);
  }
  std::fflush(options_.out);
}

void Progress::finish() {
  if (width_ > 0) std::fputs("\n", options_.out);
  width_ = 0;
  std::fflush(options_.out);
}

}  // namespace hoist::gpt
