// SPDX-License-Identifier: Apache-2.0
#include "random_program.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/rng.hpp>

namespace hoist::test {

bool UnitPlan::is_trainable() const {
  return std::ranges::any_of(parameters, [](const ParameterSpec& spec) { return spec.trainable; });
}

namespace {

bool one_in(Rng& rng, std::uint64_t n) { return rng.below(n) == 0; }

template <typename T, std::size_t N>
T one_of(Rng& rng, const std::array<T, N>& choices) {
  return choices[rng.below(N)];
}

std::vector<std::size_t> shuffled(std::size_t count, Rng& rng) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = count; i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
  return order;
}

// --- the mathematics -------------------------------------------------------------------------------------------------

GroupOptions random_group(Rng& rng) {
  using optim::OptimizerKind;
  constexpr std::array kKinds{OptimizerKind::adamw,   OptimizerKind::adamw, OptimizerKind::adam,
                              OptimizerKind::adagrad, OptimizerKind::lion,  OptimizerKind::sgd};
  GroupOptions group = optim::default_options(one_of(rng, kKinds));
  group.learning_rate = one_of(rng, std::array{1e-2, 2e-2, 3e-3, 0.0});
  if (one_in(rng, 2)) group.weight_decay = 0.1 * rng.uniform();
  group.bias_correction = !one_in(rng, 4);
  group.moments = one_of(rng, std::array{MomentType::fp32, MomentType::fp32, MomentType::bf16, MomentType::fp8});
  if (one_in(rng, 4)) group.remainder = RemainderType::int8;
  if (one_in(rng, 2)) group.rounding_seed = rng.bits();
  if (group.kind == OptimizerKind::sgd && !one_in(rng, 3)) {
    group.momentum = 0.9;
    group.nesterov = one_in(rng, 2);
    group.dampening = group.nesterov ? 0 : 0.25;
  }
  if (group.kind == OptimizerKind::adagrad) {
    group.learning_rate_decay = one_of(rng, std::array{0.0, 0.01});
    group.initial_accumulator = one_of(rng, std::array{0.0, 0.1});
  }
  return group;
}

LearningRateSchedule random_schedule(Rng& rng) {
  switch (rng.below(8)) {
    case 0:
      return WarmupRate{.steps = 4, .shape = WarmupShape::linear};
    case 1:
      return WarmupCosineRate{.total_steps = 12, .warmup_steps = 3};
    case 2:
      return OneCycleRate{
          .min_rate = 1e-3, .max_rate = 2e-2, .first_steps = 3, .decay_rate = 0.5, .decay_interval_steps = 2};
    default:
      return ConstantRate{};
  }
}

std::int64_t random_extent(Rng& rng) {
  switch (rng.below(10)) {
    case 0:
      return 1 + static_cast<std::int64_t>(rng.below(8));
    case 1:
    case 2:
      return 1 + static_cast<std::int64_t>(rng.below(40000));
    case 3:
      return static_cast<std::int64_t>(16384 * (1 + rng.below(2)) + rng.below(3)) - 1;  // about whole tiles
    default:
      return 1 + static_cast<std::int64_t>(rng.below(3000));
  }
}

// `short_type` is the 16-bit type that most models have one of.
ParameterSpec random_parameter(Rng& rng, std::string name, DType short_type, std::size_t group_count) {
  ParameterSpec spec{.name = std::move(name), .shape = {random_extent(rng)}, .dtype = short_type};
  if (one_in(rng, 3)) spec.shape = {1 + static_cast<std::int64_t>(rng.below(9)), 1 + spec.shape[0] / 8};
  if (one_in(rng, 20)) spec.shape = {};
  if (one_in(rng, 3)) spec.dtype = DType::fp32;
  if (one_in(rng, 12)) spec.dtype = one_in(rng, 2) ? DType::bf16 : DType::fp16;
  spec.group = {static_cast<std::uint32_t>(rng.below(group_count))};
  spec.counts_in_norm = spec.dtype == DType::fp16 || !one_in(rng, 10);  // else nobody sees it overflow
  return spec;
}

UnitPlan random_unit(Rng& rng, std::size_t index, DType short_type, std::size_t group_count) {
  UnitPlan unit{.stable_address = one_in(rng, 6)};
  const bool frozen = index > 0 && one_in(rng, 6);
  const std::size_t count = 1 + rng.below(4);
  for (std::size_t p = 0; p < count; ++p) {
    unit.parameters.push_back(random_parameter(rng, fmt::format("unit{}.p{}", index, p), short_type, group_count));
    unit.parameters.back().trainable = !frozen && (index == 0 || !one_in(rng, 8));
  }
  if (index > 0 && one_in(rng, 4)) unit.tied_to = rng.below(index);
  if (index > 0 && one_in(rng, 6)) unit.gathered_with = rng.below(index);
  return unit;
}

// --- what is done with it --------------------------------------------------------------------------------------------

// A program repeats itself most of the time, else nothing would ever be planned.
class ActionDraw {
 public:
  ActionDraw(const Program& program, Rng& rng) : program_(program), rng_(rng), count_(program.units.size()) {
    for (int i = 0; i < 2; ++i) orders_.push_back(shuffled(count_, rng));
  }

