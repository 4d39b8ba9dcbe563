// SPDX-License-Identifier: Apache-2.0
// hoist tune: finds the block size and queue depth that suit these drives, and writes them into a configuration.
#include "tune.hpp"

#include <algorithm>
#include <filesystem>
#include <memory>

#include <fmt/format.h>
#include <unistd.h>

#include <hoist/config/config.hpp>
#include <hoist/config/plain_json.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/named_file.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/units.hpp>

#include "commands.hpp"
#include "interrupt.hpp"
#include "json_edit.hpp"
#include "output.hpp"
#include "storage.hpp"

namespace hoist::cli {

namespace {

constexpr double kBudgetSeconds = 20;
// Part of the time budget: for the last measurement to end and the files to be removed.
constexpr double kMargin = 0.05;

struct TuneArguments {
  std::vector<std::string> paths;
  std::string size = "1GiB";
  double seconds = kBudgetSeconds;
  std::string engine;
  std::string out;
  std::string merge;
  std::string plot;
  std::string json;
  bool full = false;
  bool quiet = false;
};

std::uint64_t largest_footprint() {
  std::uint64_t bytes = 0;
  for (const measure::Setting& setting : measure::standard_settings())
    bytes = std::max(bytes, setting.footprint_bytes());
  return bytes;
}

void check_target(const std::string& option, const std::string& path) {
  namespace fs = std::filesystem;
  if (path.empty()) return;
  std::error_code ignored;
  if (fs::is_directory(path, ignored))
    throw UsageError(fmt::format("{} {}: is a directory; name a file", option, path));
  const fs::path parent = fs::absolute(path, ignored).parent_path();
  if (::access(parent.c_str(), W_OK | X_OK) != 0)
    throw UsageError(
        fmt::format("{} {}: no file can be written in {}; choose another directory", option, path, parent.string()));
}

// Checked before anything is measured, so that an unusable --merge file does not cost twenty seconds.
std::string read_config(const std::string& path) {
  if (path.empty()) return {};
  try {
    const std::string text = read_file(path, "name the configuration to change");
    std::string edited = text;
    for (const std::string_view section : {"aio", "hoist"})
      edited = with_member(edited, std::array{section, std::string_view("probe")}, 0);
    const std::array<std::string_view, 3> measured{"hoist", "measured", "probe"};
    static_cast<void>(with_member(edited, measured, 0));
    return text;
  } catch (const IoError& error) {
    throw UsageError(fmt::format("--merge: {}", error.what()));
  } catch (const JsonEditError& error) {
    throw UsageError(fmt::format("--merge {}: {}; `hoist check` says more", path, error.what()));
  }
}

// --engine, or else the engine that the configuration to change names: the values are for training with it.
aio::BackendKind engine_to_measure(const TuneArguments& arguments, const std::string& config_text) {
  if (!arguments.engine.empty()) return parse_engine_option(arguments.engine);
  const auto config = nlohmann::ordered_json::parse(config::plain_json(config_text), nullptr, false);
  const nlohmann::ordered_json::json_pointer key("/hoist/io_engine");
  if (!config.contains(key)) return aio::BackendKind::automatic;
  if (config[key] == "io_uring") return aio::BackendKind::io_uring;
  if (config[key] == "threads") return aio::BackendKind::threads;
  return aio::BackendKind::automatic;
}

class Tuning {
 public:
  Tuning(const TuneArguments& arguments, aio::BackendKind backend, const measure::StopFlag* stop)
      : arguments_(arguments),
        stop_(stop),
        begin_(Clock::now()),
        file_bytes_(parse_size_option("--size", arguments.size)),
        backend_(backend) {}

