// SPDX-License-Identifier: Apache-2.0
// Tasks in virtual time: order, lanes, waits, disturbances, budgets, and a small exhaustive oracle.
#include <algorithm>
#include <array>
#include <ctime>
#include <numeric>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/scheduler/simulation.hpp>

namespace hoist::scheduler::simulation_test {
namespace {

using After = std::vector<TaskIndex>;

constexpr std::uint32_t kLanes = 3;

TEST(Simulation, TasksOfALaneTakeTurnsAndLanesRunTogether) {
  TaskGraph graph;
  const TaskIndex first = graph.add(0, 2, {});
  const TaskIndex second = graph.add(0, 3, {});
  const TaskIndex other = graph.add(1, 4, {});
  const TaskIndex both = graph.add(TaskGraph::kNoLane, 0, After{second, other});
  const TaskIndex last = graph.add(1, 1, After{both});
  const auto times = simulate(graph, kLanes);
  EXPECT_EQ(times[first].end, 2);
  EXPECT_EQ(times[second].begin, 2);
  EXPECT_EQ(times[other].end, 4);
  EXPECT_EQ(times[both].end, 5);
  EXPECT_EQ(times[last].end, 6);
}

TEST(Simulation, ALaneTakesWhatSomebodyWaitsForFirst) {
  TaskGraph graph;
  const TaskIndex running = graph.add(0, 1, {});
  const TaskIndex write = graph.add(0, 1, {}, Urgency::nobody_waits);
  const TaskIndex read = graph.add(0, 1, {});
  const auto times = simulate(graph, kLanes);
  EXPECT_EQ(times[running].begin, 0);
  EXPECT_EQ(times[read].begin, 1);
  EXPECT_EQ(times[write].begin, 2);
}

TEST(Simulation, WaitsAreThoseOfTheTasksThatWereWaitedFor) {
  TaskGraph graph;
  const TaskIndex start = graph.add(0, 1, {});
  const TaskIndex read = graph.add(1, 4, {});
  const TaskIndex copy = graph.add(2, 2, After{read});
  const TaskIndex end = graph.add(0, 1, After{start, copy});
  const auto times = simulate(graph, kLanes);
  const auto waits = waits_of_lane(graph, times, 0, kLanes, start, end);
  EXPECT_EQ(waits[0], 0);
  EXPECT_EQ(waits[1], 3) << "from 1 to 4";
  EXPECT_EQ(waits[2], 2) << "from 4 to 6";
}

// The lane sends the next message while the first one is on its way.
TEST(Simulation, ALaneDoesNotWaitForALatency) {
  TaskGraph graph;
  const TaskIndex first = graph.add(0, 2, {}, Urgency::somebody_waits, 5);
  const TaskIndex second = graph.add(0, 1, {}, Urgency::somebody_waits, 1);
  const TaskIndex both = graph.add(1, 1, After{first, second});
  const auto times = simulate(graph, kLanes);
  EXPECT_EQ(times[first].end, 7);
  EXPECT_EQ(times[second].begin, 2);
  EXPECT_EQ(times[second].end, 4);
  EXPECT_EQ(times[both].begin, 7);
  EXPECT_EQ(waits_of_lane(graph, times, 1, kLanes, first, both)[0], 0);
  const TaskIndex again = graph.add(1, 1, After{graph.add(0, 1, After{both}, Urgency::somebody_waits, 3)});
  EXPECT_EQ(waits_of_lane(graph, simulate(graph, kLanes), 1, kLanes, both, again)[0], 4) << "the wait is the lane's";
}

TEST(Simulation, NoiseTakesLonger) {
  TaskGraph graph;
  for (int i = 0; i < 100; ++i) graph.add(0, 1, {});
  const auto end = [&](const SimulationOptions& options) { return simulate(graph, 1, options).back().end; };
  EXPECT_EQ(end({}), 100);
  const double noisy = end({.noise = 0.2, .seed = 7});
  EXPECT_NEAR(noisy, 110, 3);
  EXPECT_EQ(noisy, end({.noise = 0.2, .seed = 7}));
  EXPECT_NE(noisy, end({.noise = 0.2, .seed = 8}));
}

TEST(Simulation, FindsTheInstantAtWhichABudgetIsExceeded) {
  TaskGraph graph;
  const TaskIndex first = graph.add(0, 2, {});
  const TaskIndex second = graph.add(0, 2, After{first});
  const TaskIndex third = graph.add(1, 1, After{first});
  graph.holds = {{0, 60, first, first}, {0, 50, second, second}, {1, 1000, first, third}};
  const auto times = simulate(graph, kLanes);
  EXPECT_FALSE(find_overrun(graph, times, std::array<std::uint64_t, 2>{60, 1000})) << "given back as the next is taken";
  graph.holds.push_back({0, 11, third, third});
  const auto overrun = find_overrun(graph, times, std::array<std::uint64_t, 2>{60, 1000});
  ASSERT_TRUE(overrun);
  EXPECT_EQ(overrun->seconds, 2);
  EXPECT_EQ(overrun->tier, 0u);
  EXPECT_EQ(overrun->bytes, 61u);
}

TEST(Simulation, OfAHundredThousandTasksTakesSecondsAtMost) {
  constexpr TaskIndex kTasks = 100'000;
  TaskGraph graph;
  Rng rng(11);
  for (TaskIndex i = 0; i < kTasks; ++i) {
    After after;
    if (i > 100)
      after = {i - 1 - static_cast<TaskIndex>(rng.below(100)), i - 1 - static_cast<TaskIndex>(rng.below(100))};
    graph.add(static_cast<std::uint32_t>(rng.below(kLanes)), rng.uniform(), after);
    graph.holds.push_back({0, 1, i, i});
  }
  // Processor time: the machine may be busy with other things.
  const std::clock_t begin = std::clock();
  const auto times = simulate(graph, kLanes);
  EXPECT_FALSE(find_overrun(graph, times, std::array<std::uint64_t, 1>{kLanes}));
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 10.0) << "1 on an ordinary build and machine";
}

// The shortest of all orders of a few tasks, each begun as soon as its dependencies and its lane allow in that order.
double shortest(const TaskGraph& graph) {
  std::vector<TaskIndex> order(graph.tasks.size());
  std::iota(order.begin(), order.end(), 0);
  double best = 1e9;
  do {
    std::vector<double> ends(order.size(), -1);
    std::array<double, kLanes> free_at{};
    bool valid = true;
    for (const TaskIndex task : order) {
      double begin = free_at[graph.tasks[task].lane];
      for (const TaskIndex before : graph.dependencies_of(task)) {
        valid = valid && ends[before] >= 0;
        begin = std::max(begin, ends[before]);
      }
      if (!valid) break;
      free_at[graph.tasks[task].lane] = ends[task] = begin + graph.tasks[task].seconds;
    }
    if (valid) best = std::min(best, *std::ranges::max_element(ends));
  } while (std::ranges::next_permutation(order).found);
  return best;
}

// Some lane works at every moment, so the end is at most kLanes times the best. That it is never better than the best
// shows that the simulation breaks no dependency and no turn.
TEST(Simulation, IsNeverBetterThanTheBestOfAllOrdersAndSeldomMuchWorse) {
  int optimal = 0;
  constexpr int kGraphs = 100;
  for (int seed = 0; seed < kGraphs; ++seed) {
    Rng rng(static_cast<std::uint64_t>(seed));
    TaskGraph graph;
    for (TaskIndex i = 0; i < 7; ++i) {
      After after;
      for (TaskIndex before = 0; before < i; ++before)
        if (rng.below(4) == 0) after.push_back(before);
      graph.add(static_cast<std::uint32_t>(rng.below(kLanes)), 1 + static_cast<double>(rng.below(4)), after);
    }
    double end = 0;
    for (const TaskTimes& times : simulate(graph, kLanes)) end = std::max(end, times.end);
    const double best = shortest(graph);
    EXPECT_GE(end, best) << "seed " << seed;
    EXPECT_LE(end, kLanes * best) << "seed " << seed;
    optimal += end == best ? 1 : 0;
  }
  EXPECT_GT(optimal, kGraphs / 2);
}

}  // namespace
}  // namespace hoist::scheduler::simulation_test
