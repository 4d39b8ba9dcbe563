// SPDX-License-Identifier: Apache-2.0
// cli/main.cpp - the program `hoist`.
#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <exception>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include <hoist/core/error.hpp>
#include <hoist/core/standard_descriptors.hpp>
#include <hoist/measure/interruption.hpp>

#include "commands.hpp"
#include "interrupt.hpp"
#include "output.hpp"

namespace hoist::cli {
namespace {

// An empty value is usually an unset variable of a script: --step "$STEP" must not mean the newest step. Without
// quotes an unset variable leaves no word, and CLI11 takes the next option for the value. So a value that begins with
// -- must be joined to its option: --to=--universal.
void refuse_missing_values(const CLI::App& app, std::span<const char* const> words) {
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& value : option->results()) {
      if (value.empty()) throw CLI::ValidationError(option->get_name(), "the value is empty");
      if (!option->nonpositional() || !value.starts_with("--")) continue;
      const bool is_meant = std::ranges::any_of(option->get_lnames(), [&](const std::string& name) {
        return std::ranges::find(words, fmt::format("--{}={}", name, value)) != words.end();
      });
      if (!is_meant) {
        const std::string name = option->get_name();
        throw CLI::ValidationError(
            name, fmt::format("has no value before {}; write {}={} if that is meant", value, name, value));
      }
    }
  }
  for (const CLI::App* command : app.get_subcommands()) refuse_missing_values(*command, words);
}

// `--json -` of the command that was given.
bool asks_for_json_only(const CLI::App& app) {
  const CLI::Option* json = app.get_option_no_throw("--json");
  if (json != nullptr && json->count() > 0 && json->results().back() == "-") return true;
  return std::ranges::any_of(app.get_subcommands(),
                             [](const CLI::App* command) { return asks_for_json_only(*command); });
}

// If an unknown word stands in place of a command, CLI11 reports only that the command is missing.
std::string unknown_command(const CLI::App& app) {
  if (const auto given = app.get_subcommands(); !given.empty()) return unknown_command(*given.front());
  const std::vector<std::string> words = app.remaining();
  if (words.empty() || words.front().starts_with('-') || app.get_subcommands({}).empty()) return {};
  return fmt::format("there is no command `{}`; the commands are {}\n", words.front(),
                     listed(app.get_subcommands({}), &CLI::App::get_name));
}

int run(const Command& command) {
  try {
    return command.run();
  } catch (const measure::Interrupted&) {
    complain("hoist {}: interrupted{}\n", command.app->get_name(), command.interrupted);
    InterruptGuard::end_by_signal();
  } catch (const Error& error) {
    complain("hoist {}: {}\n", command.app->get_name(), error.what());
    return is_bad_input(error) ? kBadInput : kFailure;
  }
}

int run(int argc, char** argv) {
  CLI::App app{"hoist: model state on NVMe, pinned memory and GPU for ZeRO training.", "hoist"};
  app.set_version_flag("--version", "hoist " HOIST_VERSION);
  app.require_subcommand(1);
  app.footer("Exit codes: 0 success, 1 failure, 2 bad input.");
  const std::array commands{add_check(app), add_plan(app),   add_inspect(app), add_verify(app), add_export(app),
                            add_copy(app),  add_doctor(app), add_bench(app),   add_tune(app),   add_completion(app)};
  try {
    app.parse(argc, argv);
    refuse_missing_values(app, {argv, static_cast<std::size_t>(argc)});
  } catch (const CLI::ParseError& error) {
    std::ostringstream output, errors;
    const bool asked = app.exit(error, output, errors) == 0;  // --help and --version are no errors
    print_text(output.str());
    const std::string unknown = asked ? std::string() : unknown_command(app);
    complain_text(unknown.empty() ? errors.str() : unknown);
    return asked ? kOk : kBadInput;
  }
  if (asks_for_json_only(app)) keep_output_for_json();
  for (const Command& command : commands) {
    if (command.app->parsed()) return run(command);
  }
  return kBadInput;
}

}  // namespace
}  // namespace hoist::cli

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond `ulimit -f` becomes an error that names it instead of a signal
  std::signal(SIGPIPE, SIG_IGN);  // writing to a closed pipe is an error (EPIPE); the program still removes its files
  using namespace hoist::cli;
  hoist::occupy_standard_descriptors();
  int code = kFailure;
  try {
    code = run(argc, argv);
  } catch (const std::exception& error) {
    complain("hoist: {}\n", error.what());
  }
  return end_of_output(code);
}
