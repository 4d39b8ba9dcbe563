// SPDX-License-Identifier: Apache-2.0
#include <csignal>
#include <cstdio>
#include <future>
#include <string>

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/thread.hpp>

namespace hoist::test::thread_test {
namespace {

std::string name_of(std::thread& thread) {
  char name[16] = {};
  ::pthread_getname_np(thread.native_handle(), name, sizeof(name));
  return name;
}

TEST(Thread, HasAName) {
  std::promise<void> asked;
  std::thread thread = start_thread("a name of more than 15 characters", [&] { asked.get_future().wait(); });
  EXPECT_EQ(name_of(thread), "a name of more ");
  asked.set_value();
  thread.join();
}

TEST(Thread, LeavesTheProgramsSignalsToItsOwnThreads) {
  const auto blocks = [](int signal) {
    sigset_t blocked;
    ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    return ::sigismember(&blocked, signal) == 1;
  };
  start_thread("hoist-test", [&] {
    for (const int signal : {SIGALRM, SIGUSR1, SIGCHLD, SIGINT, SIGTERM}) EXPECT_TRUE(blocks(signal)) << signal;
    for (const int signal : {SIGSEGV, SIGBUS, SIGPROF}) EXPECT_FALSE(blocks(signal)) << signal;
  }).join();
  EXPECT_FALSE(blocks(SIGALRM));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need address space without end
TEST(Thread, ThatTheSystemRefusesIsAnErrorWithItsName) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto start_without_memory = [] {
    const rlimit limit{1, 1};
    ::setrlimit(RLIMIT_AS, &limit);
    try {
      start_thread("hoist-test", [] {}).join();
    } catch (const Error& error) {
      std::fputs(error.what(), stderr);
      ::_exit(3);
    }
    ::_exit(0);
  };
  EXPECT_EXIT(start_without_memory(), testing::ExitedWithCode(3), "'hoist-test' could not be started: .*ulimit -u");
}
#endif

TEST(Thread, ThatWouldGetTooSmallAStackIsAnErrorWithItsName) {
  pthread_attr_t former, small;
  ASSERT_EQ(::pthread_getattr_default_np(&former), 0);
  ASSERT_EQ(::pthread_attr_init(&small), 0);
  ASSERT_EQ(::pthread_attr_setstacksize(&small, 64 * 1024), 0);
  ASSERT_EQ(::pthread_setattr_default_np(&small), 0);
  std::string refusal;
  try {
    start_thread("hoist-test", [] {}).join();
  } catch (const Error& error) {
    refusal = error.what();
  }
  ::pthread_setattr_default_np(&former);
  ::pthread_attr_destroy(&former);
  ::pthread_attr_destroy(&small);
  EXPECT_NE(refusal.find("'hoist-test' would get a stack of 64.0 KiB, and 256 KiB are needed"), std::string::npos)
      << refusal;
  EXPECT_NE(refusal.find("ulimit -s"), std::string::npos);
}

}  // namespace
}  // namespace hoist::test::thread_test
