// SPDX-License-Identifier: Apache-2.0
#include "plan_report.hpp"

#include <algorithm>

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

const char* name_of(Placement placement) {
  static constexpr const char* kNames[] = {"device", "pinned", "nvme"};
  return kNames[static_cast<std::size_t>(placement)];
}

// Bytes of offloaded optimizer state that live in device memory.
std::string placement_of(const PlanRow& row) {
  const bool divided = row.engine.optimizer != Placement::device && row.prediction.device_state_bytes > 0;
  const std::string rest =
      divided ? fmt::format(" ({:.0f} % device)", 100 * row.prediction.device_state_share) : std::string();
  return fmt::format("{} / {}{}", name_of(row.engine.parameters), name_of(row.engine.optimizer), rest);
}

// A tier's need; with a budget, the bytes that it will hold, or by how much it is too small.
std::string tier_text(const Prediction::Tier& tier, bool has_budget) {
  if (!has_budget) return format_bytes(tier.least_bytes);
  if (tier.fits()) return format_bytes(tier.bytes);
  return fmt::format("{} too little", format_bytes(tier.least_bytes - tier.budget_bytes));
}

std::string verdict(const PlanRow& row, bool fastest) {
  const char* const problem = !row.refusal.empty() ? "refused" : row.fits() ? "" : "does not fit";
  return fmt::format("{}{}{}", problem, row.configured ? " (configured)" : "", fastest ? " (fastest)" : "");
}

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

std::string seconds_text(double seconds) { return seconds > 0 ? fmt::format("{:.3g} s", seconds) : "?"; }

// The work of a step of this row whose speed was not given.
std::vector<std::string> not_counted(const PlanRow& row, const StepSpeeds& speeds) {
  const Prediction& p = row.prediction;
  std::vector<std::string> options;
  const auto missing = [&](std::uint64_t bytes, double speed, const char* option) {
    if (bytes > 0 && speed <= 0) options.emplace_back(option);
  };
  missing(p.step.nvme_read, speeds.nvme_read, "--nvme-read");
  missing(p.step.nvme_write, speeds.nvme_write, "--nvme-write");
  missing(p.step.host_to_device, speeds.host_to_device, "--host-to-device");
  missing(p.step.device_to_host, speeds.device_to_host, "--device-to-host");
  missing(p.step.wire, speeds.wire, "--network");
  missing(p.update_memory_bytes, speeds.host_memory, "--host-memory");
  missing(p.device_update_bytes, speeds.device_memory, "--device-bandwidth");
  missing(1, speeds.compute_seconds, "--compute-seconds (or --tokens and --tflops)");
  return options;
}

std::uint64_t shortfall(const Prediction::Tier& tier) { return tier.fits() ? 0 : tier.least_bytes - tier.budget_bytes; }

// Of a memory that both tiers are in.
std::uint64_t host_shortfall(const Prediction& p) {
  const std::uint64_t least = p.device.least_bytes + p.pinned.least_bytes;
  return p.host_budget_bytes == 0 || least <= p.host_budget_bytes ? 0 : least - p.host_budget_bytes;
}

// The placement that lacks least, and what it needs.
std::string nothing_fits_text(const PlanReport& report) {
  const auto lacks = [](const PlanRow& row) {
    const Prediction& p = row.prediction;
    return std::max(shortfall(p.device) + shortfall(p.pinned), host_shortfall(p));
  };
  const PlanRow* closest = nullptr;
  for (const PlanRow& row : report.rows)
    if (row.refusal.empty() && (closest == nullptr || lacks(row) < lacks(*closest))) closest = &row;
  if (closest == nullptr) return "\nnothing fits: every placement is refused\n";
  std::vector<std::string> needs;
  const auto need = [&](const Prediction::Tier& tier, const char* option) {
    if (!tier.fits()) needs.push_back(fmt::format("{} {}MiB", option, divide_up(tier.least_bytes, kMiB)));
  };
  need(closest->prediction.device, "--device-memory");
  need(closest->prediction.pinned, "--pinned-memory");
  if (needs.empty()) {
    const Prediction& p = closest->prediction;
    needs.push_back(
        fmt::format("{} of host memory for a rank", format_bytes(p.device.least_bytes + p.pinned.least_bytes)));
  }
  return fmt::format("\nnothing fits: {} is closest, with {} at least; or take more ranks\n", placement_of(*closest),
                     fmt::join(needs, " and "));
}

