// SPDX-License-Identifier: Apache-2.0
// bench_step_time - do steps take as long as predicted, and is their time explained? Real steps on a drive and with
// kernels of known speed. Prints a line for each cell; ends with 1 when a claim does not hold:
//
//   a step takes within 10 % of the expected time
//   at least 99 % of its time is a kernel's, or a wait's with a cause
//
//   bench_step_time --path DIR [--smoke]      --smoke: one cell, whose time is not judged
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>

#include <fmt/format.h>

#include "timed_steps.hpp"

using namespace hoist;

int main(int argc, char** argv) {
  std::filesystem::path path = ".";
  bool smoke = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--smoke") == 0) smoke = true;
    if (std::strcmp(argv[i], "--path") == 0 && i + 1 < argc) path = argv[++i];
  }
  constexpr int kWindows = 20;
  int failed = 0;
  fmt::print("{:<18} {:>10} {:>10} {:>7} {:>10}\n", "cell", "step", "expected", "ratio", "explained");
  for (const bench::TimedCell& cell : bench::kTimedCells) {
    const std::filesystem::path directory = path / fmt::format("step-time-{}", cell.name);
    std::filesystem::remove_all(directory);
    std::filesystem::create_directories(directory);
    const bench::TimedSteps timed = bench::time_steps(cell, directory, smoke ? 1 : kWindows);
    std::filesystem::remove_all(directory);
    const double expected = timed.predicted.expected_seconds;
    const bool in_time = timed.seconds <= 1.1 * expected && timed.seconds >= 0.9 * expected;
    const bool holds = in_time && timed.explained >= 0.99;
    fmt::print("{:<18} {:>8.1f}ms {:>8.1f}ms {:>7.2f} {:>9.2f}%{}\n", cell.name, timed.seconds * 1e3, expected * 1e3,
               timed.seconds / expected, timed.explained * 100, holds || smoke ? "" : "  DOES NOT HOLD");
    std::fflush(stdout);
    if (!holds) failed = 1;
    if (smoke) return 0;
  }
  return failed;
}
