// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <thread>

#include <sys/mman.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/processors.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/detail/first_touch.hpp>
#include <hoist/platform/topology.hpp>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace hoist::platform::detail {

namespace {

constexpr std::uint64_t kHugePageBytes = 2 * kMiB;
constexpr std::uint64_t kChunkBytes = 4 * kHugePageBytes;  // milliseconds of work
constexpr Nanoseconds kNextLine = std::chrono::seconds(5);

// Faults the pages of one part in. 0, or the errno. MADV_POPULATE_WRITE reports a shortage (of reserved huge pages on
// the bound node, for example) where touching by hand would be killed by SIGBUS.
int populate(std::span<std::byte> part, PageKind kind) {
  static const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  while (::madvise(part.data(), part.size(), MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL || kind == PageKind::huge_reserved) return errno;
    for (std::size_t at = 0; at < part.size(); at += page_bytes) {  // kernels before 5.14
      *reinterpret_cast<volatile std::byte*>(part.data() + at) = std::byte{0};
    }
    return 0;
  }
  return 0;
}

class Touch {
 public:
  Touch(std::span<std::byte> bytes, PageKind kind, const FirstTouch& how)
      : bytes_(bytes),
        kind_(kind),
        how_(how),
        cpus_(how.cpus.empty() ? current_processors() : how.cpus),
        lead_bytes_(reinterpret_cast<std::uintptr_t>(bytes.data()) % kHugePageBytes) {}

  int run() {
    const std::size_t chunks = divide_up(lead_bytes_ + bytes_.size(), kChunkBytes);
    if (chunks == 1) {
      work();
      return failure_;
    }
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < std::min(cpus_.size(), chunks); ++i) {
      try {
        threads.push_back(start_joining_thread("hoist-touch", [this](const std::stop_token&) { work_and_report(); }));
      } catch (const Error&) {  // the system has no more threads
        if (threads.empty()) work();
        break;
      }
      const MutexLock lock(mutex_);
      ++started_;
    }
    await();
    return failure_;
  }

 private:
  void work() {
    while (failure_ == 0) {
      const std::size_t begin = next_.fetch_add(kChunkBytes);
      if (begin >= lead_bytes_ + bytes_.size()) return;
      if (const int code = touch(begin, begin + kChunkBytes)) failure_ = code;
    }
  }

  // Positions count from the huge page that the memory begins in, so that no two threads fault one in.
  int touch(std::size_t begin, std::size_t end) {
    if (!how_.value) return populate_part(begin, end);
    // A huge page is written while caches hold it.
    for (std::size_t at = begin; at < end; at += kHugePageBytes) {
      const std::span<std::byte> page = part(at, at + kHugePageBytes);
      if (const int code = populate_part(at, at + kHugePageBytes)) return code;
      if (!page.empty()) std::memset(page.data(), std::to_integer<int>(*how_.value), page.size());
    }
    return 0;
  }

  std::span<std::byte> part(std::size_t begin, std::size_t end) const {
    const auto offset = [&](std::size_t at) { return std::min(at - std::min(at, lead_bytes_), bytes_.size()); };
    return bytes_.subspan(offset(begin), offset(end) - offset(begin));
  }

  int populate_part(std::size_t begin, std::size_t end) {
    const std::span<std::byte> pages = part(begin, end);
    touched_ += pages.size();
    return pages.empty() ? 0 : populate(pages, kind_);
  }

  void work_and_report() {
    bind_current_thread(how_.cpus);  // a refusal costs speed only
    work();
    const MutexLock lock(mutex_);
    ++ended_;
    changed_.notify_one();
  }

  void await() {
    const TimePoint begin = Clock::now();
    TimePoint line = begin + how_.line_after;
    MutexLock lock(mutex_);
    while (!changed_.wait_until(lock, line, [&]() HOIST_REQUIRES(mutex_) { return ended_ >= started_; })) {
      const std::uint64_t touched = touched_;
      const double seconds = to_seconds(Clock::now() - begin);
      log_info("taking {}: {} of {} after {:.1f} s, {:.2f} GB/s", how_.what, format_bytes(touched),
               format_bytes(bytes_.size()), seconds, static_cast<double>(touched) / seconds / 1e9);
      line = Clock::now() + kNextLine;
    }
  }

  const std::span<std::byte> bytes_;
  const PageKind kind_;
  const FirstTouch& how_;
  const std::vector<int> cpus_;
  const std::size_t lead_bytes_;  // from the start of the first huge page
  std::atomic<std::size_t> next_{0};
  std::atomic<std::uint64_t> touched_{0};
  std::atomic<int> failure_{0};
  Mutex mutex_;
  ConditionVariable changed_;
  std::size_t started_ HOIST_GUARDED_BY(mutex_) = 0;
  std::size_t ended_ HOIST_GUARDED_BY(mutex_) = 0;
};

}  // namespace

int touch_first(std::span<std::byte> bytes, PageKind kind, const FirstTouch& how) {
  return bytes.empty() ? 0 : Touch(bytes, kind, how).run();
}

std::vector<int> usable_processors(const std::vector<int>& nodes) {
  const std::vector<int> allowed = current_processors();
  std::vector<int> cpus;
  const Topology topology = Topology::detect();
  for (const Topology::Node& node : topology.nodes()) {
    if (std::ranges::find(nodes, node.os_index) == nodes.end()) continue;
    std::ranges::copy_if(node.cpus, std::back_inserter(cpus),
                         [&](int cpu) { return std::ranges::binary_search(allowed, cpu); });
  }
  return cpus.empty() ? allowed : cpus;
}

}  // namespace hoist::platform::detail
