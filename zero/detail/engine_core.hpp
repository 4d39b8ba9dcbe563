// SPDX-License-Identifier: Apache-2.0
// zero/detail/engine_core.hpp - the life of an engine: how it is made or restored, its passes and steps, its failure
// and its end. engine.cpp is the public face, which checks calls and passes them on.
//
// Threading  The program's thread.
// Errors     run() ends the engine's life at any error but a UsageError or BudgetError.
// Main path  create, or restore -> (begin_pass -> end_pass -> step) -> ~EngineCore.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/zero/detail/engine_parts.hpp>
#include <hoist/zero/engine.hpp>

namespace hoist::detail {

struct RestorePlan;

// UsageError, before anything has happened: what hoist enqueues is for this pass, and no replay of a graph repeats it.
void refuse_capture(StreamRef stream, std::string_view call);

class EngineCore : public EngineParts {
 public:
  using EngineParts::EngineParts;
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
  void end_pass(PassState::End how);
  void discard();
  bool discard_pass();
  double gradient_norm();
  StepReport step(const StepOptions& options);

  const OwningProcess process;
  // Owns nothing: leases and scopes see by it whether the engine is still there.
  std::shared_ptr<EngineCore> self{this, [](EngineCore*) {}};
  std::optional<RestoreReport> restored;

 private:
  // Collectives of the data plane run on a thread of each engine. Those of two engines would mix in another order on
  // each rank, so this engine waits until the other's have ended. Errors: UsageError while the other has a pass.
  void take_turn(const char* call);
  // Runs what makes the engine; when it throws, the other ranks are told of an error that they may not have.
  template <typename Call>
  void make(Call call);
  // [C] Every rank makes the same engine by `call`.
  void agree_on_engine(const char* call);
  // Where create() makes the store of a run that begins with that state. [J]
  StoreDirectory directory_for(const InitialState& state);
  // Both return the store's directory.
  StoreDirectory restore_in_place(const RestorePlan& plan, const RestoreOptions& options);
  StoreDirectory reshard(const RestorePlan& plan, const RestoreOptions& options);
  // What restore() reports, and RestoreOptions::accept is asked about.
  static RestoreReport report_of(const RestorePlan& plan, std::uint64_t step, const CommitState& state);
  void open_mirror();
  void use_state(CommitState state, std::uint64_t step);
  // The same error, which also says what can be done about it.
  CorruptionError with_remedy(const CorruptionError& error) const;
  // Tells the other ranks that an exception of the program ends this engine.
  void tell_of_exception();
  // Logs that the step decided last could not be written.
  void say_lost(const std::exception_ptr& error) const;

  std::exception_ptr failure_;
  bool is_made_ = false;      // create() or restore() has succeeded
  std::string last_refusal_;  // in the pass under way
  const int exceptions_at_birth_ = std::uncaught_exceptions();
};

template <typename Call>
auto EngineCore::run(Call call) -> decltype(call()) {
  if (failure_) std::rethrow_exception(failure_);
  if (state_calls->calling_back())
    throw UsageError(fmt::format("a call of the engine from the callback of {}", state_calls->calling_back()));
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
  std::rethrow_exception(failure_);
}

}  // namespace hoist::detail
