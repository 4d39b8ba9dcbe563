// SPDX-License-Identifier: Apache-2.0
// hoist export: a store's weights as safetensors files.
#include <cstdio>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/units.hpp>
#include <hoist/interchange/export.hpp>
#include <hoist/interchange/safetensors.hpp>
#include <hoist/measure/interruption.hpp>
#include <hoist/zero/checkpoint/stored_job.hpp>

#include "commands.hpp"
#include "output.hpp"
#include "progress.hpp"
#include "storage.hpp"
#include "store_directory.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;

struct ExportArguments {
  std::vector<std::string> stores;
  std::string to;
  std::string dtype = "fp32";
  std::string step;  // empty: the newest
  std::string from;  // a named checkpoint; empty: a commit
  std::string shard_size = "5GB";
  std::string json;
  bool universal = false;
};

Json report_json(const ExportArguments& arguments, std::uint64_t step, const interchange::ExportReport& report) {
  const auto& stores = arguments.stores;
  return {{"store", stores.size() == 1 ? Json(stores.front()) : Json(stores)},
          {"step", step},
          {"dtype", arguments.dtype},
          {"tensors", report.tensor_count},
          {"elements", report.element_count},
          {"data_bytes", report.data_bytes},
          {"files", report.files}};
}

// Warns, because a slice by itself looks like a model.
void warn_of_other_groups(const std::string& directory, const StoreSummary& store) {
  const std::vector<std::string> others = other_groups(directory, store);
  if (others.empty()) return;
  complain("hoist export: this is one sharding group's part of a job; name {} as well to export what all groups have\n",
           fmt::join(others, " "));
}

// hoist.optim (python/hoist/optim/offload.py) makes such names.
void warn_of_made_names(const StoredJob& job) {
  std::vector<std::string> unnamed;
  for (const StoreSummary& group : job.groups) {
    for (const StoredParameter& parameter : group.parameters) {
      const std::string& name = parameter.name;
      const std::size_t digits = std::string_view("parameter ").size();
      if (name.starts_with("parameter ") && name.find_first_of("0123456789", digits) == digits) unnamed.push_back(name);
    }
  }
  const auto first_of = [](const std::vector<std::string>& names) {
    const std::size_t others = names.size() - 1;
    return fmt::format("'{}'", names.front()) +
           (others > 0 ? fmt::format(" and {} other{}", others, others > 1 ? "s" : "") : "");
  };
  if (!unnamed.empty())
    complain(
        "hoist export: the program made its optimizer without names: {}; give hoist.optim model.named_parameters() "
        "instead of model.parameters()\n",
        first_of(unnamed));
}

// Returns the report.
Json write_weights(const ExportArguments& arguments) {
  const std::uint64_t shard_bytes_max = parse_size_option("--shard-size", arguments.shard_size);
  const StoredJob job = find_job(arguments.stores, arguments.from);
  const StoredModelOptions options = choose_commit(job, arguments.step, arguments.from);
  if (job.groups.size() == 1) warn_of_other_groups(arguments.stores.front(), job.groups.front());
  std::vector<std::unique_ptr<StoredModel>> slices;
  std::vector<StoredModel*> borrowed;
  for (const StoreSummary& group : job.groups) {
    slices.push_back(std::make_unique<StoredModel>(group.directory, options));
    borrowed.push_back(slices.back().get());
  }
  warn_of_made_names(job);

  const interchange::ExportReport report = interchange::export_model(borrowed, {.directory = arguments.to,
                                                                                .dtype = *parse_dtype(arguments.dtype),
                                                                                .shard_bytes_max = shard_bytes_max,
                                                                                .progress = reported_as("exporting")});
  say("step {} of {}: {}, {} as {}, {}\n", borrowed.front()->step(), names_of(job),
      counted(report.tensor_count, "tensor"), counted(report.element_count, "parameter"), arguments.dtype,
      format_bytes(report.data_bytes));
  for (const std::string& file : report.files) say("  {}\n", file);
  return report_json(arguments, borrowed.front()->step(), report);
}

// Files of torch.save are PyTorch's to write.
int name_universal_command(const ExportArguments& arguments) {
  if (arguments.stores.size() > 1)
    throw UsageError("--universal takes one store: the Python command does not join the stores of several groups");
  std::string which = arguments.step.empty() ? "" : " --step " + shell_quoted(arguments.step);
  if (!arguments.from.empty()) which += " --checkpoint " + shell_quoted(arguments.from);
  say("A universal checkpoint of DeepSpeed's is written by hoist's Python package:\n"
      "  python -m hoist.torch.deepspeed export {} --to {}{} --config FILE\n"
      "FILE is the JSON that DeepSpeed will continue with.\n",
      shell_quoted(arguments.stores.front()), shell_quoted(arguments.to), which);
  return kOk;
}

int export_store(const ExportArguments& arguments) {
  if (arguments.universal) return name_universal_command(arguments);
  Json report;
  try {
    check_json(arguments.json);
    report = write_weights(arguments);
  } catch (const measure::Interrupted&) {
    throw;
  } catch (const Error& error) {
    if (dynamic_cast<const UsageError*>(&error) != nullptr) throw;
    complain("hoist export: {}\nNo file of this export remains in {}.\n", error.what(), arguments.to);
    if (dynamic_cast<const CorruptionError*>(&error) != nullptr && !arguments.step.empty()) {
      complain("The blocks of an earlier step are reused by the next one; try without --step.\n");
    }
    return is_bad_input(error) ? kBadInput : kFailure;
  }
  write_json(arguments.json, report);
  return kOk;
}

}  // namespace

Command add_export(CLI::App& app) {
  CLI::App* command = app.add_subcommand("export", "Write a store's weights as safetensors files");
  auto arguments = std::make_shared<ExportArguments>();
  add_stores(*command, arguments->stores);
  command->add_option("--to", arguments->to, "Directory for the files; created if it does not exist")
      ->required()
      ->type_name("DIR");
  CLI::Option* const dtype =
      command
          ->add_option("--dtype", arguments->dtype,
                       "fp32: the masters, bit by bit; bf16 or fp16: the weights that the forward pass uses [fp32]")
          ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  add_commit_options(*command, arguments->step, arguments->from);
  CLI::Option* const shard_size = command
                                      ->add_option("--shard-size", arguments->shard_size,
                                                   "Begin another file before one holds more than this [5GB]")
                                      ->type_name("BYTES");
  CLI::Option* const json =
      command->add_option("--json", arguments->json, "Write what was exported as JSON to this file");
  command
      ->add_flag("--universal", arguments->universal,
                 "Only print the Python command that writes a DeepSpeed universal checkpoint")
      ->excludes(dtype)
      ->excludes(shard_size)
      ->excludes(json);
  command->footer(
      "Example: hoist export /local_nvme --to weights/ --dtype bf16\n"
      "The files are named as Hugging Face's tools name them: model.safetensors, or shards and "
      "model.safetensors.index.json.");
  return {command, [arguments] { return export_store(*arguments); }, "; no file of this export remains"};
}

}  // namespace hoist::cli
