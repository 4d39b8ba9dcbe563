// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <hoist/core/units.hpp>
#include <hoist/measure/statistics.hpp>

#include "bench_io.hpp"
#include "output.hpp"
#include "storage.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;
using measure::ComparisonResult;
using measure::DriveResult;
using measure::LatencyHistogram;
using measure::median_text;

double microseconds(Nanoseconds duration) { return static_cast<double>(duration.count()) / 1e3; }

double gigabytes(std::uint64_t bytes) { return static_cast<double>(bytes) / 1e9; }

Json latency_json(const LatencyHistogram& latency) {
  return {{"p50", microseconds(latency.percentile(0.5))},
          {"p99", microseconds(latency.percentile(0.99))},
          {"max", microseconds(latency.max())}};
}

// In the backend `threads` other threads do the I/O thread's work, so its time says nothing about a drive.
bool thread_time_says_all(const BenchIoReport& report) { return report.engine != "threads"; }

Json drive_json(const BenchIoReport& report, std::size_t index) {
  const DriveResult& drive = report.result.drives[index];
  Json json{{"path", report.paths[index]},
            {"direct", static_cast<bool>(report.direct[index])},
            {"read_bytes", drive.read_bytes},
            {"written_bytes", drive.written_bytes},
            {"seconds", drive.seconds},
            {"gb_per_s", drive.bytes_per_second() / 1e9},
            {"latency_us", latency_json(drive.latency)}};
  json["cpu_seconds_per_gb"] = thread_time_says_all(report) && drive.bytes() > 0
                                   ? Json(drive.thread_seconds / gigabytes(drive.bytes()))
                                   : Json(nullptr);
  json["drive"] = storage_json(report.storage[index]);
  return json;
}

Json comparison_json(const ComparisonResult& comparison) {
  const bool has_control = !comparison.control_ratios.empty();
  return {{"tool", comparison.tool},
          {"description", comparison.description},
          {"leg_bytes", comparison.leg_bytes},
          {"ratios", comparison.ratios},
          {"ratio_median", measure::median(comparison.ratios)},
          {"ratio_interval", interval_json(comparison.ratios)},
          {"control_ratios", comparison.control_ratios},
          {"control_median", has_control ? Json(measure::median(comparison.control_ratios)) : Json(nullptr)},
          {"control_interval", has_control ? interval_json(comparison.control_ratios) : Json(nullptr)},
          {"gb_per_s", measure::median(comparison.our_bytes_per_second) / 1e9},
          {"tool_gb_per_s", measure::median(comparison.their_bytes_per_second) / 1e9},
          {"cpu_seconds_per_gb", measure::median(comparison.our_processor_seconds_per_gb)},
          {"tool_cpu_seconds_per_gb", measure::median(comparison.their_processor_seconds_per_gb)}};
}

std::vector<std::string> row(const std::string& name, std::uint64_t bytes, double bytes_per_second,
                             const LatencyHistogram& latency, const std::string& processor) {
  return {name,
          format_bytes(bytes),
          fmt::format("{:.2f}", bytes_per_second / 1e9),
          fmt::format("{:.0f}", microseconds(latency.percentile(0.5))),
          fmt::format("{:.0f}", microseconds(latency.percentile(0.99))),
          fmt::format("{:.0f}", microseconds(latency.max())),
          processor};
}

std::string table(const BenchIoReport& report) {
  std::vector<std::vector<std::string>> rows{{"", "moved", "GB/s", "p50 us", "p99 us", "max us", "CPU s/GB"}};
  const measure::WorkloadResult& all = report.result;
  const std::string processor = fmt::format("{:.4f}", all.processor_seconds_per_gb());
  if (all.drives.size() == 1) {
    rows.push_back(row(report.paths[0], all.bytes(), all.bytes_per_second(), all.latency(), processor));
    return columns(rows);
  }
  for (std::size_t i = 0; i < all.drives.size(); ++i) {
    const DriveResult& drive = all.drives[i];
    const std::string own = thread_time_says_all(report) && drive.bytes() > 0
                                ? fmt::format("{:.4f}", drive.thread_seconds / gigabytes(drive.bytes()))
                                : "";
    rows.push_back(row(report.paths[i], drive.bytes(), drive.bytes_per_second(), drive.latency, own));
  }
  rows.push_back(row("together", all.bytes(), all.bytes_per_second(), all.latency(), processor));
  return columns(rows);
}

