// SPDX-License-Identifier: Apache-2.0
// Random programs on random models: passes in any order, abandoned passes, skipped steps, leases that outlive their
// pass, restarts. Every placement, budget and delay ends in the bits of the plainest run, and every weight that the
// program looked at on the way was the same.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <limits>
#include <numeric>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>

#include "toy_ranks.hpp"

namespace hoist::test {
namespace {

// --- what is played --------------------------------------------------------------------------------------------------

struct UnitPlan {
  std::int64_t matrix = 1, norm = 1;
  bool frozen = false;  // all of it
  bool stable_address = false, bound = false;
  std::optional<std::size_t> tied_to;
};

enum class Act : std::uint8_t { train, evaluate, step, discard, read, write, settle, restart };

struct Deed {
  Act act = Act::train;
  std::vector<std::size_t> forward, backward;
  std::size_t fails_after = std::numeric_limits<std::size_t>::max();  // visits; then the pass is left by an exception
  bool nests = false;        // leases of other units and of the same one, as recomputation takes them
  bool keeps_lease = false;  // the last lease outlives the pass
  bool poisoned = false;     // gradients are not finite
  std::uint64_t salt = 0;
};

struct Program {
  int ranks = 1;
  std::vector<UnitPlan> units;
  std::vector<Deed> deeds;
};

std::vector<std::size_t> shuffled(std::size_t count, Rng& rng) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = count; i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
  return order;
}

Program random_program(std::uint64_t seed) {
  Rng rng(seed);
  Program program{.ranks = 1 + static_cast<int>(rng.below(3))};
  const std::size_t count = 2 + rng.below(4);
  for (std::size_t u = 0; u < count; ++u) {
    UnitPlan unit{.matrix = 1 + static_cast<std::int64_t>(rng.below(rng.below(4) == 0 ? 40000 : 3000)),
                  .norm = 1 + static_cast<std::int64_t>(rng.below(70)),
                  .frozen = u > 0 && rng.below(6) == 0,
                  .stable_address = rng.below(6) == 0,
                  .bound = rng.below(6) == 0};
    if (u > 0 && rng.below(4) == 0) unit.tied_to = rng.below(u);
    program.units.push_back(unit);
  }
  // A program repeats itself most of the time, else nothing would ever be planned.
  std::vector<std::vector<std::size_t>> orders;
  for (int i = 0; i < 2; ++i) orders.push_back(shuffled(count, rng));
  const auto order = [&] {
    if (rng.below(8) == 0) return shuffled(count, rng);
    return orders[rng.below(4) == 0 ? 1 : 0];
  };
  bool due = false;  // gradients wait for step or discard
  for (int i = 0; i < 22; ++i) {
    Deed deed{.salt = rng.bits()};
    const std::uint64_t draw = rng.below(16);
    if (due && draw < 9) {
      deed.act = rng.below(6) == 0 ? Act::discard : Act::step;
      due = false;
    } else if (!due && draw < 9) {
      deed.act = Act::train;
      due = true;
    } else if (draw < 12) {
      deed.act = Act::evaluate;
    } else {
      deed.act = std::array{Act::read, Act::write, Act::settle, Act::restart}[draw - 12];
      if (deed.act == Act::restart) due = false;
    }
    deed.forward = order();
    if (rng.below(8) == 0) deed.forward.resize(1 + rng.below(count));
    deed.backward = order();
    if (rng.below(7) == 0) deed.fails_after = rng.below(2 * count);
    deed.nests = rng.below(4) == 0;
    deed.keeps_lease = rng.below(4) == 0;
    deed.poisoned = rng.below(10) == 0;
    if (deed.act == Act::train && deed.fails_after < deed.forward.size() + count) due = false;
    program.deeds.push_back(std::move(deed));
  }
  return program;
}

// --- how it is played ------------------------------------------------------------------------------------------------

ToySetup plain_setup() {
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.engine.prefetch_elements = 0;
  return setup;
}

ToySetup random_setup(std::uint64_t seed, const std::string& directory) {
  Rng rng(seed ^ 0x5EEDu);
  constexpr std::array kPlaces{Placement::device, Placement::pinned, Placement::nvme, Placement::nvme};
  ToySetup setup = toy_setup(kPlaces[rng.below(4)], kPlaces[rng.below(4)], directory);
  const bool nvme = setup.engine.parameters == Placement::nvme || setup.engine.optimizer == Placement::nvme;
  if (nvme && rng.below(4) == 0) setup.engine.durability = tiers::Durability::none;
  setup.engine.sub_group_elements = 1 + rng.below(60000);
  setup.engine.optimizer_pinned_fraction = std::clamp(1.5 * rng.uniform() - 0.25, 0.0, 1.0);
  setup.engine.update_buffer_count = 3 + static_cast<unsigned>(rng.below(3));
  setup.engine.staging_buffer_count = 1 + static_cast<unsigned>(rng.below(4));
  setup.engine.prefetch_elements = std::array<std::uint64_t, 3>{0, 5000, 1'000'000}[rng.below(3)];
  setup.engine.reuse_distance_elements = std::array<std::uint64_t, 3>{0, 5000, 1'000'000}[rng.below(3)];
  setup.engine.persistence_elements = std::array<std::uint64_t, 3>{0, 1000, 1'000'000}[rng.below(3)];
  setup.runtime.host_device.chaos_seed = rng.below(2) == 0 ? 0 : rng.bits() | 1;
  setup.runtime.aio_backend = rng.below(3) == 0 ? aio::BackendKind::threads : aio::BackendKind::automatic;
  setup.runtime.comm_scratch_bytes = 256 * kKiB;
  setup.engine.optimizer_offload_ratio = std::clamp(2 * rng.uniform(), 0.0, 1.0);
  if (setup.engine.parameters == Placement::device) setup.runtime.host_device.host_accessible = rng.below(2) == 0;
  return setup;
}

class Abandoned : public std::exception {};

class Player {
 public:
  Player(const Program& program, const ToySetup& setup, const Runtime::MakeCommunicator& join)
      : program_(program),
        setup_(setup),
        runtime_(setup.runtime, join),
        stream_(runtime_.device().create_stream("compute")) {
    make_engine();
    engine_->initialize([](ParameterId parameter, std::uint64_t first, std::span<float> out) {
      for (std::size_t i = 0; i < out.size(); ++i)
        out[i] = static_cast<float>(0.2 * random_normal(parameter.index, first + i));
    });
  }

