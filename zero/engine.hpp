// SPDX-License-Identifier: Apache-2.0
// zero/engine.hpp - ZeRO-partitioned training state on three tiers. Start here.
//
// Life of a program: Engine::create() or Engine::restore() -> for each step: begin(train), gather and release units,
// gradients/accumulate and finish, end the pass, step(). An engine that exists can train: there is no half-built one.
//
// Threading  One thread at a time, not always the same. [C] marks collective calls: every rank makes the same calls in
//            the same order; a rank that differs is named in a CommError, over NCCL by the next collective call outside
//            of the pass. In a job with several sharding groups, [C] means every rank of the group, and [J] every rank
//            of the job.
// Memory     Device and pinned memory are laid out when the engine is made; nothing is taken afterwards.
// Errors     UsageError and BudgetError leave the state unchanged. After any other error in a step or pass the engine
//            has failed: it can only be destroyed, and a new one restored. The other ranks do not wait for a failed
//            rank: they stop at once, with a CommError that names it, the unit and its error, and unless that is an
//            ExchangedError, the runtimes' communicators cannot be used afterwards. The same holds for an exception of
//            the program that destroys the engine on its way, and for abandon(). In a process that was forked later
//            every call is a UsageError and the destructor does nothing.
// Main path  gather -> (scheduler) -> store.read -> copy up -> all-gather -> lease; finish -> reduce-scatter -> copy
//            down; step -> norm -> update -> store.write -> commit.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <hoist/core/owning_process.hpp>
#include <hoist/zero/lease.hpp>
#include <hoist/zero/model.hpp>
#include <hoist/zero/options.hpp>
#include <hoist/zero/runtime.hpp>
#include <hoist/zero/types.hpp>

namespace hoist {

namespace detail {
class EngineCore;
}

class Engine {
 public:
  // --- making one ----------------------------------------------------------------------------------------------------
  // [J] An engine with fresh state from `initializer`. With state on NVMe it is committed as step 0, with
  // `caller_state`. The runtime outlives the engine; model and options are copied.
  // Errors: ConfigError for options that this version does not support, naming the option and the alternative;
  // UsageError for a model without units; BudgetError; StoreError when the store already holds a commit. A rank that
  // fails alone is named to the others.
  static Engine create(Runtime& runtime, const EngineOptions& options, Model model, const Initializer& initializer,
                       std::span<const std::byte> caller_state = {});
  // [J] The same with state that another program's training has come to. Its first commit is of `state.step`, and holds
  // all of it: a crash before that leaves no commit. Such a store has a directory of its own below the offload
  // directory, like one that takes over from other ranks. Errors: also UsageError for a value that cannot be committed.
  static Engine create(Runtime& runtime, const EngineOptions& options, Model model, const InitialState& state,
                       std::span<const std::byte> caller_state = {});
  // [J] An engine that continues from the newest commit that every rank has, or from a named checkpoint
  // (RestoreOptions). Commits after that one are then abandoned, named checkpoints stay. If another number of ranks
  // made the commit, its state is distributed anew into a store of its own below the offload directory. That needs room
  // there, and every rank must reach all old ranks' files. The old store is removed once the new one is committed (with
  // nothing on NVMe: at the next restore after that), unless it keeps steps. The same happens where the options ask for
  // more room than the store has (keep_steps, mirror, caller_state_bytes_max); each rank then reads its own files
  // alone. Where a rank's drives are new, and there is a mirror (EngineOptions::mirror), its newest commit is continued
  // from in the same way. restored() tells what was found. Errors: as create(), and StoreError when there is no such
  // commit, or it belongs to another model.
  static Engine restore(Runtime& runtime, const EngineOptions& options, Model model,
                        const RestoreOptions& restore_options = {});
  // [J] The commit that restore() would continue from, if there is one. Changes nothing.
  static std::optional<std::uint64_t> find_commit(Runtime& runtime, const EngineOptions& options);
  // [J] The steps that every rank keeps under a name, oldest first. Changes nothing.
  static std::vector<NamedCheckpoint> find_checkpoints(Runtime& runtime, const EngineOptions& options);

