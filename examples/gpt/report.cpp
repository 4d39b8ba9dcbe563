// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include <hoist/core/units.hpp>

namespace hoist::gpt {
namespace {

TierUse use_of(const tiers::Budget& budget) {
  return {.budget_bytes = budget.limit_bytes(), .held_bytes = budget.held_bytes(), .peak_bytes = budget.peak_bytes()};
}

std::uint64_t bytes_on_disk(const std::string& directory) {
  std::uint64_t bytes = 0;
  std::error_code gone;
  for (const auto& entry : std::filesystem::directory_iterator(directory, gone)) {
    struct stat status {};
    if (lstat(entry.path().c_str(), &status) == 0 && S_ISREG(status.st_mode)) {
      bytes +=
          static_cast<std::uint64_t>(status.st_blocks) * 512;  // st_blocks counts 512 bytes, whatever the block size
    }
  }
  return bytes;
}

constexpr std::array kReportedWaits = {WaitCause::nvme, WaitCause::host_to_device, WaitCause::device_to_host,
                                       WaitCause::optimizer, WaitCause::comm};

std::size_t index(Link link) { return static_cast<std::size_t>(link); }
std::size_t index(WaitCause cause) { return static_cast<std::size_t>(cause); }

std::uint64_t formula_of(const StepBytes& bytes, Link link) {
  switch (link) {
    case Link::nvme_read:
      return bytes.nvme_read;
    case Link::nvme_write:
      return bytes.nvme_write;
    case Link::host_to_device:
      return bytes.host_to_device;
    case Link::device_to_host:
      return bytes.device_to_host;
    case Link::wire:
      return bytes.wire;
  }
  return 0;
}

constexpr std::array kLinks = {Link::nvme_read, Link::nvme_write, Link::host_to_device, Link::device_to_host,
                               Link::wire};

const char* link_title(Link link) {
  switch (link) {
    case Link::nvme_read:
      return "NVMe read";
    case Link::nvme_write:
      return "NVMe write";
    case Link::host_to_device:
      return "host to device";
    case Link::device_to_host:
      return "device to host";
    case Link::wire:
      return "between ranks";
  }
  return "";
}

const char* wait_title(WaitCause cause) {
  switch (cause) {
    case WaitCause::nvme:
      return "waiting for NVMe";
    case WaitCause::host_to_device:
      return "waiting for copies of weights";
    case WaitCause::device_to_host:
      return "waiting for copies of gradients";
    case WaitCause::optimizer:
      return "waiting for the optimizer";
    case WaitCause::comm:
      return "waiting for other ranks";
    case WaitCause::none:
      return "";
  }
  return "";
}

double step_seconds(const RunRecord& record) {
  double seconds = 0;
  for (const StepRecord& step : record.steps) seconds += step.seconds;
  return seconds;
}

void append_links(std::string& out, const RunRecord& record) {
  out += fmt::format("  {:<16}{:>12}{:>12}{:>9}{:>10}{:>16}\n", "link", "moved", "formula", "ratio", "busy",
                     "outside steps");
  for (const Link link : kLinks) {
    const auto& moved = record.links[index(link)];
    const std::uint64_t apart = record.links_apart[index(link)].bytes;
    if (link == Link::wire && record.world_size == 1) continue;
    std::string formula = "-", ratio = "-";
    if (record.formula) {
      const bool offloads = link == Link::host_to_device || link == Link::device_to_host;
      const std::uint64_t bytes =
          formula_of(*record.formula, link) * record.steps.size() + (offloads ? record.offloaded_bytes : 0);
      formula = format_bytes(bytes);
      if (bytes > 0) ratio = fmt::format("{:.4f}", static_cast<double>(moved.bytes) / static_cast<double>(bytes));
    }
    out += fmt::format("  {:<16}{:>12}{:>12}{:>9}{:>8.1f} s{:>16}\n", link_title(link), format_bytes(moved.bytes),
                       formula, ratio, to_seconds(moved.busy), format_bytes(apart));
  }
  if (record.offloaded_bytes > 0)
    out += fmt::format("  {:<16}{:>12} of the bytes down, and of those up\n", "activations",
                       format_bytes(record.offloaded_bytes));
  if (record.wire_in_group > 0)
    out +=
        fmt::format("  {:<16}{:>12} of the bytes between ranks\n", "within groups", format_bytes(record.wire_in_group));
}

void append_time(std::string& out, const RunRecord& record) {
  const double total = step_seconds(record);
  if (total <= 0) return;
  const auto line = [&](const char* what, double seconds) {
    out += fmt::format("  {:<34}{:>8.1f} s{:>7.1f} %\n", what, seconds, 100 * seconds / total);
  };
  out += fmt::format("  {:<34}{:>10}{:>9}\n", "where the time went", "", "");
  double rest = total;
  const auto part = [&](const char* what, double seconds) {
    line(what, seconds);
    rest -= seconds;
  };
  part("model kernels", to_seconds(record.compute));
  for (const WaitCause cause : kReportedWaits) part(wait_title(cause), to_seconds(record.waits[index(cause)]));
  line("everything else", rest);
  line("all steps", total);
  if (record.world_size > 1)
    out += fmt::format("  communication to computation: {:.3f}\n", communication_to_computation(record));
}

void append_tiers(std::string& out, const RunRecord& record) {
  out += fmt::format("  {:<16}{:>12}{:>12}{:>9}\n", "tier", "peak", "budget", "fill");
  const auto line = [&](const char* what, const TierUse& use) {
    if (use.budget_bytes == 0) return;
    out += fmt::format("  {:<16}{:>12}{:>12}{:>7.1f} %\n", what, format_bytes(use.peak_bytes),
                       format_bytes(use.budget_bytes),
                       100 * static_cast<double>(use.peak_bytes) / static_cast<double>(use.budget_bytes));
  };
  line("device", record.tiers.device);
  line("pinned memory", record.tiers.pinned);
  line("NVMe store", record.tiers.nvme);
}

}  // namespace

Tiers tier_use(Engine& engine, const EngineOptions& options) {
  std::uint64_t reserved = options.store_directory.empty() ? 0 : bytes_on_disk(options.store_directory);
  for (const std::string& directory : options.stripe_directories) reserved += bytes_on_disk(directory);
  return {.device = use_of(engine.runtime().device_budget()),
          .pinned = use_of(engine.runtime().pinned_budget()),
          .nvme = {.budget_bytes = reserved, .held_bytes = reserved, .peak_bytes = reserved}};
}

void take_step_totals(RunRecord& record, const Ledger& ledger) {
  for (const Link link : kLinks) record.links[index(link)] = ledger.totals(link);
  for (const WaitCause cause : kReportedWaits) record.waits[index(cause)] = ledger.waited(cause);
}

void take_totals_apart(RunRecord& record, const Ledger& ledger) {
  for (const Link link : kLinks) record.links_apart[index(link)] = ledger.totals(link, Ledger::Account::outside_steps);
}

double communication_to_computation(const RunRecord& record) {
  const double compute = to_seconds(record.compute);
  return compute > 0 ? to_seconds(record.waits[index(WaitCause::comm)]) / compute : 0;
}

std::string report_json(const RunRecord& record) {
  using Json = nlohmann::ordered_json;
  Json steps = Json::array();
  for (const StepRecord& step : record.steps) {
    steps.push_back(
        {{"step", step.step}, {"loss", step.loss}, {"seconds", step.seconds}, {"gradient_norm", step.gradient_norm}});
    if (step.loss_scale) steps.back().update(Json{{"loss_scale", *step.loss_scale}, {"applied", step.applied}});
  }
  const auto tier = [](const TierUse& use) {
    return Json{{"budget_bytes", use.budget_bytes}, {"peak_bytes", use.peak_bytes}};
  };
  Json links, waits;
  for (const Link link : kLinks) {
    const auto& total = record.links[index(link)];
    links[link_name(link)] = {{"bytes", total.bytes}, {"busy_seconds", to_seconds(total.busy)}};
  }
  if (record.wire_in_group > 0) links[link_name(Link::wire)]["bytes_in_group"] = record.wire_in_group;
  for (const WaitCause cause : kReportedWaits) waits[wait_cause_name(cause)] = to_seconds(record.waits[index(cause)]);
  const Json json = {
      {"device", record.device},
      {"parameters", record.parameters},
      {"world_size", record.world_size},
      {"steps", steps},
      {"digest",
       {{"master", record.digests.master}, {"moment1", record.digests.moment1}, {"moment2", record.digests.moment2}}},
      {"tiers",
       {{"device", tier(record.tiers.device)},
        {"pinned", tier(record.tiers.pinned)},
        {"nvme", tier(record.tiers.nvme)}}},
      {"links", links},
      {"wait_seconds", waits},
      {"compute_seconds", to_seconds(record.compute)},
      {"offloaded_bytes", record.offloaded_bytes},
      {"tokens_per_step", record.tokens_per_step},
      {"communication_to_computation", communication_to_computation(record)},
      {"committed_step", record.committed_step ? Json(*record.committed_step) : Json(nullptr)}};
  return json.dump(2) + "\n";
}

std::string closing_table(const RunRecord& record) {
  std::string out = "\n";
  if (!record.steps.empty()) {
    out += fmt::format("  {} steps in {:.1f} s, loss {:.3f} -> {:.3f}\n", record.steps.size(), step_seconds(record),
                       record.steps.front().loss, record.steps.back().loss);
    const auto skipped = std::ranges::count(record.steps, false, &StepRecord::applied);
    if (skipped > 0) out += fmt::format("  {} of them skipped, as their gradients were not finite\n", skipped);
    if (const auto scale = record.steps.back().loss_scale) out += fmt::format("  loss scale {} at the end\n", *scale);
  }
  out += fmt::format("  {} parameters, {} rank{}, on the {}\n\n", record.parameters, record.world_size,
                     record.world_size == 1 ? "" : "s (the numbers below are rank 0's)", record.device);
  append_links(out, record);
  out += "\n";
  append_time(out, record);
  out += "\n";
  append_tiers(out, record);
  return out;
}

}  // namespace hoist::gpt
