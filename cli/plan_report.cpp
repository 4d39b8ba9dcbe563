// SPDX-License-Identifier: Apache-2.0
#include "plan_report.hpp"

#include <algorithm>
#include <tuple>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/units.hpp>

#include "check_report.hpp"
#include "output.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;
using Rows = std::vector<std::vector<std::string>>;

constexpr double kSecondsADay = 86400;

constexpr const char* kLegend =
    "  busiest: what is in use for most of the step; gap: the time of a step, divided by the least\n"
    "  compute: the model's kernels; wire: between ranks; host_memory, device_memory: the update's reads and writes\n";

// The places of parameters and optimizer states: "pinned / nvme (20 % device)".
std::string placement_of(const PlanRow& row) {
  const bool divided = row.engine.optimizer != Placement::device && row.prediction.device_state_bytes > 0;
  const std::string rest =
      divided ? fmt::format(" ({:.0f} % device)", 100 * row.prediction.device_state_share) : std::string();
  return fmt::format("{} / {}{}", placement_id(row.engine.parameters), placement_id(row.engine.optimizer), rest);
}

// The bytes that a tier will hold, or by how much it is too small.
std::string tier_text(const Prediction::Tier& tier) {
  if (tier.fits()) return format_bytes(tier.bytes);
  return fmt::format("{} too little", format_bytes(tier.least_bytes - tier.budget_bytes));
}

std::string drive_text(const PlanRow& row) {
  if (row.fits_drives()) return format_bytes(row.prediction.nvme_bytes);
  return fmt::format("{} too little", format_bytes(row.prediction.nvme_bytes - row.drive_bytes));
}

std::uint64_t shortfall(const Prediction::Tier& tier) { return left_of(tier.least_bytes, tier.budget_bytes); }

// The bytes that the least of both tiers lacks in the memory that contains both.
std::uint64_t host_shortfall(const Prediction& p) {
  return p.host_budget_bytes == 0 ? 0 : left_of(p.device.least_bytes + p.pinned.least_bytes, p.host_budget_bytes);
}

// If neither tier says how much it lacks, it is the memory of both.
std::string problem_of(const PlanRow& row) {
  if (!row.refusal.empty()) return "refused";
  if (row.fits()) return "";
  const Prediction& p = row.prediction;
  if (p.device.fits() && p.pinned.fits() && host_shortfall(p) > 0)
    return fmt::format("does not fit: {} too little together", format_bytes(host_shortfall(p)));
  return row.fits_budgets() ? "exceeds the machine" : "does not fit";
}

std::string verdict(const PlanRow& row) { return problem_of(row) + (row.configured ? " (configured)" : ""); }

// Each reason once, with its rows.
std::string refusals_text(const PlanReport& report) {
  std::string text;
  std::vector<std::string> reasons;
  for (const PlanRow& row : report.rows) {
    if (!row.refusal.empty() && std::ranges::find(reasons, row.refusal) == reasons.end())
      reasons.push_back(row.refusal);
  }
  for (const std::string& reason : reasons) {
    std::vector<std::string> places;
    for (const PlanRow& row : report.rows)
      if (row.refusal == reason) places.push_back(placement_of(row));
    text += fmt::format("\nrefused, {}: {}\n", fmt::join(places, ", "), reason);
  }
  return text;
}

std::string seconds_text(double seconds) { return fmt::format("{:.3g} s", seconds); }

// The bytes that this machine's memories lack, whatever the budgets.
std::uint64_t memory_shortfall(const PlanRow& row) {
  const std::size_t drives = row.prediction.nvme_bytes > 0 ? 1 : 0;  // the last one
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i + drives < row.fit.memories.size(); ++i)
    bytes += left_of(row.fit.memories[i].least_bytes, row.fit.memories[i].free_bytes);
  return bytes;
}

// The problems of the closest placement: no other one is to be advised, as hoist check would.
std::string problems_text(const PlanRow& row) {
  std::string text;
  for (const MachineFit::Memory& memory : row.fit.memories)
    if (!memory.fits())
      text += fmt::format("  {}: {} needed, {} free\n", memory.name, format_bytes(memory.least_bytes),
                          format_bytes(memory.free_bytes));
  if (text.empty())
    for (const std::string& problem : row.fit.problems) text += fmt::format("  {}\n", problem);
  return text;
}