  ~Player() {
    engine_.reset();  // before the leases that were kept
    try {
      stream_->synchronize();  // what is enqueued writes to members
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }

  void play() {
    for (const Deed& deed : program_.deeds) act(deed);
    engine_->discard();
    engine_->settle();
    stream_->synchronize();
    digests_ = {state_digest(*engine_, State::master), state_digest(*engine_, State::moment1),
                state_digest(*engine_, State::moment2)};
    digests_.losses.assign(seen_.begin(), seen_.end());
  }

  const Digests& digests() const { return digests_; }

 private:
  struct Unit {
    UnitId id;
    ParameterId matrix, norm;
    std::vector<std::byte> memory;  // of a bound unit
  };

  void make_engine() {
    kept_.clear();
    engine_.reset();
    units_.assign(program_.units.size(), {});
    engine_ = std::make_unique<Engine>(runtime_, setup_.engine);
    for (std::size_t u = 0; u < units_.size(); ++u) add_unit(u);
  }

  void add_unit(std::size_t u) {
    const UnitPlan& plan = program_.units[u];
    Unit& unit = units_[u];
    const std::string name = "unit" + std::to_string(u);
    const std::array specs{
        ParameterSpec{.name = name + ".matrix", .shape = {plan.matrix}, .trainable = !plan.frozen},
        ParameterSpec{.name = name + ".norm", .shape = {plan.norm}, .dtype = DType::fp32, .trainable = !plan.frozen}};
    UnitOptions options{.stable_address = plan.stable_address};
    if (plan.bound) {
      options.binding = {
          .bind =
              [&unit](UnitId, std::uint64_t bytes, StreamRef) {
                unit.memory.resize(bytes);
                return unit.memory.data();
              },
          .unbind = [&unit](UnitId, StreamRef stream) { stream->fill(unit.memory.data(), 0xFF, unit.memory.size()); }};
    }
    unit.id = engine_->add_unit(name, specs, options);
    unit.matrix = engine_->parameter(name + ".matrix");
    unit.norm = engine_->parameter(name + ".norm");
    if (plan.tied_to) engine_->tie(unit.id, units_[*plan.tied_to].matrix);
  }

  void act(const Deed& deed) {
    switch (deed.act) {
      case Act::train:
        return pass(deed, Pass::train);
      case Act::evaluate:
        return pass(deed, Pass::evaluate);
      case Act::step:
        return step();
      case Act::discard:
        gradients_due_ = false;
        return engine_->discard();
      case Act::settle:
        return engine_->settle();
      case Act::read:
        return read(deed.salt);
      case Act::write:
        return write(deed.salt);
      case Act::restart:
        return restart(deed);
    }
  }

  void step() {
    if (!gradients_due_) return;  // its pass was abandoned
    gradients_due_ = false;
    const StepReport report = engine_->step();
    seen_.push_back(report.applied ? report.gradient_norm : -1);
    if (report.step % 2 == 0) report.committed.wait();
  }

  void pass(const Deed& deed, Pass kind) {
    if (kind == Pass::train && std::exchange(gradients_due_, false)) engine_->discard();
    kept_.clear();
    visits_left_ = deed.fails_after;
    try {
      const PassScope scope = engine_->begin(kind);
      for (const std::size_t u : deed.forward) visit(u, deed, false);
      if (kind != Pass::train) return;
      for (const std::size_t u : deed.backward) visit(u, deed, true);
      finish_tied_owners();
    } catch (const Abandoned&) {
      return;
    }
    gradients_due_ = true;
  }

  void visit(std::size_t u, const Deed& deed, bool backward) {
    const Unit& unit = units_[u];
    const UnitPlan& plan = program_.units[u];
    kept_.clear();
    Lease lease = engine_->gather(unit.id, *stream_);
    look(lease.view(unit.matrix), true);
    look(lease.view(unit.norm), true);
    if (plan.tied_to) look(lease.view(units_[*plan.tied_to].matrix), true);
    if (deed.nests) nest(u, deed.salt);
    if (backward && !plan.frozen) make_gradient(unit.id, unit.matrix, lease, deed);
    if (backward && !plan.frozen && deed.salt % 3 != 0) make_gradient(unit.id, unit.norm, lease, deed);
    if (backward && plan.tied_to && !program_.units[*plan.tied_to].frozen) {
      make_gradient(units_[*plan.tied_to].id, units_[*plan.tied_to].matrix, lease, deed);
    }
    const bool fails = visits_left_-- == 0;
    if (fails && !deed.keeps_lease) throw Abandoned();  // `lease` is released on the way
    if (deed.keeps_lease) {
      kept_.push_back(std::move(lease));
    } else {
      lease.release(*stream_);
    }
    if (fails) throw Abandoned();
    if (backward && !is_tied_owner(u)) engine_->finish(unit.id, *stream_);
  }

  // Another lease on the same memory, and one on a neighbour, for which there may be no room.
  void nest(std::size_t u, std::uint64_t salt) {
    Lease same = engine_->gather(units_[u].id, *stream_);
    look(same.view(units_[u].matrix), true);
    const Unit& other = units_[salt % units_.size()];
    try {
      const Lease neighbour = engine_->gather(other.id, *stream_);
      look(neighbour.view(other.norm), false);
    } catch (const BudgetError&) {
    }
  }

  bool is_tied_owner(std::size_t u) const {
    return std::any_of(program_.units.begin(), program_.units.end(),
                       [&](const UnitPlan& plan) { return plan.tied_to == u; });
  }

  void finish_tied_owners() {
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (is_tied_owner(u)) engine_->finish(units_[u].id, *stream_);
    }
  }

