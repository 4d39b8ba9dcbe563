// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>
#include <hoist/zero/detail/engine_parts.hpp>
#include <hoist/zero/layout/step_rules.hpp>

namespace hoist::detail {

namespace {

// What the engine goes by. Its paths stay right when the program changes its directory.
EngineOptions checked(EngineOptions options, const Runtime& runtime, const Model& model) {
  check(options, runtime.options(), runtime.world_size());
  for (const std::optional<GroupOptions>& group : model.added_groups())
    if (group) check(*group, options, runtime.options());
  make_paths_absolute(options);
  return options;
}

}  // namespace

EngineParts::EngineParts(Runtime& runtime_in, const EngineOptions& options_in, Model model)
    : runtime(runtime_in),
      options(checked(options_in, runtime_in, model)),
      table(model, state_forms(options, model), runtime.world_size(), gradient_sums(options)),
      settings(options, table.model(), runtime.rank()),
      notifier(std::make_shared<AbortNotifier>(runtime)),
      ranks(runtime, *notifier),
      records(table) {}

void EngineParts::make_parts(const StoreDirectory& directory, StoreUse use, std::optional<std::uint64_t> former_run) {
  const bool create_store = use == StoreUse::create;
  const std::uint64_t run = create_store ? ranks.agree_on_run(former_run) : 0;
  if (const int size = detail::gathering_group(options, runtime.world_size()); size > 1)
    gathering_group = runtime.communicator().split(size);
  try {
    lay_out_and_start(directory, use, run);
  } catch (...) {  // also of another rank
    if (create_store && store) store->remove_new();
    throw;
  }
  checkpoints = std::make_unique<Checkpointer>(options, ranks, store.get(), store ? ranks.job().duplicate() : nullptr,
                                               *state_access, *updates);
  pass = std::make_unique<PassState>(options, table, ranks, *gatherer, *gradients);
  const StepParts parts{runtime,  options,      table,       *memory,   ranks,      settings,
                        *updates, streams,      *executor,   *gatherer, *gradients, weight_reader.get(),
                        *pass,    *checkpoints, drives.get()};
  stepper = std::make_unique<StepRunner>(parts, *notifier);
  state_calls = std::make_unique<StateCalls>(parts, *stepper, *state_access);
}

void EngineParts::lay_out_and_start(const StoreDirectory& directory, StoreUse use, std::uint64_t run) {
  ranks.run_in_job(
      use == StoreUse::create ? "take its memory and make its store" : "take its memory and open its store", [&] {
        if (ranks.job().rank() == 0 && !options.metrics_path.empty())
          metrics = std::make_unique<StepMetrics>(options.metrics_path, options.lock_timeout, runtime.ledger());
        lay_out(directory, use, run);
      });
  // Which units are gathered when follows from the gather memory, and is the same on every rank.
  const std::uint64_t mine = memory->gather_memory().size();
  const std::uint64_t common = ranks.smallest(mine);
  if (common < mine)
    log_info(
        "rank {} has {} of device memory for gathered units and uses {}: every rank uses what the rank with the "
        "least has",
        runtime.rank(), format_bytes(mine), format_bytes(common));
  ranks.run_in_job("start its streams and threads", [&] { start(common); });
}

void EngineParts::lay_out(const StoreDirectory& directory, StoreUse use, std::uint64_t run) {
  tiers::StoreOptions wanted = store_options(options, table, records, runtime.rank(), directory, runtime.trace());
  const std::uint64_t store_memory = store_cost(options, table, records, runtime.rank()).memory_bytes;
  const MachineFacts facts = machine_facts(runtime, store_memory);
  choose_pinned_shares(options, table, facts.device_access, free_for_pinned(options, table, facts));
  memory = std::make_unique<Memory>(runtime, options, table, store_memory);

  if (options.store_directory.empty()) return;
  drives = std::make_unique<Drives>(runtime.options(), options, *memory);
  if (use == StoreUse::open) {
    const auto stored = tiers::Store::look(wanted.directory, runtime.rank()).identity;
    if (stored && stored->world_size == wanted.identity.world_size && stored->layout != wanted.identity.layout)
      throw StoreError(fmt::format("the store in {} {}; nothing was changed", wanted.directory,
                                   table.difference_from(stored->layout)));
    store = tiers::Store::open(wanted, drives->queues());
    return make_spill();
  }
  wanted.store_number = run + static_cast<std::uint64_t>(runtime.rank());
  wanted.stripe_weights = drives->measured_weights();
  store = tiers::Store::create(wanted, drives->queues());
  make_spill();
}

void EngineParts::make_spill() {
  if (!memory->spills_gradients()) return;
  const std::uint64_t bytes = memory->plan().units().scratch_bytes();
  spill = std::make_unique<GradientSpill>(runtime, table, *memory, store->make_scratch(bytes, drives->queues()));
}

void EngineParts::start(std::uint64_t gather_bytes) {
  streams.up = runtime.device().create_stream("up");
  streams.down = runtime.device().create_stream("down");
  streams.comm = runtime.device().create_stream("comm");
  executor = std::make_unique<scheduler::Executor>("hoist-submit");
  record_io = std::make_unique<RecordIo>(runtime, table, *memory, records, store.get(), spill.get());
  pipeline = std::make_unique<TilePipeline>(runtime, table, *memory, records, *record_io, store.get(), spill.get());
  // Without a drive the rest of the time is spent on handing work to threads.
  updates = std::make_unique<UpdateQueue>(*pipeline, table, update_order(options),
                                          options.uses_nvme() ? WaitCause::nvme : WaitCause::optimizer);
  if (options.parameters == Placement::nvme) {
    weight_reader =
        std::make_unique<WeightReader>(*store, memory->plan().units(), records, memory->staging_buffers(), *updates);
  }
  gatherer = std::make_unique<Gatherer>(runtime, options, table, *memory, gather_bytes, *executor, streams,
                                        weight_reader.get(), *updates, *notifier, gathering_group.get());
  gradients = std::make_unique<Gradients>(runtime, options, table, *memory, spill.get(), *executor, streams, *updates,
                                          *notifier);
  state_access =
      std::make_unique<StateAccess>(runtime.rank(), options, table, settings.groups(), *record_io, *pipeline);
}

std::vector<std::string> EngineParts::describe() const {
  std::vector<std::string> lines;
  const double fraction = options.optimizer == Placement::nvme ? options.optimizer_pinned_fraction.value_or(0) : 0;
  const double on_device = options.optimizer == Placement::device ? 0 : memory->plan().units().device_state_share();
  const double weights = options.parameters == Placement::nvme ? memory->plan().units().pinned_weight_share() : 0;
  const auto pinned = [](double share) {
    return share > 0 ? fmt::format(" ({:.4g} % of them pinned)", 100 * share) : std::string();
  };
  lines.push_back(fmt::format("parameters in {}{}, optimizer states in {}{}{}, {}", placement_name(options.parameters),
                              pinned(weights), placement_name(options.optimizer), pinned(fraction),
                              on_device > 0 ? fmt::format(", but {:.4g} % in device memory", 100 * on_device) : "",
                              describe_updates(options)));
  if (table.gradient_sums() == GradientSums::on_device) {
    lines.push_back(
        fmt::format("vertical order: a pass holds up to {} micro-batches, their gradients added up in fp32 on "
                    "the device",
                    options.micro_batches_max));
  }
  lines.push_back("commits: " + describe_commits(options));
  if (const LossScaler& scaler = settings.scaler; scaler.is_dynamic() || scaler.scale() != 1)
    lines.push_back(fmt::format("loss scale {}{}", scaler.scale(), scaler.is_dynamic() ? ", dynamic" : ""));
  lines.push_back(memory->describe());
  if (drives) lines.push_back("io: " + drives->describe());
  lines.push_back("device: " + runtime.device().description());
  return lines;
}

}  // namespace hoist::detail
