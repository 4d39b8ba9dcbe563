// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/extent_pool.hpp>

namespace hoist::tiers {

ExtentPool::ExtentPool(std::span<const std::uint64_t> record_bytes, std::uint32_t copies) {
  HOIST_ASSERT(record_bytes.size() * copies < kNoExtent, "{} records, {} extents each", record_bytes.size(), copies);
  std::vector<std::uint64_t> lengths(record_bytes.begin(), record_bytes.end());
  std::sort(lengths.begin(), lengths.end());
  for (auto at = lengths.begin(); at != lengths.end();) {
    const auto end = std::upper_bound(at, lengths.end(), *at);
    HOIST_ASSERT(*at % kBlockAlignment == 0, "a record of {} bytes", *at);
    classes_.push_back({*at, {}});
    classes_.back().free.reserve(static_cast<std::size_t>(end - at) * copies);
    at = end;
  }
  extents_.reserve(record_bytes.size() * copies);
  holders_.assign(record_bytes.size() * copies, 0);
  for (std::uint32_t copy = 0; copy < copies; ++copy) {
    for (const std::uint64_t length_bytes : record_bytes) {
      // Ascending indices make a heap as they are.
      length_class(length_bytes).free.push_back(extent_count());
      extents_.push_back({data_bytes_, length_bytes});
      data_bytes_ += length_bytes;
    }
  }
}

std::uint64_t ExtentPool::memory_bytes(std::size_t record_count, std::size_t class_count, std::uint32_t copies) {
  const std::uint64_t extents = record_count * copies;
  return extents * (sizeof(Extent) + sizeof(std::uint32_t) + sizeof(std::uint8_t)) + class_count * sizeof(LengthClass);
}

ExtentPool::LengthClass& ExtentPool::length_class(std::uint64_t length_bytes) {
  const auto found = std::lower_bound(classes_.begin(), classes_.end(), length_bytes,
                                      [](const LengthClass& c, std::uint64_t bytes) { return c.length_bytes < bytes; });
  HOIST_ASSERT(found != classes_.end() && found->length_bytes == length_bytes, "no extent has {} bytes", length_bytes);
  return *found;
}

std::uint32_t ExtentPool::extent_at(std::uint64_t offset_bytes) const {
  HOIST_ASSERT(offset_bytes < data_bytes_, "byte {} of {}", offset_bytes, data_bytes_);
  // An extent without bytes begins where the next one does, and comes before it.
  const auto next = std::ranges::upper_bound(extents_, offset_bytes, {}, &Extent::offset_bytes);
  return static_cast<std::uint32_t>(next - extents_.begin()) - 1;
}

std::uint32_t ExtentPool::take(std::uint64_t length_bytes) {
  std::vector<std::uint32_t>& heap = length_class(length_bytes).free;
  HOIST_ASSERT(!heap.empty(), "every extent of {} bytes is in use", length_bytes);
  std::pop_heap(heap.begin(), heap.end(), std::greater<>());
  const std::uint32_t index = heap.back();
  heap.pop_back();
  holders_[index] = 1;
  return index;
}

void ExtentPool::give_back(std::uint32_t index) {
  HOIST_ASSERT(index < extent_count() && !is_free(index), "extent {} of {} is not in use", index, extent_count());
  if (--holders_[index] > 0) return;
  std::vector<std::uint32_t>& heap = length_class(extents_[index].length_bytes).free;
  heap.push_back(index);
  std::push_heap(heap.begin(), heap.end(), std::greater<>());
}

void ExtentPool::hold(std::span<const std::uint32_t> used) {
  for (const std::uint32_t index : used) {
    if (index == kNoExtent) continue;
    if (holders_[index]++ > 0) continue;
    std::vector<std::uint32_t>& heap = length_class(extents_[index].length_bytes).free;
    heap.erase(std::find(heap.begin(), heap.end(), index));
    std::make_heap(heap.begin(), heap.end(), std::greater<>());
  }
}

std::string ExtentPool::check(std::span<const std::uint32_t> used, std::span<const std::uint64_t> record_bytes) const {
  HOIST_ASSERT(used.size() == record_bytes.size(), "{} extents for {} records", used.size(), record_bytes.size());
  std::vector<bool> free(extents_.size(), true);
  for (std::size_t record = 0; record < used.size(); ++record) {
    const std::uint32_t index = used[record];
    if (index == kNoExtent && record_bytes[record] == 0) continue;
    if (index >= extents_.size())
      return fmt::format("record {} lies in extent {} of {}", record, index, extents_.size());
    if (extents_[index].length_bytes != record_bytes[record])
      return fmt::format("record {} of {} bytes lies in extent {} of {} bytes", record, record_bytes[record], index,
                         extents_[index].length_bytes);
    if (!free[index]) return fmt::format("extent {} holds two records", index);
    free[index] = false;
  }
  return {};
}

std::string ExtentPool::adopt(std::span<const std::uint32_t> used, std::span<const std::uint64_t> record_bytes) {
  if (std::string problem = check(used, record_bytes); !problem.empty()) return problem;
  std::fill(holders_.begin(), holders_.end(), std::uint8_t{0});
  for (const std::uint32_t index : used)
    if (index != kNoExtent) holders_[index] = 1;
  for (LengthClass& c : classes_) c.free.clear();
  for (std::uint32_t index = 0; index < extent_count(); ++index)
    if (is_free(index)) length_class(extents_[index].length_bytes).free.push_back(index);
  return {};
}

}  // namespace hoist::tiers
