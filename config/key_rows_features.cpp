// SPDX-License-Identifier: Apache-2.0
// Features of DeepSpeed that hoist does not implement. Most would change the result, so they are refused unless
// switched off. The table still names sections that recent releases of DeepSpeed removed, because files keep them.
#include <hoist/config/detail/key_rows.hpp>

namespace hoist::config::detail {

namespace {

constexpr std::string_view kRemove =
    "hoist does not implement it, and ignoring it would change the result; remove the section";

std::vector<KeyRow> optimizer_choice_rows() {
  using enum ValueType;
  return {
      hint("zero_allow_untested_optimizer", boolean, "false", "Allow optimizers DeepSpeed has not tested.",
           "only the optimizers of optimizer.type exist"),
      hint("zero_force_ds_cpu_optimizer", boolean, "true", "Insist on DeepSpeed's CPU optimizer.",
           "the same bits come from every instruction set"),
      hint("allgather_size", integer, "500000000", "The old form of allgather_bucket_size.",
           "each unit is gathered in one grouped operation"),
      refused("disable_allgather", boolean, "false", "Broadcast weights instead.",
              "weights are gathered; leave this key out"),
  };
}

std::vector<KeyRow> parallelism_rows() {
  using enum ValueType;
  return {
      refused("use_data_before_expert_parallelism", boolean, "false", "Order of expert groups.",
              "hoist has no expert parallelism; leave this key out"),
      refused_section("tensor_parallel", "", "Tensor parallelism.",
                      "split tensors in the program, pass mesh= to hoist.torch.wrap, and remove the section"),
      refused_section("expert_parallel", "enabled", "Expert parallelism.",
                      "split experts in the program; remove the section"),
      refused_section("pipeline", "", "Pipeline parallelism.",
                      "split the pipeline in the program, pass mesh= to hoist.torch.wrap, and remove the section"),
      refused_section("elasticity", "enabled", "Batch sizes for a changing number of ranks.", kRemove),
  };
}

std::vector<KeyRow> data_rows() {
  using enum ValueType;
  return {
      refused("dataloader_drop_last", boolean, "false", "Drop the last, short batch.",
              "the program feeds its own data; leave this key out"),
      refused_section("data_efficiency", "enabled", "Data sampling and token dropping.", kRemove),
      refused_section("curriculum_learning", "enabled", "Shorter sequences first.", kRemove),
      refused_section("progressive_layer_drop", "enabled", "Random layer dropping.", kRemove),
  };
}

std::vector<KeyRow> quantisation_rows() {
  return {
      refused_section("compression_training", "", "Pruning and quantisation.", kRemove),
      refused_section("weight_quantization", "", "Quantised weights.", kRemove),
      refused_section("quantize_training", "enabled", "Mixture of quantisation.", kRemove),
      refused_section("eigenvalue", "enabled", "Curvature estimates for quantisation.", kRemove),
      refused_section("sparse_attention", "", "Sparse attention kernels.", kRemove),
  };
}

std::vector<KeyRow> engine_choice_rows() {
  return {
      refused_section("autotuning", "enabled", "DeepSpeed's own search for settings.",
                      "hoist does not search over runs; remove the section, and see `hoist tune` for the drives"),
      refused_section("compile", "deepcompile", "DeepCompile.",
                      "hoist has no model graph to compile; remove the section"),
      refused_section("hybrid_engine", "enabled", "Training and generation in one engine.",
                      "begin a pass of kind generate instead; remove the section"),
  };
}

}  // namespace

std::vector<KeyRow> feature_rows() {
  std::vector<KeyRow> rows;
  for (auto part : {optimizer_choice_rows, parallelism_rows, data_rows, quantisation_rows, engine_choice_rows}) {
    for (KeyRow& row : part()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace hoist::config::detail
