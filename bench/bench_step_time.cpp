// SPDX-License-Identifier: Apache-2.0
// bench_step_time - do steps take as long as predicted, and is their time explained? Real steps on a drive and with
// kernels of known speed. Prints a line for each cell; ends with 1 when a claim does not hold:
//
//   in the quickest of 20 windows, a step takes within 10 % of the expected time
//   in the window that is explained best, at least 99 % of the time is a kernel's, or a wait's with a cause
//
//   bench_step_time --path DIR [--json FILE] [--smoke]      --smoke: one cell, whose time is not judged
#include <cstdio>
#include <filesystem>
#include <string>

#include <fmt/format.h>

#include <hoist/core/units.hpp>
#include <hoist/measure/workload.hpp>

#include "options.hpp"
#include "temporary_directory.hpp"
#include "timed_steps.hpp"

using namespace hoist;

namespace {

double flush_seconds(const std::filesystem::path& directory) {
  measure::ScratchFile file(directory, 16 * kMiB);
  const measure::DriveOptions options{.queue_depth = 16};
  const measure::BlockBuffers buffers(options.queue_depth * options.block_bytes, /*numa_node=*/-1);
  measure::Drive drive(file, buffers, options);
  measure::Drive* const drives[] = {&drive};
  return measure::seconds_of_flush(drives);
}

int run(int argc, char** argv) {
  bench::Options options(argc, argv);
  const bool smoke = options.flag("--smoke");
  const std::filesystem::path path = options.text("--path", ".");
  const std::string json_path = options.text("--json");
  options.end();
  constexpr int kWindows = 20;
  int failed = 0;
  std::string json;
  const double flush = flush_seconds(path);
  fmt::print("a flush of the drive takes {:.1f} ms\n", flush * 1e3);
  fmt::print("{:<18} {:>10} {:>10} {:>7} {:>10}\n", "cell", "step", "expected", "ratio", "explained");
  for (const bench::TimedCell& cell : bench::kTimedCells) {
    const bench::TemporaryDirectory directory(path, fmt::format("step-time-{}", cell.name));
    const bench::TimedSteps timed = bench::time_steps(cell, directory.path(), smoke ? 1 : kWindows, flush);
    const double expected = timed.predicted.expected_seconds;
    const bool in_time = timed.seconds <= 1.1 * expected && timed.seconds >= 0.9 * expected;
    const bool holds = in_time && timed.explained >= 0.99;
    fmt::print("{:<18} {:>8.1f}ms {:>8.1f}ms {:>7.2f} {:>9.2f}%{}\n", cell.name, timed.seconds * 1e3, expected * 1e3,
               timed.seconds / expected, timed.explained * 100, holds || smoke ? "" : "  DOES NOT HOLD");
    std::fflush(stdout);
    json += fmt::format(R"({}{{"cell":"{}","seconds":{},"expected_seconds":{},"explained":{}}})",
                        json.empty() ? "" : ",", cell.name, timed.seconds, expected, timed.explained);
    if (smoke) break;
    if (!holds) failed = 1;
  }
  bench::write_json(json_path, fmt::format(R"({{"flush_seconds":{},"cells":[{}]}})", flush, json));
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main([&] { return run(argc, argv); });
}
