// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <thread>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/core/deadline.hpp>

namespace hoist::deadline_test {
namespace {

using std::chrono::milliseconds;

// How long a poll of `period` waits before it gives up.
Nanoseconds time_until_over(Deadline deadline, Nanoseconds period) {
  const TimePoint begin = Clock::now();
  while (!deadline.is_over()) std::this_thread::sleep_for(std::min(period, deadline.next_look()));
  return Clock::now() - begin;
}

TEST(Deadline, IsOverAfterItsTime) {
  EXPECT_TRUE(Deadline(Nanoseconds(0)).is_over());
  EXPECT_TRUE(Deadline(milliseconds(-1)).is_over());
  EXPECT_FALSE(Deadline(Nanoseconds::max()).is_over());
  EXPECT_GE(time_until_over(Deadline(milliseconds(60)), milliseconds(5)), milliseconds(60));
  EXPECT_GE(time_until_over(Deadline(milliseconds(60)), std::chrono::hours(1)), milliseconds(60))
      << "waiting as long as it allows";
}

TEST(Deadline, AnAnswerRenewsIt) {
  Deadline deadline(milliseconds(80));
  for (int i = 0; i < 8; ++i) {
    for (int look = 0; look < 2; ++look) {
      std::this_thread::sleep_for(milliseconds(15));
      static_cast<void>(deadline.waited());
    }
    deadline.restart();
  }
  EXPECT_LE(deadline.waited(), milliseconds(20));  // one look, which counts a quarter of the limit at most
}

TEST(Deadline, OneLookIsNeverAllOfIt) {
  Deadline deadline(milliseconds(40));
  std::this_thread::sleep_for(milliseconds(120));
  EXPECT_FALSE(deadline.is_over());
  EXPECT_LE(deadline.next_look(), milliseconds(10));
}

// A process of its own stops itself in the middle: it has 300 ms left to wait, and needs them.
TEST(Deadline, AStoppedProcessDoesNotWait) {
  const pid_t waiting = ::fork();
  ASSERT_GE(waiting, 0);
  if (waiting == 0) {
    Deadline deadline(milliseconds(600));
    ::raise(SIGSTOP);
    const TimePoint back = Clock::now();
    while (!deadline.is_over())
      std::this_thread::sleep_for(std::min<Nanoseconds>(milliseconds(10), deadline.next_look()));
    ::_exit(Clock::now() - back >= milliseconds(300) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(waiting, &status, WUNTRACED), waiting);
  ASSERT_TRUE(WIFSTOPPED(status));
  std::this_thread::sleep_for(milliseconds(1000));
  ASSERT_EQ(::kill(waiting, SIGCONT), 0);
  ASSERT_EQ(::waitpid(waiting, &status, 0), waiting);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "it was over as soon as the process went on";
}

}  // namespace
}  // namespace hoist::deadline_test