// The placement that lacks least, and what it needs: budgets that the machine can give, or what else is in the way.
std::string nothing_fits_text(const PlanReport& report) {
  const auto lacks = [](const PlanRow& row) {
    const Prediction& p = row.prediction;
    return std::tuple(memory_shortfall(row), std::max(shortfall(p.device) + shortfall(p.pinned), host_shortfall(p)),
                      left_of(p.nvme_bytes, row.drive_bytes));
  };
  const PlanRow* closest = nullptr;
  for (const PlanRow& row : report.rows)
    if (row.refusal.empty() && (closest == nullptr || lacks(row) < lacks(*closest))) closest = &row;
  if (closest == nullptr) return "\nnothing fits: every placement is refused\n";
  const std::string head = fmt::format("\nnothing fits: {} is closest", placement_of(*closest));
  const std::string problems = problems_text(*closest);
  if (memory_shortfall(*closest) > 0) return head + "\n" + problems + "  take more ranks or a larger machine\n";
  std::vector<std::string> needs;
  const auto need = [&](const Prediction::Tier& tier, const char* option) {
    if (!tier.fits()) needs.push_back(fmt::format("{} {}MiB", option, divide_up(tier.least_bytes, kMiB)));
  };
  need(closest->prediction.device, "--device-memory");
  need(closest->prediction.pinned, "--pinned-memory");
  if (!closest->fits_drives())
    needs.push_back(fmt::format("{} of drives for a rank", format_bytes(closest->prediction.nvme_bytes)));
  if (needs.empty()) return head + "\n" + problems;
  return head + fmt::format(", with {} at least; or take more ranks\n", fmt::join(needs, " and ")) + problems;
}

// "nvme 1.2 s, host_memory 0.1 s"; waits of less than 1 % of a step are left out.
std::string waits_text(const StepTime& time) {
  std::vector<std::string> waits;
  for (std::size_t r = 0; r < kResourceCount; ++r)
    if (time.wait_seconds[r] >= 0.01 * time.expected_seconds)
      waits.push_back(
          fmt::format("{} {}", resource_name(static_cast<Resource>(r)), seconds_text(time.wait_seconds[r])));
  return waits.empty() ? "none" : fmt::format("{}", fmt::join(waits, ", "));
}

// Says where GPU and processors share a memory, or reach each other's.
std::string shared_memory_text(const MachineSpec& machine) {
  if (machine.gpus_per_node == 0 || machine.device.memory == platform::GpuMemory::separate) return {};
  if (machine.device.memory == platform::GpuMemory::integrated)
    return "memory: GPU and processors share one; hoist.device_memory and hoist.pinned_memory are parts of it\n";
  return fmt::format(
      "memory: GPU and processors reach each other's, at {:g} GB/s up and {:g} GB/s down; pinned memory is the "
      "processors' alone\n",
      machine.device.host_to_device_gb_per_s, machine.device.device_to_host_gb_per_s);
}

std::string machine_text(const PlanReport& report) {
  const MachineSpec& machine = report.machine;
  std::string text = fmt::format("machine: {} ({})\n", machine.name, machine.basis) + shared_memory_text(machine);
  if (!machine.assumed.empty()) text += fmt::format("assumed: {}\n", fmt::join(machine.assumed, ", "));
  const std::string memory =
      report.has_program_bytes
          ? "the units file says what the program takes of the device"
          : fmt::format("{} of activations, with a checkpoint at every unit (docs/scale.md has the formula)",
                        format_bytes(report.rows.front().program.device_bytes));
  return text + fmt::format("a rank computes {:.0f} tokens a step; {}\n", report.tokens, memory);
}

std::string drives_text(const PlanReport& report, const PlanRow& best) {
  if (best.prediction.step.nvme_write == 0) return "";
  std::string text =
      fmt::format("  {:.3g} TB are written to the drives of a rank in a day", PlanReport::written_a_day(best) / 1e12);
  if (const auto days = report.drive_life_days(best)) text += fmt::format(": they last {:.3g} days", *days);
  return text + "\n";
}

