// SPDX-License-Identifier: Apache-2.0
// Plans of random models on random machines: each is valid (no budget is exceeded at any instant of its steps), and
// none takes longer than the same engine would without a plan, when each unit is fetched on demand.
//
// HOIST_TEST_PLANS=10000 checks so many instead of a few hundred (scripts/nightly.sh); HOIST_TEST_FIRST_SEED others.
#include <array>
#include <cmath>
#include <cstdlib>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/zero/predict/prediction.hpp>
#include <hoist/zero/predict/step_graph.hpp>
#include <hoist/zero/predict/step_time.hpp>

namespace hoist::test::random_plan_test {
namespace {

constexpr std::uint64_t kPlansOfShortRun = 200;
constexpr double kRounding = 1 - 1e-9;  // of sums

std::uint64_t number_of(const char* variable, std::uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

struct RandomCase {
  Model model;
  RuntimeOptions runtime;
  EngineOptions engine;
  StepSpeeds speeds;
  ProgramMemory program;
  int world_size = 1;
};

bool chance(Rng& rng, double share) { return rng.uniform() < share; }
// From `least` to `most`, on a logarithmic scale.
double between(Rng& rng, double least, double most) { return least * std::pow(most / least, rng.uniform()); }
template <typename T, std::size_t N>
T one_of(Rng& rng, const std::array<T, N>& all) {
  return all[rng.below(N)];
}

// Layers of one size between two that differ, as a transformer's, or layers of any size; some are frozen or tied.
Model random_model(Rng& rng) {
  const std::uint64_t units = 1 + rng.below(24);
  const double layer = between(rng, 1e5, 1e9);
  const bool uniform = chance(rng, 0.5), frozen = chance(rng, 0.2), tied = chance(rng, 0.2);
  Model model;
  for (std::uint64_t u = 0; u < units; ++u) {
    const bool inner = u > 0 && u + 1 < units;
    const auto elements = static_cast<std::int64_t>(uniform && inner ? layer : layer * between(rng, 0.05, 4));
    model.add_unit(fmt::format("unit {}", u), {{.name = fmt::format("weights {}", u),
                                                .shape = {elements},
                                                .dtype = DType::bf16,
                                                .trainable = !frozen || chance(rng, 0.3)}});
  }
  if (tied && units > 1) model.tie(UnitId{static_cast<std::uint32_t>(units - 1)}, model.parameter("weights 0"));
  return model;
}

EngineOptions random_engine(Rng& rng, const Model& model) {
  constexpr std::array kPlacements{Placement::device, Placement::pinned, Placement::nvme};
  constexpr std::array kModes{UpdateMode::automatic, UpdateMode::step, UpdateMode::forward, UpdateMode::backward};
  EngineOptions engine{.parameters = one_of(rng, kPlacements), .optimizer = one_of(rng, kPlacements)};
  engine.stage = chance(rng, 0.8) ? 3 : static_cast<int>(rng.below(3));
  engine.update_mode = one_of(rng, kModes);
  engine.gradient_clipping = chance(rng, 0.5) ? 1 : 0;
  if (engine.uses_nvme() || chance(rng, 0.3)) engine.store_directory = "/nowhere";
  engine.durability =
      engine.store_directory.empty() || chance(rng, 0.2) ? tiers::Durability::none : tiers::Durability::step;
  engine.commit_every = chance(rng, 0.8) ? 1 : 1 + static_cast<unsigned>(rng.below(4));
  engine.micro_batches_max = chance(rng, 0.5) ? 1 : 1 + static_cast<unsigned>(rng.below(5));
  engine.micro_batch_order = chance(rng, 0.5) ? MicroBatchOrder::horizontal : MicroBatchOrder::vertical;
  const auto share = [&]() -> std::optional<double> {
    if (chance(rng, 0.3)) return std::nullopt;
    return static_cast<double>(rng.below(11)) / 10;
  };
  if (engine.optimizer == Placement::nvme) engine.optimizer_pinned_fraction = share();
  if (engine.parameters == Placement::nvme) engine.parameters_pinned_fraction = share();
  if (engine.optimizer != Placement::device && chance(rng, 0.2)) engine.optimizer_offload_ratio = rng.uniform();
  engine.sub_group_elements = static_cast<std::uint64_t>(between(rng, 1e5, 1e8));
  engine.update_buffer_count = 3 + static_cast<unsigned>(rng.below(30));
  engine.staging_buffer_count = 1 + static_cast<unsigned>(rng.below(8));
  const auto all = static_cast<double>(model.parameter_count());
  engine.prefetch_elements = static_cast<std::uint64_t>(all * between(rng, 0.01, 2));
  if (chance(rng, 0.5)) engine.live_elements_max = static_cast<std::uint64_t>(all * between(rng, 0.01, 2));
  if (chance(rng, 0.3)) engine.reuse_distance_elements = static_cast<std::uint64_t>(all * between(rng, 0.01, 2));
  engine.persistence_elements = chance(rng, 0.7) ? 0 : static_cast<std::uint64_t>(all * 0.05);
  return engine;
}

StepSpeeds random_speeds(Rng& rng, const Model& model) {
  StepSpeeds speeds{.nvme_read = between(rng, 1e8, 1e11),
                    .nvme_write = between(rng, 1e8, 1e11),
                    .host_to_device = between(rng, 1e9, 1e12),
                    .device_to_host = between(rng, 1e9, 1e12),
                    .wire = between(rng, 1e9, 1e12),
                    .host_memory = between(rng, 1e9, 1e12),
                    .device_memory = between(rng, 1e11, 1e13),
                    .compute_seconds = static_cast<double>(model.parameter_count()) * between(rng, 1e-11, 1e-7),
                    .forward_share = chance(rng, 0.5) ? 0.25 : 1.0 / 3};
  if (chance(rng, 0.3)) speeds.nvme_mixed = speeds.nvme_read + speeds.nvme_write;
  if (chance(rng, 0.7)) {
    speeds.nvme_latency = between(rng, 1e-5, 1e-2);
    speeds.copy_latency = between(rng, 1e-6, 1e-4);
    speeds.wire_latency = between(rng, 1e-6, 1e-3);
  }
  return speeds;
}

// Budgets from the least that the engine starts with to twice as much as it uses. Empty: no engine takes these options.
std::optional<RandomCase> random_case(std::uint64_t seed) {
  Rng rng(seed);
  RandomCase one{.model = random_model(rng), .runtime = {}, .engine = {}, .speeds = {}, .program = {}};
  one.engine = random_engine(rng, one.model);
  one.speeds = random_speeds(rng, one.model);
  one.world_size = chance(rng, 0.5) ? 1 : 1 + static_cast<int>(rng.below(8));
  one.runtime = {.device = chance(rng, 0.8) ? platform::DeviceKind::cuda : platform::DeviceKind::host,
                 .device_ordinal = 0,
                 .device_memory_bytes = 1ull << 50,
                 .pinned_memory_bytes = 1ull << 50,
                 .update_threads = 1};
  try {
    check(one.engine, one.runtime, one.world_size);
  } catch (const ConfigError&) {
    return std::nullopt;
  }
  const Prediction most = predict(one.runtime, one.engine, one.model, one.world_size);
  const auto budget = [&](const Prediction::Tier& tier) {
    const auto least = static_cast<double>(tier.least_bytes), all = static_cast<double>(tier.bytes);
    return tier.least_bytes +
           round_up(static_cast<std::uint64_t>((2 * all - least) * std::pow(rng.uniform(), 2)), kMiB);
  };
  one.runtime.device_memory_bytes = budget(most.device);
  one.runtime.pinned_memory_bytes = budget(most.pinned);
  return one;
}

// Between two instants at which all gradients are known, no step is shorter than the critical path; and so many steps
// are no shorter than their busiest resource, except that writes of the last one may still be to do.
void expect_no_step_beats_its_bound(const Prediction& plan, const StepSpeeds& speeds, const std::string& where) {
  constexpr unsigned kSteps = 5;
  const StepTime time = predict_time(plan, speeds);
  const detail::StepGraph graph = detail::step_graph(plan, speeds, kSteps);
  const auto times = scheduler::simulate(graph.tasks, kResourceCount);
  const auto decided = [&](unsigned step) { return times[graph.decided[step]].end; };
  for (unsigned step = 1; step < kSteps && plan.awaits_norm; ++step)
    EXPECT_GE(decided(step) - decided(step - 1), kRounding * time.critical_path_seconds) << where;
  EXPECT_GE(decided(kSteps - 1), kRounding * (kSteps - 1) * time.busy(Resource::compute)) << where;
}

TEST(RandomPlan, IsValidAndNotSlowerThanFetchingOnDemand) {
  const std::uint64_t plans = number_of("HOIST_TEST_PLANS", kPlansOfShortRun);
  std::uint64_t seed = number_of("HOIST_TEST_FIRST_SEED", 1), planned = 0, faster = 0, changed = 0;
  for (; planned < plans; ++seed) {
    const auto one = random_case(seed);
    if (!one) continue;
    const auto& [model, runtime, engine, speeds, program, world_size] = *one;
    const std::string where = fmt::format("HOIST_TEST_FIRST_SEED={} HOIST_TEST_PLANS=1", seed);
    const StepQuestion question{runtime, model, world_size, program, speeds};
    const PlannedStep plan = faster_of_ahead_and_on_demand(question, plan_step(question, engine));
    if (!plan.prediction.fits()) continue;
    ++planned;
    EXPECT_EQ(overrun_of_plan(plan.prediction, speeds), "") << where;
    expect_no_step_beats_its_bound(plan.prediction, speeds, where);
    EngineOptions without = engine;
    without.prefetch_elements = 0;
    const Prediction on_demand = predict(runtime, without, model, world_size, program);
    for (const auto link : {&StepBytes::nvme_read, &StepBytes::host_to_device, &StepBytes::wire})
      EXPECT_LE(plan.prediction.step.*link, on_demand.step.*link) << where;
    EXPECT_EQ(overrun_of_plan(on_demand, speeds), "") << where;
    const double seconds = plan.time.expected_seconds;
    const double seconds_on_demand = predict_time(on_demand, speeds).expected_seconds;
    EXPECT_LE(kRounding * seconds, seconds_on_demand) << where;
    faster += seconds < 0.999 * seconds_on_demand ? 1 : 0;
    changed += plan.engine.prefetch_elements != engine.prefetch_elements ? 1 : 0;
  }
  fmt::print("{} plans; {} are more than 0.1 % faster than on demand, {} fetch on demand because that is faster\n",
             planned, faster, changed);
  // Most random machines have one busiest link, with which nothing can be won; but a plan that wins nothing is none.
  EXPECT_GE(faster, planned / 5);
  EXPECT_LE(changed, planned / 100 + 3) << "fetching ahead should seldom be the slower way";
}

}  // namespace
}  // namespace hoist::test::random_plan_test
