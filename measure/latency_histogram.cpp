// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>

#include <hoist/measure/latency_histogram.hpp>

namespace hoist::measure {

// Values below 64 have a bucket each. Above, a value with its highest bit at position p falls into one of the 64
// buckets of [2^p, 2^(p+1)), by the six bits below the highest.
std::size_t LatencyHistogram::bucket_of(std::uint64_t nanoseconds) {
  if (nanoseconds < kLinear) return nanoseconds;
  const auto highest = static_cast<unsigned>(std::bit_width(nanoseconds)) - 1;
  const unsigned group = highest - kLinearBits;
  return (group + 1) * kLinear + ((nanoseconds >> group) - kLinear);
}

std::uint64_t LatencyHistogram::middle_of(std::size_t bucket) {
  if (bucket < kLinear) return bucket;
  const std::uint64_t group = bucket / kLinear - 1;
  const std::uint64_t low = (kLinear + bucket % kLinear) << group;
  return low + (1ull << group) / 2;
}

void LatencyHistogram::record(Nanoseconds latency) noexcept {
  const auto value = static_cast<std::uint64_t>(std::max<Nanoseconds::rep>(0, latency.count()));
  ++counts_[bucket_of(value)];
  ++count_;
  max_ = std::max(max_, latency);
}

void LatencyHistogram::add(const LatencyHistogram& other) noexcept {
  for (std::size_t i = 0; i < kBuckets; ++i) counts_[i] += other.counts_[i];
  count_ += other.count_;
  max_ = std::max(max_, other.max_);
}

Nanoseconds LatencyHistogram::percentile(double share) const {
  if (count_ == 0) return Nanoseconds::zero();
  const auto wanted = static_cast<std::uint64_t>(std::ceil(std::clamp(share, 0.0, 1.0) * static_cast<double>(count_)));
  if (wanted >= count_) return max_;
  std::uint64_t seen = 0;
  for (std::size_t i = 0; i < kBuckets; ++i) {
    seen += counts_[i];
    if (seen >= std::max<std::uint64_t>(1, wanted)) return std::min(max_, Nanoseconds(middle_of(i)));
  }
  return max_;
}

}  // namespace hoist::measure
