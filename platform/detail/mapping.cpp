// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>
#include <vector>

#include <fmt/ranges.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/detail/first_touch.hpp>
#include <hoist/platform/detail/mapping.hpp>
#include <hoist/platform/free_memory.hpp>

#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << 26)
#endif
namespace hoist::platform::detail {

namespace {

constexpr std::uint64_t kHugePageBytes = 2 * kMiB;

std::uint64_t small_page_bytes() {
  static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::uint64_t page_bytes(PageKind kind) { return kind == PageKind::normal ? small_page_bytes() : kHugePageBytes; }

void* map_anonymous(std::uint64_t bytes, int extra_flags) {
  return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | extra_flags, -1, 0);
}

// Maps `bytes` at a multiple of `alignment` by mapping too much and unmapping the edges.
std::byte* map_aligned(std::uint64_t bytes, std::uint64_t alignment) {
  const std::uint64_t slack = alignment - small_page_bytes();
  void* mapped = map_anonymous(bytes + slack, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* start = static_cast<std::byte*>(mapped);
  const auto address = reinterpret_cast<std::uintptr_t>(start);
  const std::uint64_t head = round_up(address, alignment) - address;
  if (head > 0) ::munmap(start, head);
  if (slack > head) ::munmap(start + head + bytes, slack - head);
  return start + head;
}

// Pages that are touched from now on come from these nodes, while they have any; nothing is refused for lack of them.
// False if there are no such nodes.
bool prefer_nodes(std::span<std::byte> bytes, const std::vector<int>& nodes) {
  constexpr std::size_t kNodesMax = 1024, kWordBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kNodesMax / kWordBits> mask{};
  long result = -1;
  errno = EINVAL;
  if (std::ranges::all_of(nodes, [](int node) { return node >= 0 && static_cast<std::size_t>(node) < kNodesMax; })) {
    for (const int node : nodes) {
      const auto bit = static_cast<std::size_t>(node);
      mask[bit / kWordBits] |= 1ul << bit % kWordBits;
    }
    const int mode = nodes.size() == 1 ? MPOL_PREFERRED : MPOL_INTERLEAVE;
    result = ::syscall(SYS_mbind, bytes.data(), bytes.size(), mode, mask.data(), kNodesMax, 0u);
  }
  if (result != 0) {
    log_warning("memory of {} could not be placed on NUMA node {} ({}); it is placed where the touching threads run",
                format_bytes(bytes.size()), fmt::join(nodes, ", "), std::strerror(errno));
  }
  return result == 0;
}

// Says where it came from instead, if a node was short of memory.
void report_other_nodes(std::span<const std::byte> bytes, const std::vector<int>& nodes) {
  const std::vector<int> found = nodes_of_pages(bytes, 256);
  const auto elsewhere =
      std::ranges::count_if(found, [&](int node) { return std::ranges::find(nodes, node) == nodes.end(); });
  if (elsewhere == 0) return;
  log_warning("about {} % of a block of {} came from other NUMA nodes than {}, which has too little free memory",
              100 * static_cast<std::size_t>(elsewhere) / found.size(), format_bytes(bytes.size()),
              fmt::join(nodes, ", "));
}

// Whether the kernel backed the mapping at `address` with huge pages: it accepts the advice and may ignore it.
bool has_transparent_pages(const std::byte* address, std::uint64_t bytes) {
  const auto target = reinterpret_cast<std::uintptr_t>(address);
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(smaps, line)) {
    std::istringstream words(line);
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    char dash = 0;
    if (words >> std::hex >> begin >> dash >> end && dash == '-') {
      inside = begin <= target && target < end;
      continue;
    }
    constexpr std::string_view kField = "AnonHugePages:";
    if (!inside || !line.starts_with(kField)) continue;
    return std::stoull(line.substr(kField.size())) * kKiB * 2 >= bytes;
  }
  return false;
}

}  // namespace

Mapping::Mapping(const MappingOptions& options) : options_(options), bytes_(options.memory.bytes) {
  if (bytes_ == 0) return;
  const char* const what = "the configured budget";
  if (bytes_ > std::numeric_limits<std::uint64_t>::max() - kHugePageBytes)  // no number of whole pages
    refuse(bytes_, host_memory().free_bytes, what);
  if (options.largest_pages == PageKind::huge_reserved && try_map(PageKind::huge_reserved)) return;
  failure_ = 0;  // a machine without reserved pages has refused nothing
  // Reserved pages are already set apart; the kinds below compete for the rest.
  const std::uint64_t available = host_memory().free_bytes;
  if (!options.touch || bytes_ <= available) {
    if (options.largest_pages != PageKind::normal && try_map(PageKind::huge_transparent)) return;
    if (try_map(PageKind::normal)) return;
  }
  refuse(bytes_, available, what);
}

void Mapping::refuse(std::uint64_t bytes, std::uint64_t available, const char* what) const {
  const std::string refusal =
      failure_ == 0 ? "" : fmt::format(" (the kernel: {}; see ulimit -v and -d)", errno_text(failure_));
  throw BudgetError::machine({.tier = options_.tier,
                              .have_bytes = std::min(available, bytes),
                              .need_bytes = bytes,
                              .key = options_.key,
                              .detail = what + refusal});
}

std::vector<Mapping::Piece> Mapping::pieces(std::span<std::byte> whole, PageKind kind) const {
  const std::uint64_t page = kind == PageKind::huge_reserved ? kHugePageBytes : small_page_bytes();
  std::vector<Piece> all;
  std::uint64_t done = 0;
  const auto add_rest = [&](std::uint64_t end) {
    if (end > done)
      all.push_back({whole.subspan(done, end - done), options_.memory.numa_nodes, options_.memory.touch_cpus});
  };
  for (const HostMemoryPart& part : options_.memory.parts) {
    const std::uint64_t begin = round_up(part.offset, page), end = round_down(part.offset + part.bytes, page);
    HOIST_ASSERT(part.offset >= done && part.offset + part.bytes <= bytes_, "{} bytes at {} of {}, behind {}",
                 part.bytes, part.offset, bytes_, done);
    if (end <= begin) continue;
    add_rest(begin);
    all.push_back({whole.subspan(begin, end - begin), part.numa_nodes, {}});
    done = end;
  }
  add_rest(whole.size());
  return all;
}

int Mapping::touch(const Piece& piece, PageKind kind, std::optional<std::byte> value) const {
  FirstTouch how{.cpus = piece.cpus, .value = value, .what = options_.tier + " memory"};
  if (how.cpus.empty() && !piece.numa_nodes.empty()) how.cpus = usable_processors(piece.numa_nodes);
  return touch_first(piece.bytes, kind, how);
}

void Mapping::commit_up_to(std::uint64_t end, std::optional<std::byte> value) {
  if (end <= committed_bytes_) return;
  const std::span<std::byte> fresh = bytes().subspan(committed_bytes_, end - committed_bytes_);
  const std::uint64_t available = host_memory().free_bytes;
  constexpr const char* kWhat = "what is taken of the budget now";
  if (fresh.size() > available) refuse(fresh.size(), available, kWhat);
  failure_ = touch({fresh, options_.memory.numa_nodes, options_.memory.touch_cpus}, PageKind::normal, value);
  if (failure_ != 0) refuse(fresh.size(), available, kWhat);
  committed_bytes_ = end;
}

bool Mapping::try_map(PageKind kind) {
  mapped_bytes_ = round_up(bytes_, page_bytes(kind));
  if (kind == PageKind::huge_transparent) {
    data_ = map_aligned(mapped_bytes_, kHugePageBytes);
  } else {
    void* mapped = map_anonymous(mapped_bytes_, kind == PageKind::huge_reserved ? MAP_HUGETLB | MAP_HUGE_2MB : 0);
    data_ = mapped == MAP_FAILED ? nullptr : static_cast<std::byte*>(mapped);
  }
  if (data_ == nullptr) {
    failure_ = errno;
    return false;
  }
  const std::span<std::byte> whole(data_, mapped_bytes_);
  if (kind == PageKind::huge_transparent) ::madvise(data_, mapped_bytes_, MADV_HUGEPAGE);
  if (kind == PageKind::normal) ::madvise(data_, mapped_bytes_, MADV_NOHUGEPAGE);
  // A fork would copy every page that a device or a ring has pinned, and children do not need them.
  ::madvise(data_, mapped_bytes_, MADV_DONTFORK);
  std::vector<Piece> all = pieces(whole, kind);
  for (Piece& piece : all)
    if (!piece.numa_nodes.empty() && !prefer_nodes(piece.bytes, piece.numa_nodes)) piece.numa_nodes.clear();
  for (const Piece& piece : all) {
    failure_ = options_.touch ? touch(piece, kind, {}) : 0;
    if (failure_ == 0) continue;
    unmap();
    return false;
  }
  committed_bytes_ = options_.touch ? bytes_ : 0;
  page_kind_ = kind;
  for (const Piece& piece : all)
    if (options_.touch && !piece.numa_nodes.empty()) report_other_nodes(piece.bytes, piece.numa_nodes);
  return true;
}

PageKind Mapping::page_kind() const {
  const bool advised = page_kind_ == PageKind::huge_transparent;
  return advised && !has_transparent_pages(data_, mapped_bytes_) ? PageKind::normal : page_kind_;
}

void Mapping::unmap() noexcept {
  // In a forked process, other memory may lie there by now.
  if (data_ != nullptr && process_.is_this()) ::munmap(data_, mapped_bytes_);
  data_ = nullptr;
}

Mapping::~Mapping() { unmap(); }

}  // namespace hoist::platform::detail
