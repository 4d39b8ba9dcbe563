// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <hoist/config/plain_json.hpp>
#include <hoist/core/units.hpp>

#include "json_edit.hpp"
#include "output.hpp"
#include "storage.hpp"
#include "tune.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;
using measure::kPatterns;
using measure::SettingResult;

constexpr std::array<std::string_view, 3> kThreadKeys{"intra_op_parallelism", "thread_count", "num_threads"};

std::size_t index_of(measure::Pattern pattern) {
  return static_cast<std::size_t>(std::find(kPatterns.begin(), kPatterns.end(), pattern) - kPatterns.begin());
}

std::string setting_text(const measure::Setting& setting) {
  return fmt::format("{} x {}", format_bytes(setting.block_bytes), setting.queue_depth);
}

Json by_pattern(const std::array<double, kPatterns.size()>& values, double unit) {
  Json json;
  for (std::size_t i = 0; i < kPatterns.size(); ++i) json[measure::pattern_name(kPatterns[i])] = values[i] / unit;
  return json;
}

Json settings_json(const measure::SearchResult& search) {
  Json json = Json::array();
  for (const SettingResult& result : search.settings) {
    json.push_back({{"block_bytes", result.setting.block_bytes},
                    {"queue_depth", result.setting.queue_depth},
                    {"passes", result.passes},
                    {"gb_per_s", by_pattern(result.bytes_per_second, 1e9)},
                    {"standing", by_pattern(result.standing, 1)}});
  }
  return json;
}

Json share_json(const TuneReport& report) {
  std::array<double, kPatterns.size()> shares{};
  for (std::size_t i = 0; i < kPatterns.size(); ++i) shares[i] = report.share_of_full(i);
  return by_pattern(shares, 1);
}

std::string sweep_table(const measure::SearchResult& search) {
  std::vector<const SettingResult*> order;
  for (const SettingResult& result : search.settings) {
    if (result.passes > 0) order.push_back(&result);
  }
  std::stable_sort(order.begin(), order.end(), [](const SettingResult* a, const SettingResult* b) {
    return std::pair(a->passes, a->worst_standing()) > std::pair(b->passes, b->worst_standing());
  });
  std::vector<std::vector<std::string>> rows{
      {"", "block", "depth", "in flight", "read", "write", "mixed", "passes", "worst, of the best"}};
  for (const SettingResult* result : order) {
    const auto speed = [&](std::size_t i) { return fmt::format("{:.2f}", result->bytes_per_second[i] / 1e9); };
    rows.push_back({result == &search.settings[search.best] ? "->" : "", format_bytes(result->setting.block_bytes),
                    fmt::format("{}", result->setting.queue_depth), format_bytes(result->setting.footprint_bytes()),
                    speed(0), speed(1), speed(2), fmt::format("{}", result->passes),
                    fmt::format("{:.0f} %", 100 * result->worst_standing())});
  }
  return columns(rows);
}

}  // namespace

const SettingResult& best_of(const measure::SearchResult& search, std::size_t pattern) {
  return *std::ranges::max_element(search.settings, {},
                                   [&](const SettingResult& result) { return result.standing[pattern]; });
}

double TuneReport::share_of_full(std::size_t pattern) const {
  const auto standing = [&](const measure::Setting& setting) {
    return std::ranges::find(runoff->settings, setting, &SettingResult::setting)->standing[pattern];
  };
  return standing(chosen().setting) / standing(best_of(*full, pattern).setting);
}

Json configuration(const TuneReport& report) {
  const SettingResult& chosen = report.chosen();
  const auto speed = [&](measure::Pattern pattern) {
    return static_cast<std::uint64_t>(std::llround(chosen.bytes_per_second[index_of(pattern)]));
  };
  // The engine `threads` was measured with as many threads as blocks in flight; io_uring needs one, and so does a
  // handle of DeepSpeed's, whose depth is that of each thread.
  const unsigned threads = report.engine == "threads" ? chosen.setting.queue_depth : 1;
  return {{"aio",
           {{"block_size", chosen.setting.block_bytes},
            {"queue_depth", chosen.setting.queue_depth},
            {"intra_op_parallelism", threads},
            {"single_submit", false},
            {"overlap_events", true}}},
          {"hoist",
           {{"measured",
             {{"read_bytes_per_second", speed(measure::Pattern::read)},
              {"write_bytes_per_second", speed(measure::Pattern::write)},
              {"mixed_bytes_per_second", speed(measure::Pattern::mixed)}}}}}};
}

std::string merged_configuration(const std::string& config_text, const TuneReport& report) {
  const Json found = configuration(report);
  std::string text = config_text;
  const Json before = Json::parse(config::plain_json(config_text), nullptr, false);
  const Json aio = before.is_object() && before.contains("aio") ? before["aio"] : Json::object();
  const auto* const threads =
      std::ranges::find_if(kThreadKeys, [&](std::string_view key) { return aio.contains(key); });
  for (const auto& [key, value] : found["aio"].items()) {
    const bool is_threads = key == kThreadKeys[0];
    const std::string_view name = is_threads && threads != kThreadKeys.end() ? *threads : key;
    const bool searched = key == "block_size" || key == "queue_depth" || (is_threads && report.engine == "threads");
    if (!searched && aio.contains(name)) continue;
    const std::array<std::string_view, 2> path{"aio", name};
    text = with_member(text, path, value);
  }
  for (const auto& [key, value] : found["hoist"]["measured"].items()) {
    const std::array<std::string_view, 3> path{"hoist", "measured", key};
    text = with_member(text, path, value);
  }
  return text;
}

Json to_json(const TuneReport& report) {
  Json json{{"paths", report.paths}, {"engine", report.engine}, {"engine_description", report.engine_description}};
  json.update(configuration(report));
  json["seconds"] = report.seconds;
  json["complete"] = report.search.complete;
  json["settings"] = settings_json(report.search);
  if (report.full)
    json["full"] = {{"chosen_share_of_best", share_json(report)}, {"settings", settings_json(*report.full)}};
  json["drives"] = Json::array();
  for (const auto& storage : report.storage) json["drives"].push_back(storage_json(storage));
  json["warnings"] = report.warnings;
  json["machine"] = machine_json();
  return json;
}

std::string to_text(const TuneReport& report) {
  std::string text = fmt::format("engine: {}\n", report.engine_description);
  for (std::size_t i = 0; i < report.paths.size(); ++i)
    text += fmt::format("path: {}\n", drive_title(report.paths[i], report.storage[i]));
  text += "\nGB/s of all paths together; poor settings were measured less often\n";
  text += sweep_table(report.search);
  text += fmt::format("\nchosen in {:.1f} s: {}\n", report.seconds, setting_text(report.chosen().setting));
  if (report.full) {
    text += "compared with the setting that a full sweep found best for each pattern, both measured again:";
    for (std::size_t i = 0; i < kPatterns.size(); ++i) {
      text += fmt::format("{} {} {:.0f} %", i == 0 ? "" : ",", measure::pattern_name(kPatterns[i]),
                          100 * report.share_of_full(i));
    }
    text += "\n" + sweep_table(*report.full);
  }
  for (const std::string& warning : report.warnings) text += fmt::format("\nwarning: {}\n", warning);
  return text;
}

}  // namespace hoist::cli