  std::vector<Action> actions(int count) {
    std::vector<Action> drawn;
    due_ = false;
    while (std::cmp_less(drawn.size(), count) || (due_ && program_.fits_backward_mode)) drawn.push_back(action());
    return drawn;
  }

 private:
  std::vector<std::size_t> order() {
    if (one_in(rng_, 8)) return shuffled(count_, rng_);
    return orders_[one_in(rng_, 4) ? 1 : 0];
  }

  Act act() {
    if (due_ && program_.fits_backward_mode) return Act::step;
    // Between a pass and step() the engine is already reading for the update; nothing may disturb that.
    if (due_ && one_in(rng_, 4)) return one_in(rng_, 3) ? Act::write : Act::read;
    const std::uint64_t draw = rng_.below(20);
    if (draw < 11) {
      if (!due_) return Act::train;
      return one_in(rng_, 6) ? Act::discard : Act::step;
    }
    if (draw < 13) return one_in(rng_, 4) ? Act::generate : Act::evaluate;
    const Act other =
        std::array{Act::read, Act::read, Act::write, Act::settle, Act::set_rate, Act::save, Act::restart}[draw - 13];
    if (other == Act::save && !program_.saves) return Act::restart;
    return other;
  }

  Action action() {
    Action action{.act = act(), .forward = order(), .backward = order()};
    action.micro_batches = 1 + static_cast<int>(rng_.below(static_cast<std::uint64_t>(program_.micro_batches_max)));
    action.salt = rng_.bits();
    if (one_in(rng_, 8)) action.forward.resize(1 + rng_.below(count_));
    const std::size_t visits = action.forward.size() + (program_.fits_backward_mode ? 0 : count_);
    if (one_in(rng_, 7)) action.fails_after = rng_.below(visits);
    action.nests = one_in(rng_, 4);
    action.keeps_lease = one_in(rng_, 4);
    action.poisoned = !program_.fits_backward_mode && one_in(rng_, 10);
    action.accumulates = one_in(rng_, 4);
    action.stream = one_in(rng_, 4) ? 1 : 0;
    if (action.act == Act::train) due_ = action.fails_after >= visits;
    if (action.act == Act::step || action.act == Act::discard || action.act == Act::restart || action.act == Act::save)
      due_ = false;
    return action;
  }

  const Program& program_;
  Rng& rng_;
  std::size_t count_;
  std::vector<std::vector<std::size_t>> orders_;
  bool due_ = false;  // gradients wait for step or discard
};

void draw_arithmetic(Program& program, Rng& rng, DType short_type) {
  program.fits_backward_mode = one_in(rng, 4);
  if (!program.fits_backward_mode) {
    program.gradient_clipping = one_of(rng, std::array{0.0, 0.5, 0.5, 1000.0});
    const bool scales = short_type == DType::fp16 ? !one_in(rng, 4) : one_in(rng, 8);
    if (scales && one_in(rng, 3)) program.loss_scale = {.scale = 128};
    if (scales && program.loss_scale.scale == 1)
      program.loss_scale = {.dynamic = true,
                            .scale = 0x1.0p20,
                            .window = 2,
                            .hysteresis = 1 + static_cast<std::uint32_t>(rng.below(2)),
                            .scale_min = 0x1.0p-30};
  }
  program.schedule = random_schedule(rng);
  if (one_in(rng, 3)) program.micro_batches_max = 2 + static_cast<int>(rng.below(2));
  if (one_in(rng, 2)) program.order = MicroBatchOrder::vertical;
  program.groups.push_back(random_group(rng));
  for (std::uint64_t more = rng.below(3); more > 0; --more) program.groups.push_back(random_group(rng));
}

}  // namespace

