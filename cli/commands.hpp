// SPDX-License-Identifier: Apache-2.0
// cli/commands.hpp - the commands of `hoist`. Each registers itself and runs if the user chose it.
#pragma once

#include <functional>

#include <CLI/CLI.hpp>

namespace hoist::cli {

enum ExitCode { kOk = 0, kFailure = 1, kBadInput = 2 };

// Adds the command to `app`. After parsing, `run` is called if the user chose the command; it returns the exit code.
// Errors of it: UsageError and BudgetError become exit code 2; measure::Interrupted ends the program by the signal.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
  const char* interrupted = "";  // what an interruption leaves, for people: "; its files are removed"
};

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
