// SPDX-License-Identifier: Apache-2.0
#include "random_player.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>

#include "toy_kernels.hpp"

namespace hoist::test {

namespace {

constexpr std::size_t kStreams = 2;

std::uint64_t byte_count(const TensorView& view) { return view.element_count() * dtype_bytes(view.dtype); }

std::vector<std::byte> copy_of(const TensorView& view) {
  const auto* const data = static_cast<const std::byte*>(view.data);
  return {data, data + byte_count(view)};
}

}  // namespace

Player::Player(const Program& program, std::size_t session, const ToySetup& setup, Journal& journal,
               const Runtime::MakeCommunicator& join)
    : program_(program),
      session_(program.sessions[session]),
      setup_(setup),
      journal_(journal),
      runtime_(setup.runtime, join),
      rates_(journal.rates) {
  allocate_scratch();
  for (std::size_t i = 0; i < kStreams; ++i)
    streams_.push_back(runtime_.device().create_stream("compute " + std::to_string(i)));
  describe();
  session == 0 ? begin_anew() : go_on();
}

Player::~Player() {
  engine_.reset();  // before the leases that were kept
  try {
    for (const auto& stream : streams_) stream->synchronize();  // what is enqueued writes to members
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

void Player::allocate_scratch() {
  std::uint64_t elements = 0;
  for (const UnitPlan& unit : program_.units)
    for (const ParameterSpec& spec : unit.parameters) elements = std::max(elements, element_count(spec));
  for (std::size_t i = 0; i < kStreams; ++i)
    scratch_.push_back(runtime_.device_arena().allocate(elements * sizeof(float), "the program's gradients"));
}

void Player::describe() {
  units_.resize(program_.units.size());
  for (std::size_t g = 1; g < program_.groups.size(); ++g) model_.add_group(program_.groups[g]);
  for (std::size_t u = 0; u < units_.size(); ++u) add_unit(u);
}

void Player::add_unit(std::size_t index) {
  const UnitPlan& plan = program_.units[index];
  Unit& unit = units_[index];
  UnitOptions options{.stable_address = plan.stable_address};
  if (plan.gathered_with) options.gathered_with = {units_[*plan.gathered_with].id};
  unit.id = model_.add_unit("unit" + std::to_string(index), plan.parameters, options);
  for (const ParameterSpec& spec : plan.parameters) unit.parameters.push_back(model_.parameter(spec.name));
  if (plan.tied_to) model_.tie(unit.id, units_[*plan.tied_to].parameters.front());
}

// --- from session to session -----------------------------------------------------------------------------------------

void Player::begin_anew() {
  caller_state_ = caller_state(0);
  const auto fill = [](ParameterId parameter, std::uint64_t first, std::span<float> out) {
    fill_normal(parameter.index, first, out);
  };
  engine_.emplace(Engine::create(runtime_, setup_.engine, model_, fill, present_caller_state()));
}

void Player::go_on() {
  const auto kept = journal_.kept.find(session_.from);
  const bool goes_back = kept != journal_.kept.end();
  restore(goes_back ? session_.from : "");
  compare(goes_back ? kept->second : journal_.last, /*with_state=*/true);
  set_rates();
}

void Player::restore(const std::string& from) {
  engine_.emplace(Engine::restore(runtime_, setup_.engine, model_, {.from = from}));
}

void Player::compare(const Snapshot& expected, bool with_state) {
  const RestoreReport& report = *engine_->restored();
  EXPECT_EQ(report.step, expected.step);
  EXPECT_EQ(engine_->step_count(), expected.step);
  EXPECT_EQ(report.world_size, expected.ranks);
  EXPECT_EQ(engine_->loss_scale(), static_cast<float>(expected.loss_scale));
  // The caller state is the one that the rank of the same number gave or, if there was no such rank, rank 0.
  caller_state_.assign(reinterpret_cast<const char*>(report.caller_state.data()), report.caller_state.size());
  EXPECT_EQ(caller_state_, expected.caller_states.at(runtime_.rank() < expected.ranks ? runtime_.rank() : 0));
  if (with_state) {
    EXPECT_EQ(state_digests(), expected.state) << "as restored";
  }
}

Snapshot Player::snapshot() {
  return {.step = engine_->step_count(),
          .state = state_digests(),
          .loss_scale = engine_->loss_scale(),
          .ranks = runtime_.world_size(),
          .caller_states = {{runtime_.rank(), caller_state_}}};
}

// All ranks note the same snapshot, except for the caller states, of which each rank gave its own.
void Player::note(Snapshot& in_journal) {
  Snapshot now = snapshot();
  const std::lock_guard lock(journal_.mutex);
  now.caller_states.merge(in_journal.caller_states);
  in_journal = std::move(now);
}

Digests Player::state_digests() {
  return {state_digest(*engine_, State::master),
          state_digest(*engine_, State::moment1),
          state_digest(*engine_, State::moment2),
          {}};
}

// Commits do not contain learning rates that the program has set.
void Player::set_rates() {
  for (const auto& [group, rate] : rates_) engine_->set_learning_rate(GroupId{group}, rate);
}

std::string Player::caller_state(std::uint64_t salt) const {
  return std::string(salt % 60, 'x') + std::to_string(salt) + " of rank " + std::to_string(runtime_.rank());
}

Digests Player::play() {
  for (const Action& action : session_.actions) act(action);
  drop_gradients();
  engine_->settle();
  if (program_.has_several_sessions() && can_resume()) engine_->save("", present_caller_state()).wait();
  for (const auto& stream : streams_) stream->synchronize();
  compare_looks();
  note(journal_.last);
  Digests digests = state_digests();
  const std::lock_guard lock(journal_.mutex);
  journal_.rates = rates_;
  for (const Seen& seen : seen_) digests.losses.push_back(*seen);
  return digests;
}

// --- actions ---------------------------------------------------------------------------------------------------------

void Player::act(const Action& action) {
  switch (action.act) {
    case Act::train:
      return train(action);
    case Act::evaluate:
      return pass(action, Pass::evaluate, 0);
    case Act::generate:
      return pass(action, Pass::generate, 0);
    case Act::step:
      return step(action.salt);
    case Act::discard:
      return drop_gradients();
    case Act::read:
      return read(action.salt);
    case Act::write:
      return write(action.salt);
    case Act::settle:
      return engine_->settle();
    case Act::set_rate:
      return set_rate(action.salt);
    case Act::save:
      return save(action.salt);
    case Act::restart:
      return restart(action);
  }
}

bool Player::on_nvme() const {
  return setup_.engine.parameters == Placement::nvme || setup_.engine.optimizer == Placement::nvme;
}

bool Player::can_resume() const {
  return !setup_.engine.store_directory.empty() && setup_.engine.durability == tiers::Durability::step;
}

void Player::drop_gradients() {
  engine_->discard();
  gradients_due_ = false;
}

void Player::step(std::uint64_t salt) {
  if (!std::exchange(gradients_due_, false)) return;  // its pass was abandoned
  const std::string state = caller_state(salt);
  const StepReport report = engine_->step({.caller_state = std::as_bytes(std::span(state))});
  if (report.applied) caller_state_ = state;
  for (const double value : {report.applied ? report.gradient_norm : -1, static_cast<double>(report.loss_scale),
                             static_cast<double>(report.learning_rate)})
    seen_.push_back(std::make_shared<double>(value));
  if (report.step % 2 == 0) report.committed.wait();
}

void Player::train(const Action& action) {
  if (std::exchange(gradients_due_, false)) engine_->discard();
  const int passes = setup_.engine.micro_batch_order == MicroBatchOrder::vertical ? 1 : action.micro_batches;
  for (int i = 0; i < passes; ++i) {
    // The last one is left, if one is.
    Action now = action;
    if (i + 1 < passes) now.fails_after = std::numeric_limits<std::size_t>::max();
    try {
      pass(now, Pass::train, i);
    } catch (const Abandoned&) {
      return;
    }
  }
  gradients_due_ = true;
}

void Player::pass(const Action& action, Pass kind, int micro_batch) {
  kept_.clear();
  ++passes_;
  visits_left_ = action.fails_after;
  stream_ = action.stream;
  try {
    const PassScope scope = engine_->begin(
        kind, {.micro_batch = micro_batch, .micro_batches = kind == Pass::train ? action.micro_batches : 1});
    for (const std::size_t u : action.forward) visit(u, action, false, micro_batch);
    if (kind != Pass::train) return;
    for (const std::size_t u : action.backward) visit(u, action, true, micro_batch);
    finish_tied_owners();
  } catch (const Abandoned&) {
    if (kind == Pass::train) throw;
  }
}

void Player::visit(std::size_t index, const Action& action, bool backward, int micro_batch) {
  const Unit& unit = units_[index];
  kept_.clear();
  Lease lease = engine_->gather(unit.id, stream());
  look_at(index, lease);
  if (action.nests) nest(index, action, backward);
  if (backward) make_gradients(index, lease, action, micro_batch);
  const bool fails = visits_left_-- == 0;
  if (fails && !action.keeps_lease) throw Abandoned();  // `lease` is released on the way
  if (action.keeps_lease && !(program_.fits_backward_mode && backward)) {
    kept_.push_back(std::move(lease));
  } else {
    lease.release(stream());
  }
  if (fails) throw Abandoned();
  if (backward && !is_tied_owner(index)) engine_->finish(unit.id, stream());
}

void Player::look_at(std::size_t index, const Lease& lease) {
  for (const ParameterId parameter : units_[index].parameters) seen_.push_back(look(lease, parameter));
  if (const auto owner = program_.units[index].tied_to) seen_.push_back(look(lease, units_[*owner].parameters.front()));
}

// Takes another lease on the same unit, and one on another unit, for which the budget may be too small. The latter is
// held longer than the first lease at times.
void Player::nest(std::size_t index, const Action& action, bool backward) {
  Lease same = engine_->gather(units_[index].id, stream());
  seen_.push_back(look(same, units_[index].parameters.front()));
  if (backward && program_.fits_backward_mode) return;  // the neighbour may have been finished
  const Unit& other = units_[action.salt % units_.size()];
  try {
    Lease neighbour = engine_->gather(other.id, stream());
    look(neighbour, other.parameters.back());
    if (action.salt / units_.size() % 2 == 0) kept_.push_back(std::move(neighbour));
  } catch (const BudgetError&) {
  }
}

void Player::make_gradients(std::size_t index, const Lease& lease, const Action& action, int micro_batch) {
  const bool vertical = setup_.engine.micro_batch_order == MicroBatchOrder::vertical;
  const int last = vertical ? action.micro_batches - 1 : micro_batch;
  for (int m = vertical ? 0 : micro_batch; m <= last; ++m) {
    const std::uint64_t seed =
        action.salt + static_cast<std::uint64_t>(runtime_.rank()) + 7919 * static_cast<std::uint64_t>(m);
    const Unit& unit = units_[index];
    for (std::size_t p = 0; p < unit.parameters.size(); ++p)
      if (p == 0 || (action.salt + p) % 3 != 0) make_gradient(unit.id, unit.parameters[p], lease, action, seed);
    if (const auto owner = program_.units[index].tied_to)
      make_gradient(units_[*owner].id, units_[*owner].parameters.front(), lease, action, seed + 500);
  }
}

void Player::make_gradient(UnitId unit, ParameterId parameter, const Lease& lease, const Action& action,
                           std::uint64_t seed) {
  const ParameterSpec& spec = model_.parameters()[parameter.index];
  if (!spec.trainable) return;
  const TensorView weights = lease.view(parameter);
  const bool poisoned = action.poisoned && spec.counts_in_norm;  // a replica's is counted by another rank
  const float scale = poisoned ? std::numeric_limits<float>::infinity() : engine_->loss_scale();
  TensorView target;
  if (action.accumulates) {
    constexpr std::array kTypes{DType::fp32, DType::bf16, DType::fp16};
    const DType type = kTypes[action.salt % (spec.counts_in_norm ? 3 : 2)];  // no rank notices a replica's overflow
    target = {.data = scratch_[stream_].data(), .dtype = type, .shape = spec.shape};
    stream().fill(scratch_[stream_].data(), 0, byte_count(target));
  } else {
    target = engine_->gradients(unit, stream()).view(parameter);
  }
  stream().launch("gradient", [weights, target, seed = seed + 77 * parameter.index, scale] {
    std::vector<std::byte> sum = copy_of(target);
    add_gradient(copy_of(weights), weights.dtype, sum, target.dtype, seed, scale);
    std::ranges::copy(sum, static_cast<std::byte*>(target.data));
  });
  if (action.accumulates) engine_->accumulate(parameter, target, stream());
}

bool Player::is_tied_owner(std::size_t index) const {
  return std::ranges::any_of(program_.units, [&](const UnitPlan& plan) { return plan.tied_to == index; });
}

void Player::finish_tied_owners() {
  for (std::size_t u = 0; u < units_.size(); ++u)
    if (is_tied_owner(u)) engine_->finish(units_[u].id, stream());
}

// The weights as the stream finds them. Within a pass they are the same at every look.
Player::Seen Player::look(const Lease& lease, ParameterId parameter) {
  auto sum = std::make_shared<double>();
  stream().launch("look", [view = lease.view(parameter), sum] { *sum = weighted_sum(copy_of(view), view.dtype); });
  looks_.push_back({passes_, parameter, sum});
  return sum;
}

void Player::compare_looks() {
  std::map<std::pair<std::size_t, std::uint32_t>, double> first;
  for (const Look& look : looks_) {
    const auto [found, is_first] = first.emplace(std::pair(look.pass, look.parameter.index), *look.sum);
    EXPECT_EQ(found->second, *look.sum) << "parameter " << look.parameter.index << " in pass " << look.pass;
  }
}

ParameterId Player::some_parameter(std::uint64_t salt) const {
  return {static_cast<std::uint32_t>(salt % model_.parameters().size())};
}

// Without a gradient.
std::vector<State> Player::states_of(ParameterId parameter) const {
  std::vector<State> states{State::master};
  for (const State state : {State::moment1, State::moment2})
    if (engine_->keeps(parameter, state)) states.push_back(state);
  return states;
}

void Player::read(std::uint64_t salt) {
  const ParameterId parameter = some_parameter(salt);
  const std::uint64_t count = element_count(model_.parameters()[parameter.index]);
  const std::uint64_t first = salt / 3 % 2 == 0 ? 0 : salt / 5 % count;
  std::vector<State> states = states_of(parameter);
  if (gradients_due_ && engine_->keeps(parameter, State::gradient)) states.push_back(State::gradient);
  std::vector<float> values(count - first);
  engine_->read(parameter, states[salt / 7 % states.size()], first, values);
  double sum = 0;
  for (const float value : values) sum += std::isfinite(value) ? value : 1;
  seen_.push_back(std::make_shared<double>(sum));
}

void Player::write(std::uint64_t salt) {
  const ParameterId parameter = some_parameter(salt);
  const std::uint64_t count = element_count(model_.parameters()[parameter.index]);
  const std::uint64_t first = salt / 5 % count;
  const std::vector<State> states = states_of(parameter);
  const State state = states[salt / 11 % states.size()];
  const double scale = state == State::moment1 ? 1e-4 : 1;  // the update divides it by the root of moment2, maybe 0
  std::vector<float> values(std::min<std::uint64_t>(count - first, 1 + salt % 50));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(scale * (random_uniform(salt, i) - (state == State::moment2 ? 0 : 0.5)));
  engine_->write(parameter, state, first, values);
}

void Player::set_rate(std::uint64_t salt) {
  const GroupId group{static_cast<std::uint32_t>(salt % program_.groups.size())};
  rates_[group.index] = 1e-3 * static_cast<double>(salt / 7 % 20);
  engine_->set_learning_rate(group, rates_[group.index]);
}

void Player::save(std::uint64_t salt) {
  drop_gradients();
  const std::string name = "kept" + std::to_string(salt % 2);
  const Completion kept = engine_->save(name, present_caller_state());
  Snapshot* slot = nullptr;
  {
    const std::lock_guard lock(journal_.mutex);
    slot = &journal_.kept[name];
  }
  if (salt % 3 == 0) kept.wait();
  note(*slot);
}

// Ends the engine, perhaps during a pass, and resumes from the last commit. If the session cannot resume, it only drops
// the gradients.
void Player::restart(const Action& action) {
  drop_gradients();
  if (!can_resume()) return;
  // Skipped steps change the loss scale, but commit nothing.
  if (!on_nvme() || setup_.engine.commit_every > 1 || program_.loss_scale.dynamic)
    engine_->save("", present_caller_state()).wait();
  Snapshot now{.step = engine_->step_count(),
               .loss_scale = engine_->loss_scale(),
               .ranks = runtime_.world_size(),
               .caller_states = {{runtime_.rank(), caller_state_}}};
  std::optional<PassScope> scope;
  if (action.salt % 2 == 0) {
    scope.emplace(engine_->begin(Pass::train));
    ++passes_;
    const Unit& unit = units_.front();
    kept_.push_back(engine_->gather(unit.id, stream()));
    look(kept_.back(), unit.parameters.front());
    make_gradient(unit.id, unit.parameters.front(), kept_.back(), action, action.salt);
  }
  engine_.reset();
  scope.reset();
  for (const auto& stream : streams_) stream->synchronize();
  kept_.clear();
  restore("");
  compare(now, /*with_state=*/false);  // reading the state above would have carried out the update of the last step
  set_rates();
}

}  // namespace hoist::test