Program random_program(std::uint64_t seed) {
  Rng rng(seed);
  Program program;
  const DType short_type = one_of(rng, std::array{DType::bf16, DType::bf16, DType::fp16});
  draw_arithmetic(program, rng, short_type);
  const std::size_t units = 2 + rng.below(4);
  for (std::size_t u = 0; u < units; ++u)
    program.units.push_back(random_unit(rng, u, short_type, program.groups.size()));
  const auto sessions = one_of(rng, std::array<std::size_t, 8>{1, 1, 1, 1, 2, 2, 2, 3});
  program.saves = sessions > 1 || one_in(rng, 4);
  ActionDraw draw(program, rng);
  int ranks = 1 + static_cast<int>(rng.below(4));
  for (std::size_t s = 0; s < sessions; ++s) {
    if (s > 0 && one_in(rng, 2)) ranks = 1 + static_cast<int>(rng.below(4));
    Session session{.ranks = ranks, .actions = draw.actions(sessions == 1 ? 22 : 10)};
    // Where nothing was kept until then, the session goes on from the newest.
    if (s > 0 && one_in(rng, 3)) session.from = fmt::format("kept{}", rng.below(2));
    program.sessions.push_back(std::move(session));
  }
  return program;
}

// --- how it is carried out -------------------------------------------------------------------------------------------

