// SPDX-License-Identifier: Apache-2.0
// The promises of every Device and Stream, on every implementation.
#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>

#include "device_fixture.hpp"

namespace hoist::platform::device_conformance_test {
namespace {

using DeviceConformance = DeviceTest;
INSTANTIATE_TEST_SUITE_P(Every, DeviceConformance, all_implementations(), implementation_name);

TEST_P(DeviceConformance, MemoryIsTheBudget) {
  EXPECT_EQ(device_->memory().size(), kMemoryBytes);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(device_->memory().data()) % 256, 0u);
  EXPECT_EQ(device_->host_accessible(), !is_cuda());
  EXPECT_FALSE(device_->description().empty());
}

TEST_P(DeviceConformance, CopiesBytesThereAndBack) {
  const auto stream = device_->create_stream("copy");
  for (const std::size_t count : {std::size_t{1}, std::size_t{3}, std::size_t{4096}, std::size_t{100'003}}) {
    const Bytes source = pattern(count, count);
    Bytes target(count);
    stream->copy(at(512), source.data(), count, CopyKind::host_to_device);
    stream->copy(at(300'000), at(512), count, CopyKind::local);
    stream->copy(target.data(), at(300'000), count, CopyKind::device_to_host);
    stream->synchronize();
    EXPECT_EQ(target, source) << count << " bytes";
  }
}

TEST_P(DeviceConformance, FillsExactlyItsBytes) {
  const auto stream = device_->create_stream("fill");
  Bytes target(64);
  stream->fill(at(0), 0x11, 64);
  stream->fill(at(7), 0xAB, 20);
  stream->copy(target.data(), at(0), 64, CopyKind::device_to_host);
  stream->synchronize();
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(target[i], std::byte(i >= 7 && i < 27 ? 0xAB : 0x11)) << "byte " << i;
}

TEST_P(DeviceConformance, StreamKeepsItsOrder) {
  constexpr std::size_t kRounds = 40;
  constexpr std::size_t kBytes = 257;
  const auto stream = device_->create_stream("order");
  std::vector<Bytes> seen(kRounds, Bytes(kBytes));
  for (std::size_t round = 0; round < kRounds; ++round) {
    stream->fill(at(0), static_cast<std::uint8_t>(round), kBytes);
    stream->copy(at(1024), at(0), kBytes, CopyKind::local);
    stream->copy(seen[round].data(), at(1024), kBytes, CopyKind::device_to_host);
  }
  stream->synchronize();
  for (std::size_t round = 0; round < kRounds; ++round) {
    EXPECT_EQ(seen[round], Bytes(kBytes, static_cast<std::byte>(round))) << "round " << round;
  }
}

// Two streams hand one buffer to and fro; a single unordered access would show as a stale or a future value.
TEST_P(DeviceConformance, EventsOrderStreams) {
  constexpr std::size_t kRounds = 60;
  constexpr std::size_t kBytes = 4096;
  const auto producer = device_->create_stream("producer");
  const auto consumer = device_->create_stream("consumer");
  std::vector<Bytes> seen(kRounds, Bytes(kBytes));
  StreamEvent consumed;
  for (std::size_t round = 0; round < kRounds; ++round) {
    producer->wait(consumed, WaitCause::none);
    producer->fill(at(0), static_cast<std::uint8_t>(round + 1), kBytes);
    consumer->wait(producer->record(), WaitCause::none);
    consumer->copy(seen[round].data(), at(0), kBytes, CopyKind::device_to_host);
    consumed = consumer->record();
  }
  consumed.wait();
  for (std::size_t round = 0; round < kRounds; ++round) {
    EXPECT_EQ(seen[round], Bytes(kBytes, static_cast<std::byte>(round + 1))) << "round " << round;
  }
}

TEST_P(DeviceConformance, DefaultEventHasBeenReached) {
  const StreamEvent event;
  EXPECT_TRUE(event.reached());
  EXPECT_TRUE(event.completion().done());
  event.wait();
  const auto stream = device_->create_stream("default");
  stream->wait(event, WaitCause::none);
  stream->synchronize();
}

TEST_P(DeviceConformance, CompletionTellsTheHost) {
  const auto stream = device_->create_stream("completion");
  const Bytes source = pattern(50'000, 3);
  Bytes target(source.size());
  stream->copy(at(0), source.data(), source.size(), CopyKind::host_to_device);
  stream->copy(target.data(), at(0), target.size(), CopyKind::device_to_host);
  const StreamEvent event = stream->record();
  const Completion first = event.completion();
  const Completion second = event.completion();
  std::atomic<int> continuations{0};
  for (const Completion& completion : {first, second}) {
    completion.then([&](std::exception_ptr error) { continuations += error == nullptr ? 1 : 100; });
  }
  ASSERT_TRUE(first.wait_for(std::chrono::seconds(20)));
  ASSERT_TRUE(second.wait_for(std::chrono::seconds(20)));
  EXPECT_TRUE(event.reached());
  EXPECT_EQ(target, source);
  while (continuations < 2) std::this_thread::yield();
  EXPECT_EQ(continuations, 2);
}

// Enqueues from the thread that fulfils completions: allowed, since a continuation must only not block.
TEST_P(DeviceConformance, ContinuationMayEnqueue) {
  const auto first = device_->create_stream("first");
  const auto second = device_->create_stream("second");
  Promise enqueued;
  first->fill(at(0), 5, 100);
  first->record().completion().then([&](std::exception_ptr) {
    second->copy(at(1000), at(0), 100, CopyKind::local);
    enqueued.complete();
  });
  enqueued.completion().wait();
  Bytes target(100);
  second->copy(target.data(), at(1000), 100, CopyKind::device_to_host);
  second->synchronize();
  EXPECT_EQ(target, Bytes(100, std::byte{5}));
}

TEST_P(DeviceConformance, LedgerCountsLinksAndNothingElse) {
  const auto stream = device_->create_stream("ledger");
  Bytes host(70'000);
  stream->copy(at(0), host.data(), 70'000, CopyKind::host_to_device);
  stream->copy(at(100'000), host.data(), 11, CopyKind::host_to_device);
  stream->copy(at(200'000), at(0), 70'000, CopyKind::local);
  stream->fill(at(0), 1, 4096);
  stream->copy(host.data(), at(0), 1234, CopyKind::device_to_host);
  stream->synchronize();
  EXPECT_EQ(ledger_.totals(Link::host_to_device).bytes, 70'011u);
  EXPECT_EQ(ledger_.totals(Link::device_to_host).bytes, 1234u);
  EXPECT_GT(ledger_.totals(Link::host_to_device).busy.count(), 0);
  {
    const Ledger::OutsideSteps outside_steps(ledger_);
    stream->copy(at(0), host.data(), 99, CopyKind::host_to_device);
    stream->synchronize();
  }
  EXPECT_EQ(ledger_.totals(Link::host_to_device).bytes, 70'011u);
  EXPECT_EQ(ledger_.totals(Link::host_to_device, Ledger::Account::outside_steps).bytes, 99u);
}

TEST_P(DeviceConformance, EmptyOperationsAreNothing) {
  const auto stream = device_->create_stream("empty");
  stream->copy(at(0), nullptr, 0, CopyKind::host_to_device);
  stream->fill(at(0), 1, 0);
  stream->scale_into(at(0), DType::fp32, at(0), DType::bf16, 0, 1.0f, Stream::Combine::add);
  stream->synchronize();
  EXPECT_EQ(ledger_.totals(Link::host_to_device).bytes, 0u);
}

TEST_P(DeviceConformance, StreamsDrainWhenDestroyed) {
  Bytes target(10'000);
  StreamEvent event;
  {
    const auto stream = device_->create_stream("drained");
    stream->fill(at(0), 0x42, 10'000);
    stream->copy(target.data(), at(0), 10'000, CopyKind::device_to_host);
    event = stream->record();
  }
  EXPECT_TRUE(event.reached());
  EXPECT_EQ(target, Bytes(10'000, std::byte{0x42}));
  device_.reset();
  EXPECT_TRUE(event.reached());  // an event outlives stream and device
  event.wait();
  event.completion().wait();
}

TEST_P(DeviceConformance, RegistersAlignedHostMemoryOnce) {
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(4096, 8 * 4096), std::free);
  const std::span<std::byte> bytes(static_cast<std::byte*>(memory.get()), 8 * 4096);
  device_->register_host({});
  device_->register_host(bytes);
  EXPECT_THROW(device_->register_host(bytes), DeviceError);
  {
    const auto stream = device_->create_stream("pinned");
    stream->fill(at(0), 9, bytes.size());
    stream->copy(bytes.data(), at(0), bytes.size(), CopyKind::device_to_host);
  }
  EXPECT_EQ(bytes.back(), std::byte{9});
  device_->unregister_host(bytes);
  device_->register_host(bytes);  // left to the destructor
  device_.reset();
}

TEST_P(DeviceConformance, BorrowsOnlyWhatExists) {
  const auto owned = device_->create_stream("owned");
  if (!is_cuda()) {
    EXPECT_EQ(owned->native(), nullptr);
    EXPECT_THROW(static_cast<void>(device_->borrow_stream(nullptr, "borrowed")), UsageError);
    return;
  }
  const auto borrowed = device_->borrow_stream(owned->native(), "borrowed");
  EXPECT_EQ(borrowed->native(), owned->native());
  Bytes target(16);
  borrowed->fill(at(0), 3, 16);
  owned->copy(target.data(), at(0), 16, CopyKind::device_to_host);
  borrowed->synchronize();
  EXPECT_EQ(target, Bytes(16, std::byte{3}));
}

TEST_P(DeviceConformance, TellsHowLongAStreamHadNothingToDo) {
  const auto stream = device_->create_stream("idle");
  stream->fill(at(0), 1, 16);
  stream->synchronize();
  const auto tell_idle = stream->watch_idle();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // a worker may be late to its idling
  std::promise<Nanoseconds> told;
  tell_idle([&](Nanoseconds idle) { told.set_value(idle); });
  stream->fill(at(0), 2, 16);
  EXPECT_GE(told.get_future().get(), std::chrono::milliseconds(25));
  stream->synchronize();
}

TEST_P(DeviceConformance, LaunchRunsInOrderOrIsRefused) {
  const auto stream = device_->create_stream("launch");
  EXPECT_EQ(stream->name(), "launch");
  int sum = 0;
  const auto add = [&sum](int value) { return [&sum, value] { sum = sum * 10 + value; }; };
  if (is_cuda()) {
    EXPECT_THROW(stream->launch("sum", add(1)), UsageError);
    return;
  }
  for (int value = 1; value <= 6; ++value) stream->launch("sum", add(value));
  stream->synchronize();
  EXPECT_EQ(sum, 123456);
}

}  // namespace
}  // namespace hoist::platform::device_conformance_test