  // A moved-from engine can only be destroyed or assigned to.
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;
  // Carries out the step that was decided last, unless the engine has failed, and ends every lease.
  ~Engine();

  // --- what it trains ------------------------------------------------------------------------------------------------
  const Model& model() const;
  ParameterId parameter(std::string_view name) const { return model().parameter(name); }
  // The commit or checkpoint that restore() continued from; null for an engine that create() made.
  const RestoreReport* restored() const;
  // Whether there is such a state of the parameter: a frozen one has its master only, and not every optimizer keeps
  // both moments.
  bool keeps(ParameterId parameter, State state) const;

  // --- a pass --------------------------------------------------------------------------------------------------------
  // A stream that is being captured into a CUDA graph is refused by all of these, and by Lease::release: UsageError.
  [[nodiscard]] PassScope begin(Pass pass, PassOptions options = {});  // [C]
  [[nodiscard]] Lease gather(UnitId unit, StreamRef stream);           // [C]
  GradientLease gradients(UnitId unit, StreamRef stream);              // for hand-written backward passes
  // For autograd: adds `gradient` (device memory, any dtype, the parameter's shape) on `stream`; any number of times.
  // Errors: UsageError for another shape, or host memory.
  void accumulate(ParameterId parameter, const TensorView& gradient, StreamRef stream);
  // [C] The unit's gradient of this micro-batch is complete once the work on `stream` so far is. A unit without any
  // gradient in the pass is finished too, with zeros.
  void finish(UnitId unit, StreamRef stream);

  // --- a step --------------------------------------------------------------------------------------------------------
  // The group's own rate, from the next step() on. A schedule (EngineOptions::learning_rate_schedule) that has rates of
  // its own overrides it. All ranks set the same value, and step() compares. It is no part of a commit: after restore()
  // the group has the rate it was added with, until the program sets another.
  void set_learning_rate(GroupId group, double learning_rate);
  double learning_rate(GroupId group) const;  // of the next step, by the schedule
  // The factor by which the program multiplies the loss of every micro-batch up to the next step(). The step undoes it:
  // state, norms and read() show gradients without it. 1 without EngineOptions::loss_scale.
  float loss_scale() const;
  // [J] The global norm of the gradients that step() will take, as StepReport has it; infinity where one of them is not
  // finite, so that step() will skip. Waits for them. Errors: UsageError where step() would be one, and in
  // update mode `backward`, which knows no norm before its updates.
  double gradient_norm();
  StepReport step(const StepOptions& options = {});  // [J]
  // [C] Ends the pass under way and drops the gradients of its step so far; outside a pass, drops those gathered for
  // the next step. All ranks leave the pass after the same calls: the gathers of a rank that left it alone would meet
  // those of other units. A rank whose own work failed calls abandon() instead.
  void discard() noexcept;
  // [C] Ends the pass under way as if it had not begun, as long as it has finished no unit: earlier micro-batches of
  // the step stay, and begin() takes this one again. Afterwards as discard(). Returns whether earlier ones stay.
  bool discard_pass() noexcept;
  // This rank's program cannot go on: the engine has failed, and those of the other ranks stop with a CommError that
  // names this rank and `why`, instead of waiting for it until the communicator's time-out.
  void abandon(std::string_view why) noexcept;
  void settle();  // returns when every update and commit under way is done
  // Update mode `backward`: units were updated for a step that step() has not taken. A failed engine keeps the answer.
  bool has_begun_step() const;

