// SPDX-License-Identifier: Apache-2.0
// zero_optimization with its offload sections, and aio.
#include <algorithm>

#include <hoist/config/detail/key_rows.hpp>

namespace hoist::config::detail {

namespace {

constexpr std::string_view kBuckets = "each unit's gradients are one bucket, reduced as its backward ends";
constexpr std::string_view kOneGather = "each unit is gathered in one grouped operation";
constexpr std::string_view kQuantized =
    "quantised collectives change the result, and hoist does not have them; leave this key out";
constexpr std::string_view kSecondary =
    "state is partitioned over all ranks, with the same result; for gathers inside of a machine set "
    "zero_hpz_partition_size";
constexpr std::string_view kUnitClasses =
    "the program declares the units; in PyTorch, pass unit_classes= to hoist.torch.wrap";
constexpr std::string_view kNoPatches = "PyTorch's linear layer and Module.apply stay as they are";
constexpr std::string_view kAlwaysPipelined =
    "reading, updating and writing are always pipelined; offload_optimizer.buffer_count sets the depth";
constexpr std::string_view kAlwaysPinned = "staging memory is always pinned, within hoist.pinned_memory";
constexpr std::string_view kNvmePath =
    "Directory on the drive; the store is its subdirectory hoist. Required by device nvme. A list spreads "
    "the store over several drives; the first directory also has the manifest.";
constexpr std::string_view kSamePath =
    "Weights and optimizer state are stored together: if both sections are on NVMe, the paths of offload_optimizer "
    "count.";

Placement placement_of(const std::string& device) {
  if (device == "nvme") return Placement::nvme;
  return device == "cpu" ? Placement::pinned : Placement::device;
}

std::vector<KeyRow> offload_param_rows() {
  return {
      {.path = "zero_optimization.offload_param",
       .type = ValueType::section,
       .nullable = true,
       .meaning = "Where the weights live between uses."},
      {.path = "zero_optimization.offload_param.device",
       .type = ValueType::choice,
       .default_value = "\"none\"",
       .choices = {"none", "cpu", "nvme"},
       .meaning = "none: on the device; cpu: in pinned memory; nvme: in the store. Below stage 3 it has no effect.",
       .apply = [](Draft& d, const Value& v) { d.engine.parameters = placement_of(as_text(v)); }},
      {.path = "zero_optimization.offload_param.nvme_path",
       .type = ValueType::path_list,
       .nullable = true,
       .meaning = kNvmePath,
       .note = kSamePath,
       .apply = [](Draft& d, const Value& v) { d.parameter_paths = as_texts(v); }},
      {.path = "zero_optimization.offload_param.buffer_count",
       .type = ValueType::integer,
       .default_value = "5",
       .range = {.min = 1, .max = 1024},
       .meaning = "Units whose weights may be in transit from NVMe.",
       .apply = [](Draft& d, const Value& v) { d.engine.staging_buffer_count = as_unsigned(v); }},
      hint("zero_optimization.offload_param.buffer_size", ValueType::integer, "100000000",
           "Elements of one staging buffer.", "buffers take the size of the largest unit"),
      {.path = "zero_optimization.offload_param.max_in_cpu",
       .type = ValueType::integer,
       .default_value = "0",
       .deepspeed_default = "1000000000",
       .meaning =
           "With device nvme: elements of each rank's weights that live in pinned memory, at most, as far as they "
           "fit hoist.pinned_memory. A fetch does not read them from NVMe; the result is the same. "
           "hoist.parameters_pinned_fraction sets a share instead.",
       .apply = [](Draft& d, const Value& v) { d.max_in_cpu = as_count(v); }},
      hint("zero_optimization.offload_param.pin_memory", ValueType::boolean, "true", "Whether host memory is pinned.",
           kAlwaysPinned),
  };
}

std::vector<KeyRow> offload_optimizer_rows() {
  return {
      {.path = "zero_optimization.offload_optimizer",
       .type = ValueType::section,
       .nullable = true,
       .meaning = "Where masters and moments live between steps."},
      {.path = "zero_optimization.offload_optimizer.device",
       .type = ValueType::choice,
       .default_value = "\"none\"",
       .choices = {"none", "cpu", "nvme"},
       .meaning = "none: on the device, where offload_param is \"none\" too, or hoist.device is \"host\"; otherwise "
                  "where offload_param says. cpu: in pinned memory; nvme: in the store.",
       .apply = [](Draft& d, const Value& v) { d.engine.optimizer = placement_of(as_text(v)); }},
      {.path = "zero_optimization.offload_optimizer.nvme_path",
       .type = ValueType::path_list,
       .nullable = true,
       .meaning = kNvmePath,
       .note = kSamePath,
       .apply = [](Draft& d, const Value& v) { d.optimizer_paths = as_texts(v); }},
      {.path = "zero_optimization.offload_optimizer.buffer_count",
       .type = ValueType::integer,
       .default_value = "8",
       .deepspeed_default = "4",
       .range = {.max = 1024},
       .meaning =
           "Pieces of optimizer state in flight: one being read, one being updated, one being written, and slack. "
           "Less than 3 is read as 3.",
       .apply = [](Draft& d, const Value& v) { d.engine.update_buffer_count = as_unsigned(v); }},
      hint("zero_optimization.offload_optimizer.pin_memory", ValueType::boolean, "true",
           "Whether host memory is pinned.", kAlwaysPinned),
      hint("zero_optimization.offload_optimizer.pipeline_read", ValueType::boolean, "false", "Whether to read ahead.",
           kAlwaysPipelined),
      hint("zero_optimization.offload_optimizer.pipeline_write", ValueType::boolean, "false",
           "Whether to write behind.", kAlwaysPipelined),
      hint("zero_optimization.offload_optimizer.fast_init", ValueType::boolean, "false", "A quicker start from NVMe.",
           "the start writes each record once"),
      {.path = "zero_optimization.offload_optimizer.ratio",
       .type = ValueType::number,
       .default_value = "1.0",
       .range = {.max = 1},
       .meaning =
           "Share of the parameters whose optimizer state is offloaded. The state of the others, whole layers from the "
           "first on, lives in device memory (hoist.device_memory) and is updated there; the result is the same. Works "
           "at any stage, with cpu and nvme. Beside offload_param it is read as 1, unless hoist.device is \"host\".",
       .apply = [](Draft& d, const Value& v) { d.engine.optimizer_offload_ratio = as_number(v); }},
      explained(hint("zero_optimization.offload_optimizer.super_offload", ValueType::boolean, "false",
                     "DeepSpeed's CPU optimizer that updates early and takes back what should have been clipped or "
                     "skipped.",
                     "updates are exact at once, and run under the next forward pass (hoist.update_mode)")),
      {.path = "zero_optimization.offload_optimizer.cpuadam_cores_perc",
       .type = ValueType::number,
       .status = KeyStatus::hint,
       .default_value = "0.8",
       .range = {.max = 1},
       .meaning = "Share of cores for SuperOffload.",
       .note = "hoist.update_threads sets the threads of the update"},
  };
}

std::vector<KeyRow> gather_rows() {
  return {
      {.path = "zero_optimization.sub_group_size",
       .type = ValueType::integer,
       .default_value = "262144",
       .deepspeed_default = "1000000000",
       .meaning =
           "Elements that are read, updated and written as one piece; rounded down to a multiple of 16384 (at least "
           "16384), and reduced if the pinned budget is small. As many pieces as offload_optimizer.buffer_count "
           "take pinned memory, so that a number like DeepSpeed's default takes much of it, for the same "
           "transfers: leave the key out. 0: the default.",
       .apply =
           [](Draft& d, const Value& v) {
             if (as_count(v) > 0) d.engine.sub_group_elements = as_count(v);
           }},
      {.path = "zero_optimization.stage3_prefetch_bucket_size",
       .aliases = {"prefetch_bucket_size"},
       .type = ValueType::integer,
       .default_value = "50000000",
       .meaning = "Elements fetched ahead of their use; 0: no prefetch.",
       .apply = [](Draft& d, const Value& v) { d.engine.prefetch_elements = as_count(v); }},
      {.path = "zero_optimization.stage3_max_live_parameters",
       .aliases = {"max_live_parameters"},
       .type = ValueType::integer,
       .default_value = "1000000000",
       .meaning = "Elements that are gathered at once at most: the memory for gathered weights is not larger, unless "
                  "two units need "
                  "more. The hard limit is hoist.device_memory.",
       .apply = [](Draft& d, const Value& v) { d.engine.live_elements_max = as_count(v); }},
      {.path = "zero_optimization.stage3_max_reuse_distance",
       .aliases = {"max_reuse_distance"},
       .type = ValueType::integer,
       .default_value = "1000000000",
       .meaning = "A gathered unit that is needed again within this many elements stays gathered.",
       .apply = [](Draft& d, const Value& v) { d.engine.reuse_distance_elements = as_count(v); }},
      {.path = "zero_optimization.stage3_param_persistence_threshold",
       .aliases = {"param_persistence_threshold"},
       .type = ValueType::integer,
       .default_value = "100000",
       .meaning = "Units of at most this many elements stay gathered; DeepSpeed compares single parameters.",
       .apply = [](Draft& d, const Value& v) { d.engine.persistence_elements = as_count(v); }},
      {.path = "zero_optimization.stage3_model_persistence_threshold",
       .aliases = {"model_persistence_threshold"},
       .type = ValueType::integer,
       .status = KeyStatus::hint,
       .default_value = "9223372036854775807",
       .meaning = "Cap on all elements that stay gathered.",
       .note = "hoist.device_memory is the cap"},
      {.path = "zero_optimization.stage3_gather_16bit_weights_on_model_save",
       .aliases = {"gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
                   "gather_fp16_weights_on_model_save"},
       .type = ValueType::boolean,
       .status = KeyStatus::hint,
       .default_value = "false",
       .meaning = "Whether DeepSpeed's save writes one consolidated copy of the weights.",
       .note = "the store is the checkpoint; Engine::read gives the weights from any tier"},
      {.path = "zero_optimization.stage3_module_granularity_threshold",
       .aliases = {"module_granularity_threshold"},
       .type = ValueType::integer,
       .status = KeyStatus::hint,
       .default_value = "0",
       .meaning = "Modules finer than this are fetched as one.",
       .note = kUnitClasses},
      {.path = "zero_optimization.stage3_use_all_reduce_for_fetch_params",
       .aliases = {"use_all_reduce_for_fetch_params"},
       .type = ValueType::boolean,
       .status = KeyStatus::hint,
       .default_value = "false",
       .meaning = "Gather by all-reduce.",
       .note = kOneGather},
      {.path = "zero_optimization.stage3_allgather_sequential",
       .aliases = {"allgather_sequential"},
       .type = ValueType::boolean,
       .status = KeyStatus::hint,
       .default_value = "false",
       .meaning = "Gather parameters one by one.",
       .note = kOneGather},
  };
}

std::vector<KeyRow> bucket_rows() {
  return {
      hint("zero_optimization.contiguous_gradients", ValueType::boolean, "true", "Copy gradients into one buffer.",
           kBuckets),
      hint("zero_optimization.reduce_scatter", ValueType::boolean, "true", "Reduce-scatter instead of all-reduce.",
           "gradients are always reduce-scattered"),
      hint("zero_optimization.reduce_bucket_size", ValueType::integer, "500000000", "Elements of one reduction.",
           kBuckets),
      hint("zero_optimization.use_multi_rank_bucket_allreduce", ValueType::boolean, "true",
           "One reduction for several ranks' pieces.", kBuckets),
      hint("zero_optimization.allgather_partitions", ValueType::boolean, "true", "All-gather instead of broadcasts.",
           kOneGather),
      hint("zero_optimization.allgather_bucket_size", ValueType::integer, "500000000", "Elements of one gather.",
           kOneGather),
      {.path = "zero_optimization.overlap_comm",
       .type = ValueType::boolean,
       .status = KeyStatus::hint,
       .default_value = "true",
       .nullable = true,
       .meaning = "Overlap communication with compute.",
       .note = "gathers and reductions always run on streams of their own"},
      hint("zero_optimization.parameter_alignment", ValueType::boolean, "false", "Pad parameters to 16 bytes.",
           "parameters begin at multiples of 32 elements"),
      hint("zero_optimization.round_robin_gradients", ValueType::boolean, "false", "Spread gradient copies over ranks.",
           kBuckets),
      hint("zero_optimization.ignore_unused_parameters", ValueType::boolean, "true",
           "Tolerate parameters without a gradient.", "a parameter without a gradient has a gradient of zero"),
      hint("zero_optimization.memory_efficient_linear", ValueType::boolean, "true", "DeepSpeed's own linear layer.",
           kNoPatches),
      hint("zero_optimization.override_module_apply", ValueType::boolean, "true", "Patch torch.nn.Module.apply.",
           kNoPatches),
      hint("zero_optimization.leaf_module", ValueType::opaque, "", "Modules that are fetched whole.", kUnitClasses),
      hint("zero_optimization.log_trace_cache_warnings", ValueType::boolean, "false", "Log prefetch deviations.",
           "deviations are served on demand and counted"),
      hint("zero_optimization.enable_sanity_checks", ValueType::boolean, "false", "Compare ranks.",
           "ranks always compare the order of their collectives"),
      hint("zero_optimization.pipeline_loading_checkpoint", ValueType::boolean, "false",
           "Overlap reading a checkpoint with distributing it.", "each rank opens its own part of the store"),
  };
}

// Keys that DeepSpeed calls deprecated and still accepts.
std::vector<KeyRow> deprecated_rows() {
  return {
      {.path = "zero_optimization.cpu_offload",
       .type = ValueType::boolean,
       .default_value = "false",
       .nullable = true,
       .meaning = "The old form of offload_optimizer with device cpu; not allowed beside that section.",
       .apply = [](Draft& d, const Value& v) { d.old_optimizer_offload = as_bool(v); }},
      {.path = "zero_optimization.cpu_offload_param",
       .aliases = {"cpu_offload_params"},
       .type = ValueType::boolean,
       .default_value = "false",
       .nullable = true,
       .meaning = "The old form of offload_param with device cpu; not allowed beside that section.",
       .apply = [](Draft& d, const Value& v) { d.old_parameter_offload = as_bool(v); }},
      {.path = "zero_optimization.cpu_offload_use_pin_memory",
       .type = ValueType::boolean,
       .status = KeyStatus::hint,
       .default_value = "true",
       .nullable = true,
       .meaning = "The old form of pin_memory.",
       .note = kAlwaysPinned},
      hint("zero_optimization.elastic_checkpoint", ValueType::boolean, "false", "A legacy checkpoint layout.",
           "the store is the checkpoint, and any number of ranks can continue it"),
      hint("zero_optimization.legacy_stage1", ValueType::boolean, "false", "A legacy form of stage 1.",
           "there is one form of stage 1"),
  };
}

std::vector<KeyRow> feature_rows_of_zero() {
  const auto off = [](std::string_view path, std::string_view meaning, std::string_view note) {
    return refused(path, ValueType::boolean, "false", meaning, note);
  };
  return {
      hint("zero_optimization.load_from_fp32_weights", ValueType::boolean, "true", "Restore masters from fp32.",
           "masters are always restored exactly"),
      refused(
          "zero_optimization.compute_grad_norm", ValueType::boolean, "true", "Whether the norm is computed.",
          "hoist always computes the norm, while gradients are copied down; in DeepSpeed stages 1 and 2 may skip it"),
      {.path = "zero_optimization.zenflow",
       .type = ValueType::opaque,
       .status = KeyStatus::refused,
       .nullable = true,
       .meaning = "DeepSpeed's optimizer with stale updates.",
       .note = "stale updates change the result; remove the section"},
      {.path = "zero_optimization.zeropp_loco_param",
       .type = ValueType::opaque,
       .status = KeyStatus::refused,
       .nullable = true,
       .meaning = "Error feedback of quantised gradients.",
       .note = kQuantized},
      off("zero_optimization.zero_quantized_weights", "int8 weight gathers.", kQuantized),
      off("zero_optimization.zero_quantized_nontrainable_weights", "int8 gathers of frozen weights.", kQuantized),
      off("zero_optimization.zero_quantized_gradients", "int8 gradient reductions.", kQuantized),
      {.path = "zero_optimization.zero_hpz_partition_size",
       .type = ValueType::integer,
       .default_value = "1",
       .range = {.max = 1e6},
       .meaning =
           "Size of a group of consecutive ranks, usually those of a machine. After all ranks have gathered weights "
           "once, the group stores them, one part in each rank's pinned memory, and gathers them among itself until "
           "the next step. Must divide the number of ranks. 0, 1, or the number of all ranks: no groups.",
       .apply =
           [](Draft& d, const Value& v) {
             d.engine.secondary_shard_ranks = static_cast<int>(std::max<std::uint64_t>(1, as_count(v)));
           }},
      {.path = "zero_optimization.mics_shard_size",
       .type = ValueType::integer,
       .status = KeyStatus::hint,
       .default_value = "-1",
       .range = {.min = -1},
       .is_explained = true,
       .meaning = "Ranks that share one copy of all state (MiCS).",
       .note = kSecondary},
      explained(hint("zero_optimization.mics_hierarchical_params_gather", ValueType::boolean, "false",
                     "Gather in two levels.", kSecondary)),
      off("zero_optimization.save_muon_momentum_buffer_in_memory", "Keep Muon's buffer in memory.",
          "hoist does not have Muon; leave this key out"),
  };
}

std::vector<KeyRow> aio_rows() {
  return {
      {.path = "aio",
       .type = ValueType::section,
       .nullable = true,
       .meaning = "Transfers between pinned memory and NVMe."},
      {.path = "aio.block_size",
       .type = ValueType::bytes,
       .default_value = "1048576",
       .range = {.min = 4096, .max = 1073741824.0, .multiple_of = 4096},
       .meaning = "Bytes of one request to the drive; larger transfers are cut into such blocks.",
       .apply = [](Draft& d, const Value& v) { d.runtime.aio_block_bytes = as_count(v); }},
      {.path = "aio.queue_depth",
       .type = ValueType::integer,
       .default_value = "16",
       .deepspeed_default = "8",
       .range = {.min = 1, .max = 4096},
       .meaning = "Blocks in flight on each drive.",
       .apply = [](Draft& d, const Value& v) { d.runtime.aio_queue_depth = as_unsigned(v); }},
      {.path = "aio.intra_op_parallelism",
       .aliases = {"thread_count", "num_threads"},
       .type = ValueType::integer,
       .default_value = "4",
       .deepspeed_default = "1",
       .range = {.min = 1, .max = 256},
       .meaning = "Threads of the io engine \"threads\"; io_uring needs one.",
       .note = "The three names are one setting: DeepSpeed reads the first, its documentation uses the second, its "
               "tuner prints the third.",
       .apply = [](Draft& d, const Value& v) { d.runtime.aio_threads = as_unsigned(v); }},
      hint("aio.single_submit", ValueType::boolean, "false", "Submit requests one by one.",
           "the engine submits in the way that is fastest"),
      hint("aio.overlap_events", ValueType::boolean, "true", "Overlap submitting with completing.",
           "the engine always overlaps"),
      explained(hint("aio.use_gds", ValueType::boolean, "false", "Transfers straight between drive and GPU.",
                     "GPUDirect Storage is not used; transfers go through pinned memory, with the same bytes")),
  };
}

}  // namespace

std::vector<KeyRow> zero_rows() {
  std::vector<KeyRow> rows{
      section_row("zero_optimization", "Which state is partitioned over ranks and where it lives."),
      {.path = "zero_optimization.stage",
       .type = ValueType::integer,
       .default_value = "3",
       .deepspeed_default = "0",
       .range = {.min = 0, .max = 3},
       .meaning = "3: parameters, gradients and optimizer state are partitioned. 0 to 2: whole parameters stay on the "
                  "device, and gradients and optimizer state are partitioned as in stage 3, with the same result.",
       .apply = [](Draft& d, const Value& v) { d.engine.stage = static_cast<int>(as_count(v)); }},
  };
  return joined(std::move(rows), {offload_param_rows, offload_optimizer_rows, gather_rows, bucket_rows, deprecated_rows,
                                  feature_rows_of_zero, aio_rows});
}

}  // namespace hoist::config::detail
