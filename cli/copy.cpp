// SPDX-License-Identifier: Apache-2.0
// hoist copy: a commit of a store as another store, which a run can continue from.
#include <filesystem>
#include <memory>

#include <fmt/format.h>

#include <hoist/core/open_file.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

#include "commands.hpp"
#include "output.hpp"
#include "progress.hpp"
#include "store_directory.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;

struct CopyArguments {
  std::string store;
  std::vector<std::string> to;
  std::string step;  // empty: the newest
  std::string from;  // a named checkpoint; empty: a commit
  std::string bytes_per_second;
  std::string json;
};

// Below each directory, as a configuration's nvme_path names it.
std::vector<std::string> store_directories(const std::vector<std::string>& to) {
  std::vector<std::string> directories;
  for (const std::string& directory : to) directories.push_back(plain_path(std::filesystem::path(directory) / "hoist"));
  return directories;
}

// Returns the report.
Json make_copy(const CopyArguments& arguments) {
  const std::uint64_t rate = rate_of(arguments.bytes_per_second);
  const StoredJob job = find_job({arguments.store}, arguments.from);
  const StoredModelOptions which = choose_commit(job, arguments.step, arguments.from);
  const std::vector<std::string> directories = store_directories(arguments.to);
  StoredModel model(job.groups.front().directory, which);

  const StoreCopyReport report =
      model.copy({.directories = directories, .bytes_per_second = rate, .progress = reported_as("copying")});
  say("step {} of {}, {}: {} of {} copied to {}{}\n", report.step, job.groups.front().directory,
      format_bytes(report.data_bytes), report.ranks_copied, counted(model.world_size(), "rank"), directories.front(),
      report.ranks_compared > 0 ? fmt::format("; {} already there, and the same", report.ranks_compared) : "");
  return {{"store", job.groups.front().directory},
          {"to", directories},
          {"step", report.step},
          {"world_size", model.world_size()},
          {"ranks_copied", report.ranks_copied},
          {"ranks_compared", report.ranks_compared},
          {"data_bytes", report.data_bytes}};
}

int copy_store(const CopyArguments& arguments) {
  check_json(arguments.json);
  write_json(arguments.json, make_copy(arguments));
  return kOk;
}

}  // namespace

Command add_copy(CLI::App& app) {
  CLI::App* command = app.add_subcommand("copy", "Copy a commit of a store, verified, to another directory");
  auto arguments = std::make_shared<CopyArguments>();
  command->add_option("STORE", arguments->store, "The store's directory, or the nvme_path above it")->required();
  command
      ->add_option("--to", arguments->to,
                   "The nvme_path of the copy, whose subdirectory hoist is made; several to spread it over drives")
      ->required()
      ->type_name("DIR");
  add_commit_options(*command, arguments->step, arguments->from);
  command
      ->add_option("--bytes-per-second", arguments->bytes_per_second,
                   "Copy no faster on average, so that others can use the drives as well")
      ->type_name("BYTES");
  command->add_option("--json", arguments->json, "Write what was copied as JSON to this file");
  command->footer(
      "Example: hoist copy /local_nvme --to /backup --bytes-per-second 200MB\n"
      "A run continues from the copy as from the store: name its directory as nvme_path. Named checkpoints are not\n"
      "copied along. When it was interrupted, run it again: ranks that are finished are compared, and the others "
      "copied.");
  return {command, [arguments] { return copy_store(*arguments); },
          "; the same command continues with the ranks that are not finished"};
}

}  // namespace hoist::cli
