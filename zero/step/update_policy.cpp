// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/float_environment.hpp>
#include <hoist/zero/passes/waits.hpp>
#include <hoist/zero/step/update_policy.hpp>

namespace hoist::detail {

// --- what the modes share --------------------------------------------------------------------------------------------

std::exception_ptr UpdatePolicy::undone(const std::string& why) {
  HOIST_ASSERT(false, "no step is decided that could not be taken: {}", why);
  return nullptr;
}

WalkOptions UpdatePolicy::walk(std::uint64_t step) const {
  WalkOptions walk{.write_resident = parts_.options.commits_steps() && parts_.checkpoints.is_due(step),
                   .waits = WaitCause::none,
                   .in_background = true,
                   .makes_weights = true,
                   .read_gradients = true};
  // A walk does not update state that the device updates; it only writes it, where it has to be written.
  walk.read_device_only = walk.write_resident;
  walk.change_device_only = false;
  return walk;
}

TilePipeline::Work UpdatePolicy::work(std::shared_ptr<StepUpdate> update) const {
  return [table = &parts_.table, memory = &parts_.memory, arrivals = &parts_.gradients.arrivals(),
          update = std::move(update)](const TileAccess& tile) {
    if (memory->device_only(tile.unit)) return;
    const std::byte* gradient = tile.gradient;
    if (gradient == nullptr)
      gradient = arrivals->shards(tile.unit) + table->unit(tile.unit).gradient_offset(*tile.tile);
    update->apply(tile, gradient);
  };
}

void UpdatePolicy::update_on_device(StepUpdate& update) const {
  if (!parts_.memory.has_device_only()) return;
  const TimePoint begin = Clock::now();
  update.run_on_device(parts_.table, parts_.memory, *parts_.streams.down);
  parts_.runtime.ledger().waited(WaitCause::optimizer, Clock::now() - begin);
}

// Time in which the program's kernels run is no wait. After that, four things may be waited for. Reductions that still
// run wait for other ranks, and so did those that held up the executor, as far as the communicator reports their time
// (NCCL reports none). The rest is for updates that must make room for gradients, and for the drive that gradients
// spill to; without either, for the copies of the last gradients.
void UpdatePolicy::await_gradients() {
  parts_.gradients.await_made();
  const UpdateWait wait(parts_.updates);
  Ledger& ledger = parts_.runtime.ledger();
  const Nanoseconds busy_before = ledger.totals(Link::wire).busy;
  parts_.executor.drain();
  Nanoseconds reducing{0};
  if (parts_.table.world_size() > 1) {
    const TimePoint begin = Clock::now();
    parts_.streams.comm->synchronize();
    const Nanoseconds told = ledger.totals(Link::wire).busy - busy_before;
    reducing = std::max(Clock::now() - begin, std::min(wait.elapsed(), told));
    ledger.waited(WaitCause::comm, reducing);
  }
  parts_.streams.synchronize();
  parts_.gradients.wait();
  const Nanoseconds rest = wait.elapsed() - reducing;
  if (is_decided() || parts_.memory.spills_gradients()) return wait.count_into(ledger, rest);
  ledger.waited(WaitCause::device_to_host, rest);
}

void UpdatePolicy::await_updates() {
  const UpdateWait wait(parts_.updates);
  parts_.updates.finish();
  wait.count_into(parts_.runtime.ledger(), wait.elapsed());
}

UpdatePolicy::StepEnd UpdatePolicy::end_of_step(std::shared_ptr<StepUpdate> update,
                                                Checkpointer::Decided decided) const {
  const auto committed = std::make_shared<Promise>();
  const Completion completion = committed->completion();
  UpdateQueue::Ended ended = [table = &parts_.table, checkpoints = &parts_.checkpoints, update = std::move(update),
                              decided = std::move(decided), committed,
                              has_store = parts_.drives != nullptr](std::exception_ptr error) {
    Completion done;
    try {
      if (error) std::rethrow_exception(error);
      update->check(*table, has_store);
      done = checkpoints->commit(decided);
    } catch (...) {
      checkpoints->fail(decided, std::current_exception());
      committed->fail(std::current_exception());
      throw;
    }
    done.then([committed](std::exception_ptr failed) { committed->settle(failed); });
  };
  return {std::move(ended), completion};
}

namespace {

constexpr auto kTrain = static_cast<std::size_t>(Pass::train);

// --- step, forward ---------------------------------------------------------------------------------------------------

// Nothing is updated before step(), which waits for the updates, or leaves them to the next pass.
class UpdateAfterNorm final : public UpdatePolicy {
 public:
  UpdateAfterNorm(const StepParts& parts, bool step_waits) : UpdatePolicy(parts), step_waits_(step_waits) {}