  static float element(const TensorView& view, std::uint64_t i) {
    return view.dtype == DType::fp32 ? static_cast<const float*>(view.data)[i]
                                     : to_float(static_cast<const bf16*>(view.data)[i]);
  }

  void look(const TensorView& view, bool noted) {
    double* sum = noted ? &seen_.emplace_back() : &ignored_;
    stream_->launch("look", [view, sum] {
      for (std::uint64_t i = 0; i < view.element_count(); ++i)
        *sum += element(view, i) * static_cast<double>(i % 7 + 1);
    });
  }

  void make_gradient(UnitId unit, ParameterId parameter, const Lease& lease, const Deed& deed) {
    const TensorView weights = lease.view(parameter);
    const TensorView gradient = engine_->gradients(unit, *stream_).view(parameter);
    const std::uint64_t seed = deed.salt + 77 * parameter.index + static_cast<std::uint64_t>(runtime_.rank());
    const float scale = deed.poisoned ? std::numeric_limits<float>::infinity() : 1.0f;
    stream_->launch("gradient", [weights, gradient, seed, scale] {
      for (std::uint64_t i = 0; i < weights.element_count(); ++i) {
        const float value =
            scale * (0.05f * element(weights, i) + static_cast<float>(0.02 * (random_uniform(seed, i) - 0.5)));
        if (gradient.dtype == DType::fp32) {
          static_cast<float*>(gradient.data)[i] += value;
        } else {
          auto& target = static_cast<bf16*>(gradient.data)[i];
          target = to_bf16(to_float(target) + value);
        }
      }
    });
  }

  ParameterId some_parameter(std::uint64_t salt) const {
    return {static_cast<std::uint32_t>(salt % engine_->parameters().size())};
  }

