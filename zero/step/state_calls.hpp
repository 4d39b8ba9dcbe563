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
  void replace_state(const InitialState& state, std::span<const std::byte> program_state);
  void change_masters(const Initializer& change);
  Completion save(const std::string& name, std::span<const std::byte> program_state, const SaveOptions& options);
  // The call whose callback is running; null outside of one. No call may read a tile while a callback changes it.
  const char* calling_back() const { return calling_back_; }

 private:
  // [J] Runs `change` on the state within a commit of `state.step`, which holds `program_state`.
  void change_state(const char* call, const InitialState& state, std::span<const std::byte> program_state,
                    const std::function<void()>& change);
  void require_elements(ParameterId parameter, std::uint64_t first, std::uint64_t count) const;
  // [C] CommError unless every rank makes this call. `written`: the values, of write().
  void agree_on(const char* call, ParameterId parameter, State state, std::uint64_t first, std::uint64_t count,
                std::span<const float> written) const;

  StepParts parts_;
  StepRunner& stepper_;
  StateAccess& values_;
  const char* calling_back_ = nullptr;
};

}  // namespace hoist::detail
