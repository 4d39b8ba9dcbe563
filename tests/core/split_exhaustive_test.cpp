// SPDX-License-Identifier: Apache-2.0
// The split rule over every one of the 2^32 bit patterns.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "split_rule.hpp"

namespace hoist::test::split_exhaustive_test {
namespace {

TEST(SplitMasterExhaustive, HoldsForAllPatterns) {
  constexpr std::uint64_t kPatterns = std::uint64_t{1} << 32;
  constexpr std::uint64_t kPiece = std::uint64_t{1} << 22;
  std::atomic<std::uint64_t> next{0}, checked{0}, committable{0};
  std::atomic<std::uint64_t> first_broken{kPatterns};
  const auto check = [&] {
    std::uint64_t own_committable = 0;
    for (std::uint64_t piece; (piece = next.fetch_add(kPiece)) < kPatterns;) {
      for (std::uint64_t bits = piece; bits < piece + kPiece; ++bits) {
        const auto pattern = static_cast<std::uint32_t>(bits);
        own_committable += master_is_committable(std::bit_cast<float>(pattern)) ? 1u : 0u;
        if (broken_split_rule(pattern) == nullptr) continue;
        std::uint64_t seen = first_broken.load();
        while (bits < seen && !first_broken.compare_exchange_weak(seen, bits)) {
        }
        return;
      }
      checked.fetch_add(kPiece);
    }
    committable.fetch_add(own_committable);
  };
  std::vector<std::thread> threads;
  for (unsigned k = 0; k < std::max(1u, std::thread::hardware_concurrency()); ++k) threads.emplace_back(check);
  for (auto& thread : threads) thread.join();
  if (const std::uint64_t broken = first_broken.load(); broken < kPatterns) {
    const auto pattern = static_cast<std::uint32_t>(broken);
    FAIL() << std::hex << "pattern 0x" << pattern << ": " << broken_split_rule(pattern);
  }
  EXPECT_EQ(checked.load(), kPatterns);
  EXPECT_EQ(committable.load(), 2ull * kMasterLimitBits);  // every magnitude below the limit, of both signs
}

}  // namespace
}  // namespace hoist::test::split_exhaustive_test
