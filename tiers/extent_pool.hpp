// SPDX-License-Identifier: Apache-2.0
// tiers/extent_pool.hpp - assigns pieces of the data file to records, and knows the free ones.
//
// Extents are cut once, from the list of record lengths alone: first one extent per record in record order, then the
// second ones in the same order. Extents of equal length are interchangeable, so the pool searches by length and takes
// the lowest free one; records that are rewritten in one order lie in that order. An extent that a named checkpoint
// shares with the present step has two holders, and is free when both have released it.
//
// Threading  The owner serialises calls.
// Memory     Everything is reserved at construction.
// Errors     None: there is always a free extent for a record that holds fewer than its copies (see take()).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace hoist::tiers {

inline constexpr std::uint32_t kNoExtent = UINT32_MAX;  // of a record without bytes, or not written yet

struct Extent {
  std::uint64_t offset_bytes = 0;  // in the data file
  std::uint64_t length_bytes = 0;
};

class ExtentPool {
 public:
  // Every extent is free. `copies` extents for each record; a record of no bytes has extents of no bytes.
  // The first copies lie where they would with fewer.
  ExtentPool(std::span<const std::uint64_t> record_bytes, std::uint32_t copies);

  std::uint32_t extent_count() const { return static_cast<std::uint32_t>(extents_.size()); }
  const Extent& extent(std::uint32_t index) const { return extents_[index]; }
  // The extent that holds this byte of the data file. Pre: offset_bytes < data_bytes().
  std::uint32_t extent_at(std::uint64_t offset_bytes) const;
  // Length of the data file.
  std::uint64_t data_bytes() const { return data_bytes_; }
  // The memory of a pool of such records, without making it.
  static std::uint64_t memory_bytes(std::size_t record_count, std::size_t class_count, std::uint32_t copies);

  // The lowest free extent of exactly that length.
  // Pre: no record of that length holds `copies` extents already.
  std::uint32_t take(std::uint64_t length_bytes);
  void give_back(std::uint32_t index);  // by one of its holders
  bool is_free(std::uint32_t index) const { return holders_[index] == 0; }
  // One more holder of each, free or not; kNoExtent is skipped. Pre: check() found nothing.
  void hold(std::span<const std::uint32_t> used);

  // Makes exactly the extents `used` (one for each record; kNoExtent where the record has no bytes) taken and all
  // others free. Returns what check() says; unless that is empty, the pool is unchanged.
  [[nodiscard]] std::string adopt(std::span<const std::uint32_t> used, std::span<const std::uint64_t> record_bytes);
  // The problem with them as the extents of all records: an unknown extent, one used twice, or one of another length
  // than the record's. Empty if there is none.
  std::string check(std::span<const std::uint32_t> used, std::span<const std::uint64_t> record_bytes) const;

 private:
  struct LengthClass {
    std::uint64_t length_bytes = 0;
    std::vector<std::uint32_t> free;  // a heap, lowest index first
  };
  LengthClass& length_class(std::uint64_t length_bytes);

  std::vector<Extent> extents_;
  std::vector<std::uint8_t> holders_;  // of each extent
  std::vector<LengthClass> classes_;   // by length
  std::uint64_t data_bytes_ = 0;
};

}  // namespace hoist::tiers
