// SPDX-License-Identifier: Apache-2.0
// zero/detail/engine_impl.hpp - the parts of an engine and what state it is in.
//
// engine.cpp builds the model, brings it to life and takes it down, engine_initialize.cpp fills it with fresh state,
// engine_pass.cpp runs passes and steps, engine_backward.cpp what of a step is done in the backward pass,
// engine_state.cpp reads and writes state, engine_commit.cpp commits and saves it, engine_source.cpp finds what to go
// on from, engine_restore.cpp does so, engine_reshard.cpp with another number of ranks.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/core/error.hpp>
#include <hoist/scheduler/executor.hpp>
#include <hoist/zero/checkpoint/commit_state.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>
#include <hoist/zero/detail/step_metrics.hpp>
#include <hoist/zero/engine.hpp>
#include <hoist/zero/layout/record_map.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/layout/unit_table.hpp>
#include <hoist/zero/memory/drives.hpp>
#include <hoist/zero/memory/memory.hpp>
#include <hoist/zero/memory/record_io.hpp>
#include <hoist/zero/passes/gatherer.hpp>
#include <hoist/zero/passes/gradients.hpp>
#include <hoist/zero/passes/weight_reader.hpp>
#include <hoist/zero/predict/step_bytes.hpp>
#include <hoist/zero/ranks/abort_notifier.hpp>
#include <hoist/zero/ranks/common_options.hpp>
#include <hoist/zero/update/step_update.hpp>
#include <hoist/zero/update/tile_pipeline.hpp>

namespace hoist {

namespace detail {

// UsageError, before anything has happened: what hoist enqueues is for this pass, and no replay of a graph repeats it.
void refuse_capture(StreamRef stream, std::string_view call);

// A StoreError that every rank throws: of what all of them told each other.
class CommonStoreError : public StoreError {
 public:
  using StoreError::StoreError;
};

}  // namespace detail

class Engine::Impl {
 public:
  Impl(Runtime& runtime_in, const EngineOptions& options_in);
  ~Impl();

  // --- engine.cpp
  void require_open_model() const;  // initialize() or restore() has not happened yet
  void require_live() const;        // it has, and nothing failed since
  // Runs what brings the engine to life; when it throws, the engine is as it was before. The other ranks are told of an
  // error that they may not have.
  template <typename Call>
  auto enliven(Call call) -> decltype(call());
  void tear_down() noexcept;
  void tell_of_exception();
  bool failed_in_communication() const;
  // Runs a part that may fail on one rank alone. All ranks then throw: the one its own error, the others a CommError
  // that holds its text.
  void together(const char* what, const std::function<void()>& part) const;
  // The same of all ranks of the job, not of the sharding group alone: what brings engines to life, they do in step.
  void all_together(const char* what, const std::function<void()>& part) const;
  void together_in(comm::Communicator& ranks, const char* what, const std::function<void()>& part) const;
  // The ranks whose commits are one: a step is durable when it is at all of them.
  comm::Communicator& job() const { return runtime.norm_group(); }
  std::string name_in_job(int rank) const;
  // [C] That the job's sharding groups can be brought to life in step. One group needs no telling.
  void compare_groups() const;
  void require_model() const;    // that can be laid out
  void seal(bool create_store);  // takes memory, opens the store, starts threads
  // What `optimizer_pinned_fraction` is where it is left open.
  double affordable_pinned_fraction(std::uint64_t store_memory_bytes) const;
  void lay_out(bool create_store, std::uint64_t run, bool replace_first_commit);  // memory, drives and store
  std::uint64_t fewest_gather_slots() const;                                      // [C] that a rank has
  void start(std::uint64_t gather_slots);                                         // what works on them
  // [C] That all ranks bring the same model to life by the same call, with options that lead to the same collectives:
  // otherwise they would train parts of different models as one, or wait for each other somewhere on the way.
  void agree_on_model(std::string_view call) const;
  // [C] A random number that the ranks of the sharding group share, and partly all of the job: it joins the stores that
  // are made together.
  std::uint64_t agree_on_run() const;
  void require_weights_dtype() const;  // there are parameters that the loss scale is for
  Completion newest_weights_written(UnitId unit) const;
  void drain();  // executor and streams

  // --- engine_initialize.cpp
  void initialize(const Initializer& fill, std::span<const std::byte> program_state);
  // Values of a moment, as Initializer gives masters.
  using MomentInitializer = std::function<void(ParameterId, State, std::uint64_t first_element, std::span<float> out)>;
  void fill_homes(const Initializer& fill, const MomentInitializer& fill_moment = {});
  void initialize_frozen(UnitId unit, const Initializer& fill);
  void fill_segment(UnitId unit, const detail::Segment& segment, std::uint64_t first, std::span<float> values,
                    const Initializer& fill) const;

