// SPDX-License-Identifier: Apache-2.0
// DeepSpeed's services: logging, profiling, activations, checkpoints.
#include <hoist/config/detail/key_rows.hpp>
#include <hoist/config/plain_json.hpp>

namespace hoist::config::detail {

namespace {

constexpr std::string_view kProgramLogs = "the program does its own logging; a StepReport has the numbers";
constexpr std::string_view kMetrics = "hoist.metrics writes each step's numbers as JSON lines and for Prometheus";
constexpr std::string_view kLedger = "bytes and waits of every link are always in the ledger";
constexpr std::string_view kActivations = "activations belong to the program";

std::vector<KeyRow> logging_rows() {
  using enum ValueType;
  return {
      {.path = "steps_per_print",
       .type = number,
       .status = KeyStatus::hint,
       .default_value = "10",
       .range = {.min = -1, .max = kInfinityValue},
       .nullable = true,
       .meaning = "Steps between progress lines.",
       .note = kProgramLogs},
      hint("wall_clock_breakdown", boolean, "false", "Log where time goes.", kLedger),
      hint("memory_breakdown", boolean, "false", "Log where memory goes.", kLedger),
      hint("dump_state", boolean, "false", "Print the engine's state at the start.", kProgramLogs),
      optional_hint("log_level", string, "Verbosity.", kProgramLogs),
      optional_hint("vocabulary_size", integer, "Lets DeepSpeed check the alignment of embeddings.",
                    "nothing is tuned by it"),
      hint("disable_python_gc", boolean, "false", "Python's garbage collection.",
           "Python's garbage collector stays as it is"),
      hint("graph_harvesting", boolean, "false", "CUDA graphs of the model.", "graphs belong to the program"),
      hint("timers", opaque, "", "Throughput timers.", kLedger),
  };
}

std::vector<KeyRow> monitor_rows() {
  using enum ValueType;
  return {
      section_row("tensorboard", "Metrics for TensorBoard."),
      hint("tensorboard.enabled", boolean, "false", "Switch.", kMetrics),
      hint("tensorboard.output_path", string, "\"\"", "Directory.", kMetrics),
      hint("tensorboard.job_name", string, "\"DeepSpeedJobName\"", "Subdirectory.", kMetrics),
      section_row("wandb", "Metrics for Weights & Biases."),
      hint("wandb.enabled", boolean, "false", "Switch.", kMetrics),
      optional_hint("wandb.group", string, "Group.", kMetrics),
      optional_hint("wandb.team", string, "Team.", kMetrics),
      hint("wandb.project", string, "\"deepspeed\"", "Project.", kMetrics),
      section_row("csv_monitor", "Metrics as CSV files."),
      hint("csv_monitor.enabled", boolean, "false", "Switch.", kMetrics),
      hint("csv_monitor.output_path", string, "\"\"", "Directory.", kMetrics),
      hint("csv_monitor.job_name", string, "\"DeepSpeedJobName\"", "Subdirectory.", kMetrics),
      section_row("comet", "Metrics for Comet."),
      hint("comet.enabled", boolean, "false", "Switch.", kMetrics),
      hint("comet.samples_log_interval", integer, "100", "Samples between reports.", kMetrics),
      optional_hint("comet.project", string, "Project.", kMetrics),
      optional_hint("comet.workspace", string, "Workspace.", kMetrics),
      optional_hint("comet.api_key", string, "Key of the service.", kMetrics),
      optional_hint("comet.experiment_name", string, "Name of the run.", kMetrics),
      optional_hint("comet.experiment_key", string, "Key of the run.", kMetrics),
      optional_hint("comet.online", boolean, "Send at once.", kMetrics),
      optional_hint("comet.mode", string, "Whether a run is continued.", kMetrics),
  };
}

std::vector<KeyRow> profiler_rows() {
  using enum ValueType;
  return {
      section_row("flops_profiler", "A profile of the model's arithmetic."),
      hint("flops_profiler.enabled", boolean, "false", "Switch.", kProgramLogs),
      hint("flops_profiler.recompute_fwd_factor", number, "0.0", "Share of recomputation.", kProgramLogs),
      {.path = "flops_profiler.profile_step",
       .type = integer,
       .status = KeyStatus::hint,
       .default_value = "1",
       .range = {.min = -1},
       .meaning = "Step to profile.",
       .note = kProgramLogs},
      {.path = "flops_profiler.module_depth",
       .type = integer,
       .status = KeyStatus::hint,
       .default_value = "-1",
       .range = {.min = -1},
       .meaning = "Depth to print.",
       .note = kProgramLogs},
      hint("flops_profiler.top_modules", integer, "1", "Modules to print.", kProgramLogs),
      hint("flops_profiler.detailed", boolean, "true", "Print every module.", kProgramLogs),
      optional_hint("flops_profiler.output_file", string, "Where to print.", kProgramLogs),
      hint("comms_config", opaque, "",
           "A section that DeepSpeed does not read; its log of collectives is comms_logger.", kLedger),
      hint("monitor_config", opaque, "",
           "A section that DeepSpeed does not read; its sections are tensorboard, wandb, csv_monitor and comet.",
           kMetrics),
      section_row("comms_logger", "A log of collectives."),
      hint("comms_logger.enabled", boolean, "false", "Switch.", kLedger),
      hint("comms_logger.verbose", boolean, "false", "Log each call.", kLedger),
      hint("comms_logger.prof_all", boolean, "true", "Log all kinds.", kLedger),
      hint("comms_logger.debug", boolean, "false", "Log callers.", kLedger),
      hint("comms_logger.prof_ops", string_list, "[]", "Kinds to log.", kLedger),
  };
}

std::vector<KeyRow> activation_rows() {
  using enum ValueType;
  return {
      section_row("activation_checkpointing", "Recomputation of activations."),
      hint("activation_checkpointing.partition_activations", boolean, "false", "Split over model-parallel ranks.",
           kActivations),
      hint("activation_checkpointing.cpu_checkpointing", boolean, "false", "Keep them in host memory.", kActivations),
      hint("activation_checkpointing.contiguous_memory_optimization", boolean, "false", "Copy them together.",
           kActivations),
      optional_hint("activation_checkpointing.number_checkpoints", integer, "How many there are.", kActivations),
      hint("activation_checkpointing.synchronize_checkpoint_boundary", boolean, "false", "Synchronise at each.",
           kActivations),
      hint("activation_checkpointing.profile", boolean, "false", "Time each.", kActivations),
  };
}

std::vector<KeyRow> checkpoint_rows() {
  using enum ValueType;
  constexpr std::string_view kStore = "the store is the checkpoint, and each rank writes its own part";
  return {
      section_row("checkpoint", "DeepSpeed's checkpoints."),
      {.path = "checkpoint.tag_validation",
       .type = choice,
       .status = KeyStatus::hint,
       .default_value = "\"Warn\"",
       .choices = {"Warn", "Ignore", "Fail"},
       .meaning = "Whether ranks compare checkpoint names.",
       .note = "ranks always agree on a commit"},
      explained(hint("checkpoint.load_universal", boolean, "false", "DeepSpeed reads a universal checkpoint.",
                     "hoist.torch.wrap(deepspeed=DIR) begins with a universal checkpoint")),
      hint("checkpoint.use_node_local_storage", boolean, "false", "Keep parts on each node.", kStore),
      hint("checkpoint.checkpoint_serialization", boolean, "true", "The format of torch.save.", kStore),
      hint("checkpoint.parallel_write", opaque, "", "Who writes what.", kStore),
      hint("checkpoint.writer", opaque, "", "How it is written.", kStore),
      hint_section("nebula", "enabled", "Azure's checkpoint service.", kStore),
      hint_section("datastates_ckpt", "enabled", "DataStates checkpoints.", kStore),
  };
}

}  // namespace

std::vector<KeyRow> service_rows() {
  return joined({}, {logging_rows, monitor_rows, profiler_rows, activation_rows, checkpoint_rows});
}

}  // namespace hoist::config::detail
