// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/zero/predict/step_graph.hpp>

namespace hoist::detail {

namespace {

using scheduler::TaskGraph;
using scheduler::TaskIndex;
using scheduler::Urgency;
using Tasks = std::vector<TaskIndex>;

// Pieces of a step's update at most: with more, a graph takes long and shows nothing new.
constexpr std::uint64_t kPiecesMax = 2048;
constexpr std::size_t kBuffersLeast = 3;

// The latest tasks of a number of buffers that are used in turn.
class Turns {
 public:
  explicit Turns(std::size_t count) : count_(count) {}
  // Adds the task that the next user has to wait for.
  void await(Tasks& after) const {
    if (count_ > 0 && users_.size() >= count_) after.push_back(users_[users_.size() - count_]);
  }
  void used(TaskIndex until) { users_.push_back(until); }

 private:
  std::size_t count_;  // 0: no limit
  Tasks users_;
};

class Builder {
 public:
  Builder(const Prediction& prediction, const StepSpeeds& speeds)
      : p_(prediction),
        speeds_(speeds),
        piece_elements_(piece_elements()),
        buffer_count_(buffer_count()),
        update_buffers_(buffer_count_),
        staging_(prediction.staging_buffers),
        gradient_buffers_(prediction.gradient_buffers),
        spilled_(prediction.units.size()),
        updated_(prediction.units.size()),
        readable_(prediction.units.size()),
        written_(prediction.units.size()) {
    for (const UnitWork& unit : p_.units) parameters_ += static_cast<double>(unit.parameters);
    // Pieces of the ring: of all gradients, or of those that are spilled.
    for (const UnitWork& unit : p_.units) {
      const StepBytes& gradient = unit.bytes.gradient;
      const std::uint64_t bytes = p_.spilled_units > 0 ? gradient.nvme_write : gradient.device_to_host;
      largest_gradient_ = std::max(largest_gradient_, bytes / p_.passes);
    }
    if (p_.gradient_ring_bytes > 0 && largest_gradient_ > 0)
      ring_ = Turns(std::max<std::size_t>(p_.gradient_ring_bytes / largest_gradient_, 1));
  }

  StepGraph run(unsigned steps) {
    for (unsigned step = 0; step < steps; ++step) {
      for (unsigned pass = 0; pass < p_.passes; ++pass) {
        const bool first = pass == 0, last = pass + 1 == p_.passes;
        run_pass(first && step > 0 && p_.updates_under_forward, last && p_.updates_under_backward);
      }
      decide();
    }
    return std::move(out_);
  }

 private:
  TaskIndex add(Resource lane, double seconds, const Tasks& after, Urgency urgency = Urgency::somebody_waits) {
    return out_.tasks.add(static_cast<std::uint32_t>(lane), seconds, after, urgency, latency_of(lane));
  }
  double latency_of(Resource lane) const {
    if (lane == Resource::nvme) return speeds_.nvme_latency;
    if (lane == Resource::wire) return speeds_.wire_latency;
    return lane == Resource::host_to_device || lane == Resource::device_to_host ? speeds_.copy_latency : 0;
  }
  TaskIndex add_point(const Tasks& after) { return out_.tasks.add(TaskGraph::kNoLane, 0, after); }
  // Appends a task unless it has nothing to do: `after` is then what the next one waits for.
  void chain(Resource lane, double seconds, Tasks& after) {
    if (seconds > 0) after = {add(lane, seconds, after)};
  }
  void hold(HeldIn memory, std::uint64_t bytes, TaskIndex from, TaskIndex to) {
    if (bytes > 0) out_.tasks.holds.push_back({static_cast<std::uint32_t>(memory), bytes, from, to});
  }
  double read_seconds(std::uint64_t bytes) const {
    return nvme_seconds(static_cast<double>(bytes), speeds_.nvme_read, p_.step, speeds_);
  }
  double write_seconds(std::uint64_t bytes) const {
    return nvme_seconds(static_cast<double>(bytes), speeds_.nvme_write, p_.step, speeds_);
  }

  std::uint64_t piece_elements() const {
    std::uint64_t all = 0;
    for (const UnitWork& unit : p_.units) all += unit.shard_elements;
    return std::max({p_.update_buffer_parameters, divide_up(all, kPiecesMax), std::uint64_t{1}});
  }
  // A piece of the graph may be several of the engine's: then there are fewer of them at once.
  std::size_t buffer_count() const {
    if (p_.update_buffers == 0) return 0;
    const std::uint64_t bytes = p_.update_buffers * std::max(p_.update_buffer_parameters, std::uint64_t{1});
    return std::max<std::size_t>(bytes / piece_elements_, kBuffersLeast);
  }

