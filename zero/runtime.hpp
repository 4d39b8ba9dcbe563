// SPDX-License-Identifier: Apache-2.0
// zero/runtime.hpp - what a process owns once: device, budgets, communicator, update threads, the ledger.
//
// Threading  Any thread. Several engines may share one runtime; with several ranks one thread makes all their calls, in
//            the same order on each rank, and an engine's pass ends before another's begins.
// Memory     A GPU's budget is taken at construction; pinned memory, and the host device's, when an engine is laid
//            out. A runtime outlives its engines, and the streams and device blocks that a program has of it: ending it
//            before them is a bug that ends the process. In a process that was forked later, none of their destructors
//            does anything. An engine and its runtime end before main returns or exit() is called.
// Errors     UsageError from calls in a process that was forked later (the counters below stay readable there).
//            DeviceError, CommError, BudgetError, ConfigError, UsageError from construction, IoError where no trace
//            can be written. One that turns out at the end not to be writable is only logged.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <hoist/core/ledger.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/tiers/budget.hpp>
#include <hoist/tiers/device_arena.hpp>
#include <hoist/zero/options.hpp>

namespace hoist {

struct ChosenOptions;

namespace comm {
class Communicator;
struct CommunicatorOptions;
}  // namespace comm
namespace detail {
class EngineCore;
}
namespace optim {
class UpdatePool;
}

class Runtime {
 public:
  explicit Runtime(const RuntimeOptions& options);
  // With a communicator of the program's own: a rank of a ThreadGroup (`join` receives the options, scratch included),
  // or another bootstrap.
  using MakeCommunicator = std::function<std::unique_ptr<comm::Communicator>(const comm::CommunicatorOptions&)>;
  Runtime(const RuntimeOptions& options, const MakeCommunicator& join);
  // Inside a tensor- or pipeline-parallel job: state is partitioned over the ranks of `sharding` (those that hold
  // copies of the same parameters), while the gradient norm, clipping and whether a step is skipped are those of all
  // ranks of `norm`: the whole job, which holds every sharding group whole. A parameter that several sharding groups
  // have is counted by one of them (ParameterSpec::counts_in_norm).
  // Commits are the job's, too: a step counts when it is durable in every group, and after a crash all of them go on
  // from the same one. So every rank of `norm` makes the same calls of create(), restore(), find_commit(),
  // find_checkpoints(), step(), save() and write() in the same order (a group that has nothing to write() passes no
  // values); the other collective calls are each group's own. Each group has an offload directory of its own.
  struct Groups {
    MakeCommunicator sharding;  // empty: each rank has all of its model
    MakeCommunicator norm;
  };
  Runtime(const RuntimeOptions& options, const Groups& groups);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // With what was chosen for this machine where they left the choice.
  const RuntimeOptions& options() const { return options_; }
  // parts_-> throws UsageError in a process that was forked later; parts_.get()-> does not, for what stays readable
  // there (InOneProcess).
  platform::Device& device() { return *parts_->device; }
  // For memory that outlives the runtime: the device goes with its last owner, and keeps the ledger that it counts in.
  std::shared_ptr<platform::Device> shared_device() { return parts_->device; }
  // For a program's own activations and workspaces: same arena, same budget. Allocate before the engine is
  // made; the engine then uses what is left for gathered weights.
  tiers::DeviceArena& device_arena() { return *parts_->arena; }
  tiers::Budget& device_budget() { return parts_.get()->device_budget; }
  tiers::Budget& pinned_budget() { return parts_.get()->pinned_budget; }
  comm::Communicator& communicator() { return *parts_->communicator; }
  comm::Communicator& norm_group() { return parts_->norm_group ? *parts_->norm_group : communicator(); }
  bool has_several_groups() const;
  optim::UpdatePool& update_pool() { return *parts_->update_pool; }
  Ledger& ledger() { return *parts_.get()->ledger; }
  Trace* trace() { return parts_.get()->trace.get(); }  // null unless RuntimeOptions::trace_path asks for one
  int rank() const;
  int world_size() const;

 private:
  friend class detail::EngineCore;  // engine_at_work_

  Runtime(const RuntimeOptions& options, const Groups& groups, bool alone);
  Runtime(const ChosenOptions& chosen, const Groups& groups, bool alone);

  const comm::Communicator& job_ranks() const;  // of the norm group, once it is joined
  std::string trace_file() const;
  void write_trace() const noexcept;

  // In the order in which they are made.
  struct Parts {
    explicit Parts(const RuntimeOptions& options);
    ~Parts();
    std::shared_ptr<Trace> trace;
    std::shared_ptr<Ledger> ledger;
    std::unique_ptr<tiers::Budget> host_budget;  // null: the two have no common limit
    tiers::Budget device_budget;
    tiers::Budget pinned_budget;
    std::shared_ptr<platform::Device> device;
    std::unique_ptr<tiers::DeviceArena> arena;
    tiers::DeviceBlock comm_scratch;
    std::unique_ptr<comm::Communicator> communicator;
    std::unique_ptr<comm::Communicator> norm_group;  // null where it is the communicator's
    std::unique_ptr<optim::UpdatePool> update_pool;
  };

  RuntimeOptions options_;
  InOneProcess<Parts> parts_;
  detail::EngineCore* engine_at_work_ = nullptr;  // whose collectives may be under way; null: none, or one rank
};

}  // namespace hoist
