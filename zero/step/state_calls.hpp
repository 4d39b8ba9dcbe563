// SPDX-License-Identifier: Apache-2.0
// zero/step/state_calls.hpp - the calls of Engine that read, change or save the training state between two steps.
//
// read(), write(), replace_state() and change_masters() first carry out pending updates, on all ranks; save() waits
// only for what Checkpointer::save_needs() names. With state on NVMe, each change is one commit.
//
// Threading  The program's thread.
// Errors     UsageError for a call in the wrong place or a value that may not be committed, the state unchanged; after
//            any other error the engine has failed.
// Main path  StepRunner::settle_in_group -> StateAccess -> Checkpointer::commit_open.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>

#include <hoist/zero/checkpoint/state_access.hpp>
#include <hoist/zero/step/step_runner.hpp>

namespace hoist::detail {

class StateCalls {
 public:
  StateCalls(const StepParts& parts, StepRunner& stepper, StateAccess& values)
      : parts_(parts), stepper_(stepper), values_(values) {}

  // As the functions of Engine with these names.
  void read(ParameterId parameter, State state, std::uint64_t first, std::span<float> out);
  void write(ParameterId parameter, State state, std::uint64_t first, std::span<const float> values);
  void write(std::span<const UnitId> units, const UnitChanges& changes,
             std::optional<std::span<const std::byte>> program_state);
  void replace_state(const InitialState& state, std::span<const std::byte> program_state);
  void change_masters(const Initializer& change);
  Completion save(const std::string& name, std::span<const std::byte> program_state, const SaveOptions& options);
  // The call whose callback is running; null outside of one. No call may read a tile while a callback changes it.
  const char* calling_back() const { return calling_back_; }

 private:
  // [J] Runs `change` on the state within a commit of `state.step`, which holds `program_state`.
  void change_state(const char* call, const InitialState& state, std::span<const std::byte> program_state,
                    const std::function<void()>& change);
  // [J] The end of each call that changes state: runs `change`, and commits. Without `program_state`, the commit
  // keeps that of the last one. Pre: nothing is pending.
  void commit_change(const char* call, std::uint64_t step, std::optional<std::span<const std::byte>> program_state,
                     const std::function<void()>& change);
  // Runs `work`, which calls functions of the program; until it returns, other calls of the engine are UsageErrors.
  template <typename Work>
  void call_back(const char* call, const Work& work);
  void require_elements(ParameterId parameter, std::uint64_t first, std::uint64_t count) const;
  // UsageError for changes that no commit may hold. Returns, for other ranks, what they are.
  std::string check_changes(std::span<const UnitId> units, const UnitChanges& changes) const;
  void check_change(UnitId unit, const StateChange& change) const;
  std::string range_text(ParameterId parameter, State state, std::uint64_t first, std::uint64_t count,
                         const std::string& values) const;
  // [C] CommError unless every rank makes this call of the same `what`.
  void agree_on(const char* call, const std::string& what) const;

  StepParts parts_;
  StepRunner& stepper_;
  StateAccess& values_;
  const char* calling_back_ = nullptr;
};

}  // namespace hoist::detail