std::string best_text(const PlanReport& report, const PlanRow& best) {
  const StepTime& time = best.time;
  std::string text = fmt::format("\nfastest that fits: weights / optimizer state on {}, {} a step, {} busiest\n",
                                 placement_of(best), seconds_text(time.expected_seconds), resource_name(time.limit));
  Rows rows;
  for (std::size_t r = 0; r < kResourceCount; ++r) {
    const double busy = time.busy_seconds[r];
    if (busy > 0)
      rows.push_back({resource_name(static_cast<Resource>(r)), seconds_text(busy),
                      fmt::format("{:.0f} %", 100 * busy / time.expected_seconds)});
  }
  text += columns(rows);
  const auto written = PlanReport::written_a_day(best);
  if (written && *written > 0) {
    text += fmt::format("  {:.3g} TB are written to the drives of a rank in a day", *written / 1e12);
    if (report.endurance_bytes > 0) text += fmt::format(": they last {:.3g} days", report.endurance_bytes / *written);
    text += "\n";
  }
  return text;
}

Json tier_json(const Prediction::Tier& tier, bool has_budget) {
  return {{"least_bytes", tier.least_bytes},
          {"bytes", has_budget ? Json(tier.bytes) : Json(nullptr)},
          {"budget_bytes", has_budget ? Json(tier.budget_bytes) : Json(nullptr)},
          {"fits", tier.fits()}};
}

Json row_json(const PlanReport& report, const PlanRow& row) {
  Json busy = Json::object();
  for (std::size_t r = 0; r < kResourceCount; ++r)
    busy[resource_name(static_cast<Resource>(r))] = row.time.busy_seconds[r];
  const auto written = PlanReport::written_a_day(row);
  const bool wears = written && *written > 0;
  return {{"parameters", name_of(row.engine.parameters)},
          {"optimizer", name_of(row.engine.optimizer)},
          {"configured", row.configured},
          {"fits", row.fits()},
          {"refusal", row.refusal.empty() ? Json(nullptr) : Json(row.refusal)},
          {"device", tier_json(row.prediction.device, report.has_device_budget)},
          {"pinned", tier_json(row.prediction.pinned, report.has_pinned_budget)},
          {"nvme", {{"bytes", row.prediction.nvme_bytes}}},
          {"device_state", device_state_json(row.prediction)},
          {"step", step_json(row.prediction.step)},
          {"seconds", {{"least", row.time.least_seconds}, {"expected", row.time.expected_seconds}}},
          {"busy_seconds", busy},
          {"limit", row.time.least_seconds > 0 ? Json(resource_name(row.time.limit)) : Json(nullptr)},
          {"written_bytes_a_day", written ? Json(*written) : Json(nullptr)},
          {"drive_life_days",
           wears && report.endurance_bytes > 0 ? Json(report.endurance_bytes / *written) : Json(nullptr)},
          {"not_counted", not_counted(row, report.speeds)}};
}

// The fastest placement that fits, in a program's words.
Json best_json(const PlanRow& best) {
  const Prediction& p = best.prediction;
  const StepTime& time = best.time;
  const bool timed = time.expected_seconds > 0;
  const auto link = [&](Resource resource, std::uint64_t bytes) {
    return Json{{"name", resource_name(resource)},
                {"bytes", bytes},
                {"busy_share", timed ? Json(time.busy(resource) / time.expected_seconds) : Json(nullptr)}};
  };
  return {
      {"per_rank", {{"device_bytes", p.device.bytes}, {"pinned_bytes", p.pinned.bytes}, {"nvme_bytes", p.nvme_bytes}}},
      {"step_seconds", timed ? Json(time.expected_seconds) : Json(nullptr)},
      {"lower_bound_seconds", timed ? Json(time.least_seconds) : Json(nullptr)},
      {"limiting_link", timed ? Json(resource_name(time.limit)) : Json(nullptr)},
      {"links",
       {link(Resource::nvme, p.step.nvme_read + p.step.nvme_write),
        link(Resource::host_to_device, p.step.host_to_device), link(Resource::device_to_host, p.step.device_to_host),
        link(Resource::wire, p.step.wire)}}};
}

