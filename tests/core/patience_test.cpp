// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <thread>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/core/patience.hpp>

namespace hoist {
namespace {

using std::chrono::milliseconds;

// What a poll of `period` waits before it gives up.
Nanoseconds time_until_over(Patience patience, Nanoseconds period) {
  const TimePoint begin = Clock::now();
  while (!patience.is_over()) std::this_thread::sleep_for(std::min(period, patience.next_look()));
  return Clock::now() - begin;
}

TEST(Patience, IsOverAfterItsTime) {
  EXPECT_TRUE(Patience(Nanoseconds(0)).is_over());
  EXPECT_GE(time_until_over(Patience(milliseconds(60)), milliseconds(5)), milliseconds(60));
  EXPECT_GE(time_until_over(Patience(milliseconds(60)), std::chrono::hours(1)), milliseconds(60))
      << "waiting as long as it allows";
}

TEST(Patience, AnAnswerRenewsIt) {
  Patience patience(milliseconds(80));
  for (int i = 0; i < 4; ++i) {
    std::this_thread::sleep_for(milliseconds(30));
    patience.restart();
  }
  EXPECT_LT(patience.waited(), milliseconds(80));
}

TEST(Patience, OneLookIsNeverAllOfIt) {
  Patience patience(milliseconds(40));
  std::this_thread::sleep_for(milliseconds(120));
  EXPECT_FALSE(patience.is_over());
  EXPECT_LE(patience.next_look(), milliseconds(10));
}

// A process of its own stops itself in the middle: it has 300 ms left to wait, and needs them.
TEST(Patience, AStoppedProcessDoesNotWait) {
  const pid_t waiting = ::fork();
  ASSERT_GE(waiting, 0);
  if (waiting == 0) {
    Patience patience(milliseconds(600));
    ::raise(SIGSTOP);
    const TimePoint back = Clock::now();
    while (!patience.is_over())
      std::this_thread::sleep_for(std::min<Nanoseconds>(milliseconds(10), patience.next_look()));
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
}  // namespace hoist
