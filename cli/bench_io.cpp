// SPDX-License-Identifier: Apache-2.0
// hoist bench io: measures drives, and compares with fio.
#include "bench_io.hpp"

#include <memory>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>

#include "commands.hpp"
#include "interrupt.hpp"
#include "output.hpp"
#include "storage.hpp"

namespace hoist::cli {

namespace {

using measure::Pattern;

struct BenchIoArguments {
  std::vector<std::string> paths;
  std::string size = "4GiB";
  std::string op = "read";
  std::string block_size = "1MiB";
  std::int64_t queue_depth = 32;
  std::string engine;
  std::int64_t threads = 4;
  double seconds = 0;  // 0: once over the file
  std::string compare;
  std::int64_t pairs = 40;
  std::string json;
  bool quiet = false;
};

// The arguments, checked.
struct BenchIoPlan {
  Pattern pattern = Pattern::read;
  measure::DriveOptions drive;
  std::uint64_t move_bytes = 0;  // on each drive, if there is no time limit
  std::uint64_t file_bytes = 0;
  Nanoseconds duration{0};
  std::string compare;
  unsigned pairs = 0;
  ProgressStyle style = ProgressStyle::automatic;
};

// In a shorter run, drives still write into their own cache (SLC), and a mean of reads is mostly chance.
constexpr double kSustainedWriteSeconds = 60;
constexpr double kSettledReadSeconds = 3;

Pattern parse_pattern(const std::string& text) {
  for (const Pattern pattern : {Pattern::read, Pattern::write, Pattern::mixed}) {
    if (text == measure::pattern_name(pattern)) return pattern;
  }
  throw UsageError(fmt::format("--op {}: must be read, write or mixed", text));
}

void check_numbers(const BenchIoArguments& arguments) {
  if (!(arguments.seconds >= 0 && arguments.seconds <= 86400))  // also refuses nan
    throw UsageError(fmt::format("--seconds {}: must be 0 to 86400", arguments.seconds));
  if (arguments.threads < 1 || arguments.threads > 256)
    throw UsageError(fmt::format("--threads {}: must be 1 to 256", arguments.threads));
  if (arguments.pairs < 1 || arguments.pairs > 10000)
    throw UsageError(fmt::format("--pairs {}: must be 1 to 10000", arguments.pairs));
}

void check_comparison(const BenchIoPlan& plan) {
  if (plan.compare.empty()) return;
  if (plan.compare != "fio" && plan.compare != "libaio")
    throw UsageError(fmt::format("--compare {}: must be fio or libaio", plan.compare));
  if (plan.drive.backend == aio::BackendKind::null)
    throw UsageError("--compare with --engine null: the null engine moves no data, so there is nothing to compare");
  if (plan.compare == "fio") measure::require_fio();
  if (plan.compare == "libaio" && !measure::have_libaio())
    throw UsageError("--compare libaio: this build has no libaio; install libaio-dev and build again");
}

BenchIoPlan make_plan(const BenchIoArguments& arguments) {
  check_numbers(arguments);
  BenchIoPlan plan;
  plan.pattern = parse_pattern(arguments.op);
  plan.drive.backend = parse_engine_option(arguments.engine);
  plan.drive.block_bytes = parse_size_option("--block-size", arguments.block_size);
  check_block_bytes("--block-size", plan.drive.block_bytes);
  check_queue_depth("--queue-depth", arguments.queue_depth);
  plan.drive.queue_depth = static_cast<unsigned>(arguments.queue_depth);
  plan.drive.thread_count = static_cast<unsigned>(arguments.threads);
  const std::uint64_t size = parse_size_option("--size", arguments.size);
  if (size < plan.drive.block_bytes) {
    throw UsageError(fmt::format("--size {}: is smaller than one block of {}; raise it, or lower --block-size",
                                 format_bytes(size), format_bytes(plan.drive.block_bytes)));
  }
  plan.move_bytes = round_down(size, plan.drive.block_bytes);
  // The null engine touches no file; one block is enough.
  plan.file_bytes = plan.drive.backend == aio::BackendKind::null ? plan.drive.block_bytes : plan.move_bytes;
  plan.duration = std::chrono::nanoseconds(static_cast<std::int64_t>(arguments.seconds * 1e9));
  plan.compare = arguments.compare;
  plan.pairs = static_cast<unsigned>(arguments.pairs);
  if (arguments.quiet) plan.style = ProgressStyle::quiet;
  check_comparison(plan);
  check_paths(arguments.paths, plan.file_bytes);
  return plan;
}

measure::WorkloadResult run_once(const BenchIoPlan& plan, std::span<measure::Drive* const> drives,
                                 const measure::StopFlag* stop) {
  const bool timed = plan.duration.count() > 0;
  Progress progress({.what = fmt::format("measuring ({}),", measure::pattern_name(plan.pattern)),
                     .total = timed ? 0 : plan.move_bytes * drives.size(),
                     .style = plan.style});
  return measure::run_workload(drives, {.pattern = plan.pattern,
                                        .region = {0, plan.file_bytes},
                                        .bytes_max = timed ? 0 : plan.move_bytes,
                                        .duration = plan.duration,
                                        .stop = stop,
                                        .progress = [&](std::uint64_t done) { progress.update(done); }});
}

measure::ComparisonResult run_comparison(const BenchIoPlan& plan, std::span<measure::Drive* const> drives,
                                         const measure::StopFlag* stop) {
  const auto ours = measure::make_engine_contender(drives, stop);
  const auto theirs =
      plan.compare == "fio" ? measure::make_fio_contender(drives, stop) : measure::make_libaio_contender(drives, stop);
  Progress progress({.what = fmt::format("hoist and {} in turn, pair", plan.compare),
                     .unit = ProgressOptions::Unit::count,
                     .total = plan.pairs,
                     .style = plan.style});
  return measure::compare(*ours, *theirs, drives,
                          {.pattern = plan.pattern, .pairs = plan.pairs, .stop = stop, .progress = [&](unsigned done) {
                             progress.update(done);
                           }});
}

std::vector<std::string> run_warnings(const BenchIoPlan& plan, const measure::WorkloadResult& result) {
  if (plan.drive.backend == aio::BackendKind::null)
    return {"the null engine moves no data: only the processor time is meaningful"};
  if (plan.pattern != Pattern::read && result.seconds < kSustainedWriteSeconds) {
    return {
        fmt::format("{:.1f} s of writing is too short to be sustained: many drives take the first tens of gigabytes "
                    "into a fast cache (SLC) and then drop to a fraction; use --seconds 120",
                    result.seconds)};
  }
  if (result.seconds < kSettledReadSeconds) {
    return {
        fmt::format("{:.2f} s of reading says little, as drives change speed from second to second; use --seconds 10",
                    result.seconds)};
  }
  return {};
}

// Everything that needs the scratch files, which are removed when it returns.
BenchIoReport measure_all(const BenchIoArguments& arguments, const BenchIoPlan& plan, const measure::StopFlag* stop) {
  StorageRig rig(arguments.paths, plan.file_bytes, plan.drive.queue_depth * plan.drive.block_bytes);
  const auto drives = rig.drives(plan.drive);
  if (plan.drive.backend != aio::BackendKind::null) rig.fill(stop, plan.style);

  BenchIoReport report;
  report.pattern = plan.pattern;
  report.engine = engine_name(drives.front()->queue());
  report.engine_description = drives.front()->queue().description();
  report.block_bytes = plan.drive.block_bytes;
  report.queue_depth = plan.drive.queue_depth;
  report.file_bytes = plan.file_bytes;
  report.huge_pages = rig.page_kind() != platform::PageKind::normal;
  report.paths = arguments.paths;
  report.storage = rig.storage();
  for (const auto& drive : drives) report.direct.push_back(drive->file().file().is_direct());
  report.result = run_once(plan, pointers(drives), stop);
  try {
    if (!plan.compare.empty()) report.comparison = run_comparison(plan, pointers(drives), stop);
  } catch (const measure::Interrupted&) {
    throw;
  } catch (const Error& error) {  // the measurement before it counts
    report.comparison_failure = fmt::format("--compare {}: {}", plan.compare, error.what());
  }
  report.warnings = rig.warnings();
  for (std::string& warning : run_warnings(plan, report.result)) report.warnings.push_back(std::move(warning));
  return report;
}

int bench_io(const BenchIoArguments& arguments) {
  try {
    const BenchIoPlan plan = make_plan(arguments);
    check_json(arguments.json);
    const InterruptGuard interrupt;
    BenchIoReport report = measure_all(arguments, plan, interrupt.flag());
    say("{}", to_text(report));
    const bool failed = !report.comparison_failure.empty();
    if (failed) complain("hoist bench io: {}\n", report.comparison_failure);
    if (failed) report.warnings.push_back(report.comparison_failure);
    write_json(arguments.json, to_json(report));
    return failed ? kFailure : kOk;
  } catch (const BudgetError& error) {
    complain("hoist bench io: {}; lower --queue-depth or --block-size\n", error.what());
    return kBadInput;
  }
}

}  // namespace

Command add_bench(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Measure this machine");
  bench->require_subcommand(1);
  bench->footer("Example: hoist bench io --path /local_nvme --op mixed");
  CLI::App* command = bench->add_subcommand("io", "Measure drives: bandwidth, latency, processor time");
  auto arguments = std::make_shared<BenchIoArguments>();
  command->add_option("--path", arguments->paths, "A directory on the drive; give it again for each further drive")
      ->required();
  command->add_option("--size", arguments->size, "Bytes of the file in each directory [4GiB]");
  command->add_option("--op", arguments->op, "read, write or mixed: half reads, half writes, at random [read]");
  command->add_option("--block-size", arguments->block_size, "Bytes of one transfer [1MiB]");
  command->add_option("--queue-depth", arguments->queue_depth, "Transfers in flight on each drive [32]");
  command->add_option("--engine", arguments->engine,
                      "io_uring, threads, or null for hoist's own overhead [io_uring if the system allows it]");
  command->add_option("--threads", arguments->threads, "Threads of the engine `threads` [4]");
  command->add_option("--seconds", arguments->seconds, "Seconds to run [once over the file]");
  command->add_option("--compare", arguments->compare,
                      "fio or libaio: run it with the same pattern on the same files, in turn with hoist");
  command->add_option("--pairs", arguments->pairs, "Pairs of legs of about half a second for --compare [40]");
  command->add_option("--json", arguments->json, "Write the results as JSON to this file");
  command->add_flag("--quiet", arguments->quiet, "No progress");
  command->footer("Example: hoist bench io --path /local_nvme --size 8GiB --op read --compare fio --json io.json");
  const Command optimizer = add_bench_optimizer(*bench);
  return {bench, [arguments, optimizer] { return optimizer.app->parsed() ? optimizer.run() : bench_io(*arguments); },
          "; its files are removed"};
}

}  // namespace hoist::cli
