// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <chrono>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/completion.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>

namespace hoist::test::completion_test {
namespace {

using namespace std::chrono_literals;

std::exception_ptr error_of(const char* text) { return std::make_exception_ptr(std::runtime_error(text)); }

std::string text_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

TEST(Completion, DefaultIsDone) {
  const Completion completion;
  EXPECT_TRUE(completion.done());
  completion.wait();
  EXPECT_TRUE(completion.wait_for(0ns));
  EXPECT_EQ(completion.error(), nullptr);
  bool ran = false;
  completion.then([&](std::exception_ptr error) { ran = !error; });
  EXPECT_TRUE(ran);
}

TEST(Completion, PendingThenDone) {
  Promise promise;
  const Completion completion = promise.completion();
  EXPECT_FALSE(completion.done());
  EXPECT_FALSE(completion.wait_for(1ms));
  EXPECT_EQ(completion.error(), nullptr);
  promise.complete();
  EXPECT_TRUE(completion.done());
  EXPECT_TRUE(completion.wait_for(0ns));
  completion.wait();
}

TEST(Completion, FailureReachesEveryoneWhoWaits) {
  Promise promise;
  const Completion completion = promise.completion();
  const Completion copy = completion;
  promise.fail(error_of("EIO"));
  EXPECT_THROW(completion.wait(), std::runtime_error);
  EXPECT_THROW(copy.wait(), std::runtime_error);
  EXPECT_THROW((void)copy.wait_for(0ns), std::runtime_error);
  EXPECT_EQ(text_of(completion.error()), "EIO");
  EXPECT_EQ(text_of(Completion::failed(error_of("ENOSPC")).error()), "ENOSPC");
}

TEST(Completion, OutlivesItsPromise) {
  Completion completion;
  {
    Promise promise;
    completion = promise.completion();
    promise.fail(error_of("late"));
  }
  EXPECT_EQ(text_of(completion.error()), "late");
}

TEST(Completion, ContinuationsRunInOrderOnTheCompletingThread) {
  Promise promise;
  const Completion completion = promise.completion();
  std::vector<int> order;
  std::vector<std::thread::id> where;
  for (int i = 0; i < 5; ++i) {
    completion.then([&, i](std::exception_ptr error) {
      EXPECT_EQ(text_of(error), "x");
      order.push_back(i);
      where.push_back(std::this_thread::get_id());
    });
  }
  EXPECT_TRUE(order.empty());
  std::thread producer([&] { promise.fail(error_of("x")); });
  const auto producer_id = producer.get_id();
  producer.join();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
  for (const auto id : where) EXPECT_EQ(id, producer_id);
  completion.then([&](std::exception_ptr) { where.push_back(std::this_thread::get_id()); });
  EXPECT_EQ(where.back(), std::this_thread::get_id()) << "after completion it runs here and now";
}

TEST(Completion, AContinuationMaySeeItDoneAttachMoreAndDropThePromise) {
  auto promise = std::make_unique<Promise>();
  const Completion completion = promise->completion();
  bool nested = false;
  completion.then([&](std::exception_ptr) {
    EXPECT_TRUE(completion.done());
    completion.wait();
    completion.then([&](std::exception_ptr) { nested = true; });
    promise.reset();
  });
  promise->complete();
  EXPECT_TRUE(nested);
  EXPECT_EQ(promise, nullptr);
}

TEST(Completion, WaitersOnManyThreads) {
  for (int round = 0; round < 50; ++round) {
    Promise promise;
    const Completion completion = promise.completion();
    int plain = 0;  // published by the promise: the thread sanitizer watches
    std::atomic<int> right{0}, continued{0};
    std::vector<std::thread> threads;
    for (int k = 0; k < 4; ++k) {
      threads.emplace_back([&, k] {
        if (k % 2 == 0) completion.then([&](std::exception_ptr) { continued += plain == 42 ? 1 : 0; });
        completion.wait();
        right += plain == 42 ? 1 : 0;
      });
    }
    plain = 42;
    promise.complete();
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(right.load(), 4);
    EXPECT_EQ(continued.load(), 2) << "a continuation was lost or ran twice";
  }
}

// done() alone must also publish what was written before: pollers never take the lock.
TEST(Completion, PollingPublishes) {
  for (int round = 0; round < 200; ++round) {
    Promise promise;
    const Completion completion = promise.completion();
    int plain = 0;
    std::thread poller([&] {
      while (!completion.done()) std::this_thread::yield();
      EXPECT_EQ(plain, 7);
      EXPECT_EQ(text_of(completion.error()), "e");
    });
    plain = 7;
    promise.fail(error_of("e"));
    poller.join();
  }
}

TEST(WhenAll, NothingIsDone) { EXPECT_TRUE(when_all({}).done()); }

TEST(WhenAll, WaitsForAllAndReportsTheFirstErrorOfTheList) {
  std::vector<Promise> promises(4);
  std::vector<Completion> parts;
  for (auto& promise : promises) parts.push_back(promise.completion());
  parts.emplace_back();  // one that is done already
  const Completion all = when_all(parts);
  promises[3].fail(error_of("three"));
  promises[1].fail(error_of("one"));
  promises[0].complete();
  EXPECT_FALSE(all.done()) << "an error must not end it while a transfer is still in flight";
  promises[2].complete();
  EXPECT_TRUE(all.done());
  EXPECT_EQ(text_of(all.error()), "one");
}

TEST(WhenAll, OfWhichOneIsPendingEndsWithIt) {
  for (const bool fails : {false, true}) {
    Promise last;
    const std::array parts{Completion(), last.completion(), Completion()};
    const Completion all = when_all(parts);
    EXPECT_FALSE(all.done());
    fails ? last.fail(error_of("last")) : last.complete();
    EXPECT_TRUE(all.done());
    EXPECT_EQ(all.error() != nullptr, fails);
  }
  // One has failed already: the others are waited for all the same.
  Promise pending;
  const std::array parts{pending.completion(), Completion::failed(error_of("early"))};
  const Completion all = when_all(parts);
  EXPECT_FALSE(all.done());
  pending.complete();
  EXPECT_THROW(all.wait(), std::runtime_error);
}

TEST(FollowedBy, BeginsTheSecondWhenTheFirstHasEnded) {
  for (const bool first_is_done : {false, true}) {
    SCOPED_TRACE(first_is_done);
    Promise first, second;
    bool begun = false;
    if (first_is_done) first.complete();
    const Completion both = followed_by(first.completion(), [&] {
      begun = true;
      return second.completion();
    });
    EXPECT_EQ(begun, first_is_done);
    if (!first_is_done) first.complete();
    EXPECT_TRUE(begun);
    EXPECT_FALSE(both.done());
    second.complete();
    EXPECT_TRUE(both.done());
    both.wait();
  }
}

TEST(FollowedBy, FailsWithTheFirstOrWithWhatBeginsTheSecond) {
  for (const bool first_is_done : {false, true}) {
    SCOPED_TRACE(first_is_done);
    Promise failing, good;
    if (first_is_done) {
      failing.fail(error_of("first"));
      good.complete();
    }
    const Completion after_failure = followed_by(failing.completion(), []() -> Completion {
      ADD_FAILURE() << "the second was begun";
      return {};
    });
    const Completion thrown =
        followed_by(good.completion(), []() -> Completion { throw std::runtime_error("cannot begin"); });
    if (!first_is_done) {
      failing.fail(error_of("first"));
      good.complete();
    }
    EXPECT_THROW(after_failure.wait(), std::runtime_error);
    EXPECT_THROW(thrown.wait(), std::runtime_error);
  }
}

TEST(WhenAll, FromManyThreads) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Rng rng(seed);
    std::vector<Promise> promises(16);
    std::vector<Completion> parts;
    for (auto& promise : promises) parts.push_back(promise.completion());
    const std::size_t failing = rng.below(32);  // half of the time none
    std::vector<int> written(promises.size());
    std::vector<std::thread> threads;
    const Completion all = when_all(parts);
    for (std::size_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (std::size_t i = t; i < promises.size(); i += 4) {
          written[i] = 1;
          i == failing ? promises[i].fail(error_of("f")) : promises[i].complete();
        }
      });
    }
    try {
      all.wait();
      EXPECT_GE(failing, promises.size()) << "seed " << seed;
    } catch (const std::runtime_error&) {
      EXPECT_LT(failing, promises.size()) << "seed " << seed;
    }
    for (const int one : written) EXPECT_EQ(one, 1) << "seed " << seed;
    for (auto& thread : threads) thread.join();
  }
}

