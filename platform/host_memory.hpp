// SPDX-License-Identifier: Apache-2.0
// platform/host_memory.hpp - one large block of host memory for transfers: huge pages, chosen NUMA nodes, touched in
// parallel.
//
// With 4 KiB pages a 1 MiB transfer is 256 segments, more than many drives take in one request, so it is split; with
// huge pages it is one. Tries reserved huge pages first, then transparent ones, then ordinary pages; `page_kind()`
// returns the kind.
//
// Threading  Construction uses several threads, and logs how far they are if it takes more than a second; afterwards
//            the object is constant.
// Memory     Allocated once, returned at destruction. A forked child does not have it: a fork would copy every page
//            that a device or a ring has pinned. 0 bytes give an empty block.
// Errors     BudgetError if the machine lacks the memory; a NUMA node that does not exist is a warning, not an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace hoist::platform {

namespace detail {
class Mapping;
}

enum class PageKind : std::uint8_t { huge_reserved, huge_transparent, normal };

// A piece of a block that is on other nodes than the rest. Its edges move inwards to whole pages.
struct HostMemoryPart {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::vector<int> numa_nodes{};  // as below
};

struct HostMemoryOptions {
  std::uint64_t bytes = 0;  // rounded up to whole pages of the kind obtained
  bool huge_pages = true;   // false: ordinary pages, for tests
  // NUMA nodes, OS numbers. One: from it as long as it has memory, then from others. Several: in turn from each. None:
  // wherever the touching threads run.
  std::vector<int> numa_nodes{};
  // Processors, OS numbers: threads on them touch the memory first. Empty: those of `numa_nodes`, or all, as far as the
  // process may use them.
  std::vector<int> touch_cpus{};
  std::vector<HostMemoryPart> parts{};  // in ascending order; processors of their nodes touch them
};

class HostMemory {
 public:
  explicit HostMemory(const HostMemoryOptions& options);
  ~HostMemory();
  HostMemory(HostMemory&& other) noexcept;
  HostMemory& operator=(HostMemory&&) = delete;
  HostMemory(const HostMemory&) = delete;

  // Exactly the requested bytes.
  std::span<std::byte> bytes() const;
  PageKind page_kind() const;
  static constexpr std::uint64_t kSliceBytes = std::uint64_t{1} << 30;
  // The same block in pieces of at most 1 GiB, each of which io_uring registers as one buffer.
  std::vector<std::span<std::byte>> slices(std::uint64_t slice_bytes = kSliceBytes) const;

 private:
  std::unique_ptr<detail::Mapping> mapping_;  // null once moved from
};

// The NUMA nodes, OS numbers, of up to `count` pages that are spread evenly over touched memory. Empty if the kernel
// does not say.
std::vector<int> nodes_of_pages(std::span<const std::byte> bytes, std::size_t count);

}  // namespace hoist::platform
