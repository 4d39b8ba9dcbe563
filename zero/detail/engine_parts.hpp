// SPDX-License-Identifier: Apache-2.0
// zero/detail/engine_parts.hpp - what an engine is made of, and how the parts are connected.
//
// Threading  The program's thread.
// Errors     UsageError, ConfigError and BudgetError for what no engine is made of; those of the store.
// Main path  make_parts -> lay_out (memory, drives, store) -> start (streams, threads) -> commits, passes, steps.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <hoist/scheduler/executor.hpp>
#include <hoist/zero/checkpoint/checkpointer.hpp>
#include <hoist/zero/checkpoint/state_access.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/detail/step_metrics.hpp>
#include <hoist/zero/memory/drives.hpp>
#include <hoist/zero/memory/gradient_spill.hpp>
#include <hoist/zero/memory/record_io.hpp>
#include <hoist/zero/passes/pass_state.hpp>
#include <hoist/zero/step/state_calls.hpp>
#include <hoist/zero/step/step_runner.hpp>

namespace hoist::detail {

class EngineParts {
 public:
  EngineParts(Runtime& runtime, const EngineOptions& options, Model model);

  std::vector<std::string> describe() const;

  Runtime& runtime;
  EngineOptions options;  // as given, but for what was left to the engine: pinned fractions, spilled gradients
  const UnitTable table;
  StepSettings settings;
  const std::shared_ptr<AbortNotifier> notifier;
  const AbortNotifier::Disarm disarm{*notifier};  // when every part has ended
  const RankAgreement ranks;
  const RecordMap records;

  // Null until make_parts(), which makes state_calls last. They end in the reverse of this order.
  std::unique_ptr<StepMetrics> metrics;  // rank 0's, when asked for
  std::unique_ptr<Memory> memory;
  std::unique_ptr<comm::Communicator> gathering_group;  // null where ranks do not gather among a part of themselves
  std::unique_ptr<Drives> drives;                       // null without a store
  std::unique_ptr<GradientSpill> spill;                 // null unless some gradients are spilled
  Streams streams;
  std::unique_ptr<RecordIo> record_io;
  std::unique_ptr<TilePipeline> pipeline;
  std::unique_ptr<StateAccess> state_access;
  std::unique_ptr<Checkpointer> checkpoints;
  std::unique_ptr<tiers::Store> store;  // null without one. Its commit thread uses the checkpointer
  std::unique_ptr<UpdateQueue> updates;
  std::unique_ptr<WeightReader> weight_reader;  // null unless parameters are on NVMe
  std::unique_ptr<scheduler::Executor> executor;
  std::unique_ptr<Gatherer> gatherer;
  std::unique_ptr<Gradients> gradients;
  std::unique_ptr<PassState> pass;
  std::unique_ptr<StepRunner> stepper;
  std::unique_ptr<StateCalls> state_calls;

 protected:
  enum class StoreUse : std::uint8_t { create, open };
  // [J] `former_run`: of the store that a new one takes over from.
  void make_parts(const StoreDirectory& directory, StoreUse use, std::optional<std::uint64_t> former_run = {});

 private:
  void lay_out_and_start(const StoreDirectory& directory, StoreUse use, std::uint64_t run);
  void lay_out(const StoreDirectory& directory, StoreUse use, std::uint64_t run);
  void make_spill();
  void start(std::uint64_t gather_bytes);
};

}  // namespace hoist::detail
