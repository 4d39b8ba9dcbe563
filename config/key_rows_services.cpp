// SPDX-License-Identifier: Apache-2.0
// DeepSpeed's other sections: logging, profiling, checkpoints, activations, and features that do not exist here.
#include <hoist/config/detail/key_rows.hpp>

namespace hoist::config::detail {

namespace {

constexpr std::string_view kProgramLogs = "the program does its own logging; a StepReport has the numbers";
constexpr std::string_view kBooks = "bytes and waits of every link are always in the ledger";
constexpr std::string_view kActivations = "activations belong to the program";
constexpr std::string_view kRemove = "does not exist here and would change the result; remove the section";

std::vector<KeyRow> logging_rows() {
  using enum ValueType;
  return {
      hint("steps_per_print", integer, "10", "Steps between progress lines.", kProgramLogs),
      hint("wall_clock_breakdown", boolean, "false", "Log where time goes.", kBooks),
      hint("memory_breakdown", boolean, "false", "Log where memory goes.", kBooks),
      hint("dump_state", boolean, "false", "Print the engine's state at the start.", kProgramLogs),
      hint("log_level", string, "", "Verbosity.", kProgramLogs),
      hint("vocabulary_size", integer, "", "Lets DeepSpeed check the alignment of embeddings.",
           "nothing is tuned by it"),
      hint("graph_harvesting", boolean, "false", "CUDA graphs of the model.", "graphs belong to the program"),
      hint("timers", opaque, "", "Throughput timers.", kBooks),
      section_row("tensorboard", "Metrics for TensorBoard."),
      hint("tensorboard.enabled", boolean, "false", "Switch.", kProgramLogs),
      hint("tensorboard.output_path", string, "\"\"", "Directory.", kProgramLogs),
      hint("tensorboard.job_name", string, "\"DeepSpeedJobName\"", "Subdirectory.", kProgramLogs),
      section_row("wandb", "Metrics for Weights & Biases."),
      hint("wandb.enabled", boolean, "false", "Switch.", kProgramLogs),
      hint("wandb.group", string, "", "Group.", kProgramLogs),
      hint("wandb.team", string, "", "Team.", kProgramLogs),
      hint("wandb.project", string, "\"deepspeed\"", "Project.", kProgramLogs),
      section_row("csv_monitor", "Metrics as CSV files."),
      hint("csv_monitor.enabled", boolean, "false", "Switch.", kProgramLogs),
      hint("csv_monitor.output_path", string, "\"\"", "Directory.", kProgramLogs),
      hint("csv_monitor.job_name", string, "\"DeepSpeedJobName\"", "Subdirectory.", kProgramLogs),
      hint("comet", opaque, "", "Metrics for Comet.", kProgramLogs),
      section_row("flops_profiler", "A profile of the model's arithmetic."),
      hint("flops_profiler.enabled", boolean, "false", "Switch.", kProgramLogs),
      hint("flops_profiler.recompute_fwd_factor", number, "0.0", "Share of recomputation.", kProgramLogs),
      hint("flops_profiler.profile_step", integer, "1", "Step to profile.", kProgramLogs),
      {.path = "flops_profiler.module_depth",
       .type = integer,
       .status = KeyStatus::hint,
       .default_value = "-1",
       .range = {.min = -1},
       .meaning = "Depth to print.",
       .note = kProgramLogs},
      hint("flops_profiler.top_modules", integer, "1", "Modules to print.", kProgramLogs),
      hint("flops_profiler.detailed", boolean, "true", "Print every module.", kProgramLogs),
      hint("flops_profiler.output_file", string, "", "Where to print.", kProgramLogs),
      section_row("comms_logger", "A log of collectives."),
      hint("comms_logger.enabled", boolean, "false", "Switch.", kBooks),
      hint("comms_logger.verbose", boolean, "false", "Log each call.", kBooks),
      hint("comms_logger.prof_all", boolean, "true", "Log all kinds.", kBooks),
      hint("comms_logger.debug", boolean, "false", "Log callers.", kBooks),
      hint("comms_logger.prof_ops", string_list, "[]", "Kinds to log.", kBooks),
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
      hint("activation_checkpointing.number_checkpoints", integer, "", "How many there are.", kActivations),
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
      hint("checkpoint.tag_validation", string, "\"WARN\"", "Whether ranks compare checkpoint names.",
           "ranks always agree on a commit"),
      refused("checkpoint.load_universal", boolean, "false", "Read DeepSpeed's universal checkpoints.",
              "they cannot be read; leave this key out"),
      hint("checkpoint.use_node_local_storage", boolean, "false", "Keep parts on each node.", kStore),
      hint("checkpoint.parallel_write", opaque, "", "Who writes what.", kStore),
      hint("checkpoint.writer", opaque, "", "How it is written.", kStore),
      refused_section("nebula", "enabled", "Azure's checkpoint service.", "it is not supported; remove the section"),
      refused_section("datastates_ckpt", "enabled", "DataStates checkpoints.",
                      "they are not supported; remove the section"),
  };
}

std::vector<KeyRow> feature_rows() {
  using enum ValueType;
  return {
      hint("zero_allow_untested_optimizer", boolean, "false", "Allow optimizers DeepSpeed has not tested.",
           "only the optimizers of optimizer.type exist"),
      hint("zero_force_ds_cpu_optimizer", boolean, "true", "Insist on DeepSpeed's CPU optimizer.",
           "the same bits come from every instruction set"),
      refused("disable_allgather", boolean, "false", "Broadcast weights instead.",
              "weights are gathered; leave this key out"),
      refused("dataloader_drop_last", boolean, "false", "Drop the last, short batch.",
              "the program feeds its own data; leave this key out"),
      refused("use_data_before_expert_parallelism", boolean, "false", "Order of expert groups.",
              "there is no expert parallelism; leave this key out"),
      refused_section("elasticity", "enabled", "Batch sizes for a changing number of ranks.", kRemove),
      refused_section("autotuning", "enabled", "DeepSpeed's own search for settings.",
                      "runs are not searched over here; remove the section"),
      refused_section("compile", "deepcompile", "DeepCompile.",
                      "there is no model graph to compile; remove the section"),
      refused_section("hybrid_engine", "enabled", "Training and generation in one engine.",
                      "begin a pass of kind generate instead; remove the section"),
      refused_section("curriculum_learning", "enabled", "Shorter sequences first.", kRemove),
      refused_section("data_efficiency", "enabled", "Data sampling and token dropping.", kRemove),
      refused_section("progressive_layer_drop", "enabled", "Random layer dropping.", kRemove),
      refused_section("eigenvalue", "enabled", "Curvature estimates for quantisation.", kRemove),
      refused_section("quantize_training", "enabled", "Mixture of quantisation.", kRemove),
      refused_section("sparse_attention", "", "Sparse attention kernels.", kRemove),
      refused_section("compression_training", "", "Pruning and quantisation.", kRemove),
      refused_section("weight_quantization", "", "Quantised weights.", kRemove),
      refused_section("tensor_parallel", "", "Tensor parallelism.", "split tensors in the program; remove the section"),
      refused_section("expert_parallel", "", "Expert parallelism.", "split experts in the program; remove the section"),
      refused_section("pipeline", "", "Pipeline parallelism.", "split the pipeline in the program; remove the section"),
  };
}

}  // namespace

std::vector<KeyRow> service_rows() {
  std::vector<KeyRow> rows;
  for (auto part : {logging_rows, activation_rows, checkpoint_rows, feature_rows}) {
    for (KeyRow& row : part()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace hoist::config::detail
