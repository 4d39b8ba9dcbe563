// SPDX-License-Identifier: Apache-2.0
// platform/detail/mapping.hpp - anonymous memory from the kernel, on the largest available pages.
//
// Memory     Mapped, bound and touched at construction; unmapped at destruction.
// Errors     BudgetError if the machine lacks the memory; a refused NUMA binding is a warning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <hoist/platform/host_memory.hpp>

namespace hoist::platform::detail {

struct MappingOptions {
  std::uint64_t bytes = 0;
  PageKind largest_pages = PageKind::huge_transparent;  // the first kind tried; falls back towards `normal`
  int numa_node = -1;                                   // negative: not bound
  unsigned touch_threads = 1;
  // For the BudgetError: "device" or "pinned", and the setting to lower.
  std::string tier;
  std::string key;
};

class Mapping {
 public:
  explicit Mapping(const MappingOptions& options);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;
  Mapping(const Mapping&) = delete;

  std::span<std::byte> bytes() const { return {data_, static_cast<std::size_t>(bytes_)}; }
  // The page kind that backs it now. Cost: with transparent huge pages, a walk through /proc/self/smaps.
  PageKind page_kind() const;

 private:
  // False, and nothing is mapped, if the kernel has no pages of this kind.
  bool try_map(PageKind kind, const MappingOptions& options);
  void unmap() noexcept;

  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;                // asked for
  std::uint64_t mapped_bytes_ = 0;         // rounded up to whole pages
  PageKind page_kind_ = PageKind::normal;  // as requested; the kernel may give fewer transparent huge pages
  int failure_ = 0;                        // errno of the last refusal
};

// Memory that is available without swapping or a kill: the kernel's estimate, limited by the memory control groups of
// this process.
std::uint64_t available_memory_bytes();

}  // namespace hoist::platform::detail
