// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/detail/engine_impl.hpp>

namespace hoist {

// What a step depends on is taken down here, on the program's thread. The rest waits for the step before, and is not
// worth holding up the program for.
void Engine::Impl::begin_updating() {
  const std::uint64_t step = step_count + 1;
  begun_update = make_update(step, gradient_mean());
  detail::WalkOptions walk = walk_of_update(step);
  walk.waits = WaitCause::none;
  walk.in_background = true;
  const auto open = [this, step, walk, update = begun_update] {
    live.deferred->finish();
    last_commit.wait();  // its extents, and memory it may still be written from, are free after it
    if (nvme_placement()) live.store->begin_step(step);
    live.deferred->open(walk, work_of(update));
  };
  updating = true;
  live.gradients->hand_on(
      {.open = open,
       .announce =
           [this](UnitId unit) {
             live.deferred->announce(unit);
             if (live.weight_reader) live.weight_reader->outdate(unit);
           },
       .take = [this](UnitId unit) { return live.deferred->offer(unit); },
       .withdraw = [this](UnitId unit, const auto& error) { live.deferred->withdraw(unit, error); }});
}

// Units whose gradients stayed on the device. Those that come to the host make room for others there by being used at
// once; these do not, and the program may use weights until here that are updated where they are.
void Engine::Impl::offer_the_rest() {
  update_on_device(*begun_update);
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    const UnitId unit{u};
    if (!table.unit(unit).is_trainable() || !live.memory->state_on_device(unit)) continue;
    live.deferred->announce(unit);
    live.deferred->offer(unit);  // a failure of the step is its end's
  }
}

Completion Engine::Impl::conclude_updating() {
  const auto committed = std::make_shared<Promise>();
  const Completion completion = committed->completion();
  const auto train = static_cast<std::size_t>(Pass::train);
  commit_ahead = commit_is_due() && stores_steps();
  offer_the_rest();
  live.deferred->conclude(end_of_step(std::exchange(begun_update, nullptr), committed), live.gatherer->expected(train));
  updating = false;
  live.gatherer->stage_for(train);
  return completion;
}

void Engine::Impl::require_undecided(const char* call) const {
  if (!updating) return;
  throw UsageError(
      fmt::format("{} after a unit's finish() and before step(): in update mode \"backward\" units are being updated "
                  "for the step already; call step() first",
                  call));
}

void Engine::Impl::require_untouched(UnitId id) const {
  if (!updating) return;
  const auto require = [&](UnitId unit) {
    if (!table.unit(unit).is_trainable() || !live.gradients->finished(unit)) return;
    throw UsageError(
        fmt::format("unit '{}' is gathered after its finish(): in update mode \"backward\" its weights are being "
                    "updated already; finish it after its last use, or set hoist.update_mode to \"forward\"",
                    table.unit(unit).name));
  };
  require(id);
  for (const UnitId owner : table.unit(id).tied) require(owner);
}

void Engine::Impl::fail_updating(const std::string& why) {
  // The step before this one may still be landing, which telling the others of a failure would break off.
  live.gradients->await_opened();
  fail(std::make_exception_ptr(
      Error(fmt::format("step {} cannot be taken: {}, and units were updated for it already (hoist.update_mode "
                        "\"backward\"). Nothing of it was committed: restore the last commit, in a new engine; "
                        "\"forward\" can drop such a step",
                        step_count + 1, why))));
}

}  // namespace hoist
