// SPDX-License-Identifier: Apache-2.0
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/ledger.hpp>

namespace hoist::test::ledger_test {
namespace {

using namespace std::chrono_literals;
using Account = Ledger::Account;

TEST(Ledger, CountsPerLink) {
  Ledger ledger;
  ledger.count(Link::nvme_read, 100, 5ns);
  ledger.count(Link::nvme_read, 11, 2ns);
  ledger.count(Link::wire, 7, 1ns);
  EXPECT_EQ(ledger.totals(Link::nvme_read).bytes, 111u);
  EXPECT_EQ(ledger.totals(Link::nvme_read).busy, 7ns);
  EXPECT_EQ(ledger.totals(Link::wire).bytes, 7u);
  EXPECT_EQ(ledger.totals(Link::nvme_write).bytes, 0u);
  EXPECT_EQ(ledger.totals(Link::nvme_read, Account::outside_steps).bytes, 0u);
}

TEST(Ledger, WorkApartStaysOutOfTheSteps) {
  Ledger ledger;
  {
    const Ledger::OutsideSteps outer(ledger);
    ledger.count(Link::nvme_write, 10, 1ns);
    ledger.waited(WaitCause::nvme, 5ns);
    {
      const Ledger::OutsideSteps inner(ledger);
      ledger.count(Link::nvme_write, 20, 1ns);
    }
    ledger.count(Link::nvme_write, 30, 1ns);  // still apart
  }
  ledger.count(Link::nvme_write, 1, 1ns);
  ledger.waited(WaitCause::nvme, 3ns);
  EXPECT_EQ(ledger.totals(Link::nvme_write, Account::outside_steps).bytes, 60u);
  EXPECT_EQ(ledger.totals(Link::nvme_write, Account::outside_steps).busy, 3ns);
  EXPECT_EQ(ledger.totals(Link::nvme_write).bytes, 1u);
  EXPECT_EQ(ledger.waited(WaitCause::nvme), 3ns);
}

TEST(Ledger, AnAccountThatIsNamedIsThatOfOneCountOnly) {
  Ledger ledger;
  ledger.count(Link::nvme_read, 10, 1ns, Account::outside_steps);
  ledger.count(Link::nvme_read, 1, 1ns);
  EXPECT_EQ(ledger.current_account(), Account::steps);
  EXPECT_EQ(ledger.totals(Link::nvme_read, Account::outside_steps).bytes, 10u);
  const Ledger::OutsideSteps outside_steps(ledger);
  EXPECT_EQ(ledger.current_account(), Account::outside_steps);
  ledger.count(Link::nvme_read, 2, 1ns, Account::steps);
  EXPECT_EQ(ledger.totals(Link::nvme_read).bytes, 3u);
}

TEST(Ledger, FromManyThreads) {
  Ledger ledger;
  std::vector<std::thread> threads;
  for (int k = 0; k < 4; ++k) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10000; ++i) {
        ledger.count(Link::host_to_device, 3, 2ns);
        ledger.waited(WaitCause::comm, 1ns);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(ledger.totals(Link::host_to_device).bytes, 120000u);
  EXPECT_EQ(ledger.totals(Link::host_to_device).busy, 80000ns);
  EXPECT_EQ(ledger.waited(WaitCause::comm), 40000ns);
}

TEST(Ledger, EveryLinkAndCauseHasItsOwnName) {
  std::set<std::string> names;
  for (std::size_t k = 0; k < kLinkCount; ++k) names.insert(link_name(static_cast<Link>(k)));
  EXPECT_EQ(names, (std::set<std::string>{"nvme_read", "nvme_write", "host_to_device", "device_to_host", "wire"}));
  names.clear();
  for (std::size_t k = 0; k < kWaitCauseCount; ++k) names.insert(wait_cause_name(static_cast<WaitCause>(k)));
  EXPECT_EQ(names, (std::set<std::string>{"nvme", "host_to_device", "device_to_host", "optimizer", "comm", "none"}));
}

}  // namespace
}  // namespace hoist::test::ledger_test
