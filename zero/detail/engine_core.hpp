// SPDX-License-Identifier: Apache-2.0
// zero/detail/engine_core.hpp - an engine's parts: how they are made, connected and ended.
//
// engine_core.cpp makes and ends them; engine.cpp is the public face, which checks calls and passes them on.
//
// Threading  The program's thread.
// Errors     run() ends the engine's life at any error but a UsageError or BudgetError.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <hoist/core/error.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/scheduler/executor.hpp>
#include <hoist/zero/checkpoint/checkpointer.hpp>
#include <hoist/zero/checkpoint/state_access.hpp>
#include <hoist/zero/checkpoint/store_search.hpp>
#include <hoist/zero/detail/step_metrics.hpp>
#include <hoist/zero/engine.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/memory/drives.hpp>
#include <hoist/zero/memory/record_io.hpp>
#include <hoist/zero/passes/pass_state.hpp>
#include <hoist/zero/step/step_runner.hpp>

namespace hoist::detail {

struct RestorePlan;

// UsageError, before anything has happened: what hoist enqueues is for this pass, and no replay of a graph repeats it.
void refuse_capture(StreamRef stream, std::string_view call);

class EngineCore {
 public:
  EngineCore(Runtime& runtime, const EngineOptions& options, Model model);
  ~EngineCore();
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;

  void create(const InitialState& state, std::span<const std::byte> program_state);
  void restore(const RestoreOptions& options);

  // Runs a call. A UsageError or BudgetError leaves the engine as it was; any other error ends its life.
  template <typename Call>
  auto run(Call call) -> decltype(call());
  // Ends the engine's life; the first error counts. The other ranks are told, unless an exchange has done so.
  void fail(const std::exception_ptr& error);

  void begin_pass(Pass pass, const PassOptions& options);
  void end_pass(bool complete);
  void discard();
  StepReport step(const StepOptions& options);
  void settle();
  void read(ParameterId parameter, State state, std::uint64_t first, std::span<float> out);
  void write(ParameterId parameter, State state, std::uint64_t first, std::span<const float> values);
  void replace_state(const InitialState& state, std::span<const std::byte> program_state);
  void change_masters(const Initializer& change);
  Completion save(const std::string& name, std::span<const std::byte> program_state, const SaveOptions& options);

  bool keeps(ParameterId parameter, State state) const;
  void require_parameter(ParameterId parameter) const;
  void require_unit(UnitId unit) const;
  std::vector<std::string> describe() const;

  const OwningProcess process;
  std::shared_ptr<EngineCore> self;  // owns nothing: leases and scopes see by it whether the engine is still there
  Runtime& runtime;
  EngineOptions options;  // as given, but for a pinned fraction that was left to the engine
  const UnitTable table;
  StepSettings settings;
  std::optional<RestoreReport> restored;

  std::shared_ptr<AbortNotifier> notifier;
  RankAgreement ranks;
  std::exception_ptr failure;

  // The parts, in the order in which they are made; they are ended in the reverse order.
  std::unique_ptr<comm::Communicator> gathering_group;  // null where ranks do not gather among a part of themselves
  RecordMap records;
  std::unique_ptr<StepMetrics> metrics;  // rank 0's, when asked for
  std::unique_ptr<Memory> memory;
  std::unique_ptr<Drives> drives;       // null without a store
  std::unique_ptr<tiers::Store> store;  // null without one
  Streams streams;
  std::unique_ptr<scheduler::Executor> executor;
  std::unique_ptr<RecordIo> record_io;
  std::unique_ptr<TilePipeline> pipeline;
  std::unique_ptr<UpdateQueue> updates;
  std::unique_ptr<WeightReader> weight_reader;  // null unless parameters are on NVMe
  std::unique_ptr<Gatherer> gatherer;
  std::unique_ptr<Gradients> gradients;
  std::unique_ptr<StateAccess> state_access;
  std::unique_ptr<Checkpointer> checkpoints;
  std::unique_ptr<PassState> pass;
  std::unique_ptr<StepRunner> stepper;

 private:
  // Runs what makes the engine; when it throws, the other ranks are told of an error that they may not have.
  template <typename Call>
  void make(Call call);
  void require_model() const;  // UsageError or ConfigError: it can be trained with these options
  // The same values, each checked: UsageError for one that could not be committed.
  Initializer checked_masters(const Initializer& masters) const;
  MomentInitializer checked_moments(const MomentInitializer& moments) const;
  // Where create() makes the store of a run that begins with that state. [J]
  StoreDirectory directory_for(const InitialState& state);
  enum class StoreUse : std::uint8_t { create, open };
  void make_parts(const StoreDirectory& directory, StoreUse use);
  void lay_out(const StoreDirectory& directory, StoreUse use, std::uint64_t run, bool replace_first_commit);
  void start(std::uint64_t gather_bytes);
  Completion newest_weights_written(UnitId unit) const;
  std::span<std::byte> unused_staging_buffer() const;  // until the first pass

  void restore_in_place(const RestorePlan& plan, const std::string& from);
  void reshard(const RestorePlan& plan, const std::string& from);
  void open_mirror();
  void use_state(CommitState state, std::uint64_t step);
  // The same error, which also says what can be done about it.
  CorruptionError with_remedy(const CorruptionError& error) const;

  // [J] All ranks go on from the same step and loss scale. `what`: the verb of it.
  void agree_on_begin(const char* what, const InitialState& state) const;
  // [J] Runs `change` on the state within a commit of `state.step`, which holds `program_state`.
  void change_state(const char* call, const InitialState& state, std::span<const std::byte> program_state,
                    const std::function<void()>& change);
  void check_range(ParameterId parameter, std::uint64_t first, std::uint64_t count) const;
  void check_kept(ParameterId parameter, State state) const;  // UsageError: there is no such state
  void settle_together();  // [C] carries out what is pending; a failure is every rank's
  void drain();
  void book_io();  // tells the ledger what the drives have moved
  bool failed_in_communication() const;
  void tell_of_exception();

  StoreDirectory directory_;         // which of the stores below the offload directory
  std::span<std::byte> registered_;  // with the device
  bool alive_ = false;               // made whole
  std::string last_refusal_;         // in the pass under way
  const int exceptions_at_birth_ = std::uncaught_exceptions();
};

template <typename Call>
auto EngineCore::run(Call call) -> decltype(call()) {
  if (failure) std::rethrow_exception(failure);
  try {
    return call();
  } catch (const UsageError& refusal) {
    last_refusal_ = refusal.what();
    throw;
  } catch (const BudgetError& refusal) {
    last_refusal_ = refusal.what();
    throw;
  } catch (const CorruptionError& error) {
    fail(std::make_exception_ptr(with_remedy(error)));
  } catch (...) {
    fail(std::current_exception());
  }
  std::rethrow_exception(failure);
}

}  // namespace hoist::detail