  // The update of a unit once `decided` tasks are done; its reads begin after `reads_after`.
  void update(std::uint32_t u, const Tasks& decided, const Tasks& reads_after) {
    const UnitWork& unit = p_.units[u];
    const StepBytes& bytes = unit.bytes.update;
    if (!unit.trainable || unit.device_update_bytes > 0) return;
    const std::uint64_t pieces = std::max<std::uint64_t>(divide_up(unit.shard_elements, piece_elements_), 1);
    const double share = 1 / static_cast<double>(pieces);
    const bool buffered = bytes.nvme_read > 0;
    const std::uint64_t resident_write = unit.bytes.resident_write_bytes;
    const std::uint64_t buffered_write = bytes.nvme_write - resident_write;
    // State on NVMe only must be written before it is read again; nothing changes before the last commit is durable.
    Tasks old;
    if (readable_[u]) old.push_back(*readable_[u]);
    if (spilled_[u]) old.push_back(*spilled_[u]);
    if (committed_) old.push_back(*committed_);
    Tasks computed, stored, readable;
    for (std::uint64_t i = 0; i < pieces; ++i) {
      Tasks after = old;
      after.insert(after.end(), decided.begin(), decided.end());
      std::optional<TaskIndex> first;
      if (buffered) {
        Tasks before = old;
        before.insert(before.end(), reads_after.begin(), reads_after.end());
        update_buffers_.await(before);
        first = add(Resource::nvme, read_seconds(bytes.nvme_read) * share, before);
        after.push_back(*first);
      }
      const TaskIndex compute =
          add(Resource::host_memory, time_of(unit.update_memory_bytes, speeds_.host_memory) * share, after);
      computed.push_back(compute);
      const auto store = [&](std::uint64_t part, Urgency urgency) {
        stored.push_back(add(Resource::nvme, write_seconds(part) * share, {compute}, urgency));
        return stored.back();
      };
      const TaskIndex last = buffered_write > 0 ? store(buffered_write, Urgency::nobody_waits) : compute;
      readable.push_back(last);
      if (resident_write > 0) store(resident_write, Urgency::only_a_commit_waits);
      if (!buffered) continue;
      update_buffers_.used(last);
      hold(HeldIn::update_buffers, p_.update_buffers * p_.update_buffer_bytes / buffer_count_, *first, last);
    }
    updated_[u] = add_point(computed);
    readable_[u] = add_point(readable);
    written_[u] = stored.empty() ? updated_[u] : add_point(stored);
  }

  // The slots of a pass: units forward, then backward.
  std::uint32_t unit_of(std::size_t slot) const {
    const std::size_t units = p_.units.size();
    return static_cast<std::uint32_t>(slot < units ? slot : 2 * units - 1 - slot);
  }

  void run_pass(bool updates_forward, bool updates_backward) {
    const std::size_t slots = 2 * p_.units.size();
    std::vector<Tasks> ready(slots);  // what brings the units of each slot
    slot_tasks_.assign(slots, 0);
    pass_begins_ = last_compute_;
    auto fetch = p_.fetches.begin();
    std::uint32_t next_update = 0;  // in the order of forward
    gathered_.clear();
    for (std::size_t slot = 0; slot < slots; ++slot) {
      for (; fetch != p_.fetches.end() && fetch->issued_at <= slot; ++fetch) {
        // An update that is asked for begins with the fetch, and any other one in its turn.
        const std::uint32_t until = fetch->unit + 1;
        for (; updates_forward && next_update < until; ++next_update) update_forward(next_update);
        bring(*fetch, slots, ready);
      }
      const std::uint32_t u = unit_of(slot);
      for (; updates_forward && next_update <= u && slot < p_.units.size(); ++next_update) update_forward(next_update);
      compute(slot, u, ready[slot]);
      if (slot >= p_.units.size()) gradient(slot, u, updates_backward);
    }
    for (const auto& [from, last_use, bytes] : gathered_)
      hold(HeldIn::gather_memory, bytes, from, slot_tasks_[last_use]);
  }

  void update_forward(std::uint32_t u) {
    Tasks reads_after;
    if (p_.updates_on_request) staging_.await(reads_after);
    update(u, {out_.decided.back()}, reads_after);
  }

