// SPDX-License-Identifier: Apache-2.0
// platform/detail/mapping.hpp - anonymous memory from the kernel, on the largest available pages.
//
// Memory     Mapped and bound at construction, and touched there or by commit_up_to(); unmapped at destruction. A
//            forked process does not have the mapping, and there the destructor does nothing.
// Errors     BudgetError if the machine lacks the memory; a NUMA node that does not exist is a warning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <hoist/core/owning_process.hpp>
#include <hoist/platform/host_memory.hpp>

namespace hoist::platform::detail {

struct MappingOptions {
  HostMemoryOptions memory{};                           // `largest_pages` replaces its huge_pages
  PageKind largest_pages = PageKind::huge_transparent;  // the first kind tried; falls back towards `normal`
  bool touch = true;                                    // false: commit_up_to() does
  // For the BudgetError: "device" or "pinned", and the setting to lower.
  std::string tier;
  std::string key;
};

class Mapping {
 public:
  explicit Mapping(const MappingOptions& options);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<std::byte> bytes() const { return {data_, static_cast<std::size_t>(bytes_)}; }
  // Touches the first `end` bytes, as far as they have not been, and writes `value` to the new ones.
  // Errors: BudgetError if the machine lacks the memory.
  void commit_up_to(std::uint64_t end, std::optional<std::byte> value = {});
  std::span<std::byte> committed() const { return bytes().first(committed_bytes_); }
  // The page kind that backs it now. Cost: with transparent huge pages, a walk through /proc/self/smaps.
  PageKind page_kind() const;

 private:
  // False, and nothing is mapped, if the kernel has no pages of this kind.
  bool try_map(PageKind kind);
  // Pages that are placed and touched in the same way.
  struct Piece {
    std::span<std::byte> bytes;
    std::vector<int> numa_nodes;
    std::vector<int> cpus;
  };
  std::vector<Piece> pieces(std::span<std::byte> whole, PageKind kind) const;
  int touch(const Piece& piece, PageKind kind, std::optional<std::byte> value) const;  // 0, or the errno
  void unmap() noexcept;
  [[noreturn]] void refuse(std::uint64_t bytes, std::uint64_t available, const char* what) const;

  OwningProcess process_;
  MappingOptions options_;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;                // asked for
  std::uint64_t mapped_bytes_ = 0;         // rounded up to whole pages
  std::uint64_t committed_bytes_ = 0;      // from the start
  PageKind page_kind_ = PageKind::normal;  // as requested; the kernel may give fewer transparent huge pages
  int failure_ = 0;                        // errno of the last refusal
};

}  // namespace hoist::platform::detail
