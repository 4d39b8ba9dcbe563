// SPDX-License-Identifier: Apache-2.0
// aio/stripe_layout.hpp - maps bytes of a logical file to drives and offsets. Arithmetic only.
//
// The file is cut into units. Drive d takes weight[d] of every sum(weights) units, spread evenly: a drive's k-th unit
// of the pattern stands at (2k + 1) / (2 * weight), the drives' units are sorted by that, and a tie goes to the lower
// drive. Weights 3,1 make the pattern 0 0 1 0. This order is part of the on-disk format and never changes.
//
// Threading  Constant.
// Main path  A range of the logical file is one range on each drive: [drive_bytes(d, begin), drive_bytes(d, end)).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <hoist/core/units.hpp>

namespace hoist::aio {

class StripeLayout {
 public:
  static constexpr std::uint32_t kWeightMax = 16;
  static constexpr unsigned kDriveCountMax = 64;

  // Weights are divided by their greatest common divisor, so that equal patterns are equal values.
  // Errors: UsageError unless `unit_bytes` is a positive multiple of 4 KiB and there are 1 to 64 weights of 1 to 16.
  StripeLayout(std::uint64_t unit_bytes, std::vector<std::uint32_t> weights);
  // Everything on one drive: logical and drive offsets are the same.
  static StripeLayout one_drive() { return {kMiB, {1}}; }

  std::uint64_t unit_bytes() const { return unit_bytes_; }
  const std::vector<std::uint32_t>& weights() const { return weights_; }
  unsigned drive_count() const { return static_cast<unsigned>(weights_.size()); }

  struct DriveOffset {
    unsigned drive = 0;
    std::uint64_t offset_bytes = 0;  // on that drive
    std::uint64_t run_bytes = 0;     // this many bytes are contiguous both in the logical file and there
  };
  DriveOffset place(std::uint64_t logical_offset_bytes) const;
  // The inverse. `place(logical_offset(d, o))` is drive d at offset o.
  std::uint64_t logical_offset(unsigned drive, std::uint64_t offset_bytes) const;
  // How many of the first `logical_bytes` bytes are on the drive: the space it needs, and the offset of a range on it.
  std::uint64_t drive_bytes(unsigned drive, std::uint64_t logical_bytes) const;

  // "stripe1 unit=1048576 weights=3,1", for a store's superblock. decode() returns nullopt unless `text` is exactly
  // what encode() writes.
  std::string encode() const;
  static std::optional<StripeLayout> decode(std::string_view text);

  friend bool operator==(const StripeLayout& a, const StripeLayout& b) {
    return a.unit_bytes_ == b.unit_bytes_ && a.weights_ == b.weights_;  // the rest follows from these
  }

 private:
  struct Slot {
    unsigned drive = 0;
    std::uint32_t run_units = 0;  // from here on, around the end of the pattern, on the same drive
  };
  void lay_pattern();
  std::uint64_t units_before(unsigned drive, std::uint64_t slot) const {
    return before_[drive * (pattern_.size() + 1) + slot];
  }

  std::uint64_t unit_bytes_;
  std::vector<std::uint32_t> weights_;
  std::vector<Slot> pattern_;
  std::vector<std::uint32_t> before_;              // [drive, slot]: the drive's units in earlier slots
  std::vector<std::vector<std::uint32_t>> slots_;  // [drive]: its slots, ascending
};

}  // namespace hoist::aio
