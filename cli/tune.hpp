// SPDX-License-Identifier: Apache-2.0
// cli/tune.hpp - the result of hoist tune, as configuration, table, JSON and picture.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <hoist/measure/machine.hpp>
#include <hoist/measure/search.hpp>

namespace hoist::cli {

struct TuneReport {
  std::vector<std::string> paths;
  std::vector<measure::Storage> storage;
  std::string engine;  // "io_uring", "threads"
  std::string engine_description;
  measure::SearchResult search;
  // Every setting, measured in the same way right after the search.
  std::optional<measure::SearchResult> full;
  // The chosen setting and the full sweep's best for each pattern, measured again in turn: which of many settings is
  // best in one sweep is partly luck and does not measure how good it is.
  std::optional<measure::SearchResult> runoff;
  double seconds = 0;  // of the search, the writing of the files included
  std::vector<std::string> warnings;

  const measure::SettingResult& chosen() const { return search.settings[search.best]; }
  // The chosen setting's speed as a share of the full sweep's best, for a pattern. Pre: full and runoff.
  double share_of_full(std::size_t pattern) const;
};

const measure::SettingResult& best_of(const measure::SearchResult& search, std::size_t pattern);

// The keys that are written: {"aio": {...}, "hoist": {"measured": {...}}}.
nlohmann::ordered_json configuration(const TuneReport& report);
// `config_text` with those keys set. Keys of "aio" that were not searched over are added only where they are missing.
// Errors: JsonEditError.
std::string merged_configuration(const std::string& config_text, const TuneReport& report);

nlohmann::ordered_json to_json(const TuneReport& report);
std::string to_text(const TuneReport& report);
// A heat map of bandwidth for each pattern, block sizes across and queue depths down.
std::string to_svg(const TuneReport& report);

}  // namespace hoist::cli
