// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include <fmt/format.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/core/digest.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>
#include <hoist/zero/step/state_calls.hpp>

namespace hoist::detail {

void StateCalls::require_elements(ParameterId parameter, std::uint64_t first, std::uint64_t count) const {
  parts_.table.require(parameter);
  const std::uint64_t elements = parts_.table.parameter(parameter).count;
  if (first > elements || count > elements - first) {
    throw UsageError(fmt::format("elements [{}, {}) of parameter '{}', which has {}", first, first + count,
                                 parts_.table.spec(parameter).name, elements));
  }
}

std::string StateCalls::range_text(ParameterId parameter, State state, std::uint64_t first, std::uint64_t count,
                                   const std::string& values) const {
  static constexpr std::array kNames{"master", "first moment", "second moment", "gradient"};
  // The name, which may be long, comes last: the first bytes travel.
  return fmt::format("{} [{}, {}){} of '{}'", kNames.at(static_cast<std::size_t>(state)), first, first + count, values,
                     parts_.table.spec(parameter).name);
}

// The parts that ranks send each other are nameless: those of two calls would be taken for one.
void StateCalls::agree_on(const char* call, const std::string& what) const {
  parts_.pass.check_agreement_before(call);
  if (comm::Communicator& ranks = parts_.ranks.group(); ranks.size() > 1) {
    const std::string text = fmt::format("{} of {}", call, what);
    comm::agree(ranks, text_hash(text), text, [&] { return text; });
  }
}

void StateCalls::read(ParameterId parameter, State state, std::uint64_t first, std::span<float> out) {
  require_elements(parameter, first, out.size());
  if (parts_.pass.under_way()) throw UsageError("state is read between passes, not inside of one");
  parts_.table.require_kept(parameter, state);
  if (state == State::gradient && !parts_.pass.gradients_due())
    throw UsageError("gradients are there after the last pass of a step, and until step()");
  const Parameter& p = parts_.table.parameter(parameter);
  if (state == State::gradient && !parts_.gradients.finished(p.unit)) {
    throw UsageError(
        fmt::format("the gradient of parameter '{}' was not finished in the pass", parts_.table.spec(parameter).name));
  }
  stepper_.policy().require_undecided("read()");
  agree_on("read()", range_text(parameter, state, first, out.size(), ""));
  stepper_.settle_in_group();
  Runtime& runtime = parts_.runtime;
  const Ledger::OutsideSteps outside_steps(runtime.ledger());
  parts_.gradients.wait();

  const auto mean = static_cast<float>(parts_.settings.gradient_mean(parts_.pass.passes_of_step()));
  const std::uint64_t shard = parts_.table.segment_of(parameter).shard_elements;
  for (int rank = 0; rank < runtime.world_size(); ++rank) {
    const OwnedRange owned = owned_range(p.first_element + first, out.size(), shard, rank);
    if (owned.shard.count == 0) continue;
    const std::span<float> part = out.subspan(owned.offset, owned.shard.count);
    if (rank == runtime.rank() && state == State::gradient)
      values_.read_gradient(parameter, parts_.gradients.arrivals().shards(p.unit), mean, owned.shard.first, part);
    else if (rank == runtime.rank())
      values_.read(parameter, state, owned.shard.first, part);
    if (runtime.world_size() > 1) runtime.communicator().broadcast_host(std::as_writable_bytes(part), rank);
  }
  stepper_.count_io();
}

template <typename Work>
void StateCalls::call_back(const char* call, const Work& work) {
  struct Called {
    Called(const char*& by, const char* call) : by_(by) { by_ = call; }
    ~Called() { by_ = nullptr; }
    const char*& by_;
  } const called(calling_back_, call);
  work();
}

void StateCalls::check_change(UnitId unit, const StateChange& change) const {
  require_elements(change.parameter, change.first_element, change.values.size());
  const ParameterSpec& spec = parts_.table.spec(change.parameter);
  if (parts_.table.parameter(change.parameter).unit != unit) {
    throw UsageError(fmt::format("parameter '{}' is not one of unit '{}'", spec.name, parts_.table.unit(unit).name));
  }
  if (change.state == State::gradient) throw UsageError("gradients cannot be written; use accumulate() in a pass");
  parts_.table.require_kept(change.parameter, change.state);
  if (change.chosen.empty()) return require_committable(spec, change.state, change.values);
  if (change.chosen.size() != change.values.size())
    throw UsageError(fmt::format("{} values of parameter '{}', and a choice among {}", change.values.size(), spec.name,
                                 change.chosen.size()));
  for (std::size_t i = 0; i < change.values.size(); ++i)
    if (change.chosen[i] != 0) require_committable(spec, change.state, change.values.subspan(i, 1));
}

std::string StateCalls::check_changes(std::span<const UnitId> units, const UnitChanges& changes) const {
  if (!changes) throw UsageError("write() needs changes");
  const bool compares = parts_.ranks.group().size() > 1;
  Digest values, ranges;
  std::uint64_t count = 0;
  StateChange last;
  for (std::size_t u = 0; u < units.size(); ++u) {
    parts_.table.require(units[u]);
    if (u > 0 && units[u].index <= units[u - 1].index) throw UsageError("write() needs units in ascending order");
    for (const StateChange& change : changes(units[u])) {
      check_change(units[u], change);
      last = change;
      ++count;
      if (!compares) continue;
      values.update(std::as_bytes(change.values));
      values.update(std::as_bytes(change.chosen));
      const std::string range =
          range_text(change.parameter, change.state, change.first_element, change.values.size(), "");
      ranges.update(std::as_bytes(std::span(range)));
    }
  }
  if (!compares) return {};
  if (count == 0) return "nothing";
  if (count > 1) return fmt::format("{} ranges ({}), values {}", count, ranges.hex(), values.hex());
  return range_text(last.parameter, last.state, last.first_element, last.values.size(),
                    last.values.empty() ? "" : ", values " + values.hex());
}

void StateCalls::write(ParameterId parameter, State state, std::uint64_t first, std::span<const float> values) {
  parts_.table.require(parameter);
  const UnitId unit = parts_.table.parameter(parameter).unit;
  const StateChange change{.parameter = parameter, .state = state, .first_element = first, .values = values};
  write(
      std::span(&unit, 1), [&](UnitId) { return std::vector{change}; }, std::nullopt);
}

void StateCalls::write(std::span<const UnitId> units, const UnitChanges& changes,
                       std::optional<std::span<const std::byte>> program_state) {
  if (parts_.pass.under_way()) throw UsageError("state is written between passes, not inside of one");
  stepper_.policy().require_undecided("write()");
  std::string what;
  try {
    call_back("write()", [&] { what = check_changes(units, changes); });
  } catch (const UsageError&) {
    throw;
  } catch (const std::exception& error) {
    if (parts_.ranks.job().size() > 1) throw;
    throw UsageError(error.what());  // nothing has changed and no rank waits: the engine stays usable
  }
  const char* const with_state = program_state ? ", with a caller state" : "";
  agree_on("write()", what + with_state);
  const std::uint64_t step = parts_.settings.step_count;
  // A commit is the whole job's: a group that made one alone would be one ahead from here on.
  const bool is_jobs = parts_.checkpoints.on_nvme() && parts_.ranks.has_several_groups();
  if (is_jobs)
    comm::agree(parts_.ranks.job(), 2 * step + (program_state ? 1 : 0),
                fmt::format("write() after step {}{}", step, with_state));
  if (program_state)
    parts_.ranks.check_in_job("keep its program's state", [&] { require_room(parts_.options, *program_state); });
  const bool changes_nothing = units.empty() && !program_state;
  if (is_jobs ? parts_.ranks.all_true_in_job(changes_nothing) : changes_nothing) return;
  stepper_.settle_in_group();
  const Ledger::OutsideSteps outside_steps(parts_.runtime.ledger());
  commit_change("write()", step, program_state, [&] {
    for (const UnitId unit : units) values_.write(unit, changes(unit));
  });
}

void StateCalls::commit_change(const char* call, std::uint64_t step,
                               std::optional<std::span<const std::byte>> program_state,
                               const std::function<void()>& change) {
  Checkpointer& checkpoints = parts_.checkpoints;
  parts_.gatherer.quiesce();
  checkpoints.state_changed();
  parts_.ranks.run_in_group("change its state", [&] {
    checkpoints.reopen_step(step);
    // The engine must not outlive an error of a callback: a part of the state has been replaced.
    try {
      call_back(call, change);
    } catch (...) {
      std::rethrow_exception(current_failure());
    }
  });
  parts_.settings.step_count = step;
  checkpoints.commit_open(program_state ? CommitState::of(parts_.settings.scaler, *program_state) : checkpoints.state(),
                          step);
  parts_.gatherer.invalidate();
  stepper_.count_io();
}

void StateCalls::change_state(const char* call, const InitialState& state, std::span<const std::byte> program_state,
                              const std::function<void()>& change) {
  if (parts_.pass.under_way()) throw UsageError(fmt::format("{} belongs between passes, not inside of one", call));
  stepper_.policy().require_undecided(call);
  parts_.pass.check_agreement_before(call);
  parts_.ranks.agree_on_beginning(call, state);
  stepper_.settle_in_group();
  const std::uint64_t step = state.step;
  const Checkpointer& checkpoints = parts_.checkpoints;
  std::uint64_t newest = checkpoints.committed_step().value_or(0);
  if (checkpoints.on_nvme()) newest = std::max(newest, parts_.settings.step_count);
  if (step < newest) {
    throw UsageError(
        fmt::format("state of step {} cannot follow step {} in one store, whose newest commit would be the older one; "
                    "restore() goes back to a named checkpoint, or use another directory",
                    step, newest));
  }
  const Ledger::OutsideSteps outside_steps(parts_.runtime.ledger());
  parts_.pass.drop();
  commit_change(call, step, program_state, change);
}

void StateCalls::replace_state(const InitialState& state, std::span<const std::byte> program_state) {
  if (!state.masters) throw UsageError("replace_state() needs an Initializer, which makes the values of masters");
  parts_.ranks.check_in_job("keep its program's state", [&] { require_room(parts_.options, program_state); });
  change_state("replace_state()", state, program_state, [&] {
    parts_.settings.scaler.restore(state.loss_scale.value_or(LossScaler(parts_.options.loss_scale).state()));
    values_.fill(state.masters, {}, state.moments);
  });
}

void StateCalls::change_masters(const Initializer& change) {
  if (!change) throw UsageError("change_masters() needs values");
  change_state("change_masters()", {.step = parts_.settings.step_count}, parts_.checkpoints.state().program,
               [&] { values_.change_masters(change); });
}

Completion StateCalls::save(const std::string& name, std::span<const std::byte> program_state,
                            const SaveOptions& options) {
  if (parts_.pass.under_way() || parts_.pass.passes_done() > 0)
    throw UsageError("save() belongs between step() and the next pass");
  Checkpointer& checkpoints = parts_.checkpoints;
  const std::uint64_t step = parts_.settings.step_count;
  checkpoints.check_save(name, options);
  parts_.pass.check_agreement_before("save()");
  if (comm::Communicator& job = parts_.ranks.job(); job.size() > 1) {
    comm::agree(job, random_bits(text_hash(options.mirror ? name + " and in the mirror" : name), step),
                fmt::format("save '{}' of step {}{}", name, step, options.mirror ? ", and in the mirror" : ""));
  }
  parts_.ranks.check_in_job("keep its program's state", [&] { require_room(parts_.options, program_state); });
  const Checkpointer::SaveNeeds needs = checkpoints.save_needs(name, options);
  switch (needs) {
    case Checkpointer::SaveNeeds::nothing:
      break;
    case Checkpointer::SaveNeeds::drained_streams:
      stepper_.drain();
      break;
    case Checkpointer::SaveNeeds::settled_engine:
      stepper_.settle_in_group();
      break;
  }
  return checkpoints.save(name, CommitState::of(parts_.settings.scaler, program_state), step, options, needs);
}

}  // namespace hoist::detail