  // --- engine_pass.cpp
  bool in_pass(std::uint64_t serial) const { return pass && pass_serial == serial; }
  void begin(Pass pass, const PassOptions& options);
  void end_pass(bool complete);
  void check_micro_batch(const PassOptions& wanted) const;  // that it comes in its order
  void require_finished() const;                            // every trainable unit's gradient in the last pass
  std::uint64_t hash_of_settings() const;
  // [C] That all ranks made the same calls in the pass that ended; and, in a step, that they will step alike.
  void check_agreement(bool on_settings);
  StepReport step(const StepOptions& options);
  // [C] Until the gradients of this step are at home, and the step before is carried out.
  void await_inputs();
  // [C] Of a step that is decided, what every rank must have done before any goes on.
  void begin_step(double gradient_scale);
  void await_gradients();  // until all of the step's are at home
  double global_norm();    // of the sum over micro-batches, with the loss scale
  // What the gradients at home are to be multiplied by: they are sums over micro-batches of scaled losses' gradients.
  double gradient_mean() const { return 1.0 / micro_batches / scaler.scale(); }
  // A group's options as the schedule has them after so many steps.
  GroupOptions scheduled(GroupOptions group, std::uint64_t applied_steps) const;
  std::shared_ptr<detail::StepUpdate> make_update(std::uint64_t step, double gradient_scale) const;
  void update_now(double gradient_scale);
  // Device-only units: all at once, and waits for it; what else is updated, tile by tile, is what
  // the work is for.
  void update_on_device(detail::StepUpdate& update);
  detail::TilePipeline::Work work_of(std::shared_ptr<detail::StepUpdate> update) const;
  Completion update_later(double gradient_scale);
  // What a step ends in that is carried out later. `committed` is done when it is durable.
  detail::UpdateQueue::Ended end_of_step(std::shared_ptr<detail::StepUpdate> update,
                                         std::shared_ptr<Promise> committed);
  void settle_together();  // [C] carries out what is pending; a failure is every rank's
  void await_deferred();   // carries out what the last step left pending, and books the time as part of this one
  // Ends the engine's life; the first one counts. The other ranks are told, unless an exchange has done so.
  void fail(const std::exception_ptr& error);
  // Runs a call; any error of it but a UsageError or BudgetError ends the engine's life.
  template <typename Call>
  auto guarded(Call call) -> decltype(call());

  // --- engine_backward.cpp: update mode `backward`
  bool updates_in_backward() const { return options.update_mode == UpdateMode::backward; }
  // Whether the pass under way is the one whose gradients complete a step.
  bool completes_step() const { return pass == Pass::train && micro_batches_done + 1 == micro_batches; }
  void read_ahead();      // in update mode `forward`, what the step will update first
  void begin_updating();  // at the pass's first finish(): from here on the step is decided
  void require_undecided(const char* call) const;
  void require_untouched(UnitId unit) const;   // by the step under way
  void offer_the_rest();                       // what is updated for the step under way that was not handed on
  Completion conclude_updating();              // done when the step is committed
  void fail_updating(const std::string& why);  // the step under way is not taken, and cannot be undone

  // --- engine_state.cpp
  void settle();
  void read(ParameterId parameter, State state, std::uint64_t first, std::span<float> out);
  void read_owned(ParameterId parameter, State state, std::uint64_t shard_first, std::span<float> out);
  void write(ParameterId parameter, State state, std::uint64_t first, std::span<const float> values);
  void write_trainable(ParameterId parameter, State state, const OwnedRange& owned, std::span<const float> values);
  void write_frozen(ParameterId parameter, const OwnedRange& owned, std::span<const float> values);
  void check_range(ParameterId parameter, std::uint64_t first, std::uint64_t count) const;
  void check_kept(ParameterId parameter, State state) const;  // that there is such a state of the parameter

