// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/scheduler/executor.hpp>

namespace hoist::scheduler::executor_test {
namespace {

TEST(Executor, RunsTasksInOrderOnOneThread) {
  std::vector<int> order;
  {
    Executor executor("test");
    for (int i = 0; i < 1000; ++i) executor.enqueue([&order, i] { order.push_back(i); });
    executor.drain();
    ASSERT_EQ(order.size(), 1000u);
    executor.enqueue([&order] { order.push_back(1000); });
  }  // the destructor runs what was enqueued
  ASSERT_EQ(order.size(), 1001u);
  for (int i = 0; i < 1001; ++i) ASSERT_EQ(order[static_cast<std::size_t>(i)], i);
}

TEST(Executor, AFailureFailsEverythingAfterIt) {
  Executor executor("test");
  std::atomic<bool> ran{false};
  const Completion before = executor.enqueue([] {});
  const Completion failed = executor.enqueue([] { throw std::runtime_error("disk on fire"); });
  const Completion after = executor.enqueue([&] { ran = true; });
  EXPECT_NO_THROW(before.wait());
  EXPECT_THROW(failed.wait(), std::runtime_error);
  EXPECT_THROW(after.wait(), std::runtime_error);
  EXPECT_THROW(executor.drain(), std::runtime_error);
  EXPECT_FALSE(ran);
}

// A refusal leaves its caller's state unchanged; a task that failed does not.
TEST(Executor, ATaskThatIsRefusedHasFailed) {
  Executor executor("test");
  const Completion refused = executor.enqueue([] { throw UsageError("no such stream"); });
  try {
    refused.wait();
    FAIL() << "the task succeeded";
  } catch (const UsageError&) {
    FAIL() << "a caller would go on";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "no such stream");
  }
  EXPECT_THROW(executor.drain(), Error);
}

}  // namespace
}  // namespace hoist::scheduler::executor_test
