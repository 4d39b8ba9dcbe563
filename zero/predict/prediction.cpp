// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/scheduler/plan.hpp>
#include <hoist/tiers/device_arena.hpp>
#include <hoist/zero/checkpoint/commit_state.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>
#include <hoist/zero/layout/record_map.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/memory/pinned_needs.hpp>
#include <hoist/zero/predict/prediction.hpp>
#include <hoist/zero/predict/step_bytes.hpp>

namespace hoist {

namespace {

detail::UnitTable table_of(const EngineOptions& engine, const Model& model, int world_size) {
  if (world_size < 1) throw UsageError(fmt::format("{} ranks cannot train anything", world_size));
  if (model.units().empty()) throw UsageError("the model has no units");
  return detail::UnitTable(model, detail::state_forms(engine, model), world_size, detail::gradient_sums(engine));
}

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

std::vector<std::uint32_t> fetches_of(const EngineOptions& engine, const detail::UnitTable& table,
                                      const detail::DeviceNeeds& needs, std::uint64_t gather_slots) {
  const scheduler::FetchPlannerOptions options = detail::fetch_planner_options(engine, table, needs, gather_slots);
  const scheduler::Plan plan =
      scheduler::plan(plain_pass(table), {.items = options.items,
                                          .slot_count = options.slot_count,
                                          .prefetch_elements = options.prefetch_elements,
                                          .live_elements_max = options.live_elements_max,
                                          .reuse_distance_elements = options.reuse_distance_elements});
  std::vector<std::uint32_t> fetches(table.units().size(), 0);
  for (const scheduler::Fetch& fetch : plan.fetches) ++fetches[fetch.item];
  return fetches;
}

void predict_device(const RuntimeOptions& runtime, const ProgramMemory& program, int world_size,
                    const detail::DeviceNeeds& needs, Prediction& out) {
  const auto rounded = [](std::uint64_t bytes) { return round_up(bytes, tiers::DeviceArena::kAlignment); };
  const std::uint64_t others =
      rounded(program.device_bytes) + (world_size > 1 ? rounded(runtime.comm_scratch_bytes) : 0);
  out.device.budget_bytes = round_down(runtime.device_memory_bytes, kBlockAlignment);
  out.device.least_bytes = others + needs.least_bytes();
  if (!out.device.fits() && out.device.budget_bytes > others)
    out.fitting_offload_ratio = needs.offload_ratio_within(out.device.budget_bytes - others);
  const detail::DeviceNeeds::Buffers buffers =
      needs.choose(std::max(out.device.budget_bytes, out.device.least_bytes) - others);
  out.device.bytes = others + needs.bytes(buffers);
  out.gather_slots = buffers.gather_slots;
  out.gradient_buffers = buffers.gradients;
}

std::uint64_t pinned_bytes_beside(const RuntimeOptions& runtime, std::uint64_t other_bytes) {
  const std::uint64_t budget = runtime.pinned_memory_bytes;
  return budget > other_bytes ? budget - other_bytes : 0;
}

// `other_bytes`: of the same budget, the store's tables and what the program takes.
void predict_pinned(const RuntimeOptions& runtime, const detail::PinnedNeeds& needs, std::uint64_t other_bytes,
                    Prediction& out) {
  out.pinned.budget_bytes = runtime.pinned_memory_bytes;
  out.pinned.least_bytes = other_bytes + needs.bytes(needs.choose(0));
  const detail::PinnedNeeds::Buffers buffers = needs.choose(pinned_bytes_beside(runtime, other_bytes));
  out.pinned.bytes = other_bytes + needs.bytes(buffers);
  out.staging_buffers = buffers.staging_count;
  out.update_buffers = buffers.update_count;
  out.update_buffer_parameters = buffers.piece_tiles * tiers::kTileElements;
  out.gradient_ring_bytes = buffers.gradient_ring_bytes;
  out.trailing_bytes = buffers.update_count * needs.update_buffer_bytes(buffers.piece_tiles);
}

tiers::Store::Cost store_cost(const EngineOptions& engine, const detail::UnitTable& table) {
  if (engine.store_directory.empty()) return {};
  const detail::RecordMap records(table);
  return tiers::Store::cost(detail::store_options(engine, table, records, /*rank=*/0));
}

// Gradient, weights and state are read, the last two written; weights of fp16 are made of their masters.
std::uint64_t update_bytes(const detail::Unit& unit) {
  std::uint64_t bytes = 0;
  for (const detail::Segment& segment : unit.segments) {
    if (!segment.trainable) continue;
    bytes += segment.shard_elements * dtype_bytes(segment.home_gradient_dtype);
    bytes += (segment.update_makes_weights() ? 1 : 2) * segment.shard_bytes();
    bytes += 2 * segment.record().state_bytes(segment.shard_elements);
  }
  return bytes;
}

}  // namespace

Prediction predict(const RuntimeOptions& runtime, const EngineOptions& options, const Model& model, int world_size,
                   const ProgramMemory& program) {
  const detail::UnitTable table = table_of(options, model, world_size);
  const bool apart = detail::homes_are_apart(runtime, options);
  const tiers::Store::Cost store = store_cost(options, table);
  const std::uint64_t other_pinned_bytes = store.memory_bytes + program.pinned_bytes;
  EngineOptions engine = options;
  if (!engine.optimizer_pinned_fraction) {
    engine.optimizer_pinned_fraction =
        detail::largest_pinned_fraction(engine, table, apart, pinned_bytes_beside(runtime, other_pinned_bytes));
  }

  Prediction out;
  out.parameter_count = model.parameter_count();
  const detail::DeviceNeeds device(engine, table, apart);
  predict_device(runtime, program, world_size, device, out);
  out.nvme_bytes = store.disk_bytes;
  out.pinned_fraction = *engine.optimizer_pinned_fraction;
  const detail::PinnedNeeds pinned(engine, table, apart);
  predict_pinned(runtime, pinned, other_pinned_bytes, out);
  out.device_state_bytes = pinned.device_states().bytes();
  out.device_state_share = pinned.device_states().share();
  out.phases = detail::step_phases(engine, table, fetches_of(engine, table, device, out.gather_slots), apart);
  out.step = out.phases.sum();
  if (detail::update_mode(engine) == UpdateMode::forward)
    out.read_ahead_bytes = std::min(out.trailing_bytes, out.phases.update.nvme_read);
  // State at home is written from there.
  if (engine.optimizer != Placement::nvme) out.trailing_bytes = out.step.nvme_write;
  out.passes = detail::passes_of_a_step(engine);
  out.update_mode = detail::update_mode(engine);
  for (std::uint32_t u = 0; u < table.units().size(); ++u)
    (pinned.apart(UnitId{u}) ? out.device_update_bytes : out.update_memory_bytes) += update_bytes(table.units()[u]);
  return out;
}

double largest_pinned_fraction(const RuntimeOptions& runtime, const EngineOptions& engine, const Model& model,
                               int world_size, const ProgramMemory& program) {
  const detail::UnitTable table = table_of(engine, model, world_size);
  const std::uint64_t available =
      pinned_bytes_beside(runtime, store_cost(engine, table).memory_bytes + program.pinned_bytes);
  const double most =
      detail::largest_pinned_fraction(engine, table, detail::homes_are_apart(runtime, engine), available);
  return std::max(most, engine.optimizer_pinned_fraction.value_or(0));
}

}  // namespace hoist