  TuneReport run() {
    check();
    StorageRig rig(arguments_.paths, round_down(file_bytes_, kMiB), largest_footprint());
    rig.fill(stop_, style());
    TuneReport report;
    report.paths = arguments_.paths;
    report.storage = rig.storage();
    report.warnings = rig.warnings();
    {
      const auto drives = rig.drives(drive_options(measure::standard_settings().front()));
      report.engine = engine_name(drives.front()->queue());
      report.engine_description = drives.front()->queue().description();
    }
    report.search = search(rig, measure::quick_rounds(arguments_.seconds / kBudgetSeconds), "searching,",
                           [&] { return to_seconds(Clock::now() - begin_) > arguments_.seconds * (1 - kMargin); });
    report.seconds = to_seconds(Clock::now() - begin_);
    if (arguments_.full) {
      report.full = search(rig, measure::full_round(), "full sweep,", {});
      report.runoff = search(rig, measure::runoff_round(), "runoff,", {}, contenders(report));
    }
    if (!report.search.complete) {
      report.warnings.emplace_back(
          "time ran out before the search was done (the drives are slow, or another program uses them); give it more "
          "--seconds");
    }
    report.warnings.emplace_back(
        "writing was measured for seconds: many drives slow down when they write for minutes (SLC cache); `hoist bench "
        "io --op write --seconds 120` shows the sustained speed");
    return report;
  }

 private:
  void check() const {
    if (!(arguments_.seconds >= 1 && arguments_.seconds <= 3600))  // also refuses nan
      throw UsageError(fmt::format("--seconds {}: must be 1 to 3600", arguments_.seconds));
    if (backend_ == aio::BackendKind::null)
      throw UsageError("--engine null: moves no data, so there is nothing to tune; choose io_uring or threads");
    if (file_bytes_ < largest_footprint()) {
      throw UsageError(fmt::format("--size {}: at least {} are needed, the largest amount in flight",
                                   format_bytes(file_bytes_), format_bytes(largest_footprint())));
    }
    check_paths(arguments_.paths, file_bytes_);
  }

  ProgressStyle style() const { return arguments_.quiet ? ProgressStyle::quiet : ProgressStyle::automatic; }

  measure::DriveOptions drive_options(const measure::Setting& setting) const {
    return {.backend = backend_,
            .block_bytes = setting.block_bytes,
            .queue_depth = setting.queue_depth,
            .thread_count = setting.queue_depth};
  }

  // The chosen setting, and each that is best for a pattern.
  static std::vector<measure::Setting> contenders(const TuneReport& report) {
    std::vector<measure::Setting> settings{report.chosen().setting};
    for (std::size_t pattern = 0; pattern < measure::kPatterns.size(); ++pattern) {
      const measure::Setting best = best_of(*report.full, pattern).setting;
      if (std::ranges::find(settings, best) == settings.end()) settings.push_back(best);
    }
    return settings;
  }

  measure::SearchResult search(const StorageRig& rig, std::vector<measure::SearchRound> rounds, const char* what,
                               std::function<bool()> out_of_time,
                               std::vector<measure::Setting> settings = measure::standard_settings()) {
    std::unique_ptr<Progress> progress;
    std::uint64_t seed = 0;
    return measure::search_settings(
        {.settings = std::move(settings),
         .rounds = std::move(rounds),
         .measure =
             [&](const measure::Setting& setting, measure::Pattern pattern, Nanoseconds leg) {
               const auto drives = rig.drives(drive_options(setting));
               const auto pointers_of_drives = pointers(drives);
               return measure::run_workload(pointers_of_drives, {.pattern = pattern,
                                                                 .region = {0, round_down(file_bytes_, kMiB)},
                                                                 .duration = leg,
                                                                 .seed = ++seed,
                                                                 .stop = stop_})
                   .bytes_per_second();
             },
         .out_of_time = std::move(out_of_time),
         .progress =
             [&](std::size_t done, std::size_t total) {
               if (!progress) {
                 progress = std::make_unique<Progress>(ProgressOptions{.what = std::string(what) + " measurement",
                                                                       .unit = ProgressOptions::Unit::count,
                                                                       .total = total,
                                                                       .style = style()});
               }
               progress->update(done);
             }});
  }