  void read(std::uint64_t salt) {
    const ParameterId parameter = some_parameter(salt);
    const bool trainable = engine_->parameters()[parameter.index].trainable;
    std::vector<float> values(static_cast<std::size_t>(engine_->parameters()[parameter.index].shape[0]));
    std::vector<State> states{State::master};
    if (trainable) states.push_back(State::moment2);
    if (trainable && gradients_due_) states.push_back(State::gradient);
    engine_->read(parameter, states[salt / 7 % states.size()], 0, values);
    double sum = 0;
    for (const float value : values) sum += std::isfinite(value) ? value : 1;
    seen_.push_back(sum);
  }

  void write(std::uint64_t salt) {
    const ParameterId parameter = some_parameter(salt);
    const auto count = static_cast<std::uint64_t>(engine_->parameters()[parameter.index].shape[0]);
    const std::uint64_t first = salt / 5 % count;
    std::vector<float> values(std::min<std::uint64_t>(count - first, 1 + salt % 50));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(random_uniform(salt, i) - 0.5);
    engine_->write(parameter, State::master, first, values);
  }

  // Stops and continues from the last commit, with whatever is under way; where nothing can be continued, only the
  // gradients go.
  void restart(const Deed& deed) {
    engine_->discard();
    gradients_due_ = false;
    if (setup_.engine.store_directory.empty() || setup_.engine.durability == tiers::Durability::none) return;
    const bool nvme = setup_.engine.parameters == Placement::nvme || setup_.engine.optimizer == Placement::nvme;
    if (!nvme) engine_->save("restart", {}).wait();
    const std::uint64_t step = engine_->step_count();
    std::optional<PassScope> scope;
    if (deed.salt % 2 == 0) {
      scope.emplace(engine_->begin(Pass::train));
      kept_.push_back(engine_->gather(units_.front().id, *stream_));
      look(kept_.back().view(units_.front().norm), false);
      if (!program_.units.front().frozen) make_gradient(units_.front().id, units_.front().norm, kept_.back(), deed);
    }
    engine_.reset();
    scope.reset();
    stream_->synchronize();
    make_engine();
    EXPECT_EQ(engine_->restore().step, step);
  }

  const Program& program_;
  const ToySetup& setup_;
  Runtime runtime_;
  std::unique_ptr<platform::Stream> stream_;
  std::vector<Unit> units_;
  std::deque<double> seen_;
  double ignored_ = 0;
  std::unique_ptr<Engine> engine_;
  std::vector<Lease> kept_;  // destroyed before the stream
  bool gradients_due_ = false;
  std::size_t visits_left_ = 0;
  Digests digests_;
};

std::vector<Digests> play(const Program& program, const ToySetup& setup) {
  std::vector<Digests> digests(static_cast<std::size_t>(program.ranks));
  on_ranks(program.ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
    Player player(program, setup, join);
    player.play();
    digests[static_cast<std::size_t>(rank)] = player.digests();
  });
  return digests;
}

// The smallest device the program fits into.
std::uint64_t least_device_bytes(const Program& program, ToySetup setup) {
  setup.runtime.device_memory_bytes = setup.runtime.comm_scratch_bytes + kBlockAlignment;
  const TempDirectory directory;
  if (!setup.engine.store_directory.empty()) setup.engine.store_directory = directory / "store";
  try {
    on_ranks(program.ranks,
             [&](int, const Runtime::MakeCommunicator& join) { const Player player(program, setup, join); });
  } catch (const BudgetError& error) {
    return error.need.need_bytes;
  }
  return setup.runtime.device_memory_bytes;
}

void compare(std::uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed) + "; HOIST_TEST_SEED=" + std::to_string(seed) + " plays it alone");
  const Program program = random_program(seed);
  const TempDirectory directory;
  ToySetup setup = random_setup(seed, directory / "store");
  if (seed % 2 == 0) setup.runtime.device_memory_bytes = least_device_bytes(program, setup);
  const Digests expected = play(program, plain_setup()).front();
  for (const Digests& digests : play(program, setup)) {
    EXPECT_EQ(digests, expected) << program.ranks << " ranks, placement " << static_cast<int>(setup.engine.parameters)
                                 << ' ' << static_cast<int>(setup.engine.optimizer) << ", ratio "
                                 << setup.engine.optimizer_offload_ratio;
  }
}

TEST(RandomProgram, EndsInTheSameBitsEverywhere) {
  if (const char* seed = std::getenv("HOIST_TEST_SEED")) return compare(std::strtoull(seed, nullptr, 10));
  const TimePoint end = Clock::now() + std::chrono::seconds(8);
  for (std::uint64_t seed = 1; seed <= 8 || Clock::now() < end; ++seed) {
    try {
      compare(seed);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "seed " << seed << ": " << error.what();
    }
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace hoist::test