  // --- engine_source.cpp: what a restore continues from (detail/restore_source.hpp)
  struct CommonCommit;
  struct Source;
  // The newest that has one. `strict`: a store that has come further and has none is an error instead of passed over.
  // `from`: nothing for a store's commits, "" for all steps it keeps, or the name of one.
  std::optional<Source> find_source(const std::optional<std::string>& from, bool strict = true) const;
  std::vector<detail::StoreDirectory> agree_on_directories() const;  // all that any rank sees, newest first
  int agree_on_world_size(const std::string& directory) const;       // of the store there; 0: no manifest can be read
  Source agree_on_source(const detail::StoreDirectory& where, const std::optional<std::string>& from) const;
  // The commits among these that every rank of the job lists, newest first. `store_number`: of the store that lists
  // them.
  std::vector<CommonCommit> agree_on_commits(std::span<const tiers::CommitHeader> commits,
                                             std::uint64_t store_number) const;
  static std::vector<CommonCommit> common_to(comm::Communicator& ranks, std::span<const CommonCommit> listed);
  CommonCommit choose_commit(const std::string& from) const;  // of the store that is open
  std::optional<std::uint64_t> find_commit() const;
  std::vector<KeptStep> find_kept() const;
  void refuse_resharded() const;
  detail::CommonStoreError nothing_to_restore(const std::string& from) const;

  // --- engine_restore.cpp
  RestoreReport restore(const RestoreOptions& restore_options);
  void restore_in_place(const RestoreOptions& restore_options);
  void forget_what_others_lack();                                      // of kept steps, after a restore
  std::string remedy_for(const CorruptionError::Where& damage) const;  // which kept steps it leaves alone

  // --- engine_reshard.cpp. `passed_over`: places, by their order, that came to nothing in the job.
  void reshard(const Source& source, const RestoreOptions& restore_options,
               const std::vector<std::uint64_t>& passed_over);
  // Beside what the engine needs at least, of the pinned budget.
  tiers::Budget::Hold hold_for_reading(std::uint64_t bytes) const;
  void remove_unfinished_places(std::uint64_t after, const std::vector<std::uint64_t>& passed_over) const;
  void remove_older_places(const std::vector<std::uint64_t>& passed_over) const;
  std::vector<std::string> drive_directories() const;

  // --- engine_commit.cpp
  static std::uint64_t name_digest(const std::string& name);
  // What a commit of the present state keeps beside the records.
  detail::CommitState commit_state(std::span<const std::byte> program_state) const;
  Completion commit(const std::string& name, const detail::CommitState& state);  // and notes it as the last one
  Completion keep(const std::string& name, const detail::CommitState& state);
  // The step that was just computed is committed when it is due; what save() asked for meanwhile is kept.
  // On the update thread. Returns what is done when the step is durable; at once when it is not committed.
  Completion commit_deferred(const detail::CommitState& state, bool due);
  void fail_pending_saves(const std::exception_ptr& error);
  // Tells the other ranks of the job what kept this one's commit from landing (null: it did); throws when another's
  // did not. On the commit thread.
  void commit_barrier(const std::exception_ptr& problem);
  // This rank comes to no commit where the others do: they learn it there.
  void fail_commit_barrier(const std::exception_ptr& problem) noexcept;
  Completion save(const std::string& name, std::span<const std::byte> caller_state);
  void require_room_for(std::span<const std::byte> program_state) const;
  void check_save(const std::string& name, std::span<const std::byte> program_state) const;
  // State that lives in memory, into the step of the store that is open.
  void write_homes(bool with_frozen);
  Completion save_in_background(const std::string& name, std::span<const std::byte> program_state);

  bool stores_steps() const { return nvme_placement() && options.durability == tiers::Durability::step; }
  // Commits outlive the process: all of them, except on a store that is rewritten in place.
  bool is_durable() const { return !nvme_placement() || stores_steps(); }
  bool in_vertical_order() const { return detail::gradient_sums(options) == detail::GradientSums::on_device; }
  bool nvme_placement() const { return options.parameters == Placement::nvme || options.optimizer == Placement::nvme; }
  // Whether the present step, or another one, is to be committed.
  bool commit_is_due() const { return commit_is_due(step_count); }
  bool commit_is_due(std::uint64_t step) const { return step % options.commit_every == 0; }
  detail::WalkOptions step_writes(bool committed = true) const {
    return {.write_resident = detail::writes_resident_state(options, committed)};
  }
  detail::WalkOptions walk_of_update(std::uint64_t step) const;
  bool stores_frozen() const { return options.parameters == Placement::nvme || step_writes().write_resident; }

  std::shared_ptr<Engine> self;  // owns nothing: leases and scopes see by it whether the engine is still there
  Runtime& runtime;
  EngineOptions options;  // as given; lay_out() finds a pinned fraction that was left to it
  std::vector<GroupOptions> groups;
  detail::UnitTable table;

  detail::StoreDirectory place;  // which of the stores below the offload directory

