// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <sys/syscall.h>
#include <unistd.h>

#include <hoist/platform/detail/mapping.hpp>
#include <hoist/platform/host_memory.hpp>

namespace hoist::platform {

HostMemory::HostMemory(const HostMemoryOptions& options)
    : mapping_(std::make_unique<detail::Mapping>(
          detail::MappingOptions{.memory = options,
                                 .largest_pages = options.huge_pages ? PageKind::huge_reserved : PageKind::normal,
                                 .tier = "pinned",
                                 .key = "the pinned memory budget"})) {}

HostMemory::~HostMemory() = default;
HostMemory::HostMemory(HostMemory&&) noexcept = default;

std::span<std::byte> HostMemory::bytes() const { return mapping_ ? mapping_->bytes() : std::span<std::byte>(); }

PageKind HostMemory::page_kind() const { return mapping_ ? mapping_->page_kind() : PageKind::normal; }

std::vector<int> nodes_of_pages(std::span<const std::byte> bytes, std::size_t count) {
  const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t all = bytes.size() / page_bytes, pages = std::min(all, count);
  std::vector<void*> addresses;
  for (std::size_t i = 0; i < pages; ++i) {
    // Anywhere in its part of the block, as pages may alternate between nodes.
    const std::size_t begin = i * all / pages, end = (i + 1) * all / pages;
    const std::size_t page = begin + i * 7919 % (end - begin);
    addresses.push_back(const_cast<std::byte*>(bytes.data()) + page * page_bytes);
  }
  std::vector<int> nodes(pages, -1);
  // Without nodes to move them to, it only reports.
  if (::syscall(SYS_move_pages, 0, pages, addresses.data(), nullptr, nodes.data(), 0) != 0) return {};
  std::erase_if(nodes, [](int node) { return node < 0; });
  return nodes;
}

std::vector<std::span<std::byte>> HostMemory::slices(std::uint64_t slice_bytes) const {
  std::vector<std::span<std::byte>> result;
  const std::span<std::byte> all = bytes();
  for (std::uint64_t at = 0; at < all.size(); at += slice_bytes) {
    result.push_back(all.subspan(at, std::min<std::uint64_t>(slice_bytes, all.size() - at)));
  }
  return result;
}

}  // namespace hoist::platform
