// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <hoist/core/error.hpp>
#include <hoist/core/ledger.hpp>
#include <hoist/core/trace.hpp>
#include <hoist/tests/support/other_kinds.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::trace_test {
namespace {

using hoist::test::TempDirectory;
using Json = nlohmann::json;

Json written(const Trace& trace, const TempDirectory& directory) {
  trace.write(directory / "trace.json", "rank 3");
  std::ifstream file(directory / "trace.json");
  return Json::parse(file);
}

std::vector<Json> spans(const Json& trace) {
  std::vector<Json> found;
  for (const Json& event : trace.at("traceEvents"))
    if (event.at("ph") == "X") found.push_back(event);
  return found;
}

TEST(Trace, IsWhatAViewerExpects) {
  const TempDirectory directory;
  Trace trace;
  const TimePoint begin = Clock::now();
  trace.add(TraceRow::nvme_read, "layer \"7\"\\", begin, begin + std::chrono::microseconds(1500), 4096);
  const Json json = written(trace, directory);
  const auto events = spans(json);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].at("name"), "layer \"7\"\\");
  EXPECT_EQ(events[0].at("dur"), 1500.0);
  EXPECT_EQ(events[0].at("args").at("bytes"), 4096);
  std::set<std::string> names;
  for (const Json& event : json.at("traceEvents"))
    if (event.at("ph") == "M") names.insert(event.at("args").at("name"));
  EXPECT_EQ(names, (std::set<std::string>{"rank 3", "NVMe read"}));
}

TEST(Trace, WhatOverlapsIsDrawnOnLanes) {
  const TempDirectory directory;
  Trace trace;
  const TimePoint t = Clock::now();
  const auto at = [&](int begin, int end) {
    trace.add(TraceRow::wire, "x", t + std::chrono::microseconds(begin), t + std::chrono::microseconds(end));
  };
  at(0, 10), at(5, 8), at(10, 12), at(9, 20);
  const auto events = spans(written(trace, directory));
  ASSERT_EQ(events.size(), 4u);
  for (std::size_t i = 0; i < events.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (events[i].at("tid") != events[j].at("tid")) continue;
      EXPECT_LE(events[j].at("ts").get<double>() + events[j].at("dur").get<double>(),
                events[i].at("ts").get<double>() + 0.002);
    }
  }
  std::set<int> lanes;
  for (const Json& event : events) lanes.insert(event.at("tid").get<int>());
  EXPECT_EQ(lanes.size(), 2u);
}

TEST(Trace, KeepsTheNewestWhenFull) {
  const TempDirectory directory;
  Trace trace(4);
  for (int i = 0; i < 10; ++i) trace.add(TraceRow::program, std::to_string(i), Clock::now(), Clock::now());
  EXPECT_EQ(trace.dropped(), 6u);
  const auto events = spans(written(trace, directory));
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events.front().at("name"), "6");
}

TEST(Trace, TakesEventsFromManyThreads) {
  const TempDirectory directory;
  Trace trace;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i)
        const TraceSpan span(&trace, TraceRow::commit, "a name longer than thirty bytes by far");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(spans(written(trace, directory)).size(), 2000u);
}

TEST(Trace, LedgersTellItWhatLinksDidAndWhatWasWaitedFor) {
  const TempDirectory directory;
  Trace trace;
  Ledger ledger;
  ledger.trace_to(&trace);
  ledger.count(Link::host_to_device, 100, std::chrono::microseconds(20));
  ledger.waited(WaitCause::comm, std::chrono::microseconds(30));
  ledger.waited(WaitCause::optimizer, std::chrono::microseconds(40));
  std::multiset<std::string> names;
  for (const Json& event : spans(written(trace, directory))) names.insert(event.at("name"));
  EXPECT_EQ(names, (std::multiset<std::string>{"host_to_device", "comm", "optimizer"}));
}

TEST(Trace, APlaceThatCannotBeWrittenIsNamed) {
  const Trace trace;
  EXPECT_THROW(trace.write("/nowhere/at/all.json", "rank 0"), IoError);
  EXPECT_THROW(Trace::check("/nowhere/at/all.json"), IoError);
  const test::TempDirectory directory;
  EXPECT_THROW(Trace::check(directory.path().string()), IoError);
  Trace::check(directory / "trace.json");
  EXPECT_TRUE(std::filesystem::is_empty(directory.path())) << "nothing is left behind";
  const test::TestDeadline deadline;  // for whoever might read a pipe one day
  ASSERT_TRUE(test::kOtherKinds.front().make(directory / "pipe"));
  EXPECT_THROW(Trace::check(directory / "pipe"), IoError);
  EXPECT_THROW(trace.write(directory / "pipe", "rank 0"), IoError);
  EXPECT_THROW(trace.write("/dev/full", "rank 0"), IoError);
  {
    Trace long_one;
    for (int i = 0; i < 10000; ++i) long_one.add(TraceRow::commit, "a commit", {}, {});
    EXPECT_THROW(long_one.write("/dev/full", "rank 0"), IoError) << "more than fits the stream's buffer";
  }
  // A device is written to; a file that took its place would be everybody's surprise.
  std::filesystem::create_symlink("/dev/null", directory / "nowhere");
  Trace::check(directory / "nowhere");
  trace.write(directory / "nowhere", "rank 0");
  EXPECT_TRUE(std::filesystem::is_symlink(directory / "nowhere"));
}

}  // namespace
}  // namespace hoist::trace_test
