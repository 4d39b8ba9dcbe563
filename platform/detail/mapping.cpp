// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/ranges.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/detail/mapping.hpp>
#include <hoist/platform/free_memory.hpp>

#ifndef MAP_HUGE_2MB
#define MAP_HUGE_2MB (21 << 26)
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
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

// Faults the pages of one part in. 0, or the errno. MADV_POPULATE_WRITE reports a shortage (of reserved huge pages on
// the bound node, for example) where touching by hand would be killed by SIGBUS.
int populate(std::span<std::byte> part, PageKind kind) {
  while (::madvise(part.data(), part.size(), MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL || kind == PageKind::huge_reserved) return errno;
    for (std::size_t at = 0; at < part.size(); at += small_page_bytes()) {  // kernels before 5.14
      *reinterpret_cast<volatile std::byte*>(part.data() + at) = std::byte{0};
    }
    return 0;
  }
  return 0;
}

int touch(std::span<std::byte> bytes, PageKind kind, unsigned threads) {
  const std::uint64_t pages = bytes.size() / page_bytes(kind);
  const std::uint64_t parts = std::clamp<std::uint64_t>(threads, 1, std::max<std::uint64_t>(pages, 1));
  const std::uint64_t part_bytes = divide_up(pages, parts) * page_bytes(kind);
  std::atomic<int> failure{0};
  const auto touch_part = [&](std::uint64_t part) {
    const std::uint64_t begin = std::min<std::uint64_t>(part * part_bytes, bytes.size());
    const std::uint64_t end = std::min<std::uint64_t>(begin + part_bytes, bytes.size());
    if (begin == end) return;
    if (const int code = populate(bytes.subspan(begin, end - begin), kind)) failure = code;
  };
  std::vector<std::jthread> helpers;
  for (std::uint64_t part = 1; part < parts; ++part)
    helpers.push_back(start_joining_thread("hoist-touch", [&, part](const std::stop_token&) { touch_part(part); }));
  touch_part(0);
  helpers.clear();  // joins
  return failure;
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

Mapping::Mapping(const MappingOptions& options) : options_(options), bytes_(options.bytes) {
  if (bytes_ == 0) return;
  if (options.largest_pages == PageKind::huge_reserved && try_map(PageKind::huge_reserved, options)) return;
  // Reserved pages are already set apart; the kinds below compete for the rest.
  const std::uint64_t available = host_memory().free_bytes;
  if (!options.touch || bytes_ <= available) {
    if (options.largest_pages != PageKind::normal && try_map(PageKind::huge_transparent, options)) return;
    if (try_map(PageKind::normal, options)) return;
  }
  refuse(bytes_, available, "the configured budget");
}

void Mapping::refuse(std::uint64_t bytes, std::uint64_t available, const char* what) const {
  const std::string refusal =
      failure_ == 0 ? "" : fmt::format(" (mmap: {}; see ulimit -v)", std::generic_category().message(failure_));
  throw BudgetError::machine({.tier = options_.tier,
                              .have_bytes = std::min(available, bytes),
                              .need_bytes = bytes,
                              .key = options_.key,
                              .detail = what + refusal});
}

std::span<std::byte> Mapping::commit_up_to(std::uint64_t end) {
  if (end <= committed_bytes_) return {};
  const std::span<std::byte> fresh = bytes().subspan(committed_bytes_, end - committed_bytes_);
  const std::uint64_t available = host_memory().free_bytes;
  constexpr const char* kWhat = "what is taken of the budget now";
  if (fresh.size() > available) refuse(fresh.size(), available, kWhat);
  failure_ = touch(fresh, PageKind::normal, options_.touch_threads);
  if (failure_ != 0) refuse(fresh.size(), available, kWhat);
  committed_bytes_ = end;
  return fresh;
}

bool Mapping::try_map(PageKind kind, const MappingOptions& options) {
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
  const bool placed = !options.numa_nodes.empty() && prefer_nodes(whole, options.numa_nodes);
  failure_ = options.touch ? touch(whole, kind, options.touch_threads) : 0;
  if (failure_ != 0) {
    unmap();
    return false;
  }
  committed_bytes_ = options.touch ? bytes_ : 0;
  page_kind_ = kind;
  if (options.touch && placed) report_other_nodes(bytes(), options.numa_nodes);
  return true;
}

PageKind Mapping::page_kind() const {
  const bool advised = page_kind_ == PageKind::huge_transparent;
  return advised && !has_transparent_pages(data_, mapped_bytes_) ? PageKind::normal : page_kind_;
}

void Mapping::unmap() noexcept {
  if (data_ != nullptr) ::munmap(data_, mapped_bytes_);
  data_ = nullptr;
}

Mapping::~Mapping() { unmap(); }

Mapping::Mapping(Mapping&& other) noexcept
    : options_(other.options_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      mapped_bytes_(std::exchange(other.mapped_bytes_, 0)),
      committed_bytes_(other.committed_bytes_),
      page_kind_(other.page_kind_) {}

}  // namespace hoist::platform::detail
