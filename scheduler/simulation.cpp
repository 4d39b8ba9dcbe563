// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <queue>
#include <tuple>

#include <hoist/core/assert.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/scheduler/simulation.hpp>

namespace hoist::scheduler {

namespace {

class Simulation {
 public:
  Simulation(const TaskGraph& graph, std::uint32_t lane_count, const SimulationOptions& options)
      : graph_(graph), options_(options), times_(graph.tasks.size()), missing_(graph.tasks.size()), lanes_(lane_count) {
    followers_.resize(graph.tasks.size());
    for (TaskIndex task = 0; task < graph.tasks.size(); ++task) {
      const auto after = graph.dependencies_of(task);
      missing_[task] = static_cast<std::uint32_t>(after.size());
      for (const TaskIndex before : after) followers_[before].push_back(task);
    }
  }

  std::vector<TaskTimes> run() {
    for (TaskIndex task = 0; task < graph_.tasks.size(); ++task)
      if (missing_[task] == 0) becomes_ready(task);
    start_all();
    while (!running_.empty()) {
      now_ = running_.top().seconds;
      // All that ends now, before anything begins: a lane then has its whole choice.
      while (!running_.empty() && running_.top().seconds <= now_) {
        const Event event = running_.top();
        running_.pop();
        if (event.frees_lane) frees_lane(event.task);
        if (event.ends) ends(event.task);
      }
      start_all();
    }
    return std::move(times_);
  }

 private:
  using Waiting = std::pair<Urgency, TaskIndex>;
  struct Event {
    double seconds;
    TaskIndex task;
    bool frees_lane, ends;
    auto operator<=>(const Event&) const = default;
  };
  struct Lane {
    std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>> ready;
    bool busy = false;
    bool listed = false;  // in changed_
  };

  double seconds_of(TaskIndex task) const {
    const double seconds = graph_.tasks[task].seconds;
    return options_.noise > 0 ? seconds * (1 + options_.noise * random_uniform(options_.seed, task)) : seconds;
  }

  void changed(std::uint32_t lane) {
    if (lanes_[lane].listed) return;
    lanes_[lane].listed = true;
    changed_.push_back(lane);
  }

  void becomes_ready(TaskIndex task) {
    const TaskGraph::Task& one = graph_.tasks[task];
    if (one.lane == TaskGraph::kNoLane) {
      begins(task);
      return;
    }
    HOIST_ASSERT(one.lane < lanes_.size(), "lane {}", one.lane);
    lanes_[one.lane].ready.emplace(one.urgency, task);
    changed(one.lane);
  }

  void begins(TaskIndex task) {
    const double latency = graph_.tasks[task].latency_seconds, free = now_ + seconds_of(task);
    times_[task] = {now_, free + latency};
    running_.push({.seconds = free, .task = task, .frees_lane = true, .ends = latency == 0});
    if (latency > 0) running_.push({.seconds = times_[task].end, .task = task, .frees_lane = false, .ends = true});
  }

  void frees_lane(TaskIndex task) {
    const std::uint32_t lane = graph_.tasks[task].lane;
    if (lane == TaskGraph::kNoLane) return;
    lanes_[lane].busy = false;
    changed(lane);
  }

  void ends(TaskIndex task) {
    for (const TaskIndex follower : followers_[task])
      if (--missing_[follower] == 0) becomes_ready(follower);
  }

  void start_all() {
    for (const std::uint32_t index : changed_) {
      Lane& lane = lanes_[index];
      lane.listed = false;
      if (lane.busy || lane.ready.empty()) continue;
      lane.busy = true;
      begins(lane.ready.top().second);
      lane.ready.pop();
    }
    changed_.clear();
  }

