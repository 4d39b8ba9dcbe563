// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/mman.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/free_memory.hpp>
#include <hoist/platform/host_memory.hpp>
#include <hoist/platform/topology.hpp>
#include <hoist/tests/support/forked.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::platform::host_memory_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

bool all_zero_and_writable(std::span<std::byte> bytes) {
  const bool zero = std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
  std::fill(bytes.begin(), bytes.end(), std::byte{0xA5});
  return zero && std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0xA5}; });
}

std::uint64_t address(std::span<std::byte> bytes) { return reinterpret_cast<std::uintptr_t>(bytes.data()); }

std::uint64_t free_reserved_pages() {
  std::ifstream file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
  std::uint64_t count = 0;
  return file >> count ? count : 0;
}

// A forked process does not have the memory, and may have mapped something else there.
TEST(HostMemory, AForkedProcessUnmapsNothing) {
  std::optional<HostMemory> memory(std::in_place, HostMemoryOptions{.bytes = 8 * kMiB, .huge_pages = false});
  void* const there = memory->bytes().data();
  const int code = hoist::test::exit_code_of_fork([&] {
    constexpr int kWhere = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    void* const own = ::mmap(there, 4 * kMiB, PROT_READ | PROT_WRITE, kWhere, -1, 0);
    if (own != there) return 1;
    memory.reset();
    static_cast<volatile char*>(own)[2 * kMiB] = 1;
    return 0;
  });
  EXPECT_EQ(code, 0);
}

TEST(HostMemory, OrdinaryPages) {
  const HostMemory memory({.bytes = 5 * kMiB + 123, .huge_pages = false});
  EXPECT_EQ(memory.bytes().size(), 5 * kMiB + 123);
  EXPECT_EQ(memory.page_kind(), PageKind::normal);
  EXPECT_EQ(address(memory.bytes()) % kBlockAlignment, 0u);
  EXPECT_TRUE(all_zero_and_writable(memory.bytes()));
}

// Whatever the machine gives, the bytes are good; and it says which kind it gave.
TEST(HostMemory, HugePagesWithFallBack) {
  constexpr std::uint64_t kBytes = 9 * kMiB;
  const std::uint64_t reserved = free_reserved_pages();
  const HostMemory memory({.bytes = kBytes, .huge_pages = true});
  EXPECT_EQ(memory.bytes().size(), kBytes);
  if (reserved == 0) {
    EXPECT_NE(memory.page_kind(), PageKind::huge_reserved);
  }
  if (memory.page_kind() != PageKind::normal) {
    EXPECT_EQ(address(memory.bytes()) % (2 * kMiB), 0u);
  }
  EXPECT_TRUE(all_zero_and_writable(memory.bytes()));
}

TEST(HostMemory, ReservedPagesAreReturned) {
  constexpr std::uint64_t kPages = 2;
  const std::uint64_t before = free_reserved_pages();
  if (before < kPages) GTEST_SKIP() << before << " reserved huge pages are free, " << kPages << " are needed";
  {
    const HostMemory memory({.bytes = kPages * 2 * kMiB});
    EXPECT_EQ(memory.page_kind(), PageKind::huge_reserved);
    EXPECT_TRUE(all_zero_and_writable(memory.bytes()));
  }
  EXPECT_EQ(free_reserved_pages(), before);
}

TEST(HostMemory, AnEmptyBlock) {
  const HostMemory memory({.bytes = 0});
  EXPECT_TRUE(memory.bytes().empty());
  EXPECT_TRUE(memory.slices().empty());
}

