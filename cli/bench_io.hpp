// SPDX-License-Identifier: Apache-2.0
// cli/bench_io.hpp - the results of hoist bench io, as a table for people and as JSON.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <hoist/measure/comparison.hpp>
#include <hoist/measure/machine.hpp>
#include <hoist/measure/workload.hpp>

namespace hoist::cli {

struct BenchIoReport {
  measure::Pattern pattern = measure::Pattern::read;
  std::string engine;              // "io_uring", "threads", "null"
  std::string engine_description;  // with its features: registered buffers, files
  std::uint64_t block_bytes = 0;
  unsigned queue_depth = 0;
  std::uint64_t file_bytes = 0;  // in each directory
  bool huge_pages = false;
  std::vector<std::string> paths;
  std::vector<measure::Storage> storage;
  std::vector<bool> direct;
  measure::WorkloadResult result;
  std::optional<measure::ComparisonResult> comparison;
  std::string comparison_failure;  // why there is no result of the comparison that was asked for
  std::vector<std::string> warnings;
};

nlohmann::ordered_json to_json(const BenchIoReport& report);
std::string to_text(const BenchIoReport& report);

}  // namespace hoist::cli