  const TaskGraph& graph_;
  const SimulationOptions& options_;
  std::vector<TaskTimes> times_;
  std::vector<std::uint32_t> missing_;  // dependencies that have not ended
  std::vector<std::vector<TaskIndex>> followers_;
  std::vector<Lane> lanes_;
  std::vector<std::uint32_t> changed_;  // lanes that may have something to begin
  std::priority_queue<Event, std::vector<Event>, std::greater<>> running_;
  double now_ = 0;
};

}  // namespace

TaskIndex TaskGraph::add(std::uint32_t lane, double seconds, std::span<const TaskIndex> after, Urgency urgency,
                         double latency_seconds) {
  const auto index = static_cast<TaskIndex>(tasks.size());
  tasks.push_back({lane, seconds, urgency, static_cast<std::uint32_t>(dependencies.size()), latency_seconds});
  for (const TaskIndex before : after) {
    HOIST_ASSERT(before < index, "task {} after {}", index, before);
    dependencies.push_back(before);
  }
  return index;
}

std::span<const TaskIndex> TaskGraph::dependencies_of(TaskIndex task) const {
  const std::size_t begin = tasks[task].first_dependency;
  const std::size_t end = task + 1 < tasks.size() ? tasks[task + 1].first_dependency : dependencies.size();
  return std::span(dependencies).subspan(begin, end - begin);
}

std::vector<TaskTimes> simulate(const TaskGraph& graph, std::uint32_t lane_count, const SimulationOptions& options) {
  return Simulation(graph, lane_count, options).run();
}

std::vector<double> waits_of_lane(const TaskGraph& graph, std::span<const TaskTimes> times, std::uint32_t lane,
                                  std::uint32_t lane_count, TaskIndex from, TaskIndex to) {
  std::vector<double> waits(lane_count, 0);
  double idle_since = times[from].end;
  for (TaskIndex task = from + 1; task < graph.tasks.size(); ++task) {
    if (graph.tasks[task].lane != lane && task != to) continue;
    if (times[task].begin < idle_since) continue;
    // Back along the tasks that ended last before this one could begin; each explains the time since its own cause.
    TaskIndex cause = task;
    for (double until = times[task].begin; until > idle_since;) {
      const auto before = graph.dependencies_of(cause);
      if (before.empty()) break;
      cause = *std::ranges::max_element(before, {}, [&](TaskIndex one) { return times[one].end; });
      double since = idle_since;  // when the cause's own cause ended
      for (const TaskIndex one : graph.dependencies_of(cause)) since = std::max(since, times[one].end);
      const std::uint32_t blamed = graph.tasks[cause].lane;
      if (blamed != TaskGraph::kNoLane && until > since) waits[blamed] += until - since;
      until = std::min(until, since);
    }
    if (task == to) break;
    idle_since = times[task].end;
  }
  return waits;
}

std::optional<Overrun> find_overrun(const TaskGraph& graph, std::span<const TaskTimes> times,
                                    std::span<const std::uint64_t> budgets) {
  // Memory that is given back at an instant may be taken at the same instant.
  struct Change {
    double seconds;
    bool takes;
    std::uint32_t tier;
    std::uint64_t bytes;
  };
  std::vector<Change> changes;
  for (const TaskGraph::Hold& hold : graph.holds) {
    if (times[hold.to].end <= times[hold.from].begin) continue;
    changes.push_back({times[hold.from].begin, true, hold.tier, hold.bytes});
    changes.push_back({times[hold.to].end, false, hold.tier, hold.bytes});
  }
  std::ranges::sort(changes, {}, [](const Change& one) { return std::tuple(one.seconds, one.takes); });
  std::vector<std::uint64_t> held(budgets.size(), 0);
  for (const Change& change : changes) {
    HOIST_ASSERT(change.tier < budgets.size(), "tier {}", change.tier);
    std::uint64_t& bytes = held[change.tier];
    bytes = change.takes ? bytes + change.bytes : bytes - change.bytes;
    if (bytes > budgets[change.tier]) return Overrun{change.seconds, change.tier, bytes};
  }
  return std::nullopt;
}

}  // namespace hoist::scheduler
