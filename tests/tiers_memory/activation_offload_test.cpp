// SPDX-License-Identifier: Apache-2.0
// Activations that leave the device and come back: on every implementation of Device, with streams that are late.
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/activation_offload.hpp>
#include <hoist/tiers/budget.hpp>

namespace hoist::tiers::activation_offload_test {
namespace {

using platform::CopyKind;
using platform::DeviceKind;

constexpr std::uint64_t kItemBytes = 3 * 4096 + 64;
constexpr std::size_t kItems = 7;

struct Case {
  const char* name;
  DeviceKind kind;
  std::uint64_t chaos_seed;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class ActivationOffloadTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    std::string why;
    if (GetParam().kind == DeviceKind::cuda && platform::cuda_device_count(&why) == 0)
      GTEST_SKIP() << "no CUDA GPU: " << why;
    device_ = platform::Device::create({.kind = GetParam().kind,
                                        .memory_bytes = 64 * kKiB,
                                        .host = {.chaos_seed = GetParam().chaos_seed},
                                        .ledger = &ledger_});
    compute_ = device_->create_stream("compute");
  }
  Ledger ledger_;
  std::unique_ptr<platform::Device> device_;
  std::unique_ptr<platform::Stream> compute_;
};

// What a model does: two buffers, written by layers in turn, overwritten only once they have come down; then brought
// back in reverse, one layer ahead.
TEST_P(ActivationOffloadTest, TwoBuffersAreEnoughForAnyNumberOfLayers) {
  Budget budget("pinned", "hoist.pinned_memory", kMiB);
  ActivationOffload offload(*device_, budget, {.items = kItems, .item_bytes = kItemBytes, .huge_pages = false});
  EXPECT_EQ(budget.held_bytes(), ActivationOffload::bytes({.items = kItems, .item_bytes = kItemBytes}));
  std::byte* const buffers[] = {device_->memory().data(), device_->memory().data() + 16 * kKiB};
  std::byte* const results = device_->memory().data() + 48 * kKiB;
  for (int pass = 0; pass < 3; ++pass) {
    platform::StreamEvent free[2];
    for (std::size_t i = 0; i < kItems; ++i) {
      compute_->wait(free[i % 2], WaitCause::host_to_device);
      compute_->fill(buffers[i % 2], static_cast<std::uint8_t>(10 * pass + static_cast<int>(i) + 1), kItemBytes);
      free[i % 2] = offload.offload(i, buffers[i % 2], *compute_);
    }
    platform::StreamEvent filled[2];
    filled[0] = offload.reload(kItems - 1, buffers[0], *compute_);
    for (std::size_t turn = 0; turn < kItems; ++turn) {
      const std::size_t item = kItems - 1 - turn;
      if (item > 0) filled[(turn + 1) % 2] = offload.reload(item - 1, buffers[(turn + 1) % 2], *compute_);
      compute_->wait(filled[turn % 2], WaitCause::host_to_device);
      compute_->copy(results + item, buffers[turn % 2] + kItemBytes - 1, 1, CopyKind::local);
    }
    std::vector<std::byte> found(kItems);
    device_->register_host(found);
    compute_->copy(found.data(), results, kItems, CopyKind::device_to_host);
    compute_->synchronize();
    device_->unregister_host(found);
    for (std::size_t i = 0; i < kItems; ++i)
      EXPECT_EQ(found[i], static_cast<std::byte>(10 * pass + static_cast<int>(i) + 1)) << "item " << i;
  }
  EXPECT_EQ(ledger_.totals(Link::host_to_device).bytes, 3 * kItems * kItemBytes);
  EXPECT_EQ(ledger_.totals(Link::device_to_host).bytes, 3 * kItems * (kItemBytes + 1));
}

// A program that leaves its backward pass by an exception has not waited for the last reload.
TEST_P(ActivationOffloadTest, AnItemIsNotOverwrittenBeforeItHasComeUp) {
  Budget budget("pinned", "hoist.pinned_memory", kMiB);
  ActivationOffload offload(*device_, budget, {.items = 1, .item_bytes = kItemBytes, .huge_pages = false});
  std::byte* const source = device_->memory().data();
  std::byte* const target = source + 32 * kKiB;
  for (std::uint8_t pass = 1; pass <= 20; ++pass) {
    compute_->fill(source, pass, kItemBytes);
    compute_->wait(offload.offload(0, source, *compute_), WaitCause::host_to_device);
    const platform::StreamEvent reloaded = offload.reload(0, target, *compute_);
    compute_->fill(source, 0, kItemBytes);
    compute_->wait(offload.offload(0, source, *compute_), WaitCause::host_to_device);
    compute_->wait(reloaded, WaitCause::host_to_device);
    std::byte found{};
    const std::span found_bytes(&found, 1);
    device_->register_host(found_bytes);
    compute_->copy(&found, target, 1, CopyKind::device_to_host);
    compute_->synchronize();
    device_->unregister_host(found_bytes);
    ASSERT_EQ(found, std::byte{pass});
  }
}

TEST_P(ActivationOffloadTest, WhatDoesNotFitTheBudgetIsRefused) {
  Budget budget("pinned", "hoist.pinned_memory", 16 * kKiB);
  try {
    const ActivationOffload offload(*device_, budget, {.items = 2, .item_bytes = kItemBytes, .huge_pages = false});
    FAIL() << "16 KiB were enough";
  } catch (const BudgetError& error) {
    EXPECT_EQ(error.need.key, "hoist.pinned_memory");
  }
  EXPECT_EQ(budget.held_bytes(), 0u);
}

TEST(ActivationOffloadBytes, CountsThatDoNotFitAreRefusedAtOnce) {
  const auto device = platform::Device::create({.kind = DeviceKind::host, .memory_bytes = 64 * kKiB});
  Budget budget("pinned", "hoist.pinned_memory", kMiB);
  const auto offload = [&](std::size_t items, std::uint64_t item_bytes) {
    const ActivationOffload made(*device, budget, {.items = items, .item_bytes = item_bytes, .huge_pages = false});
  };
  constexpr std::uint64_t kMax = ~std::uint64_t{0}, kLargest = kMax - (kBlockAlignment - 1);
  EXPECT_THROW(offload(1, kLargest + 1), UsageError);
  EXPECT_THROW(offload(3, kMax - 0xff), UsageError);
  EXPECT_THROW(offload(2, std::uint64_t{1} << 63), UsageError);
  EXPECT_THROW(offload(std::size_t{1} << 32, std::uint64_t{1} << 32), UsageError);
  EXPECT_THROW(offload(kMax, 1), UsageError);
  EXPECT_THROW(offload(1, kLargest), BudgetError);
  EXPECT_THROW(offload(4'000'000'000, kMiB), BudgetError);
  EXPECT_EQ(ActivationOffload::bytes({.items = 0, .item_bytes = kMax}), 0u);
  EXPECT_EQ(ActivationOffload::bytes({.items = 1, .item_bytes = kLargest}), kLargest);
  EXPECT_EQ(budget.held_bytes(), 0u);
}

TEST_P(ActivationOffloadTest, AnItemThatIsNotThereIsTheCallersMistake) {
  Budget budget("pinned", "hoist.pinned_memory", kMiB);
  ActivationOffload offload(*device_, budget, {.items = 2, .item_bytes = kItemBytes, .huge_pages = false});
  EXPECT_THROW(offload.offload(2, device_->memory().data(), *compute_), UsageError);
  EXPECT_THROW(offload.reload(2, device_->memory().data(), *compute_), UsageError);
  offload.offload(1, device_->memory().data(), *compute_);
  EXPECT_THROW(offload.reload(0, device_->memory().data(), *compute_), UsageError);
  EXPECT_NO_THROW(offload.reload(1, device_->memory().data(), *compute_));
}

INSTANTIATE_TEST_SUITE_P(All, ActivationOffloadTest,
                         testing::Values(Case{"host", DeviceKind::host, 0}, Case{"host_chaos", DeviceKind::host, 3},
                                         Case{"host_chaos_2", DeviceKind::host, 44}, Case{"cuda", DeviceKind::cuda, 0}),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace hoist::tiers::activation_offload_test