  void await_inputs() override {
    await_gradients();
    if (!step_waits_) carry_out("carry out the last step");
  }

  // Nothing can be updated before the norm is known, but what comes first can be read.
  void after_finish() override {
    if (step_waits_ || std::exchange(read_ahead_in_, parts_.pass.serial()) == parts_.pass.serial()) return;
    if (parts_.checkpoints.on_nvme())
      parts_.updates.read_ahead(walk(parts_.settings.step_count + 1), parts_.gatherer.expected(kTrain));
  }

  Completion apply(double gradient_scale, CommitState state) override {
    open();
    parts_.gatherer.invalidate();
    const std::uint64_t step = parts_.settings.step_count;
    const auto update = parts_.settings.make_update(step, gradient_scale);
    update_on_device(*update);
    UpdateQueue::Step queued{
        .walk = walk(step), .work = work(update), .expected = parts_.gatherer.expected(kTrain), .ended = {}};
    auto [ended, committed] = end_of_step(update, parts_.checkpoints.decide(step, std::move(state)));
    queued.ended = std::move(ended);
    parts_.updates.begin(std::move(queued));
    if (step_waits_)
      carry_out("apply the step");
    else
      parts_.gatherer.stage_for(kTrain);
    return committed;
  }

 private:
  // Opens the step, on all ranks or none.
  void open() {
    parts_.ranks.run_in_group("apply the step", [&] {
      const TimePoint begin = Clock::now();
      parts_.checkpoints.await_last();
      ++parts_.settings.step_count;
      parts_.checkpoints.open_step(parts_.settings.step_count);  // waits for what save() has begun
      parts_.runtime.ledger().waited(WaitCause::nvme, Clock::now() - begin);
    });
  }

  void carry_out(const char* what) {
    parts_.ranks.run_in_group(what, [&] { await_updates(); });
  }

  const bool step_waits_;
  std::uint64_t read_ahead_in_ = 0;  // the pass, by its serial
};

// --- backward --------------------------------------------------------------------------------------------------------

class UpdateInBackward final : public UpdatePolicy {
 public:
  using UpdatePolicy::UpdatePolicy;

  void before_finish(UnitId unit, StreamRef stream) override {
    if (update_) return;
    parts_.gradients.buffer(unit, stream);  // a budget that refuses it does so before the step is begun
    begin();
  }

  bool is_decided() const override { return update_ != nullptr; }

  void require_undecided(const char* call) const override {
    if (!is_decided()) return;
    throw UsageError(
        fmt::format("{} after a unit's finish() and before step(): in update mode \"backward\" units are being updated "
                    "for the step already; call step() first",
                    call));
  }

  void require_gatherable(UnitId id) const override {
    if (!is_decided()) return;
    const auto require = [&](UnitId unit) {
      if (!parts_.table.unit(unit).is_trainable() || !parts_.gradients.finished(unit)) return;
      throw UsageError(
          fmt::format("unit '{}' is gathered after its finish(): in update mode \"backward\" its weights are being "
                      "updated already; finish it after its last use, or set hoist.update_mode to \"forward\"",
                      parts_.table.unit(unit).name));
    };
    require(id);
    for (const UnitId owner : parts_.table.unit(id).tied) require(owner);
  }

