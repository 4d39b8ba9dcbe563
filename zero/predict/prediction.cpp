// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/scheduler/plan.hpp>
#include <hoist/tiers/device_arena.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>
#include <hoist/zero/layout/record_map.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/machine.hpp>
#include <hoist/zero/memory/memory_plan.hpp>
#include <hoist/zero/predict/prediction.hpp>
#include <hoist/zero/predict/step_bytes.hpp>

namespace hoist {

namespace {

detail::UnitTable table_of(const EngineOptions& engine, const Model& model, int world_size) {
  if (world_size < 1) throw UsageError(fmt::format("world_size is {}: it must be at least 1", world_size));
  if (model.units().empty()) throw UsageError("the model has no units");
  return detail::UnitTable(model, detail::state_forms(engine, model), world_size, detail::gradient_sums(engine));
}

constexpr std::uint32_t kNotUsed = ~std::uint32_t{0};

// Every unit once forward, once backward.
scheduler::AccessTrace plain_pass(const detail::UnitTable& table) {
  using scheduler::AccessKind;
  scheduler::AccessTrace trace;
  const auto units = static_cast<std::uint32_t>(table.units().size());
  const auto gather = [&](std::uint32_t u, AccessKind kind) {
    for (const UnitId owner : table.units()[u].tied) trace.push_back({kind, owner.index});
    trace.push_back({kind, u});
  };
  for (std::uint32_t u = 0; u < units; ++u) {
    gather(u, AccessKind::gather);
    gather(u, AccessKind::release);
  }
  for (std::uint32_t u = units; u-- > 0;) {
    gather(u, AccessKind::gather);
    gather(u, AccessKind::release);
    if (table.units()[u].is_trainable()) trace.push_back({AccessKind::finish, u});
  }
  return trace;
}

// The fetches that the engine's planner makes for plain_pass().
std::vector<PlannedFetch> fetches_of(const EngineOptions& engine, const detail::MemoryPlan& memory) {
  using scheduler::AccessKind;
  const scheduler::PlanInputs inputs =
      detail::plan_inputs(engine, memory.units(), memory.device_buffers().gather_bytes);
  const scheduler::Plan plan = scheduler::plan(plain_pass(memory.units().table()), inputs);
  std::vector<PlannedFetch> fetches;
  std::vector<std::optional<std::size_t>> latest(inputs.items.size());  // of each unit
  std::uint32_t slot = 0;
  bool gathering = false;  // the accesses of a slot's gather, until its releases
  const auto issue = [&](std::size_t point) {
    for (const scheduler::Fetch& fetch : plan.fetches_at(point)) {
      latest[fetch.item] = fetches.size();
      fetches.push_back({fetch.item, slot, kNotUsed, 0, fetch.place.bytes});
    }
  };
  issue(0);
  for (std::size_t i = 0; i < plan.trace.size(); ++i) {
    const scheduler::Access access = plan.trace[i];
    if (access.kind == AccessKind::gather) gathering = true;
    if (access.kind == AccessKind::release && gathering) {
      gathering = false;
      ++slot;
    }
    issue(i + 1);
    if (access.kind != AccessKind::gather || !latest[access.item]) continue;
    PlannedFetch& used = fetches[*latest[access.item]];
    used.first_use = std::min(used.first_use, slot);
    used.last_use = slot;
  }
  return fetches;
}

std::vector<std::uint32_t> counts_of(const std::vector<PlannedFetch>& fetches, std::size_t units) {
  std::vector<std::uint32_t> counts(units, 0);
  for (const PlannedFetch& fetch : fetches) ++counts[fetch.unit];
  return counts;
}

// The program's own blocks and what the communicator takes.
std::uint64_t other_device_bytes(const RuntimeOptions& runtime, const ProgramMemory& program, int world_size) {
  const auto rounded = [](std::uint64_t bytes) { return round_up(bytes, tiers::DeviceArena::kAlignment); };
  return rounded(program.device_bytes) + (world_size > 1 ? rounded(runtime.comm_scratch_bytes) : 0);
}

detail::MachineFacts facts_of(const RuntimeOptions& runtime, std::uint64_t other_device, std::uint64_t other_pinned) {
  detail::MachineFacts facts{
      .device_access = detail::device_access(runtime),
      .free_device_bytes = left_of(round_down(runtime.device_memory_bytes, kBlockAlignment), other_device),
      .free_pinned_bytes = left_of(runtime.pinned_memory_bytes, other_pinned)};
  if (runtime.host_memory_bytes != 0)
    facts.free_host_bytes = left_of(runtime.host_memory_bytes, other_device + other_pinned);
  return facts;
}

void describe_memory(const EngineOptions& engine, const detail::MemoryPlan& plan, Prediction& out) {
  const detail::PinnedBuffers& pinned = plan.pinned_buffers();
  out.gather_bytes = plan.device_buffers().gather_bytes;
  out.gradient_buffers = plan.device_buffers().gradient_count;
  out.staging_buffers = pinned.staging_count;
  out.update_buffers = pinned.update_count;
  out.update_buffer_parameters = pinned.sub_group_tiles * tiers::kTileElements;
  out.gradient_ring_bytes = pinned.gradient_ring_bytes;
  out.gradient_buffer_bytes = plan.buffer_bytes(detail::MemoryRole::gradient_buffer);
  out.staging_buffer_bytes = plan.buffer_bytes(detail::MemoryRole::staging_buffer);
  out.update_buffer_bytes = plan.buffer_bytes(detail::MemoryRole::update_buffer);
  out.device_state_bytes = plan.units().device_state_bytes();
  out.device_state_share = plan.units().device_state_share();
  for (std::uint32_t u = 0; u < plan.units().table().units().size(); ++u)
    if (plan.units().unit(UnitId{u}).gradient_spilled) ++out.spilled_units;
  if (engine.parameters == Placement::nvme) out.pinned_weight_share = plan.units().pinned_weight_share();
}

// Gradient, weights and state are read, the last two written; weights of fp16 are made of their masters.
std::uint64_t update_bytes(const detail::Unit& unit) {
  std::uint64_t bytes = 0;
  for (const detail::Segment& segment : unit.trainable_segments()) {
    bytes += segment.shard_elements * dtype_bytes(segment.gradient_shard_dtype);
    bytes += (segment.update_makes_weights() ? 1 : 2) * segment.shard_bytes();
    bytes += 2 * segment.record().state_bytes(segment.shard_elements);
  }
  return bytes;
}

UnitWork work_of(const detail::Unit& unit, bool device_only, const UnitStep& bytes) {
  UnitWork work{.bytes = bytes, .parameters = unit.elements, .trainable = unit.is_trainable()};
  (device_only ? work.device_update_bytes : work.update_memory_bytes) = update_bytes(unit);
  for (const detail::Segment& segment : unit.trainable_segments())
    if (!device_only) work.shard_elements += segment.shard_elements;
  return work;
}

// What a prediction begins with.
struct Setting {
  RuntimeOptions runtime;
  detail::UnitTable table;
  detail::StoreCost store;
  std::uint64_t other_device = 0, other_pinned = 0;  // bytes that are not the engine's
  detail::MachineFacts facts;
};

Setting setting_of(const RuntimeOptions& given, const EngineOptions& engine, const Model& model, int world_size,
                   const ProgramMemory& program) {
  Setting setting{.runtime = choose_for_this_machine(given).runtime, .table = table_of(engine, model, world_size)};
  setting.store = detail::store_cost(engine, setting.table, detail::RecordMap(setting.table), /*rank=*/0);
  setting.other_device = other_device_bytes(setting.runtime, program, world_size);
  setting.other_pinned = setting.store.memory_bytes + program.pinned_bytes;
  setting.facts = facts_of(setting.runtime, setting.other_device, setting.other_pinned);
  return setting;
}

// `least`: the plan for the smallest budget.
void describe_tiers(const Setting& setting, const EngineOptions& engine, const detail::MemoryPlan& least,
                    const detail::MemoryPlan& plan, Prediction& out) {
  using detail::MemoryTier;
  const RuntimeOptions& runtime = setting.runtime;
  out.device.budget_bytes = round_down(runtime.device_memory_bytes, kBlockAlignment);
  out.device.least_bytes = setting.other_device + least.bytes(MemoryTier::device);
  out.device.bytes = setting.other_device + plan.bytes(MemoryTier::device);
  out.pinned.budget_bytes = runtime.pinned_memory_bytes;
  out.pinned.least_bytes = setting.other_pinned + least.bytes(MemoryTier::pinned);
  out.pinned.bytes = setting.other_pinned + plan.bytes(MemoryTier::pinned);
  out.host_budget_bytes = runtime.host_memory_bytes;
  if (!out.device.fits() && out.device.budget_bytes > setting.other_device)
    out.fitting_offload_ratio = detail::fitting_offload_ratio(engine, setting.table, setting.facts.device_access,
                                                              setting.facts.free_device_bytes);
  out.scratch_bytes = plan.units().scratch_bytes();
  out.nvme_bytes = setting.store.disk_bytes + out.scratch_bytes;
  out.mirror_bytes = setting.store.mirror_disk_bytes;
}

void describe_step(const EngineOptions& engine, const detail::MemoryPlan& plan, Prediction& out) {
  const std::vector<detail::Unit>& units = plan.units().table().units();
  out.fetches = fetches_of(engine, plan);
  const auto steps = detail::unit_steps(engine, plan.units(), counts_of(out.fetches, units.size()));
  out.step = detail::sum_of(steps);
  out.passes = detail::passes_of_a_step(engine);
  out.updates_under_forward = detail::updates_under_forward(engine);
  out.updates_under_backward = detail::hands_gradients_on(engine);
  if (engine.commits_steps()) out.commits = 1.0 / engine.commit_every;
  out.awaits_norm = engine.gradient_clipping > 0 || engine.weights_dtype == DType::fp16;
  out.updates_on_request = detail::update_order(engine) == detail::UpdateOrder::on_request;
  for (std::uint32_t u = 0; u < units.size(); ++u) {
    out.units.push_back(work_of(units[u], plan.units().unit(UnitId{u}).device_only, steps[u]));
    out.update_memory_bytes += out.units.back().update_memory_bytes;
    out.device_update_bytes += out.units.back().device_update_bytes;
  }
}

}  // namespace

Prediction predict(const RuntimeOptions& given, const EngineOptions& options, const Model& model, int world_size,
                   const ProgramMemory& program) {
  if (options.commit_every < 1) throw UsageError("EngineOptions::commit_every is 0: it must be at least 1");
  const Setting setting = setting_of(given, options, model, world_size, program);
  const detail::UnitTable& table = setting.table;
  const detail::MachineFacts& facts = setting.facts;
  EngineOptions engine = options;
  detail::choose_pinned_shares(engine, table, facts.device_access, detail::free_for_pinned(engine, table, facts));
  EngineOptions smallest = options;  // shares that the engine chooses are those for the smallest budget
  detail::choose_pinned_shares(smallest, table, facts.device_access, 0);
  const detail::MemoryPlan least(smallest, table, {facts.device_access, 0, 0});
  const detail::MemoryPlan plan(engine, table, facts);
  Prediction out;
  out.program = program;
  out.parameter_count = model.parameter_count();
  out.pinned_fraction = *engine.optimizer_pinned_fraction;
  out.parameters_pinned_fraction = *engine.parameters_pinned_fraction;
  describe_tiers(setting, engine, least, plan, out);
  describe_memory(engine, plan, out);
  describe_step(engine, plan, out);
  return out;
}

double largest_pinned_fraction(const RuntimeOptions& given, EngineOptions engine, const Model& model, int world_size,
                               const ProgramMemory& program, std::optional<double> EngineOptions::*share) {
  const Setting setting = setting_of(given, engine, model, world_size, program);
  const std::uint64_t free_bytes = detail::free_for_pinned(engine, setting.table, setting.facts);
  const std::optional<double> asked = std::exchange(engine.*share, 0);
  detail::choose_pinned_shares(engine, setting.table, setting.facts.device_access, free_bytes);
  engine.*share = asked;
  const double most =
      detail::largest_pinned_share(engine, share, setting.table, setting.facts.device_access, free_bytes);
  return std::max(most, asked.value_or(0));
}

}  // namespace hoist