namespace {

// The common part of the two: everything that the result depends on.
ToySetup setup_of(const Program& program) {
  ToySetup setup = toy_setup(Placement::device, Placement::device);
  setup.runtime.device_memory_bytes = 16 * kMiB;
  setup.runtime.pinned_memory_bytes = 128 * kMiB;
  setup.runtime.comm_scratch_bytes = 256 * kKiB;
  setup.engine.optimizer_defaults = program.groups.front();
  setup.engine.gradient_clipping = program.gradient_clipping;
  setup.engine.loss_scale = program.loss_scale;
  setup.engine.learning_rate_schedule = program.schedule;
  setup.engine.micro_batch_order = program.order;
  setup.engine.micro_batches_max = static_cast<unsigned>(program.micro_batches_max);
  setup.engine.keep_steps = program.saves ? 2 : 0;
  return setup;
}

bool has_states_of_8_bits(const Program& program) {
  return std::ranges::any_of(program.groups, [](const GroupOptions& group) {
    return group.moments == MomentType::fp8 || group.remainder == RemainderType::int8;
  });
}

void draw_placement(const Program& program, std::size_t session, Rng& rng, const std::string& directory,
                    ToySetup& setup) {
  const bool last = session + 1 == program.sessions.size();
  const int ranks = program.sessions[session].ranks;
  constexpr std::array kPlaces{Placement::device, Placement::pinned, Placement::nvme, Placement::nvme};
  EngineOptions& engine = setup.engine;
  engine.parameters = one_of(rng, kPlaces);
  engine.optimizer = one_of(rng, kPlaces);
  const bool nvme = engine.parameters == Placement::nvme || engine.optimizer == Placement::nvme;
  if (nvme || program.saves || one_in(rng, 3)) engine.store_directory = directory + "/first";
  if (nvme && !program.saves && last && one_in(rng, 4)) engine.durability = tiers::Durability::none;
  if (engine.durability == tiers::Durability::step && one_in(rng, 3))
    engine.commit_every = 2 + static_cast<unsigned>(rng.below(3));
  if (engine.parameters == Placement::device) engine.stage = static_cast<int>(rng.below(4));
  if (one_in(rng, 3)) engine.optimizer_offload_ratio = std::clamp(1.4 * rng.uniform() - 0.2, 0.0, 1.0);
  if (!one_in(rng, 3)) engine.optimizer_pinned_fraction = std::clamp(1.5 * rng.uniform() - 0.25, 0.0, 1.0);
  if (one_in(rng, 6)) engine.optimizer_pinned_fraction.reset();
  if (!one_in(rng, 3)) engine.parameters_pinned_fraction = std::clamp(1.5 * rng.uniform() - 0.25, 0.0, 1.0);
  if (one_in(rng, 6)) engine.parameters_pinned_fraction.reset();
  if (one_in(rng, 4)) engine.parameters_pinned_elements_max = rng.below(100'000);
  // State that only the device can read beside state on NVMe: everything that passes between the two needs memory that
  // nothing else uses meanwhile.
  const bool is_divided = !has_states_of_8_bits(program) && one_in(rng, 3);
  if (is_divided) {
    engine.parameters = Placement::device;
    engine.optimizer = Placement::nvme;
    engine.store_directory = directory + "/first";
    engine.optimizer_offload_ratio = 0.2 + 0.6 * rng.uniform();
  }
  const bool states_on_device = engine.optimizer == Placement::device || engine.optimizer_offload_ratio < 1;
  const bool may_be_device_only =
      !states_on_device || (engine.parameters == Placement::device && !has_states_of_8_bits(program));
  setup.runtime.host_device.host_accessible = !may_be_device_only || (!is_divided && one_in(rng, 2));
  if (engine.stage == 3 && ranks == 4 && !one_in(rng, 3)) engine.secondary_shard_ranks = 2;
  if (engine.stage == 3 && ranks < 4 && one_in(rng, 3)) engine.secondary_shard_ranks = ranks;  // none
}

void draw_update_mode(const Program& program, Rng& rng, EngineOptions& engine) {
  if (engine.optimizer == Placement::device) {
    if (one_in(rng, 2)) engine.update_mode = UpdateMode::step;
  } else if (program.fits_backward_mode && !one_in(rng, 3)) {
    engine.update_mode = UpdateMode::backward;
  } else {
    engine.update_mode = one_of(rng, std::array{UpdateMode::automatic, UpdateMode::forward, UpdateMode::step});
  }
}

void draw_spill(const Program& program, Rng& rng, EngineOptions& engine) {
  if (!engine.uses_nvme() || engine.update_mode == UpdateMode::backward || one_in(rng, 2)) return;
  engine.gradient_spill_units = 1 + static_cast<std::uint32_t>(rng.below(program.units.size()));
  if (one_in(rng, 3)) engine.gradient_spill_units.reset();
}

void draw_movement(const Program& program, Rng& rng, EngineOptions& engine) {
  engine.sub_group_elements = 1 + rng.below(60000);
  if (one_in(rng, 5)) engine.sub_group_elements = 1'000'000'000;
  engine.update_buffer_count = 3 + static_cast<unsigned>(rng.below(6));
  engine.staging_buffer_count = 1 + static_cast<unsigned>(rng.below(5));
  constexpr std::array<std::uint64_t, 3> kElements{0, 5000, 1'000'000};
  engine.prefetch_elements = one_of(rng, kElements);
  engine.live_elements_max = one_of(rng, kElements);
  engine.reuse_distance_elements = one_of(rng, kElements);
  engine.persistence_elements = one_of(rng, kElements);
  if (one_in(rng, 3)) engine.micro_batches_max += 1 + static_cast<unsigned>(rng.below(2));
  // With one micro-batch in every pass the two orders are the same sums.
  if (program.micro_batches_max == 1)
    engine.micro_batch_order = one_in(rng, 2) ? MicroBatchOrder::vertical : MicroBatchOrder::horizontal;
  if (!engine.store_directory.empty() && engine.durability == tiers::Durability::step && one_in(rng, 3))
    engine.keep_steps += 1 + static_cast<unsigned>(rng.below(2));
  engine.lock_timeout = std::chrono::seconds(60);  // another session's process may be slow to end
}

void draw_machine(Rng& rng, RuntimeOptions& runtime) {
  runtime.host_device.chaos_seed = one_in(rng, 2) ? 0 : rng.bits() | 1;
  runtime.aio_backend = one_in(rng, 3) ? aio::BackendKind::threads : aio::BackendKind::automatic;
  runtime.aio_block_bytes = one_of(rng, std::array<std::uint64_t, 4>{4096, 20480, 256 * kKiB, kMiB});
  runtime.aio_queue_depth = 1 + static_cast<unsigned>(rng.below(16));
  runtime.aio_threads = 1 + static_cast<unsigned>(rng.below(4));
  runtime.update_threads = 1 + static_cast<unsigned>(rng.below(3));
  runtime.huge_pages = one_in(rng, 2);
  runtime.comm_scratch_bytes = one_of(rng, std::array<std::uint64_t, 3>{64 * kKiB, 256 * kKiB, 4 * kMiB});
  runtime.host_device.link_bytes_per_second = one_in(rng, 6) ? 100'000'000 : 0;
}

// The only 16-bit type of what is trained, if there is one.
std::optional<DType> common_type(const Program& program) {
  std::optional<DType> type;
  for (const UnitPlan& unit : program.units) {
    for (const ParameterSpec& spec : unit.parameters) {
      if (!spec.trainable || spec.dtype == DType::fp32) continue;
      if (type && *type != spec.dtype) return std::nullopt;
      type = spec.dtype;
    }
  }
  return type;
}

}  // namespace

ToySetup plain_setup(const Program& program, const std::string& directory) {
  ToySetup setup = setup_of(program);
  setup.runtime.update_threads = 1;
  setup.engine.stage = 0;
  setup.engine.update_mode = UpdateMode::step;
  setup.engine.prefetch_elements = 0;
  if (program.saves) setup.engine.store_directory = directory + "/plain";
  return setup;
}

ToySetup random_setup(const Program& program, std::uint64_t seed, std::size_t session, const std::string& directory) {
  ToySetup setup = setup_of(program);
  Rng of_all(seed ^ 0xD21E5u), rng(random_bits(seed ^ 0x5EEDu, session));
  draw_placement(program, session, rng, directory, setup);
  draw_movement(program, rng, setup.engine);
  draw_update_mode(program, rng, setup.engine);
  draw_machine(rng, setup.runtime);
  // A store stays on the drives it was made on, and has the room for caller state that it was made with.
  setup.engine.caller_state_bytes_max = one_of(of_all, std::array<std::uint64_t, 3>{128, 4096, 64 * kKiB});
  const std::uint64_t further = one_in(of_all, 3) ? 1 + of_all.below(2) : 0;
  for (std::uint64_t d = 0; d < further && !setup.engine.store_directory.empty(); ++d)
    setup.engine.stripe_directories.push_back(fmt::format("{}/drive{}", directory, d));
  if (one_in(rng, 3)) setup.engine.weights_dtype = common_type(program);
  if (one_in(rng, 4)) setup.engine.metrics_path = directory + "/metrics.jsonl";
  if (one_in(rng, 4)) setup.runtime.trace_path = directory + "/trace.json";
  draw_spill(program, rng, setup.engine);
  return setup;
}

// --- in words --------------------------------------------------------------------------------------------------------

namespace {

std::string_view name_of(Placement placement) {
  return std::array{"device", "pinned", "nvme"}[static_cast<std::size_t>(placement)];
}

std::string describe(const Action& action) {
  constexpr std::array kActs{"train", "evaluate", "generate", "step", "discard", "read",
                             "write", "settle",   "set_rate", "save", "restart"};
  std::string text = kActs[static_cast<std::size_t>(action.act)];
  if (action.act > Act::generate) return text;
  text += fmt::format(" {}", fmt::join(action.forward, "-"));
  if (action.act == Act::train) text += fmt::format("/{} x{}", fmt::join(action.backward, "-"), action.micro_batches);
  if (action.fails_after < action.forward.size() + action.backward.size())
    text += fmt::format(", left after {}", action.fails_after);
  if (action.nests) text += ", nests";
  if (action.keeps_lease) text += ", keeps a lease";
  if (action.poisoned) text += ", poisoned";
  if (action.accumulates) text += ", accumulates";
  if (action.stream > 0) text += ", other stream";
  return text;
}

std::string describe(const UnitPlan& unit) {
  std::string text;
  for (const ParameterSpec& spec : unit.parameters)
    text += fmt::format("{}{}[{}]{} g{}", text.empty() ? "" : ", ", dtype_name(spec.dtype), fmt::join(spec.shape, ","),
                        spec.trainable ? "" : " frozen", spec.group.index);
  if (unit.stable_address) text += ", stable";
  if (unit.gathered_with) text += fmt::format(", gathered with {}", *unit.gathered_with);
  if (unit.tied_to) text += fmt::format(", tied to {}", *unit.tied_to);
  return text;
}

}  // namespace

std::string describe(const Program& program) {
  std::string text =
      fmt::format("clipping {}, loss scale {}{}, {} {} micro-batches, schedule {}{}\n", program.gradient_clipping,
                  program.loss_scale.scale, program.loss_scale.dynamic ? " dynamic" : "", program.micro_batches_max,
                  program.order == MicroBatchOrder::vertical ? "vertical" : "horizontal", program.schedule.index(),
                  program.fits_backward_mode ? ", fits update mode backward" : "");
  for (const GroupOptions& group : program.groups)
    text += fmt::format("group: {} lr {} decay {} moments {}{} seed {:x}\n", optim::optimizer_name(group.kind),
                        group.learning_rate, group.weight_decay, moment_type_name(group.moments),
                        group.remainder == RemainderType::int8 ? " remainder int8" : "", group.rounding_seed);
  for (std::size_t u = 0; u < program.units.size(); ++u)
    text += fmt::format("unit {}: {}\n", u, describe(program.units[u]));
  for (const Session& session : program.sessions) {
    text += fmt::format("session of {} ranks{}:", session.ranks, session.from.empty() ? "" : ", from " + session.from);
    for (const Action& action : session.actions) text += fmt::format(" [{}]", describe(action));
    text += '\n';
  }
  return text;
}

std::string describe(const ToySetup& setup) {
  const EngineOptions& e = setup.engine;
  const RuntimeOptions& r = setup.runtime;
  constexpr std::array kModes{"auto", "step", "forward", "backward"};
  const auto share = [](std::optional<double> fraction) {
    return fraction ? fmt::format("{:.3f}", *fraction) : "auto";
  };
  return fmt::format(
      "parameters {}, optimizer {}, stage {}, update {}, {}, durability {} every {}, keeps {}, ratio {:.3f}, pinned "
      "fraction {}, of weights {} and {} elements, gradients of {} units spilled, groups of {}, sub-group {}, buffers "
      "{} + {}, prefetch {}, live {}, "
      "reuse {}, persistence {}, up to "
      "{} micro-batches {}, caller state {}; device {} bytes{}, pinned {} bytes{}, {} further drives, backend {}, "
      "blocks "
      "{}, depth {}, {} io threads, {} update threads, scratch {}, chaos {:x}, link {}{}{}{}",
      name_of(e.parameters), name_of(e.optimizer), e.stage, kModes[static_cast<std::size_t>(e.update_mode)],
      e.store_directory.empty() ? "no store" : "a store", e.durability == tiers::Durability::none ? "none" : "step",
      e.commit_every, e.keep_steps, e.optimizer_offload_ratio, share(e.optimizer_pinned_fraction),
      share(e.parameters_pinned_fraction), e.parameters_pinned_elements_max,
      e.gradient_spill_units ? fmt::to_string(*e.gradient_spill_units) : "auto", e.secondary_shard_ranks,
      e.sub_group_elements, e.update_buffer_count, e.staging_buffer_count, e.prefetch_elements, e.live_elements_max,
      e.reuse_distance_elements, e.persistence_elements, e.micro_batches_max,
      e.micro_batch_order == MicroBatchOrder::vertical ? "vertical" : "horizontal", e.caller_state_bytes_max,
      r.device_memory_bytes, r.host_device.host_accessible ? "" : " device-only", r.pinned_memory_bytes,
      r.huge_pages ? ", huge pages" : "", e.stripe_directories.size(),
      r.aio_backend == aio::BackendKind::threads ? "threads" : "automatic", r.aio_block_bytes, r.aio_queue_depth,
      r.aio_threads, r.update_threads, r.comm_scratch_bytes, r.host_device.chaos_seed,
      r.host_device.link_bytes_per_second, e.metrics_path.empty() ? "" : ", metrics",
      r.trace_path.empty() ? "" : ", trace", e.weights_dtype ? ", weights declared" : "");
}

}  // namespace hoist::test