std::string cost_text(const PlanReport& report, const PlanRow& best) {
  const double seconds = best.time.expected_seconds;
  std::string text =
      fmt::format("  a step takes {:.3g} kJ of energy", joules(report.machine, report.layout, seconds) / 1e3);
  const StepCost costs = cost(report.machine, report.layout, seconds);
  const std::string& currency = report.machine.rates.currency;
  if (costs.energy > 0) text += fmt::format(", which costs {:.3g} {}", costs.energy, currency);
  if (costs.rent > 0) text += fmt::format("; the machine costs {:.3g} {} a step", costs.rent, currency);
  return text + "\n";
}

std::string what_ifs_text(const PlanReport& report, const PlanRow& best) {
  std::string text;
  for (const WhatIf& one : report.what_ifs) {
    const double saved = 1 - one.seconds / best.time.expected_seconds;
    text += fmt::format("  {}: {} a step", one.name, seconds_text(one.seconds));
    text += saved < 0.001 ? ", which is no gain\n"
                          : fmt::format(", {:.1f} % less, on {} / {}\n", 100 * saved, placement_id(one.parameters),
                                        placement_id(one.optimizer));
  }
  return text;
}

// "one drive takes 2 times as long, each transfer and kernel takes up to 10 % longer".
std::string disturbance_name(const StepDisturbance& disturbance) {
  std::vector<std::string> parts;
  if (disturbance.slow_drive > 1)
    parts.push_back(fmt::format("one drive takes {:g} times as long", disturbance.slow_drive));
  if (disturbance.slow_rank > 1)
    parts.push_back(fmt::format("one rank takes {:g} times as long", disturbance.slow_rank));
  if (disturbance.noise > 0)
    parts.push_back(fmt::format("each transfer and kernel takes up to {:g} % longer", 100 * disturbance.noise));
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string disturbance_text(const PlanReport& report, const PlanRow& best) {
  if (!best.disturbed) return "";
  const double planned = best.time.expected_seconds, disturbed = best.disturbed->expected_seconds;
  return fmt::format("  if {}: {} a step, {:.1f} % more, {} busiest\n", disturbance_name(report.disturbance),
                     seconds_text(disturbed), 100 * (disturbed / planned - 1), resource_name(best.disturbed->limit));
}

std::string fetching_text(const PlanRow& best) {
  return best.engine.prefetch_elements > 0
             ? ""
             : "  units are fetched when they are needed, not ahead (stage3_prefetch_bucket_size 0)\n";
}

std::string commits_text(const EngineOptions& engine) {
  return fmt::format("  commits: {}{}\n", describe_commits(engine),
                     engine.store_directory.empty() ? "; hoist.checkpoint_path names one" : "");
}

std::string best_text(const PlanReport& report, const PlanRow& best) {
  const StepTime& time = best.time;
  std::string text = fmt::format("\nfastest that fits: weights / optimizer state on {}, {} a step, {} busiest\n",
                                 placement_of(best), seconds_text(time.expected_seconds), resource_name(time.limit));
  Rows rows{{"", "busy", "of a step", "kernels wait"}};
  for (std::size_t r = 0; r < kResourceCount; ++r) {
    const double busy = time.busy_seconds[r];
    if (busy > 0)
      rows.push_back({resource_name(static_cast<Resource>(r)), seconds_text(busy),
                      fmt::format("{:.0f} %", 100 * busy / time.expected_seconds), seconds_text(time.wait_seconds[r])});
  }
  text += columns(rows);
  text += fmt::format(
      "  no schedule of this placement takes less than {} (busiest resource {}, critical path {}): the gap is {:.2f}\n",
      seconds_text(time.least_seconds), seconds_text(time.busy(time.limit)), seconds_text(time.critical_path_seconds),
      time.gap());
  text += fetching_text(best) + disturbance_text(report, best);
  text += report.overrun.empty() ? "  no budget is exceeded at any instant of these steps\n"
                                 : fmt::format("  a budget is exceeded: {}\n", report.overrun);
  text += report.free_tokens
              ? fmt::format("  from {:.3g} tokens a rank and step on, offloading costs no time\n", *report.free_tokens)
              : "  offloading costs time with any number of tokens\n";
  return text + what_ifs_text(report, best) + commits_text(best.engine) + drives_text(report, best) +
         cost_text(report, best);
}

Json by_resource(const std::array<double, kResourceCount>& seconds) {
  Json json = Json::object();
  for (std::size_t r = 0; r < kResourceCount; ++r) json[resource_name(static_cast<Resource>(r))] = seconds[r];
  return json;
}

Json row_json(const PlanReport& report, const PlanRow& row) {
  const StepTime& time = row.time;
  const auto days = report.drive_life_days(row);
  return {
      {"parameters", placement_id(row.engine.parameters)},
      {"optimizer", placement_id(row.engine.optimizer)},
      {"configured", row.configured},
      {"fits", row.fits()},
      {"problems", row.fit.problems},
      {"refusal", row.refusal.empty() ? Json(nullptr) : Json(row.refusal)},
      {"device", tier_json(row.prediction.device)},
      {"pinned", tier_json(row.prediction.pinned)},
      {"nvme", {{"bytes", row.prediction.nvme_bytes}, {"drive_bytes", row.drive_bytes}, {"fits", row.fits_drives()}}},
      {"program_device_bytes", row.program.device_bytes},
      {"device_state", device_state_json(row.prediction)},
      {"optimizer_pinned_fraction", row.prediction.pinned_fraction},
      {"parameters_pinned_fraction", row.prediction.parameters_pinned_fraction},
      {"spilled_gradients", spilled_gradients_json(row.prediction)},
      {"step", step_json(row.prediction.step)},
      {"seconds",
       {{"least", time.least_seconds},
        {"critical_path", time.critical_path_seconds},
        {"expected", time.expected_seconds},
        {"disturbed", row.disturbed ? Json(row.disturbed->expected_seconds) : Json(nullptr)},
        {"gap", time.gap()}}},
      {"prefetch_elements", row.engine.prefetch_elements},
      {"busy_seconds", by_resource(time.busy_seconds)},
      {"wait_seconds", by_resource(time.wait_seconds)},
      {"limit", resource_name(time.limit)},
      {"written_bytes_a_day", PlanReport::written_a_day(row)},
      {"drive_life_days", or_null(days)}};
}

Json disturbance_json(const PlanReport& report, const PlanRow& best) {
  if (!best.disturbed) return nullptr;
  const StepDisturbance& disturbance = report.disturbance;
  return {{"slow_drive", disturbance.slow_drive},
          {"slow_rank", disturbance.slow_rank},
          {"noise", disturbance.noise},
          {"step_seconds", best.disturbed->expected_seconds},
          {"limiting_link", resource_name(best.disturbed->limit)}};
}

// The fastest placement that fits, in a program's words.
Json best_json(const PlanReport& report, const PlanRow& best) {
  const Prediction& p = best.prediction;
  const StepTime& time = best.time;
  const auto link = [&](Resource resource, std::uint64_t bytes) {
    return Json{{"name", resource_name(resource)},
                {"bytes", bytes},
                {"busy_share", time.busy(resource) / time.expected_seconds},
                {"wait_seconds", time.waited(resource)}};
  };
  Json what_ifs = Json::array();
  for (const WhatIf& one : report.what_ifs)
    what_ifs.push_back({{"more", one.name},
                        {"step_seconds", one.seconds},
                        {"parameters", placement_id(one.parameters)},
                        {"optimizer", placement_id(one.optimizer)}});
  const StepCost costs = cost(report.machine, report.layout, time.expected_seconds);
  return {
      {"per_rank", {{"device_bytes", p.device.bytes}, {"pinned_bytes", p.pinned.bytes}, {"nvme_bytes", p.nvme_bytes}}},
      {"step_seconds", time.expected_seconds},
      {"lower_bound_seconds", time.least_seconds},
      {"limiting_link", resource_name(time.limit)},
      {"disturbance", disturbance_json(report, best)},
      {"links",
       {link(Resource::nvme, p.step.nvme_read + p.step.nvme_write),
        link(Resource::host_to_device, p.step.host_to_device), link(Resource::device_to_host, p.step.device_to_host),
        link(Resource::wire, p.step.wire)}},
      {"overrun", report.overrun.empty() ? Json(nullptr) : Json(report.overrun)},
      {"what_if", what_ifs},
      {"free_tokens", or_null(report.free_tokens)},
      {"energy_joules", joules(report.machine, report.layout, time.expected_seconds)},
      {"cost", {{"rent", costs.rent}, {"energy", costs.energy}, {"currency", report.machine.rates.currency}}}};
}

Json nothing_fits_json() {
  return {{"per_rank", nullptr},      {"step_seconds", nullptr}, {"lower_bound_seconds", nullptr},
          {"limiting_link", nullptr}, {"disturbance", nullptr},  {"links", Json::array()}};
}

}  // namespace

