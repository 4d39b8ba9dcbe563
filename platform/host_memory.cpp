// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/platform/detail/mapping.hpp>
#include <hoist/platform/host_memory.hpp>

namespace hoist::platform {

HostMemory::HostMemory(const HostMemoryOptions& options)
    : mapping_(std::make_unique<detail::Mapping>(
          detail::MappingOptions{.bytes = options.bytes,
                                 .largest_pages = options.huge_pages ? PageKind::huge_reserved : PageKind::normal,
                                 .numa_node = options.numa_node,
                                 .touch_threads = options.touch_threads,
                                 .tier = "pinned",
                                 .key = "the pinned memory budget"})) {}

HostMemory::~HostMemory() = default;
HostMemory::HostMemory(HostMemory&&) noexcept = default;

std::span<std::byte> HostMemory::bytes() const { return mapping_ ? mapping_->bytes() : std::span<std::byte>(); }

PageKind HostMemory::page_kind() const { return mapping_ ? mapping_->page_kind() : PageKind::normal; }

std::vector<std::span<std::byte>> HostMemory::slices(std::uint64_t slice_bytes) const {
  std::vector<std::span<std::byte>> result;
  const std::span<std::byte> all = bytes();
  for (std::uint64_t at = 0; at < all.size(); at += slice_bytes) {
    result.push_back(all.subspan(at, std::min<std::uint64_t>(slice_bytes, all.size() - at)));
  }
  return result;
}

}  // namespace hoist::platform