TEST(HostMemory, MovesItsBytes) {
  HostMemory first({.bytes = 10'000});
  const std::byte* data = first.bytes().data();
  first.bytes()[9'999] = std::byte{3};
  const HostMemory second(std::move(first));
  EXPECT_EQ(second.bytes().data(), data);
  EXPECT_EQ(second.bytes()[9'999], std::byte{3});
  EXPECT_TRUE(first.bytes().empty());  // NOLINT(bugprone-use-after-move): a moved-from block is empty
  EXPECT_TRUE(first.slices().empty());
}

// A node that exists, and ones that do not: a node is a wish, and its refusal a warning.
TEST(HostMemory, ComesFromItsNodesWhereItCan) {
  for (const std::vector<int>& nodes : {std::vector{0}, std::vector{900}, std::vector{0, 901}, std::vector{-3}}) {
    const HostMemory memory({.bytes = 4 * kMiB, .numa_nodes = nodes});
    EXPECT_TRUE(all_zero_and_writable(memory.bytes())) << "node " << nodes.front();
  }
}

// The policy of the mapping that holds `address`, as the kernel prints it.
std::string memory_policy(const void* address) {
  std::ifstream maps("/proc/self/numa_maps");
  std::string policy;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::uint64_t begin = 0;
    std::string text;
    words >> std::hex >> begin >> text;
    if (begin <= reinterpret_cast<std::uintptr_t>(address)) policy = text;
  }
  return policy;
}

TEST(HostMemory, EveryPageIsOnTheNodeThatWasAskedFor) {
  if (!std::filesystem::exists("/proc/self/numa_maps")) GTEST_SKIP() << "the kernel knows no NUMA nodes";
  const std::vector<Topology::Node> nodes = Topology::detect().nodes();
  for (const Topology::Node& node : nodes) {
    for (const bool huge : {false, true}) {
      const HostMemory memory({.bytes = 4 * kMiB, .huge_pages = huge, .numa_nodes = {node.os_index}});
      EXPECT_EQ(memory_policy(memory.bytes().data()), fmt::format("prefer:{}", node.os_index));
      const std::vector<int> found = nodes_of_pages(memory.bytes(), 64);
      EXPECT_EQ(found, std::vector<int>(64, node.os_index));
    }
  }
  if (nodes.size() < 2) return;  // scripts/emulated-numa.sh has two
  const HostMemory memory(
      {.bytes = 4 * kMiB, .huge_pages = false, .numa_nodes = {nodes[0].os_index, nodes[1].os_index}});
  const std::vector<int> found = nodes_of_pages(memory.bytes(), 1024);
  EXPECT_EQ(std::ranges::count(found, nodes[0].os_index), 512);
  EXPECT_EQ(std::ranges::count(found, nodes[1].os_index), 512);
}

// The edges of a part move inwards to whole pages. Memory between two parts is placed as if there were no parts.
TEST(HostMemory, APartHasNodesOfItsOwn) {
  if (!std::filesystem::exists("/proc/self/numa_maps")) GTEST_SKIP() << "the kernel knows no NUMA nodes";
  const int node = Topology::detect().nodes().back().os_index;
  const std::string placed = fmt::format("prefer:{}", node);
  const HostMemory memory({.bytes = 12 * kMiB,
                           .huge_pages = false,
                           .parts = {{.offset = 0, .bytes = 4096, .numa_nodes = {node}},
                                     {.offset = kMiB + 100, .bytes = 2 * kMiB, .numa_nodes = {node}},
                                     {.offset = 8 * kMiB + 1, .bytes = 4096, .numa_nodes = {node}},
                                     {.offset = 11 * kMiB, .bytes = kMiB, .numa_nodes = {node}}}});
  const auto policy_at = [&](std::uint64_t offset) { return memory_policy(memory.bytes().data() + offset); };
  EXPECT_EQ(policy_at(0), placed);
  EXPECT_EQ(policy_at(4096), "default");
  EXPECT_EQ(policy_at(kMiB), "default");
  EXPECT_EQ(policy_at(kMiB + 4096), placed);
  EXPECT_EQ(policy_at(3 * kMiB - 1), placed);
  EXPECT_EQ(policy_at(3 * kMiB), "default") << "half a page of the part";
  EXPECT_EQ(policy_at(8 * kMiB + 4096), "default") << "no page is the part's alone";
  EXPECT_EQ(policy_at(11 * kMiB), placed);
  EXPECT_EQ(policy_at(12 * kMiB - 1), placed);
  EXPECT_EQ(nodes_of_pages(memory.bytes().subspan(kMiB + 4096, kMiB), 64), std::vector<int>(64, node));
  EXPECT_EQ(nodes_of_pages(memory.bytes(), 3072).size(), 3072u) << "of 3072 pages, all touched";
  EXPECT_TRUE(all_zero_and_writable(memory.bytes()));
}

TEST(HostMemory, APartThatIsAllOfIt) {
  for (const bool huge : {false, true}) {
    const HostMemory memory({.bytes = 6 * kMiB, .huge_pages = huge, .parts = {{.bytes = 6 * kMiB, .numa_nodes = {0}}}});
    EXPECT_TRUE(all_zero_and_writable(memory.bytes()));
  }
}

TEST(HostMemory, RefusesWhatTheMachineLacks) {
  for (const std::uint64_t bytes : {std::uint64_t{1} << 46, ~std::uint64_t{0}}) {
    for (const bool huge : {true, false}) {
      try {
        const HostMemory memory({.bytes = bytes, .huge_pages = huge});
        FAIL() << bytes << " bytes were given";
      } catch (const BudgetError& error) {
        EXPECT_EQ(error.need.tier, "pinned");
        EXPECT_LT(error.need.have_bytes, error.need.need_bytes);
        EXPECT_THAT(error.what(), Not(HasSubstr("ulimit"))) << "memory is lacking, and no limit refused it";
      }
    }
  }
}

TEST(HostMemory, SlicesCoverEverythingOnce) {
  const HostMemory memory({.bytes = 7 * 4096 + 1});
  ASSERT_EQ(memory.slices().size(), 1u);
  EXPECT_EQ(memory.slices()[0].size(), memory.bytes().size());
  const auto slices = memory.slices(3 * 4096);
  ASSERT_EQ(slices.size(), 3u);
  const std::byte* end = memory.bytes().data();
  for (const auto slice : slices) {
    EXPECT_EQ(slice.data(), end);
    EXPECT_LE(slice.size(), 3u * 4096);
    end = slice.data() + slice.size();
  }
  EXPECT_EQ(end, memory.bytes().data() + memory.bytes().size());
}

TEST(AvailableMemory, IsPlausible) {
  const std::uint64_t available = host_memory().free_bytes;
  EXPECT_GT(available, kMiB);
  EXPECT_LT(available, std::uint64_t{1} << 46);
}

}  // namespace
}  // namespace hoist::platform::host_memory_test
