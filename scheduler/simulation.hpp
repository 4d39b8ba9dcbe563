// SPDX-License-Identifier: Apache-2.0
// scheduler/simulation.hpp - runs a graph of tasks in virtual time, on lanes that do one task after the other, and
// checks what the tasks hold against budgets. Pure.
//
// A lane is a link, or the processors of one kind. A lane takes the most urgent of the tasks that are ready, then
// the one that was added first. A task that has begun ends. Its lane takes the next task before the first one's latency
// has passed: the messages of a link follow each other.
//
// Cost  n log n in the number of tasks: 100,000 in less than a second.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace hoist::scheduler {

using TaskIndex = std::uint32_t;

enum class Urgency : std::uint8_t { somebody_waits, nobody_waits, only_a_commit_waits };

struct TaskGraph {
  struct Task {
    std::uint32_t lane = 0;  // kNoLane: takes no turn
    double seconds = 0;      // for which it keeps the lane busy
    Urgency urgency = Urgency::somebody_waits;
    std::uint32_t first_dependency = 0;  // in `dependencies`, up to the next task's
    double latency_seconds = 0;          // after these, until it ends
  };
  // Memory that is taken when one task begins and given back when another one ends.
  struct Hold {
    std::uint32_t tier = 0;
    std::uint64_t bytes = 0;
    TaskIndex from = 0;
    TaskIndex to = 0;
  };
  static constexpr std::uint32_t kNoLane = ~std::uint32_t{0};

  std::vector<Task> tasks;
  std::vector<TaskIndex> dependencies;
  std::vector<Hold> holds;

  // Pre: the dependencies were added before.
  TaskIndex add(std::uint32_t lane, double seconds, std::span<const TaskIndex> after,
                Urgency urgency = Urgency::somebody_waits, double latency_seconds = 0);
  std::span<const TaskIndex> dependencies_of(TaskIndex task) const;
};

struct SimulationOptions {
  double noise = 0;  // each task takes 1 to 1 + noise times as long, at random
  std::uint64_t seed = 1;
};

struct TaskTimes {
  double begin = 0;
  double end = 0;
};
// By task.
std::vector<TaskTimes> simulate(const TaskGraph& graph, std::uint32_t lane_count,
                                const SimulationOptions& options = {});

// How long `lane` stood idle because of each other lane, between the end of task `from` and the end of `to`: along the
// chain of tasks that each of its tasks waited for. Pre: the lane's tasks run in the order of their indices.
std::vector<double> waits_of_lane(const TaskGraph& graph, std::span<const TaskTimes> times, std::uint32_t lane,
                                  std::uint32_t lane_count, TaskIndex from, TaskIndex to);

// The first instant at which the holds of a tier take more than its budget.
struct Overrun {
  double seconds = 0;
  std::uint32_t tier = 0;
  std::uint64_t bytes = 0;
};
std::optional<Overrun> find_overrun(const TaskGraph& graph, std::span<const TaskTimes> times,
                                    std::span<const std::uint64_t> budgets);

}  // namespace hoist::scheduler