  // --- state ---------------------------------------------------------------------------------------------------------
  // [C] Elements [first_element, first_element + out.size()) of one parameter, from whatever tier; every rank receives
  // them. State::gradient: after finish() of all units and before step(), reduced over ranks, without the loss scale,
  // unclipped.
  void read(ParameterId parameter, State state, std::uint64_t first_element, std::span<float> out);
  // [J] Every rank passes the same values. With a store of steps, a commit of its own, with the caller state of the
  // last step, or of a save after it; a sharding group that has nothing to change passes none. Errors: UsageError for
  // State::gradient, for a moment that is not kept, and for a master that could not be committed.
  void write(ParameterId parameter, State state, std::uint64_t first_element, std::span<const float> values);
  // [J] The same for many parameters, in one commit: after a crash, all of them have changed or none. `units` are in
  // ascending order. `changes` is called twice for each: all values are checked and compared, and then written. Only
  // one unit's values must be in memory at a time. With `caller_state`, the commit holds that one: all ranks of the job
  // pass one, or none does. Errors: as above;
  // after any other error, one of `changes` included, the engine has failed and the last commit stays. Cost: the state
  // of each unit is read and written once.
  void write(std::span<const UnitId> units, const UnitChanges& changes,
             std::optional<std::span<const std::byte>> caller_state = {});
  // [J] Replaces the whole state, and the caller state, as if `step` steps had been applied: for state that another
  // program made. Gradients that wait for step() are dropped. With a store of steps, one commit. Errors: UsageError for
  // fewer steps than were committed; after any other error, an initializer's included, the engine has failed and the
  // last commit stays.
  void replace_state(const InitialState& state, std::span<const std::byte> caller_state = {});
  // [J] Changes masters of trainable parameters, in the same way: `change` finds the present values in its `out`, and
  // replaces those that it wants to.
  void change_masters(const Initializer& change);
  // [J] Keeps the present state under a name (of 1 to 47 bytes), with `caller_state`, for restore() to go back to: the
  // last EngineOptions::keep_steps of them. A step of the same name is replaced, once this one is durable everywhere.
  // Without a name, or without keep_steps, the save is a commit like a step's, and the next one replaces it.
  // restore() without a name finds this caller state too, until the next step's.
  // Cost: with state on NVMe the step's own commit is kept under the name: no data moves, and the call does not wait
  // (call settle() before you wait: StepReport::committed). A save that needs a commit of its own (without a name or
  // keep_steps, between commits (commit_every), or to the mirror) first waits for every pending update and commit. With
  // all state in memory the call waits for the engine's streams and for the save before. A thread then writes the state
  // under the next pass, and the next step() waits for it. State unchanged since the last save is not written again.
  Completion save(std::string name, std::span<const std::byte> caller_state, const SaveOptions& options = {});

  // --- what happened -------------------------------------------------------------------------------------------------
  Runtime& runtime();
  std::uint64_t step_count() const;                     // steps applied
  std::optional<std::uint64_t> committed_step() const;  // the newest durable step
  MirrorReport mirror() const;
  // The bytes that one step must move by the formula for this configuration and the passes recorded so far. P5 compares
  // Ledger::totals with this.
  StepBytes formula_bytes() const;
  // The part of Link::wire in the Ledger that stayed within this rank's group (EngineOptions::secondary_shard_ranks).
  std::uint64_t wire_bytes_in_group() const;
  // Whether the unit, once gathered in a pass, stays in device memory until it ends: it does not share its memory, or
  // the memory holds all units at once.
  bool keeps_gathered(UnitId unit) const;
  // One line per choice made: tiers, io backend, buffers, update mode. For reports.
  std::vector<std::string> describe() const;

 private:
  explicit Engine(std::unique_ptr<detail::EngineCore> core);
  InOneProcess<detail::EngineCore> core_;
};

// Where each parameter of a model lies in its unit's gathered memory, by ParameterId::index.
std::vector<ParameterPlace> gathered_layout(const EngineOptions& options, const Model& model, int world_size);

// BudgetError, naming the smallest budget that works, unless the device can hold `program_bytes` of the program's
// own blocks beside what the engine needs at least. For a program that is about to allocate them, before it makes the
// engine.
void require_device_memory(Runtime& runtime, const EngineOptions& options, const Model& model,
                           std::uint64_t program_bytes);

// XXH3-64 over `state` of all parameters in declaration order, as fp32 in little-endian; 16 hex digits. Independent of
// placement and partition. [C] Parameters without such a moment do not enter its digest.
std::string state_digest(Engine& engine, State state);

}  // namespace hoist