TEST(PromiseDeathTest, TwiceIsABug) {
  Promise promise;
  promise.complete();
  EXPECT_DEATH(promise.complete(), "fulfilled twice");
  EXPECT_DEATH(promise.fail(error_of("x")), "fulfilled twice");
}

// Memory for whatever takes the promise may be lacking.
TEST(Promise, FailsIfAnExceptionKeepsItFromItsTaker) {
  Completion completion;
  const auto start = [&] {
    const Promise promise;
    completion = promise.completion();
    throw std::bad_alloc();
  };
  EXPECT_THROW(start(), std::bad_alloc);
  EXPECT_THAT([&] { completion.wait(); }, testing::ThrowsMessage<Error>(testing::HasSubstr("an exception dropped")));
}

TEST(PromiseDeathTest, NeverIsABug) {
  EXPECT_DEATH({ Promise promise; }, "destroyed before it was fulfilled");
  const auto overwrite_pending = [] {
    Promise first;
    Promise second;
    second.complete();
    first = std::move(second);
  };
  EXPECT_DEATH(overwrite_pending(), "overwritten before it was fulfilled");
}

TEST(PromiseDeathTest, AMovedFromPromiseIsEmptyNotBroken) {
  Promise first;
  Promise second = std::move(first);
  second.complete();
  EXPECT_DEATH(first.complete(), "moved away");  // NOLINT: used after move on purpose
}

}  // namespace
}  // namespace hoist::test::completion_test
