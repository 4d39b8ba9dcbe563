// SPDX-License-Identifier: Apache-2.0
// cli/commands.hpp - the commands of `hoist`. Each registers itself and runs if the user chose it.
#pragma once

#include <concepts>
#include <functional>
#include <string>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

namespace hoist::cli {

enum ExitCode { kOk = 0, kFailure = 1, kBadInput = 2 };

// A command of the program. After parsing, `run` is called if the user chose the command; it returns the exit code.
// is_bad_input() tells which errors of it become exit code 2; measure::Interrupted ends the program by the signal.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
  const char* interrupted = "";  // what an interruption leaves, for people: "; its files are removed"
};

// Refuses an option's value that is no number of this type, or is out of range. CLI::Range calls "8.0" out of range,
// and accepts "nan". `name`: of the value, in the help.
template <typename Number>
CLI::Validator between(Number least, Number most, const char* name) {
  return CLI::Validator(
      [least, most](const std::string& text) {
        Number value = 0;
        const bool reads = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
        if (reads) return std::string();
        if constexpr (std::integral<Number>)
          return fmt::format("{} is not an integer from {} to {}", text, least, most);
        else
          return fmt::format("{} is not a number from {:g} to {:g}", text, least, most);
      },
      name);
}
inline CLI::Validator rank_count() { return between(1, 1 << 24, "COUNT"); }

// Each adds its command to `app`.
Command add_check(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_completion(CLI::App& app);
Command add_inspect(CLI::App& app);
Command add_verify(CLI::App& app);
Command add_export(CLI::App& app);
Command add_copy(CLI::App& app);
Command add_doctor(CLI::App& app);
Command add_bench(CLI::App& app);
Command add_tune(CLI::App& app);
Command add_bench_optimizer(CLI::App& bench);  // of `bench`, which runs it

}  // namespace hoist::cli
