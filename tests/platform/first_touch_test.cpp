// SPDX-License-Identifier: Apache-2.0
// The first touch of memory, checked by the kernel's records: which pages are in memory, who touched them, their
// contents.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <hoist/core/units.hpp>
#include <hoist/platform/detail/first_touch.hpp>
#include <hoist/platform/host_memory.hpp>
#include <hoist/platform/topology.hpp>

#include "../support/log_capture.hpp"

namespace hoist::platform::first_touch_test {
namespace {

// Fresh memory, at `offset` bytes behind a multiple of 2 MiB.
class Fresh {
 public:
  Fresh(std::size_t bytes, std::size_t offset, bool huge) : mapped_bytes_(bytes + 4 * kMiB) {
    mapped_ = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ::madvise(mapped_, mapped_bytes_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    auto* const start = static_cast<std::byte*>(mapped_);
    const auto address = reinterpret_cast<std::uintptr_t>(start);
    bytes_ = {start + (round_up(address, 2 * kMiB) - address) + offset, bytes};
  }
  ~Fresh() { ::munmap(mapped_, mapped_bytes_); }
  Fresh(const Fresh&) = delete;
  Fresh& operator=(const Fresh&) = delete;
  std::span<std::byte> bytes() const { return bytes_; }

  // Pages of 4 KiB that are in memory.
  std::size_t resident() const {
    std::vector<unsigned char> pages(bytes_.size() / 4096);
    if (::mincore(bytes_.data(), bytes_.size(), pages.data()) != 0) return 0;
    return static_cast<std::size_t>(std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; }));
  }

 private:
  void* mapped_ = nullptr;
  std::size_t mapped_bytes_;
  std::span<std::byte> bytes_;
};

bool is_all(std::span<const std::byte> bytes, std::byte value) {
  return bytes.front() == value && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
}

TEST(FirstTouch, EveryPageOfAnyPieceIsInMemoryOnce) {
  for (const bool huge : {false, true}) {
    for (const std::size_t offset : {std::size_t{0}, std::size_t{4096}, std::size_t{2 * kMiB - 4096}}) {
      for (const std::size_t bytes : {std::size_t{4096}, std::size_t{2 * kMiB}, std::size_t{8 * kMiB},
                                      std::size_t{8 * kMiB + 4096}, std::size_t{37 * kMiB + 12288}}) {
        for (const bool writes : {false, true}) {
          const Fresh fresh(bytes, offset, huge);
          ASSERT_EQ(fresh.resident(), 0u);
          const detail::FirstTouch how{.value = writes ? std::optional(std::byte{0xFF}) : std::nullopt};
          ASSERT_EQ(detail::touch_first(fresh.bytes(), PageKind::normal, how), 0);
          EXPECT_EQ(fresh.resident(), bytes / 4096) << bytes << " bytes at " << offset;
          EXPECT_TRUE(is_all(fresh.bytes(), writes ? std::byte{0xFF} : std::byte{0})) << bytes << " at " << offset;
        }
      }
    }
  }
}

// The value is what was asked for, and nothing before or behind the piece.
TEST(FirstTouch, WritesNothingOutside) {
  const Fresh fresh(20 * kMiB, 0, true);
  const auto piece = fresh.bytes().subspan(kMiB, 17 * kMiB);
  ASSERT_EQ(detail::touch_first(piece, PageKind::normal, {.value = std::byte{0x5A}}), 0);
  EXPECT_TRUE(is_all(piece, std::byte{0x5A}));
  EXPECT_TRUE(is_all(fresh.bytes().first(kMiB), std::byte{0}));
  EXPECT_TRUE(is_all(fresh.bytes().subspan(18 * kMiB), std::byte{0}));
}

// The faults are other threads', not the caller's.
TEST(FirstTouch, ThreadsShareTheWorkAndTheCallerWaits) {
  const Fresh fresh(64 * kMiB, 0, false);
  rusage before{}, after{};
  ::getrusage(RUSAGE_THREAD, &before);
  ASSERT_EQ(detail::touch_first(fresh.bytes(), PageKind::normal, {}), 0);
  ::getrusage(RUSAGE_THREAD, &after);
  EXPECT_LT(after.ru_minflt - before.ru_minflt, 1000) << "of 16384 pages";
}

TEST(FirstTouch, LeavesTheCallersProcessorsAsTheyWere) {
  cpu_set_t before;
  ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  int last = 0;
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &before)) last = static_cast<int>(cpu);
  const Fresh fresh(64 * kMiB, 0, true);
  ASSERT_EQ(detail::touch_first(fresh.bytes(), PageKind::normal, {.cpus = {last}}), 0);
  EXPECT_EQ(fresh.resident(), 64 * kMiB / 4096);
  cpu_set_t after;
  ASSERT_EQ(::sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&before, &after)) << "the caller's own processors changed";
}

TEST(FirstTouch, ARefusedProcessorCostsSpeedOnly) {
  const Fresh fresh(64 * kMiB, 0, true);
  ASSERT_EQ(detail::touch_first(fresh.bytes(), PageKind::normal, {.cpus = {-1, 999'999}}), 0);
  EXPECT_EQ(fresh.resident(), 64 * kMiB / 4096);
}

TEST(FirstTouch, UsesProcessorsOfItsNodesOrElseAll) {
  const Topology topology = Topology::detect();
  for (const Topology::Node& node : topology.nodes()) {
    if (!node.cpus.empty()) {
      EXPECT_EQ(detail::usable_processors({node.os_index}), node.cpus);
    }
  }
  EXPECT_EQ(detail::usable_processors({900}).size(), topology.cpu_count());
}

// More than a second in truth; here at once.
TEST(FirstTouch, SaysHowFarItIs) {
  const test::LogCapture log;
  const Fresh fresh(256 * kMiB, 0, false);
  ASSERT_EQ(detail::touch_first(fresh.bytes(), PageKind::normal,
                                {.what = "pinned memory", .line_after = std::chrono::milliseconds(1)}),
            0);
  EXPECT_THAT(log.text(), testing::ContainsRegex("taking pinned memory: [0-9.]+ .?i?B of 256 MiB after [0-9.]+ s"));
  EXPECT_EQ(log.count("taking"), 1u) << "the next line is due after five seconds";
}

TEST(FirstTouch, IsSilentWhenItIsShort) {
  const test::LogCapture log;
  const HostMemory memory({.bytes = 64 * kMiB});
  EXPECT_EQ(log.text(), "");
}

}  // namespace
}  // namespace hoist::platform::first_touch_test
