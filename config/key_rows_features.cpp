// SPDX-License-Identifier: Apache-2.0
// Features of DeepSpeed that hoist does not implement. Those that would change the result are refused unless switched
// off; those that would not are named in a warning. The table still names sections that recent releases of DeepSpeed
// removed, because files keep them.
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
      hint("disable_allgather", boolean, "false", "Broadcast weights instead of gathering them.",
           "each unit is gathered in one grouped operation"),
  };
}

std::vector<KeyRow> parallelism_rows() {
  using enum ValueType;
  return {
      hint("use_data_before_expert_parallelism", boolean, "false", "Order of expert groups.",
           "only DeepSpeed's own MoE layers have such groups"),
      {.path = "tensor_parallel",
       .type = ValueType::opaque,
       .status = KeyStatus::refused,
       .neutral = "autotp_size",
       .off_values = {"0", "1"},
       .nullable = true,
       .meaning = "Tensor parallelism (AutoTP).",
       .note = "remove the section, and every rank computes whole layers with its own data; or split tensors in the "
               "program and pass mesh= to hoist.torch.wrap"},
      refused_section("expert_parallel", "enabled", "Expert parallelism.",
                      "split experts in the program; remove the section"),
      hint_section("moe", "", "A section that DeepSpeed does not read; programs read it themselves.",
                   "experts are layers of the model"),
      hint_section("pipeline", "", "Pipeline parallelism of a model of DeepSpeed's class PipelineModule.",
                   "as in DeepSpeed, it has no effect on other models; hoist does not run a PipelineModule"),
      refused_section("elasticity", "enabled", "Batch sizes for a changing number of ranks.",
                      "hoist does not choose batch sizes; set train_batch_size and remove the section"),
  };
}

std::vector<KeyRow> data_rows() {
  using enum ValueType;
  return {
      {.path = "dataloader_drop_last",
       .type = boolean,
       .default_value = "false",
       .meaning = "Whether the loader that hoist.torch.initialize(training_data=...) returns drops the last, short "
                  "batch. Other programs have loaders of their own.",
       .apply = [](Draft&, const Value&) { /* hoist.torch.initialize reads it */ }},
      refused_section("data_efficiency", "enabled", "Data sampling and token dropping.", kRemove),
      refused_section("curriculum_learning", "enabled", "Shorter sequences first.", kRemove),
      refused_section("progressive_layer_drop", "enabled", "Random layer dropping.", kRemove),
  };
}

// DeepSpeed compresses nothing while each part's own switch is off.
KeyRow parts_switched_off(std::string_view path, std::string_view meaning) {
  KeyRow row = refused_section(path, "enabled", meaning, kRemove);
  row.switches_in_parts = true;
  return row;
}

std::vector<KeyRow> quantisation_rows() {
  return {
      parts_switched_off("compression_training", "Pruning and quantisation."),
      parts_switched_off("weight_quantization", "Quantised weights."),
      refused_section("quantize_training", "enabled", "Mixture of quantisation.", kRemove),
      refused_section("eigenvalue", "enabled", "Curvature estimates for quantisation.", kRemove),
      hint_section("sparse_attention", "", "Sparse attention of a model that reads this section itself.",
                   "attention belongs to the model; DeepSpeed's engine does not read the section"),
      hint_section("fp8", "", "A section that DeepSpeed does not read; Accelerate has fp8 settings of its own.",
                   "layers of fp8 belong to the model"),
  };
}

std::vector<KeyRow> engine_choice_rows() {
  return {
      hint_section("autotuning", "enabled", "DeepSpeed's search for settings over several runs.",
                   "the run trains with this file's settings; `hoist plan` compares placements without running them"),
      hint_section("compile", "deepcompile", "DeepCompile: gathers and offloading planned from the compiled model.",
                   "hoist plans gathers and offloading from the recorded order of the first pass; the program may "
                   "compile its model"),
      refused_section(
          "hybrid_engine", "enabled", "Training and generation in one engine.",
          "remove the section; generate() works on the wrapped model, and a C++ program begins a pass of kind "
          "generate"),
  };
}

}  // namespace

std::vector<KeyRow> feature_rows() {
  return joined({}, {optimizer_choice_rows, parallelism_rows, data_rows, quantisation_rows, engine_choice_rows});
}

}  // namespace hoist::config::detail
