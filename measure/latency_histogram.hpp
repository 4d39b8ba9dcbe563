// SPDX-License-Identifier: Apache-2.0
// measure/latency_histogram.hpp - many latencies in fixed memory, and their percentiles.
//
// Buckets are linear within each power of two (64 of them), so a percentile is off by at most 1.6 % of its value,
// whatever that value is. The maximum is exact.
//
// Threading  One thread at a time.
// Memory     29 KiB, never more.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <hoist/core/clock.hpp>

namespace hoist::measure {

class LatencyHistogram {
 public:
  void record(Nanoseconds latency) noexcept;
  void add(const LatencyHistogram& other) noexcept;

  std::uint64_t count() const { return count_; }
  Nanoseconds max() const { return max_; }
  // The latency that `share` (0 to 1) of all transfers did not exceed; 0 when there are none.
  Nanoseconds percentile(double share) const;

 private:
  static constexpr unsigned kLinearBits = 6;  // 64 buckets in each power of two
  static constexpr std::uint64_t kLinear = 1ull << kLinearBits;
  static constexpr std::size_t kBuckets = (64 - kLinearBits) * kLinear;

  static std::size_t bucket_of(std::uint64_t nanoseconds);
  static std::uint64_t middle_of(std::size_t bucket);

  std::array<std::uint64_t, kBuckets> counts_{};
  std::uint64_t count_ = 0;
  Nanoseconds max_{0};
};

}  // namespace hoist::measure