std::string comparison_text(const ComparisonResult& comparison) {
  std::string text = fmt::format("\nhoist / {}, {} alternating pairs of {} each\n", comparison.tool,
                                 comparison.ratios.size(), format_bytes(comparison.leg_bytes));
  std::string ratios;
  for (std::size_t i = 0; i < comparison.ratios.size(); ++i)
    ratios += fmt::format("{}{:.3f}", i % 10 == 0 ? "\n   " : " ", comparison.ratios[i]);
  text += "  ratio of each pair:" + ratios + "\n";
  std::vector<std::vector<std::string>> rows{
      {"median [95 % interval]", median_text(comparison.ratios)},
      {"control, hoist / hoist",
       comparison.control_ratios.empty() ? "none (one pair)" : median_text(comparison.control_ratios)},
      {"GB/s, hoist and " + comparison.tool,
       fmt::format("{:.2f} and {:.2f}", measure::median(comparison.our_bytes_per_second) / 1e9,
                   measure::median(comparison.their_bytes_per_second) / 1e9)},
      {"CPU s/GB, hoist and " + comparison.tool,
       fmt::format("{:.4f} and {:.4f}", measure::median(comparison.our_processor_seconds_per_gb),
                   measure::median(comparison.their_processor_seconds_per_gb))},
      {comparison.tool, comparison.description}};
  return text + columns(rows);
}

}  // namespace

Json to_json(const BenchIoReport& report) {
  const measure::WorkloadResult& all = report.result;
  Json json{{"op", measure::pattern_name(report.pattern)},
            {"engine", report.engine},
            {"block_bytes", report.block_bytes},
            {"queue_depth", report.queue_depth},
            {"paths", report.paths},
            {"gb_per_s", all.bytes_per_second() / 1e9},
            {"latency_us", latency_json(all.latency())},
            {"cpu_seconds_per_gb", all.processor_seconds_per_gb()},
            {"compare", report.comparison ? comparison_json(*report.comparison) : Json(nullptr)},
            {"seconds", all.seconds},
            {"flush_seconds", all.flush_seconds},
            {"file_bytes", report.file_bytes},
            {"blocks", all.latency().count()},
            {"huge_pages", report.huge_pages},
            {"engine_description", report.engine_description},
            {"drives", Json::array()}};
  for (std::size_t i = 0; i < all.drives.size(); ++i) json["drives"].push_back(drive_json(report, i));
  json["warnings"] = report.warnings;
  json["machine"] = machine_json();
  return json;
}

std::string to_text(const BenchIoReport& report) {
  std::string text = fmt::format("{}, blocks of {}, {} in flight on each drive, files of {}\nengine: {}\n",
                                 measure::pattern_name(report.pattern), format_bytes(report.block_bytes),
                                 report.queue_depth, format_bytes(report.file_bytes), report.engine_description);
  for (std::size_t i = 0; i < report.paths.size(); ++i)
    text += fmt::format("path: {}\n", drive_title(report.paths[i], report.storage[i]));
  text += "\n" + table(report);
  if (report.pattern != measure::Pattern::read && report.engine != "null")
    text += fmt::format("  then {:.1f} ms to flush (fdatasync), not in the GB/s\n", report.result.flush_seconds * 1e3);
  if (report.engine == "null") {
    const auto blocks = static_cast<double>(std::max<std::uint64_t>(1, report.result.latency().count()));
    text += fmt::format("  {:.0f} ns of processor time for each block: our own overhead\n",
                        report.result.processor_seconds / blocks * 1e9);
  }
  if (report.comparison) text += comparison_text(*report.comparison);
  for (const std::string& warning : report.warnings) text += fmt::format("\nwarning: {}\n", warning);
  return text;
}

}  // namespace hoist::cli