  // Adds what ends before the program reaches a slot of this pass.
  void await_slot(std::uint32_t slot, Tasks& after) const {
    if (slot > 0) {
      after.push_back(slot_tasks_[slot - 1]);
    } else if (pass_begins_) {
      after.push_back(*pass_begins_);
    }
  }

  // Reads, copies up and gathers a unit.
  void bring(const PlannedFetch& fetch, std::size_t slots, std::vector<Tasks>& ready) {
    if (fetch.first_use >= slots) return;
    const UnitWork& unit = p_.units[fetch.unit];
    const bool forward = fetch.first_use < p_.units.size();
    const StepBytes bytes = (forward ? unit.bytes.forward_fetch : unit.bytes.backward_fetch) / p_.passes;
    Tasks after;
    std::optional<TaskIndex> read;
    if (bytes.nvme_read > 0) {
      Tasks before;
      staging_.await(before);
      if (readable_[fetch.unit] && !forward) before.push_back(*readable_[fetch.unit]);
      read = add(Resource::nvme, read_seconds(bytes.nvme_read), before);
      after.push_back(*read);
    }
    if (updated_[fetch.unit]) after.push_back(*updated_[fetch.unit]);
    // Its place in the gather memory is free, and the program has come that far.
    await_slot(fetch.issued_at, after);
    const TaskIndex begins = add_point(after);
    after = {begins};
    chain(Resource::host_to_device, time_of(bytes.host_to_device, speeds_.host_to_device), after);
    if (read) {
      staging_.used(after.front());
      hold(HeldIn::staging_buffers, p_.staging_buffer_bytes, *read, after.front());
    }
    chain(Resource::wire, time_of(bytes.wire, speeds_.wire), after);
    ready[fetch.first_use].push_back(after.front());
    if (fetch.bytes > 0) gathered_.push_back({begins, fetch.last_use, fetch.bytes});
  }

  void compute(std::size_t slot, std::uint32_t u, Tasks after) {
    const bool forward = slot < p_.units.size();
    const double pass_seconds = speeds_.compute_seconds / p_.passes;
    const double share = forward ? speeds_.forward_share : 1 - speeds_.forward_share;
    if (last_compute_) after.push_back(*last_compute_);
    if (updated_[u]) after.push_back(*updated_[u]);
    if (!forward) gradient_buffers_.await(after);
    last_compute_ =
        add(Resource::compute, pass_seconds * share * static_cast<double>(p_.units[u].parameters) / parameters_, after);
    slot_tasks_[slot] = *last_compute_;
  }

  void gradient(std::size_t slot, std::uint32_t u, bool updates) {
    const StepBytes bytes = p_.units[u].bytes.gradient / p_.passes;
    Tasks after{slot_tasks_[slot]};
    chain(Resource::wire, time_of(bytes.wire, speeds_.wire), after);
    const bool spilled = bytes.nvme_write > 0;
    if ((updates || spilled) && bytes.device_to_host > 0) ring_.await(after);
    chain(Resource::device_to_host, time_of(bytes.device_to_host, speeds_.device_to_host), after);
    if (!p_.units[u].trainable) return;
    gradient_buffers_.used(add_point(after));
    hold(HeldIn::gradient_buffers, p_.gradient_buffer_bytes, slot_tasks_[slot], after.front());
    if (spilled) {
      if (bytes.nvme_read > 0) {
        if (spilled_[u]) after.push_back(*spilled_[u]);
        after = {add(Resource::nvme, read_seconds(bytes.nvme_read), after)};
      }
      spilled_[u] = add(Resource::nvme, write_seconds(bytes.nvme_write), after, Urgency::nobody_waits);
      ring_.used(*spilled_[u]);
    }
    gradients_.insert(gradients_.end(), after.begin(), after.end());
    if (!updates) return;
    update(u, after, after);
    if (bytes.device_to_host > 0 && updated_[u]) ring_.used(*updated_[u]);
  }