Json nothing_fits_json() {
  return {{"per_rank", nullptr},
          {"step_seconds", nullptr},
          {"lower_bound_seconds", nullptr},
          {"limiting_link", nullptr},
          {"links", Json::array()}};
}

}  // namespace

const PlanRow* PlanReport::best() const {
  const PlanRow* best = nullptr;
  const auto key = [](const PlanRow& row) { return std::pair(row.time.expected_seconds, row.prediction.nvme_bytes); };
  for (const PlanRow& row : rows) {
    if (row.fits() && (best == nullptr || key(row) < key(*best))) best = &row;
  }
  return best;
}

std::optional<double> PlanReport::written_a_day(const PlanRow& row) {
  if (row.time.expected_seconds <= 0) return std::nullopt;
  return static_cast<double>(row.prediction.step.nvme_write) * kSecondsADay / row.time.expected_seconds;
}

std::string plan_text(const PlanReport& report) {
  std::string text = fmt::format("{} parameters ({}) on {} rank{}; figures are per rank\n\n",
                                 report.rows.front().prediction.parameter_count, report.model, report.world_size,
                                 report.world_size > 1 ? "s" : "");
  Rows rows{{"weights / state", report.has_device_budget ? "device" : "device, at least",
             report.has_pinned_budget ? "pinned" : "pinned, at least", "NVMe", "NVMe a step", "a step", "at least",
             "busiest", ""}};
  const PlanRow* const best = report.best();
  for (const PlanRow& row : report.rows) {
    const Prediction& p = row.prediction;
    const bool timed = row.time.least_seconds > 0;
    rows.push_back({placement_of(row), tier_text(p.device, report.has_device_budget),
                    tier_text(p.pinned, report.has_pinned_budget), format_bytes(p.nvme_bytes),
                    format_bytes(p.step.nvme_read + p.step.nvme_write), seconds_text(row.time.expected_seconds),
                    seconds_text(row.time.least_seconds), timed ? resource_name(row.time.limit) : "?",
                    verdict(row, &row == best && timed)});
  }
  text += columns(rows) + program_pinned_text(report.program_pinned_bytes) + refusals_text(report);
  if (best == nullptr) {
    text += nothing_fits_text(report);
  } else if (best->time.least_seconds > 0) {
    text += best_text(report, *best);
  }
  std::vector<std::string> options;
  for (const PlanRow& row : report.rows) {
    for (const std::string& option : not_counted(row, report.speeds))
      if (row.refusal.empty() && std::ranges::find(options, option) == options.end()) options.push_back(option);
  }
  if (!options.empty())
    text += fmt::format("\nnot counted, because no speed was given: {}\n", fmt::join(options, ", "));
  return text;
}

Json plan_json(const PlanReport& report) {
  Json json{{"parameters", report.rows.front().prediction.parameter_count},
            {"model", report.model},
            {"world_size", report.world_size},
            {"program_pinned_bytes", report.program_pinned_bytes},
            {"rows", Json::array()}};
  for (const PlanRow& row : report.rows) json["rows"].push_back(row_json(report, row));
  const PlanRow* const best = report.best();
  json["best"] = best == nullptr ? Json(nullptr) : Json(best - report.rows.data());
  json.update(best == nullptr ? nothing_fits_json() : best_json(*best));
  json["zero_table"] = Json::array();
  for (const ZeroRow& row : report.zero_table) {
    json["zero_table"].push_back(
        {{"stage", row.stage}, {"offload", row.offload}, {"bytes_per_gpu", row.bytes_per_gpu}, {"scheme", row.scheme}});
  }
  return json;
}

}  // namespace hoist::cli
