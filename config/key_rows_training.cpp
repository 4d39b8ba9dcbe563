// SPDX-License-Identifier: Apache-2.0
// Batch sizes, optimizer, clipping and number formats.
#include <hoist/config/detail/key_rows.hpp>

namespace hoist::config::detail {

namespace {

constexpr std::string_view kCompressedAdam =
    "hoist does not compress gradients; use \"Adam\", the same optimizer without compression, and remove the "
    "parameters that only compression has";
constexpr std::string_view kLamb =
    "hoist does not have it; use \"AdamW\", with a learning rate of its own (LAMB scales each layer's step)";
constexpr std::string_view kMuon = "hoist does not have it; use \"AdamW\", with a learning rate of its own";
constexpr std::string_view kMup =
    "hoist does not scale learning rates by width; use the same optimizer without Mu, and parameter groups with the "
    "learning rates that muP gives";
constexpr std::string_view kOneKernel = "there is one kernel, the same on every instruction set";
constexpr std::string_view kOneReduction =
    "gradients travel and are averaged in their own type; on the CPU they are added in fp32 (NCCL adds in their type); "
    "leave this key out";
constexpr std::string_view kOneMean =
    "every order gives the mean; hoist adds in fp32 and rounds once (NCCL adds in the gradients' own type, after a "
    "division by a power of two, so that sums of fp16 do not overflow)";
constexpr std::string_view kFp16Sums =
    "an fp16 sum loses the smaller micro-batches' contributions and overflows early; sums are fp32, so leave this key "
    "out";
constexpr std::string_view kMixedPrecision =
    "mixed precision is bf16 or fp16 weights beside fp32 masters; remove the section, and for fp16 use fp16.enabled";
constexpr std::string_view kAutocast =
    "hoist does not start it; put the forward pass under torch.autocast and remove the section, or use bf16.enabled";
constexpr std::string_view kNoLossScale = "bf16 has the range of fp32, so there is no loss to scale";
constexpr std::string_view kNoSequenceParallelism = "hoist has no sequence parallelism; leave this key out";

std::vector<KeyRow> batch_rows() {
  return {
      {.path = "train_batch_size",
       .type = ValueType::integer,
       .range = {.min = 1},
       .nullable = true,
       .meaning = "Samples of one step over all ranks: micro-batch times accumulation times world size.",
       .apply = [](Draft& d, const Value& v) { d.training.train_batch_size = as_count(v); }},
      {.path = "train_micro_batch_size_per_gpu",
       .type = ValueType::integer,
       .range = {.min = 1},
       .nullable = true,
       .meaning = "Samples of one forward and backward on one rank.",
       .apply = [](Draft& d, const Value& v) { d.training.train_micro_batch_size_per_gpu = as_count(v); }},
      {.path = "gradient_accumulation_steps",
       .type = ValueType::integer,
       .range = {.min = 1, .max = 1 << 20},
       .nullable = true,
       .meaning = "Micro-batches of a step, which takes the mean of their gradients. Default: the number that the "
                  "other two batch sizes imply, else 1. With more than one, gradients are fp32 sums: 4 bytes a "
                  "parameter of pinned memory instead of 2 (unless hoist.micro_batch_order is vertical).",
       .apply =
           [](Draft& d, const Value& v) {
             d.training.gradient_accumulation_steps = as_count(v);
             d.engine.micro_batches_max = as_unsigned(v);
           }},
      refused("managed_gradient_accumulation", ValueType::boolean, "true", "Whether the library finds the step's end.",
              "the program says when a step ends; leave this key out"),
      {.path = "gradient_clipping",
       .type = ValueType::number,
       .default_value = "1.0",
       .meaning = "Largest global gradient norm; longer gradients are scaled down to it. 0: no clipping.",
       .note = "DeepSpeed's default was 0 before 2026-06.",
       .apply = [](Draft& d, const Value& v) { d.engine.gradient_clipping = as_number(v); }},
  };
}

std::vector<KeyRow> optimizer_rows() {
  return {
      section_row("optimizer", "The optimizer of parameter group 0; programs may add groups of their own."),
      {.path = "optimizer.type",
       .type = ValueType::choice,
       .default_value = "\"AdamW\"",
       .choices = {"AdamW", "Adam", "Adagrad", "Lion", "SGD"},
       .refusals = {{"\"OneBitAdam\"", kCompressedAdam},
                    {"\"ZeroOneAdam\"", kCompressedAdam},
                    {"\"OneBitLamb\"", kLamb},
                    {"\"Lamb\"", kLamb},
                    {"\"Muon\"", kMuon},
                    {"\"MuAdam\"", kMup},
                    {"\"MuAdamW\"", kMup},
                    {"\"MuSGD\"", kMup}},
       .meaning = "AdamW and Lion decay weights separately from the gradient. Adam does too, as in DeepSpeed, unless "
                  "adam_w_mode is false: then it adds decay to the gradient (L2), as Adagrad and SGD do. Formulas: "
                  "docs/optimizers.md.",
       .apply = [](Draft& d, const Value& v) { d.optimizer_type = as_text(v); }},
      hint("optimizer.legacy_fusion", ValueType::boolean, "false", "An old fused kernel's choice.", kOneKernel),
      section_row("optimizer.params", "Settings of the optimizer."),
      {.path = "optimizer.params.lr",
       .type = ValueType::number,
       .default_value = "0.001",
       .meaning = "Learning rate at the start; the program may change it every step. Default for Adagrad: 0.01.",
       .apply = [](Draft& d, const Value& v) { d.engine.optimizer_defaults.learning_rate = as_number(v); }},
      {.path = "optimizer.params.betas",
       .type = ValueType::number_pair,
       .default_value = "[0.9, 0.999]",
       .range = {.max = 1, .max_excluded = true},
       .meaning = "Decay of the first and of the second moment; Lion: share of the moment in the step, and its decay. "
                  "Adam, AdamW and Lion only. The default is DeepSpeed's for Lion as well; its paper's is [0.9, 0.99].",
       .apply =
           [](Draft& d, const Value& v) {
             d.engine.optimizer_defaults.beta1 = std::get<std::vector<double>>(v)[0];
             d.engine.optimizer_defaults.beta2 = std::get<std::vector<double>>(v)[1];
           }},
      {.path = "optimizer.params.eps",
       .type = ValueType::number,
       .default_value = "1e-8",
       .meaning =
           "Added to the root of the second moment. Default for Adagrad: 1e-10. Adam, AdamW and Adagrad only. 0 "
           "is refused, because a parameter whose gradients were all 0 would become 0/0 (but not for Adagrad with "
           "an initial_accumulator_value).",
       .apply = [](Draft& d, const Value& v) { d.engine.optimizer_defaults.epsilon = as_number(v); }},
      {.path = "optimizer.params.weight_decay",
       .type = ValueType::number,
       .default_value = "0.0",
       .meaning = "Weight decay. With torch_adam the default of AdamW is 0.01, as in DeepSpeed.",
       .apply = [](Draft& d, const Value& v) { d.engine.optimizer_defaults.weight_decay = as_number(v); }},
      {.path = "optimizer.params.bias_correction",
       .type = ValueType::boolean,
       .default_value = "true",
       .meaning = "Whether the moments are corrected for their start at zero.",
       .apply = [](Draft& d, const Value& v) { d.engine.optimizer_defaults.bias_correction = as_bool(v); }},
      {.path = "optimizer.params.adam_w_mode",
       .type = ValueType::boolean,
       .default_value = "true",
       .meaning = "Type Adam only: false adds weight decay to the gradient (L2).",
       .apply = [](Draft& d, const Value& v) { d.adam_w_mode = as_bool(v); }},
      {.path = "optimizer.params.torch_adam",
       .type = ValueType::boolean,
       .default_value = "false",
       .meaning =
           "Selects PyTorch's formula, which hoist always uses; the key only changes the default of weight_decay.",
       .apply = [](Draft& d, const Value& v) { d.torch_adam = as_bool(v); }},
      {.path = "optimizer.params.momentum",
       .type = ValueType::number,
       .default_value = "0.0",
       .range = {.max = 1e6},
       .meaning = "SGD only: share of the earlier sum of gradients that enters a step. With 0 no moment is stored.",
       .apply = [](Draft& d, const Value& v) { d.engine.optimizer_defaults.momentum = as_number(v); }},
      {.path = "optimizer.params.dampening",
       .type = ValueType::number,
       .default_value = "0.0",
       .range = {.max = 1e6},
       .meaning = "SGD only: share of a gradient that is left out when it is added to the sum.",
       .apply = [](Draft& d, const Value& v) { d.engine.optimizer_defaults.dampening = as_number(v); }},
      {.path = "optimizer.params.nesterov",
       .type = ValueType::boolean,
       .default_value = "false",
       .meaning = "SGD only: Nesterov's momentum.",
       .apply = [](Draft& d, const Value& v) { d.engine.optimizer_defaults.nesterov = as_bool(v); }},
      {.path = "optimizer.params.lr_decay",
       .type = ValueType::number,
       .default_value = "0.0",
       .meaning = "Adagrad only: the learning rate of step n is lr / (1 + (n - 1) * lr_decay).",
       .apply = [](Draft& d, const Value& v) { d.engine.optimizer_defaults.learning_rate_decay = as_number(v); }},
      {.path = "optimizer.params.initial_accumulator_value",
       .type = ValueType::number,
       .default_value = "0.0",
       .meaning = "Adagrad only: initial value of every sum of squares.",
       .apply = [](Draft& d, const Value& v) { d.engine.optimizer_defaults.initial_accumulator = as_number(v); }},
      refused("optimizer.params.fp32_optimizer_states", ValueType::boolean, "true", "Whether moments are fp32.",
              "leave this key out; for moments of bf16 set hoist.moments_dtype"),
      refused("optimizer.params.amsgrad", ValueType::boolean, "false", "The AMSGrad variant.",
              "hoist does not have AMSGrad; use Adam or AdamW without it"),
      refused("optimizer.params.maximize", ValueType::boolean, "false", "Ascend instead of descend.",
              "steps always descend; negate the loss"),
      hint("optimizer.params.fused", ValueType::boolean, "false", "PyTorch's fused kernel.", kOneKernel),
      hint("optimizer.params.foreach", ValueType::boolean, "false", "PyTorch's multi-tensor kernel.", kOneKernel),
      hint("optimizer.params.capturable", ValueType::boolean, "false", "Let CUDA graphs capture steps.",
           "steps run outside of CUDA graphs"),
      refused("optimizer.params.differentiable", ValueType::boolean, "false", "Whether autograd records a step.",
              "gradients do not flow through a step; leave this key out"),
      hint("optimizer.params.set_grad_none", ValueType::boolean, "true", "Free gradients instead of zeroing them.",
           "gradient buffers are zeroed in place"),
      {.path = "optimizer.params.max_grad_norm",
       .type = ValueType::number,
       .status = KeyStatus::refused,
       .meaning = "Clipping inside the optimizer.",
       .note = "as in DeepSpeed, clipping is set by gradient_clipping at the top level"},
  };
}

std::vector<KeyRow> bf16_rows() {
  return {
      {.path = "bf16",
       .aliases = {"bfloat16"},
       .type = ValueType::section,
       .meaning = "bf16 weights beside an exact fp32 master."},
      {.path = "bf16.enabled",
       .type = ValueType::boolean,
       .default_value = "true",
       .deepspeed_default = "false",
       .meaning =
           "Parameters declared bf16 are trained with a split fp32 master. If the file says true, fp16 parameters are "
           "refused. If it says false, bf16 parameters are refused: all are fp32, or fp16 with fp16.enabled.",
       .apply = [](Draft&, const Value&) { /* what parameters declared bf16 do anyway */ }},
      hint("bf16.immediate_grad_update", ValueType::boolean, "false",
           "Whether gradients reach the accumulator at once.", "hoist has no accumulator to postpone"),
      explained(hint("bf16.check_grad_overflow", ValueType::boolean, "true",
                     "Whether a step with infinite gradients is skipped. Some releases of DeepSpeed write out false.",
                     "a step with a gradient that is not finite is always skipped")),
      refused("bf16.bf16_master_weights_and_grads", ValueType::boolean, "false", "bf16 master weights.",
              "masters are fp32, stored split without extra bytes; leave this key out"),
      refused("bf16.bf16_optimizer_states", ValueType::boolean, "false", "bf16 moments.",
              "leave this key out; for moments of bf16 set hoist.moments_dtype"),
      // Copied from an fp16 section in many files; DeepSpeed itself has ignored or refused them here.
      explained(hint("bf16.auto_cast", ValueType::boolean, "false", "Whether inputs are cast.",
                     "DeepSpeed has no such key for bf16, and inputs are not cast: cast them, or use torch.autocast")),
      hint("bf16.loss_scale", ValueType::number, "0", "A loss scale.", kNoLossScale),
      hint("bf16.initial_scale_power", ValueType::integer, "16", "A loss scale's start.", kNoLossScale),
      hint("bf16.loss_scale_window", ValueType::integer, "1000", "A loss scale's growth.", kNoLossScale),
      hint("bf16.hysteresis", ValueType::integer, "2", "Overflows that a loss scale tolerates before it shrinks.",
           kNoLossScale),
      hint("bf16.min_loss_scale", ValueType::integer, "1", "A loss scale's floor.", kNoLossScale),
  };
}

std::vector<KeyRow> fp16_rows() {
  return {
      section_row("fp16",
                  "fp16 weights beside whole fp32 masters, with a scaled loss. The other keys have an effect only with "
                  "enabled."),
      {.path = "fp16.enabled",
       .type = ValueType::boolean,
       .default_value = "false",
       .meaning =
           "Whether 16-bit parameters are fp16. The program declares them so (one that declares bf16 is refused) "
           "and multiplies its loss by Engine::loss_scale().",
       .apply = [](Draft& d, const Value& v) { d.fp16.enabled = as_bool(v); }},
      {.path = "fp16.auto_cast",
       .type = ValueType::boolean,
       .default_value = "false",
       .meaning =
           "Whether hoist.torch casts floating-point inputs of the model to fp16. A C++ program makes the inputs of "
           "its layers itself.",
       .apply = [](Draft&, const Value&) { /* hoist.torch reads it */ }},
      {.path = "fp16.loss_scale",
       .type = ValueType::number,
       .default_value = "0",
       .range = {.max = 1e19},
       .meaning =
           "Fixed loss scale; 0: a dynamic one, which halves when gradients overflow and doubles when they have not "
           "for a while. A step whose gradients are not finite is skipped with either.",
       .apply = [](Draft& d, const Value& v) { d.fp16.fixed_scale = as_number(v); }},
      {.path = "fp16.initial_scale_power",
       .type = ValueType::integer,
       .default_value = "16",
       .range = {.max = 64},
       .meaning = "Logarithm of the first dynamic scale.",
       .apply = [](Draft& d, const Value& v) { d.fp16.initial_power = as_unsigned(v); }},
      {.path = "fp16.loss_scale_window",
       .type = ValueType::integer,
       .default_value = "1000",
       .range = {.min = 1, .max = 9e15},
       .meaning = "Steps without an overflow after which the dynamic scale doubles, up to 2^64.",
       .apply = [](Draft& d, const Value& v) { d.fp16.window = as_count(v); }},
      {.path = "fp16.hysteresis",
       .type = ValueType::integer,
       .default_value = "2",
       .range = {.min = 1, .max = 1'000'000},
       .meaning = "Overflows until the dynamic scale halves; the first ones skip their step and only count. The count "
                  "restarts when the scale doubles.",
       .apply = [](Draft& d, const Value& v) { d.fp16.hysteresis = as_unsigned(v); }},
      {.path = "fp16.consecutive_hysteresis",
       .type = ValueType::boolean,
       .default_value = "false",
       .meaning = "Whether that count restarts with every step without an overflow.",
       .apply = [](Draft& d, const Value& v) { d.fp16.consecutive_hysteresis = as_bool(v); }},
      {.path = "fp16.min_loss_scale",
       .type = ValueType::number,
       .default_value = "1",
       .range = {.max = 9e15, .min_excluded = true},
       .meaning = "Smallest dynamic scale; an overflow at it ends the run with an error, as in DeepSpeed.",
       .apply = [](Draft& d, const Value& v) { d.fp16.scale_min = as_number(v); }},
      refused("fp16.fp16_master_weights_and_grads", ValueType::boolean, "false", "fp16 master weights.",
              "most updates are too small for an fp16 master; masters are fp32, so leave this key out"),
      refused_section("amp", "enabled", "NVIDIA Apex mixed precision.", kMixedPrecision),
      refused_section("torch_autocast", "enabled", "PyTorch autocast.", kAutocast),
  };
}

std::vector<KeyRow> data_type_rows() {
  return {
      section_row("data_types", "Types of gradients, parameters and buffers."),
      {.path = "data_types.grad_accum_dtype",
       .type = ValueType::choice,
       .status = KeyStatus::hint,
       .default_value = "\"bf16\"",
       .choices = {"bf16", "bfloat16", "fp32", "float32", "float"},
       .refusals = {{"\"fp16\"", kFp16Sums}, {"\"float16\"", kFp16Sums}, {"\"half\"", kFp16Sums}},
       .nullable = true,
       .meaning = "Type in which the gradients of micro-batches are added.",
       .note = "sums over micro-batches are fp32, exact where their types allow it"},
      {.path = "data_types.param_dtype",
       .type = ValueType::choice,
       .status = KeyStatus::refused,
       .default_value = "\"bf16\"",
       .choices = {"bf16", "bfloat16", "fp16", "fp32"},
       .neutral = "\"bf16\"",
       .nullable = true,
       .meaning = "Type of the parameters.",
       .note = "the program declares each parameter's type; leave this key out"},
      {.path = "data_types.buffer_dtype",
       .type = ValueType::choice,
       .status = KeyStatus::refused,
       .choices = {"bf16", "bfloat16", "fp16", "fp32"},
       .nullable = true,
       .meaning = "Type of module buffers.",
       .note = "buffers belong to the program; leave this key out"},
      {.path = "data_types.keep_in_fp32_modules",
       .type = ValueType::string_list,
       .status = KeyStatus::refused,
       .default_value = "[]",
       .neutral = "[]",
       .meaning = "Buffers that stay fp32.",
       .note = "buffers belong to the program; leave this key out"},
  };
}

std::vector<KeyRow> reduction_rows() {
  return {
      {.path = "communication_data_type",
       .type = ValueType::choice,
       .status = KeyStatus::refused,
       .default_value = "\"bf16\"",
       .choices = {"bf16", "fp16", "fp32"},
       .neutral = "\"bf16\"",
       .nullable = true,
       .meaning = "Type in which gradients travel.",
       .note = kOneReduction},
      {.path = "seq_parallel_communication_data_type",
       .type = ValueType::choice,
       .status = KeyStatus::hint,
       .default_value = "\"fp32\"",
       .choices = {"fp32", "bf16", "fp16"},
       .nullable = true,
       .meaning = "Type in which gradients travel between ranks that share a sequence.",
       .note = "no ranks share a sequence"},
      {.path = "sequence_parallel_size",
       .type = ValueType::integer,
       .status = KeyStatus::refused,
       .default_value = "1",
       .range = {.min = 1},
       .neutral = "1",
       .meaning = "Ranks that share one sequence.",
       .note = kNoSequenceParallelism},
      explained(hint("prescale_gradients", ValueType::boolean, "false",
                     "Whether gradients are divided by the number of ranks before they are added, or after.",
                     kOneMean)),
      {.path = "gradient_predivide_factor",
       .type = ValueType::number,
       .status = KeyStatus::hint,
       .default_value = "1.0",
       .range = {.min_excluded = true},
       .is_explained = true,
       .meaning = "Part of that number by which gradients are divided before they are added.",
       .note = kOneMean},
      {.path = "gradient_allreduce_op",
       .type = ValueType::choice,
       .status = KeyStatus::refused,
       .default_value = "\"mean\"",
       .choices = {"mean", "sum"},
       .neutral = "\"mean\"",
       .meaning = "Whether gradients are averaged or added over ranks.",
       .note = "gradients are averaged; scale the loss by the world size for a sum"},
      refused("fp32_allreduce", ValueType::boolean, "false", "The old form of communication_data_type.", kOneReduction),
      explained(hint("sparse_gradients", ValueType::boolean, "false",
                     "Exchange only those rows of an embedding that have a gradient.",
                     "all rows are reduced, with the same mean")),
  };
}

}  // namespace

std::vector<KeyRow> training_rows() {
  return joined({}, {batch_rows, optimizer_rows, bf16_rows, fp16_rows, data_type_rows, reduction_rows});
}

}  // namespace hoist::config::detail