  // step(): every gradient is there.
  void decide() {
    Tasks after = std::move(gradients_);
    gradients_.clear();
    after.push_back(*last_compute_);
    Tasks before;  // step() begins when the last step's commit is durable
    if (p_.updates_under_forward) await_writes(before);
    if (!before.empty()) after.push_back(commit(before));
    out_.decided.push_back(add_point(after));
    after = {out_.decided.back()};
    std::uint64_t brought_down = 0;
    for (const UnitWork& unit : p_.units) brought_down += unit.bytes.update.device_to_host;
    if (device_written_) after.push_back(*device_written_);
    chain(Resource::device_memory, time_of(p_.device_update_bytes, speeds_.device_memory), after);
    if (p_.device_update_bytes > 0) write_device_units(brought_down, after);
    if (!p_.updates_under_forward && !p_.updates_under_backward) {
      // Reads begin when the program calls step(), which is when it has submitted its last slot.
      Tasks reads_after;
      const std::uint32_t submitted = p_.fetches.empty() ? 0 : p_.fetches.back().issued_at;
      await_slot(submitted, reads_after);
      for (std::uint32_t u = 0; u < p_.units.size(); ++u) update(u, {out_.decided.back()}, reads_after);
      await_writes(after);
    }
    last_compute_ = add_point(after);
    if (p_.updates_under_forward) return;
    Tasks written;  // the program does not wait for this commit, but the next step's updates do
    await_writes(written);
    committed_ = commit(written);
  }

  // When a commit of these writes is durable: it flushes them, and after them its manifest.
  TaskIndex commit(const Tasks& written) {
    const double flushes = 2 * p_.commits * speeds_.nvme_flush;
    if (flushes <= 0) return add_point(written);
    return out_.tasks.add(static_cast<std::uint32_t>(Resource::nvme), 0, written, Urgency::somebody_waits, flushes);
  }

  // Adds all writes of the latest updates.
  void await_writes(Tasks& after) const {
    for (const auto& written : written_)
      if (written) after.push_back(*written);
    if (device_written_) after.push_back(*device_written_);
  }

  // A commit also writes the units whose state is in device memory, out of update buffers.
  void write_device_units(std::uint64_t brought_down, Tasks after) {
    chain(Resource::device_to_host, time_of(brought_down, speeds_.device_to_host), after);
    std::uint64_t written = 0;
    for (const UnitWork& unit : p_.units)
      if (unit.device_update_bytes > 0) written += unit.bytes.update.nvme_write;
    if (written > 0) after = {add(Resource::nvme, write_seconds(written), after, Urgency::nobody_waits)};
    device_written_ = after.front();
  }

  struct Gathered {
    TaskIndex from;
    std::uint32_t last_use;
    std::uint64_t bytes;
  };

  const Prediction& p_;
  const StepSpeeds& speeds_;
  double parameters_ = 0;
  std::uint64_t largest_gradient_ = 0;
  std::uint64_t piece_elements_;
  std::size_t buffer_count_;
  StepGraph out_;
  Turns update_buffers_, staging_, gradient_buffers_, ring_{0};
  std::vector<std::optional<TaskIndex>> spilled_;  // by unit: its latest gradient is on NVMe
  // By unit, the tasks after which its latest update is computed; readable from NVMe again; written to NVMe as a whole.
  std::vector<std::optional<TaskIndex>> updated_, readable_, written_;
  std::optional<TaskIndex> last_compute_, pass_begins_, device_written_;
  std::optional<TaskIndex> committed_;  // not in mode forward
  Tasks slot_tasks_;                    // of this pass
  Tasks gradients_;                     // of this step
  std::vector<Gathered> gathered_;
};

}  // namespace

StepGraph step_graph(const Prediction& prediction, const StepSpeeds& speeds, unsigned steps) {
  return Builder(prediction, speeds).run(steps);
}

std::vector<std::uint64_t> reserved_bytes(const Prediction& p) {
  return {p.gather_bytes, p.gradient_buffers * p.gradient_buffer_bytes, p.staging_buffers * p.staging_buffer_bytes,
          p.update_buffers * p.update_buffer_bytes};
}

double nvme_seconds(double bytes, double bytes_per_second, const StepBytes& step, const StepSpeeds& speeds) {
  if (bytes_per_second <= 0 || bytes <= 0) return 0;
  const double alone = bytes / bytes_per_second;
  if (speeds.nvme_mixed <= 0 || speeds.nvme_read <= 0 || speeds.nvme_write <= 0) return alone;
  const auto read = static_cast<double>(step.nvme_read), written = static_cast<double>(step.nvme_write);
  const double in_turn = read / speeds.nvme_read + written / speeds.nvme_write;
  return in_turn > 0 ? alone * least_nvme_seconds(read, written, speeds) / in_turn : 0;
}

}  // namespace hoist::detail