  void require_no_norm_limit() const override {
    if (!is_decided()) return;
    throw UsageError(
        "a largest norm for a step whose units were updated in the backward pass (hoist.update_mode "
        "\"backward\"); \"forward\" knows the norm before it updates");
  }

  std::exception_ptr undone(const std::string& why) override {
    // The commit of the step before may still be under way; telling the other ranks of a failure would break it off.
    // Where it fails, more is lost than this step.
    try {
      parts_.gradients.arrivals().await_opened();
    } catch (...) {
      return std::current_exception();
    }
    return std::make_exception_ptr(StepUndoneError(
        fmt::format("step {} cannot be taken: {}, and units were updated for it already (hoist.update_mode "
                    "\"backward\"). Nothing of it was committed: {}; \"forward\" can drop such a step",
                    parts_.settings.step_count + 1, why,
                    parts_.drives != nullptr ? "restore the last commit, in a new engine" : "start anew")));
  }

  void await_inputs() override {
    if (!update_) begin();  // no unit has gradients
    parts_.ranks.run_in_group("update its units", [&] {
      await_gradients();
      parts_.updates.check();
    });
  }

  Completion apply(double, CommitState state) override {
    ++parts_.settings.step_count;
    parts_.gatherer.invalidate();
    offer_the_rest();
    const std::vector<UnitId> expected = parts_.gatherer.expected(kTrain);
    auto [ended, committed] =
        end_of_step(update_, parts_.checkpoints.decide(parts_.settings.step_count, std::move(state)));
    parts_.updates.conclude(std::move(ended), expected);
    update_ = nullptr;
    parts_.gatherer.stage_for(kTrain);
    return committed;
  }

 private:
  // Takes down what the step depends on, on the program's thread. The rest waits for the step before, which must not
  // hold up the program.
  void begin() {
    const FloatEnvironment environment;  // of the rates and the mean; the program may have another
    const std::uint64_t step = parts_.settings.step_count + 1;
    update_ = parts_.settings.make_update(step, parts_.settings.gradient_mean(parts_.pass.passes_of_step()));
    const auto open = [updates = &parts_.updates, checkpoints = &parts_.checkpoints, step, walk = walk(step),
                       work = work(update_)] {
      updates->finish();
      checkpoints->open_step(step);
      updates->open(walk, work);
    };
    parts_.gradients.arrivals().hand_on(
        {.open = open,
         .announce =
             [updates = &parts_.updates, reader = parts_.weight_reader](UnitId unit) {
               updates->announce(unit);
               if (reader != nullptr) reader->outdate(unit);
             },
         .take = [updates = &parts_.updates](UnitId unit) { return updates->offer(unit); },
         .withdraw = [updates = &parts_.updates](UnitId unit, const auto& error) { updates->withdraw(unit, error); }});
  }

  // Units whose gradients stayed on the device. Those that come to the host make room for others there by being used at
  // once; these do not, and the program may use weights until here that are updated where they are.
  void offer_the_rest() {
    update_on_device(*update_);
    for (std::uint32_t u = 0; u < parts_.table.units().size(); ++u) {
      const UnitId unit{u};
      if (!parts_.table.unit(unit).is_trainable() || !parts_.memory.state_on_device(unit)) continue;
      parts_.updates.announce(unit);
      parts_.updates.offer(unit);  // a failure of the step is its end's
    }
  }

  std::shared_ptr<StepUpdate> update_;  // of the step for which units are being updated
};

}  // namespace

std::unique_ptr<UpdatePolicy> make_update_policy(const StepParts& parts) {
  const UpdateMode mode = parts.options.resolved_update_mode();
  if (mode == UpdateMode::backward) return std::make_unique<UpdateInBackward>(parts);
  return std::make_unique<UpdateAfterNorm>(parts, /*step_waits=*/mode != UpdateMode::forward);
}

}  // namespace hoist::detail