  // The live engine, in order of dependence: destroyed from the last to the first.
  struct Live {
    std::unique_ptr<detail::RecordMap> records;
    std::unique_ptr<detail::Memory> memory;
    std::span<std::byte> registered;  // with the device
    std::unique_ptr<comm::Communicator> commit_channel;
    std::unique_ptr<comm::Communicator> group;  // that gathers among itself; null where there is none
    std::unique_ptr<detail::Drives> drives;
    std::unique_ptr<tiers::Store> store;  // null without one
    detail::Streams streams;
    std::unique_ptr<detail::RecordIo> record_io;
    std::unique_ptr<detail::TilePipeline> pipeline;
    std::unique_ptr<detail::UpdateQueue> deferred;        // null in update mode `step`
    std::unique_ptr<detail::WeightReader> weight_reader;  // null unless parameters are on NVMe
    std::unique_ptr<scheduler::Executor> executor;
    std::unique_ptr<detail::Gatherer> gatherer;
    std::unique_ptr<detail::Gradients> gradients;
  };
  Live live;
  std::unique_ptr<detail::Metrics> metrics;  // rank 0's, when asked for
  bool sealed = false;
  std::atomic<bool> peers_gone{false};  // the engine failed because of other ranks: none is there to be told
  std::exception_ptr failure;
  std::shared_ptr<detail::AbortNotifier> abort_notifier;  // of the life under way
  const int exceptions_at_birth = std::uncaught_exceptions();
  bool ended_by_exception = false;

  std::optional<Pass> pass;    // under way
  bool pass_was_left = false;  // the last one, by an exception or discard()
  std::string last_refusal;    // in it
  TimePoint pass_began{};
  std::uint64_t pass_serial = 0;
  Pass ended_pass = Pass::train;  // the last one
  bool agreement_due = false;     // a pass ended that ranks have not compared yet
  int held_micro_batches = 1;     // by the train pass under way; several in vertical order
  int micro_batches = 1;          // passes that make the step under way
  int micro_batches_done = 0;     // complete train passes since the last step
  bool gradients_due = false;     // all of them ended; step() or discard() is next
  bool reading_ahead = false;     // for the step of the pass under way
  bool updating = false;          // units are updated already for the step under way, by this:
  std::shared_ptr<detail::StepUpdate> begun_update;
  std::uint64_t step_count = 0;
  LossScaler scaler;  // changes in step() alone, and only after the step before has been carried out
  Completion last_commit;
  bool uncommitted = false;  // steps were taken that no commit holds, and none is on its way

  // save() while the step it means has still to be committed, by the update thread.
  struct PendingSave {
    std::string name;
    detail::CommitState state;
    Promise promise;
  };
  std::mutex saves_mutex;
  bool commit_ahead = false;
  std::exception_ptr update_error;  // why the step that is meant will never be committed
  std::vector<PendingSave> pending_saves;
  Completion last_keep;                        // likewise under the mutex
  std::atomic<bool> changed_since_save{true};  // of state that lives in memory
  std::thread saver;                           // writes state that lives in memory; last_commit is its end
  std::atomic<std::int64_t> committed_step{-1};
  // What a commit of the present step keeps beside the records: as of the last step that was applied, or of the save()
  // that committed it.
  detail::CommitState step_state;
  aio::DriveQueue::Stats counted_io{};  // what the ledger has already been told
  void book_io();
};

template <typename Call>
auto Engine::Impl::guarded(Call call) -> decltype(call()) {
  require_live();
  try {
    return call();
  } catch (const UsageError& refusal) {
    last_refusal = refusal.what();
    throw;
  } catch (const BudgetError& refusal) {
    last_refusal = refusal.what();
    throw;
  } catch (const CorruptionError& error) {
    fail(std::make_exception_ptr(CorruptionError(error.where, remedy_for(error.where))));
  } catch (...) {
    fail(std::current_exception());
  }
  std::rethrow_exception(failure);
}

template <typename Call>
auto Engine::Impl::enliven(Call call) -> decltype(call()) {
  require_open_model();
  const auto give_up = [&](bool all_know) {
    if (!all_know) abort_notifier->notify(std::current_exception());
    tear_down();
  };
  try {
    return call();
  } catch (const UsageError&) {
    give_up(/*all_know=*/true);
    throw;
  } catch (const ConfigError&) {
    give_up(/*all_know=*/true);
    throw;
  } catch (const detail::CommonStoreError&) {
    give_up(/*all_know=*/true);
    throw;
  } catch (...) {
    give_up(/*all_know=*/false);
    throw;
  }
}

}  // namespace hoist
