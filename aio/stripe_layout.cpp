// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <limits>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/aio/stripe_layout.hpp>
#include <hoist/core/error.hpp>

namespace hoist::aio {

namespace {

constexpr std::string_view kUnitPrefix = "stripe1 unit=";
constexpr std::string_view kWeightsPrefix = " weights=";

// Removes a word, or a number, from the front of `text`.
bool take_word(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

template <typename Number>
bool take_number(std::string_view& text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return true;
}

}  // namespace

StripeLayout::StripeLayout(std::uint64_t unit_bytes, std::vector<std::uint32_t> weights)
    : unit_bytes_(unit_bytes), weights_(std::move(weights)) {
  constexpr std::uint64_t kUnitMax = 1ull << 40;  // no product with a pattern's length overflows
  if (unit_bytes_ == 0 || unit_bytes_ > kUnitMax || unit_bytes_ % kBlockAlignment != 0)
    throw UsageError(
        fmt::format("the unit of a stripe must be a multiple of 4 KiB of at most 1 TiB, not {} bytes", unit_bytes_));
  if (weights_.empty() || weights_.size() > kDriveCountMax)
    throw UsageError(fmt::format("a file is striped over 1 to {} drives, not {}", kDriveCountMax, weights_.size()));
  for (const std::uint32_t weight : weights_) {
    if (weight == 0 || weight > kWeightMax)
      throw UsageError(fmt::format("the weight of a drive must be 1 to {}, not {}", kWeightMax, weight));
  }
  const std::uint32_t divisor =
      std::accumulate(weights_.begin(), weights_.end(), 0u, [](auto a, auto b) { return std::gcd(a, b); });
  for (std::uint32_t& weight : weights_) weight /= divisor;
  lay_pattern();
}

void StripeLayout::lay_pattern() {
  struct Turn {
    unsigned drive;
    std::uint32_t numerator;  // it stands at numerator / (2 * weight)
  };
  std::vector<Turn> turns;
  for (unsigned drive = 0; drive < drive_count(); ++drive) {
    for (std::uint32_t k = 0; k < weights_[drive]; ++k) turns.push_back({drive, 2 * k + 1});
  }
  std::stable_sort(turns.begin(), turns.end(), [&](const Turn& a, const Turn& b) {  // drives ascend in a tie
    return a.numerator * weights_[b.drive] < b.numerator * weights_[a.drive];
  });

  const std::size_t count = turns.size();
  pattern_.resize(count);
  slots_.resize(drive_count());
  before_.resize(drive_count() * (count + 1));
  for (std::size_t slot = 0; slot < count; ++slot) {
    const unsigned drive = turns[slot].drive;
    pattern_[slot].drive = drive;
    slots_[drive].push_back(static_cast<std::uint32_t>(slot));
    for (unsigned d = 0; d < drive_count(); ++d)
      before_[d * (count + 1) + slot + 1] = before_[d * (count + 1) + slot] + (d == drive ? 1 : 0);
  }
  for (std::size_t slot = 0; slot < count; ++slot) {
    std::uint32_t run = 1;
    while (run < count && pattern_[(slot + run) % count].drive == pattern_[slot].drive) ++run;
    pattern_[slot].run_units = run;
  }
}

StripeLayout::DriveOffset StripeLayout::place(std::uint64_t logical_offset_bytes) const {
  if (drive_count() == 1)
    return {0, logical_offset_bytes, std::numeric_limits<std::uint64_t>::max() - logical_offset_bytes};
  const std::uint64_t unit = logical_offset_bytes / unit_bytes_;
  const std::uint64_t within = logical_offset_bytes % unit_bytes_;
  const std::uint64_t slot = unit % pattern_.size();
  const unsigned drive = pattern_[slot].drive;
  const std::uint64_t drive_unit = unit / pattern_.size() * weights_[drive] + units_before(drive, slot);
  return {drive, drive_unit * unit_bytes_ + within, pattern_[slot].run_units * unit_bytes_ - within};
}

std::uint64_t StripeLayout::logical_offset(unsigned drive, std::uint64_t offset_bytes) const {
  const std::uint64_t drive_unit = offset_bytes / unit_bytes_;
  const std::uint64_t round = drive_unit / weights_[drive];
  const std::uint64_t slot = slots_[drive][drive_unit % weights_[drive]];
  return (round * pattern_.size() + slot) * unit_bytes_ + offset_bytes % unit_bytes_;
}

std::uint64_t StripeLayout::drive_bytes(unsigned drive, std::uint64_t logical_bytes) const {
  const std::uint64_t unit = logical_bytes / unit_bytes_;
  const std::uint64_t slot = unit % pattern_.size();
  const std::uint64_t whole_units = unit / pattern_.size() * weights_[drive] + units_before(drive, slot);
  return whole_units * unit_bytes_ + (pattern_[slot].drive == drive ? logical_bytes % unit_bytes_ : 0);
}

std::string StripeLayout::encode() const {
  return fmt::format("{}{}{}{}", kUnitPrefix, unit_bytes_, kWeightsPrefix, fmt::join(weights_, ","));
}

std::optional<StripeLayout> StripeLayout::decode(std::string_view text) {
  std::string_view rest = text;
  std::uint64_t unit_bytes = 0;
  if (!take_word(rest, kUnitPrefix) || !take_number(rest, unit_bytes) || !take_word(rest, kWeightsPrefix))
    return std::nullopt;
  std::vector<std::uint32_t> weights;
  do {
    if (!take_number(rest, weights.emplace_back())) return std::nullopt;
  } while (take_word(rest, ",") && weights.size() <= kDriveCountMax);
  try {
    StripeLayout layout(unit_bytes, std::move(weights));
    if (layout.encode() == text) return layout;  // else: leading zeros, a common divisor, something behind
  } catch (const UsageError&) {
  }
  return std::nullopt;
}

}  // namespace hoist::aio