  const TuneArguments& arguments_;
  const measure::StopFlag* stop_;
  const TimePoint begin_;
  const std::uint64_t file_bytes_;
  const aio::BackendKind backend_;
};

// hoist's own verdict on the file that is about to be written.
void warn_if_refused(TuneReport& report, const std::string& text, const std::string& path) {
  try {
    static_cast<void>(Config::parse(text, path));
  } catch (const ConfigError& error) {
    report.warnings.push_back(fmt::format("`hoist check {}` refuses the file: {}", path, error.what()));
  }
}

// Writes the settings and returns the path; empty if none was named. Reads the configuration anew: it may have been
// edited meanwhile.
std::string write_settings(const TuneArguments& arguments, TuneReport& report) {
  const std::string target = arguments.out.empty() ? arguments.merge : arguments.out;
  if (target.empty()) return target;
  const std::string text = arguments.merge.empty() ? configuration(report).dump(2) + "\n"
                                                   : merged_configuration(read_config(arguments.merge), report);
  warn_if_refused(report, text, target);
  write_output(target, text);
  return target;
}

// The results are printed in any case.
void write_results(const TuneArguments& arguments, TuneReport& report) {
  std::string target;
  try {
    target = write_settings(arguments, report);
  } catch (const std::exception&) {
    say("{}\n{}\n", to_text(report), configuration(report).dump(2));
    throw;
  }
  say("{}", to_text(report));
  if (target.empty()) {
    say("\n{}\n", configuration(report).dump(2));
  } else {
    say("\nwritten to {}\n", target);
  }
  write_json(arguments.json, to_json(report));
  if (!arguments.plot.empty()) write_output(arguments.plot, to_svg(report));
}

int tune(const TuneArguments& arguments) {
  check_target("--out", arguments.out);
  check_target("--merge", arguments.merge);
  check_target("--plot", arguments.plot);
  check_json(arguments.json);
  const OutputPath json{"--json", arguments.json}, plot{"--plot", arguments.plot};
  check_outputs_apart({json, plot}, {arguments.merge});
  check_outputs_apart({json, plot, {"--out", arguments.out}}, {});
  check_replaces_only({"--out", arguments.out}, arguments.merge, "name it with --merge");
  const aio::BackendKind backend = engine_to_measure(arguments, read_config(arguments.merge));
  const InterruptGuard interrupt;
  TuneReport report = Tuning(arguments, backend, interrupt.flag()).run();
  write_results(arguments, report);
  return kOk;
}

}  // namespace

Command add_tune(CLI::App& app) {
  CLI::App* command = app.add_subcommand("tune", "Find the io settings that suit these drives, in 20 seconds");
  auto arguments = std::make_shared<TuneArguments>();
  command->add_option("--path", arguments->paths, "A directory on the drive; give it again for each further drive")
      ->required();
  command->add_option("--size", arguments->size, "Bytes of the file in each directory [1GiB]");
  command->add_option(
      "--seconds", arguments->seconds,
      "Seconds of the search, with the writing of the files, but at least one pass over the settings [20]");
  command->add_option(
      "--engine", arguments->engine,
      "io_uring or threads [with --merge the file's hoist.io_engine, else io_uring if the system allows it]");
  command->add_option("--out", arguments->out, "Write the settings to this file, which is a new one");
  command->add_option(
      "--merge", arguments->merge,
      "Set them in this configuration and leave the rest as it is; with --out, write the result there instead");
  command->add_flag("--full", arguments->full,
                    "Afterwards measure every setting, and the best ones again, to judge the choice (a minute)");
  command->add_option("--plot", arguments->plot, "Draw the sweep into this SVG file");
  command->add_option("--json", arguments->json, "Write all measurements as JSON to this file");
  command->add_flag("--quiet", arguments->quiet, "No progress");
  command->footer("Example: hoist tune --path /local_nvme --merge offload.json --plot sweep.svg");
  return {command, [arguments] { return tune(*arguments); }, "; its files are removed and nothing was written"};
}

}  // namespace hoist::cli