double PlanReport::written_a_day(const PlanRow& row) {
  if (row.time.expected_seconds <= 0) return 0;
  return static_cast<double>(row.prediction.step.nvme_write) * kSecondsADay / row.time.expected_seconds;
}

std::optional<double> PlanReport::drive_life_days(const PlanRow& row) const {
  const double endurance = endurance_bytes(machine, layout), written = written_a_day(row);
  if (endurance <= 0 || written <= 0) return std::nullopt;
  return endurance / written;
}

std::string plan_text(const PlanReport& report) {
  std::string text =
      fmt::format("{} parameters ({}) on {}; figures are per rank\n", report.rows.front().prediction.parameter_count,
                  report.model, counted(report.world_size, "rank"));
  text += machine_text(report) + "\n";
  const bool disturbed = report.rows.front().disturbed.has_value();
  Rows rows{{"", "weights / state", "device", "pinned", "NVMe", "NVMe a step", "a step", "at least", "busiest",
             "kernels wait for", ""}};
  const auto after_step = [](std::vector<std::string>& row, std::string cell) {
    row.insert(row.begin() + 7, std::move(cell));
  };
  if (disturbed) after_step(rows.front(), "disturbed");
  for (std::size_t i = 0; i < report.rows.size(); ++i) {
    const PlanRow& row = report.rows[i];
    const Prediction& p = row.prediction;
    rows.push_back({row.fits() ? fmt::format("{}.", i + 1) : "", placement_of(row), tier_text(p.device),
                    tier_text(p.pinned), drive_text(row), format_bytes(p.step.nvme_read + p.step.nvme_write),
                    seconds_text(row.time.expected_seconds), seconds_text(row.time.least_seconds),
                    resource_name(row.time.limit), waits_text(row.time), verdict(row)});
    if (disturbed) after_step(rows.back(), seconds_text(row.disturbed->expected_seconds));
  }
  text += columns(rows) + kLegend + program_pinned_text(report.program_pinned_bytes) + refusals_text(report);
  const PlanRow* const best = report.best();
  return text + (best == nullptr ? nothing_fits_text(report) : best_text(report, *best));
}

Json plan_json(const PlanReport& report) {
  Json json{{"parameters", report.rows.front().prediction.parameter_count},
            {"model", report.model},
            {"world_size", report.world_size},
            {"tokens", report.tokens},
            {"machine",
             {{"name", report.machine.name}, {"basis", report.machine.basis}, {"assumed", report.machine.assumed}}},
            {"program_pinned_bytes", report.program_pinned_bytes},
            {"rows", Json::array()}};
  for (const PlanRow& row : report.rows) json["rows"].push_back(row_json(report, row));
  const PlanRow* const best = report.best();
  json["best"] = best == nullptr ? Json(nullptr) : Json(best - report.rows.data());
  json.update(best == nullptr ? nothing_fits_json() : best_json(report, *best));
  json["zero_table"] = Json::array();
  for (const ZeroRow& row : report.zero_table) {
    json["zero_table"].push_back(
        {{"stage", row.stage}, {"offload", row.offload}, {"bytes_per_gpu", row.bytes_per_gpu}, {"scheme", row.scheme}});
  }
  return json;
}

}  // namespace hoist::cli
