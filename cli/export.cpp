// SPDX-License-Identifier: Apache-2.0
// hoist export: a store's weights as safetensors files.
#include <cstdio>
#include <memory>

#include <fmt/format.h>

#include <hoist/core/units.hpp>
#include <hoist/interchange/export.hpp>
#include <hoist/interchange/safetensors.hpp>

#include "commands.hpp"
#include "interrupt.hpp"
#include "output.hpp"
#include "progress.hpp"
#include "store_directory.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;

struct ExportArguments {
  std::string store;
  std::string to;
  std::string dtype = "fp32";
  std::string step;  // empty: the newest
  std::string from;  // a kept step; empty: a commit
  std::string shard_size = "5GB";
  std::string json;
};

// The wanted step, known to be there.
std::optional<std::uint64_t> chosen_step(const std::string& text, const StoreSummary& store) {
  if (text.empty()) return std::nullopt;
  std::string held;
  for (const tiers::CommitHeader& commit : store.commits) {
    const std::string step = fmt::format("{}", commit.step);
    if (step == text) return commit.step;
    held += (held.empty() ? "" : ", ") + step;
  }
  throw BadInput(fmt::format("--step {}: {} holds {}", text, store.directory,
                             held.empty() ? "no step that every rank has" : "the steps " + held));
}

void check_kept(const std::string& name, const StoreSummary& store) {
  if (name.empty() || std::ranges::find(store.kept, name, &tiers::CommitHeader::name) != store.kept.end()) return;
  std::string held;
  for (const tiers::CommitHeader& kept : store.kept) held += (held.empty() ? "" : ", ") + kept.name;
  throw BadInput(fmt::format("--from {}: {} keeps {}", name, store.directory,
                             held.empty() ? "no step under a name" : "the steps " + held));
}

std::uint64_t shard_bytes(const std::string& text) {
  const auto bytes = parse_bytes(text);
  if (!bytes || *bytes == 0) throw BadInput(fmt::format("--shard-size {} is not a byte count such as 5GB", text));
  return *bytes;
}

Json report_json(const ExportArguments& arguments, const StoredModel& model, const interchange::ExportReport& report) {
  return {{"store", arguments.store},
          {"step", model.step()},
          {"dtype", arguments.dtype},
          {"tensors", report.tensor_count},
          {"elements", report.element_count},
          {"data_bytes", report.data_bytes},
          {"files", report.files}};
}

DType dtype_of(const std::string& name) {
  for (const DType dtype : {DType::bf16, DType::fp16})
    if (name == dtype_name(dtype)) return dtype;
  return DType::fp32;
}

// Returns the report.
Json write_weights(const ExportArguments& arguments) {
  const std::uint64_t shard_bytes_max = shard_bytes(arguments.shard_size);
  const StoreSummary store = look_at_store(find_store(arguments.store));
  const auto step = chosen_step(arguments.step, store);
  check_kept(arguments.from, store);
  StoredModel model(store.directory, {.step = step, .from = arguments.from});
  const bool has_bf16 =
      std::ranges::find(store.parameters, DType::bf16, &StoredParameter::dtype) != store.parameters.end();
  if (dtype_of(arguments.dtype) == DType::fp16 && has_bf16)
    throw BadInput("--dtype fp16: the store's model is bf16, of which fp16 would lose range; use bf16 or fp32");

  const InterruptGuard interrupt;
  std::optional<Progress> progress;
  const interchange::ExportReport report =
      interchange::export_model(model, {.directory = arguments.to,
                                        .dtype = dtype_of(arguments.dtype),
                                        .shard_bytes_max = shard_bytes_max,
                                        .progress = [&](std::uint64_t done, std::uint64_t total) {
                                          measure::throw_if_stopped(interrupt.flag());
                                          if (!progress)
                                            progress.emplace(ProgressOptions{.what = "exporting", .total = total});
                                          progress->update(done);
                                        }});
  progress.reset();
  say("step {} of {}: {} tensors, {} parameters as {}, {}\n", model.step(), store.directory, report.tensor_count,
      report.element_count, arguments.dtype, format_bytes(report.data_bytes));
  for (const std::string& file : report.files) say("  {}\n", file);
  return report_json(arguments, model, report);
}

int export_store(const ExportArguments& arguments) {
  Json report;
  try {
    check_json(arguments.json);
    report = write_weights(arguments);
  } catch (const BadInput& error) {
    complain("hoist export: {}\n", error.what());
    return kBadInput;
  } catch (const interchange::SafetensorsError& error) {  // the destination holds a model, or a name fits no file
    complain("hoist export: {}\n", error.what());
    return kBadInput;
  } catch (const measure::Interrupted&) {
    complain("hoist export: interrupted; nothing was left in {}\n", arguments.to);
    InterruptGuard::end_by_signal();
  } catch (const Error& error) {
    complain("hoist export: {}\nNothing was left in {}.\n", error.what(), arguments.to);
    if (dynamic_cast<const CorruptionError*>(&error) != nullptr && !arguments.step.empty()) {
      complain("The blocks of an earlier step are reused by the next one; try without --step.\n");
    }
    return kFailure;
  }
  write_json(arguments.json, report);
  return kOk;
}

}  // namespace

Command add_export(CLI::App& app) {
  CLI::App* command = app.add_subcommand("export", "Write a store's weights as safetensors files");
  auto arguments = std::make_shared<ExportArguments>();
  command->add_option("STORE", arguments->store, "The store's directory, or the nvme_path above it")->required();
  command->add_option("--to", arguments->to, "Directory for the files; made when it does not exist")
      ->required()
      ->type_name("DIR");
  command
      ->add_option("--dtype", arguments->dtype,
                   "fp32: the masters, bit by bit; bf16 or fp16: what the forward pass uses")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command->add_option("--step", arguments->step, "Which of the steps `hoist inspect` lists; the newest by default")
      ->type_name("N");
  command->add_option("--from", arguments->from, "The kept step of this name instead")
      ->excludes("--step")
      ->type_name("NAME");
  command->add_option("--shard-size", arguments->shard_size, "Begin another file before one holds more than this")
      ->capture_default_str()
      ->type_name("BYTES");
  command->add_option("--json", arguments->json, "Write what was exported as JSON to this file");
  command->footer(
      "Example: hoist export /local_nvme --to weights/ --dtype bf16\n"
      "The files are those of Hugging Face: model.safetensors, or shards and model.safetensors.index.json.");
  return {command, [arguments] { return export_store(*arguments); }};
}

}  // namespace hoist::cli
