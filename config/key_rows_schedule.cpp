// SPDX-License-Identifier: Apache-2.0
// The section "scheduler": DeepSpeed's learning-rate schedules. schedule_rules.cpp knows which parameters belong to
// which type and which it requires; the formulas are in zero/update/learning_rate.hpp.
#include <hoist/config/detail/key_rows.hpp>

namespace hoist::config::detail {

namespace {

constexpr std::string_view kTorchSchedule =
    "PyTorch's schedules need PyTorch; use one of DeepSpeed's, or set engine.lr_scheduler in PyTorch, or call "
    "Engine::set_learning_rate before each step";

std::vector<KeyRow> type_rows() {
  std::vector<Refusal> refusals;
  for (const std::string_view name :
       {"\"StepLR\"", "\"MultiStepLR\"", "\"ExponentialLR\"", "\"LinearLR\"", "\"ConstantLR\"", "\"PolynomialLR\"",
        "\"LambdaLR\"", "\"CosineAnnealingLR\"", "\"CosineAnnealingWarmRestarts\"", "\"CyclicLR\"", "\"OneCycleLR\"",
        "\"ReduceLROnPlateau\""}) {
    refusals.push_back({name, kTorchSchedule});
  }
  return {
      section_row("scheduler", "A learning rate for every group that changes with the number of applied steps."),
      {.path = "scheduler.type",
       .type = ValueType::choice,
       .choices = {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"},
       .refusals = std::move(refusals),
       .nullable = true,
       .meaning = "The schedule. Without it optimizer.params.lr and the program set the rate.",
       .apply = [](Draft& d, const Value& v) { d.schedule.type = as_text(v); }},
      section_row("scheduler.params", "Settings of the schedule; each belongs to some types only."),
      {.path = "scheduler.params.last_batch_iteration",
       .type = ValueType::integer,
       .status = KeyStatus::refused,
       .default_value = "-1",
       .range = {.min = -1},
       .neutral = "-1",
       .meaning = "Where a resumed schedule begins.",
       .note = "the schedule follows the number of applied steps, which a commit keeps; leave this key out"},
  };
}

std::vector<KeyRow> warmup_rows() {
  return {
      {.path = "scheduler.params.warmup_min_lr",
       .type = ValueType::number,
       .default_value = "0.0",
       .meaning = "Rate of the first step. WarmupLR, WarmupDecayLR.",
       .apply = [](Draft& d, const Value& v) { d.schedule.warmup.min_rate = as_number(v); }},
      {.path = "scheduler.params.warmup_max_lr",
       .type = ValueType::number,
       .nullable = true,
       .meaning =
           "Rate at the end of the warm-up. WarmupLR, WarmupDecayLR. Default: the optimizer's rate for WarmupLR, "
           "0.001 for WarmupDecayLR, as in DeepSpeed; \"auto\": the optimizer's rate.",
       .apply = [](Draft& d, const Value& v) { d.schedule.warmup.max_rate = as_number(v); }},
      {.path = "scheduler.params.warmup_num_steps",
       .type = ValueType::integer,
       .default_value = "1000",
       .range = {.min = 0},
       .meaning = "Steps of the warm-up; 1 counts as 2, as in DeepSpeed, and so does 0. WarmupLR, WarmupDecayLR, "
                  "WarmupCosineLR.",
       .apply =
           [](Draft& d, const Value& v) {
             d.schedule.warmup.steps = as_count(v);
             d.schedule.cosine.warmup_steps = as_count(v);
           }},
      {.path = "scheduler.params.warmup_type",
       .type = ValueType::choice,
       .default_value = "\"log\"",
       .choices = {"log", "linear"},
       .meaning = "How the warm-up rises. WarmupLR, WarmupDecayLR, WarmupCosineLR.",
       .apply =
           [](Draft& d, const Value& v) {
             d.schedule.warmup.shape = as_text(v) == "linear" ? WarmupShape::linear : WarmupShape::logarithmic;
             d.schedule.cosine.shape = d.schedule.warmup.shape;
           }},
      {.path = "scheduler.params.total_num_steps",
       .type = ValueType::integer,
       .range = {.min = 1},
       .meaning = "Step at which the rate has reached its end: warmup_min_lr for WarmupDecayLR, cos_min_ratio of the "
                  "optimizer's rate for WarmupCosineLR.",
       .apply = [](Draft& d, const Value& v) { d.schedule.total_steps = as_count(v); }},
      {.path = "scheduler.params.warmup_min_ratio",
       .type = ValueType::number,
       .default_value = "0.0",
       .meaning = "Share of the optimizer's rate at which the warm-up begins. WarmupCosineLR.",
       .apply = [](Draft& d, const Value& v) { d.schedule.cosine.warmup_min_ratio = as_number(v); }},
      {.path = "scheduler.params.cos_min_ratio",
       .type = ValueType::number,
       .default_value = "0.0001",
       .meaning = "Share of the optimizer's rate at which the cosine ends. WarmupCosineLR.",
       .apply = [](Draft& d, const Value& v) { d.schedule.cosine.cosine_min_ratio = as_number(v); }},
  };
}

std::vector<KeyRow> cycle_rate_rows() {
  return {
      {.path = "scheduler.params.cycle_min_lr",
       .type = ValueType::number,
       .meaning = "Rate at both ends of the cycle. OneCycle.",
       .apply = [](Draft& d, const Value& v) { d.schedule.cycle.min_rate = as_number(v); }},
      {.path = "scheduler.params.cycle_max_lr",
       .type = ValueType::number,
       .meaning = "Rate at the peak of the cycle. OneCycle.",
       .apply = [](Draft& d, const Value& v) { d.schedule.cycle.max_rate = as_number(v); }},
      {.path = "scheduler.params.cycle_first_step_size",
       .type = ValueType::integer,
       .default_value = "2000",
       .range = {.min = 1, .max = 9e15},
       .meaning = "Steps of the rising half. OneCycle.",
       .apply = [](Draft& d, const Value& v) { d.schedule.cycle.first_steps = as_count(v); }},
      {.path = "scheduler.params.cycle_second_step_size",
       .type = ValueType::integer,
       .range = {.max = 9e15},
       .nullable = true,
       .meaning = "Steps of the falling half. OneCycle. Default: as many as the rising half.",
       .apply = [](Draft& d, const Value& v) { d.schedule.cycle.second_steps = as_count(v); }},
      {.path = "scheduler.params.cycle_first_stair_count",
       .type = ValueType::integer,
       .default_value = "0",
       .range = {.max = 9e15},
       .meaning = "Stairs of the rising half; 0: a straight line. OneCycle.",
       .apply = [](Draft& d, const Value& v) { d.schedule.cycle.first_stairs = as_count(v); }},
      {.path = "scheduler.params.cycle_second_stair_count",
       .type = ValueType::integer,
       .range = {.max = 9e15},
       .nullable = true,
       .meaning = "Stairs of the falling half. OneCycle. Default: as many as the rising half.",
       .apply = [](Draft& d, const Value& v) { d.schedule.cycle.second_stairs = as_count(v); }},
      {.path = "scheduler.params.decay_step_size",
       .type = ValueType::integer,
       .default_value = "0",
       .range = {.max = 9e15},
       .meaning = "Steps between decays after the cycle; 0: none. OneCycle.",
       .apply = [](Draft& d, const Value& v) { d.schedule.cycle.decay_interval_steps = as_count(v); }},
      {.path = "scheduler.params.decay_lr_rate",
       .type = ValueType::number,
       .default_value = "0.0",
       .meaning = "How fast the rate falls after the cycle. OneCycle.",
       .apply = [](Draft& d, const Value& v) { d.schedule.cycle.decay_rate = as_number(v); }},
  };
}

std::vector<KeyRow> cycle_momentum_rows() {
  return {
      {.path = "scheduler.params.cycle_momentum",
       .type = ValueType::boolean,
       .default_value = "true",
       .meaning = "Whether beta1 falls while the rate rises, and back. OneCycle.",
       .note = "as in DeepSpeed, beta2 is then 0.99 whatever optimizer.params.betas says",
       .apply = [](Draft& d, const Value& v) { d.schedule.cycle_momentum = as_bool(v); }},
      {.path = "scheduler.params.cycle_min_mom",
       .type = ValueType::number,
       .default_value = "0.8",
       .range = {.max = 1, .max_excluded = true},
       .meaning = "beta1 at the peak of the cycle. OneCycle.",
       .apply = [](Draft& d, const Value& v) { d.schedule.momentum.min_beta1 = as_number(v); }},
      {.path = "scheduler.params.cycle_max_mom",
       .type = ValueType::number,
       .default_value = "0.9",
       .range = {.max = 1, .max_excluded = true},
       .meaning = "beta1 at both ends of the cycle. OneCycle.",
       .apply = [](Draft& d, const Value& v) { d.schedule.momentum.max_beta1 = as_number(v); }},
      refused("scheduler.params.decay_mom_rate", ValueType::number, "0.0", "How fast beta1 grows after the cycle.",
              "DeepSpeed's formula lets beta1 grow past 1, where Adam diverges; use 0"),
  };
}

std::vector<KeyRow> range_test_rows() {
  return {
      {.path = "scheduler.params.lr_range_test_min_lr",
       .type = ValueType::number,
       .default_value = "0.001",
       .meaning = "Rate of the first step. LRRangeTest.",
       .apply = [](Draft& d, const Value& v) { d.schedule.range_test.min_rate = as_number(v); }},
      {.path = "scheduler.params.lr_range_test_step_size",
       .type = ValueType::integer,
       .default_value = "2000",
       .range = {.min = 1},
       .meaning = "Steps of one interval. LRRangeTest.",
       .apply = [](Draft& d, const Value& v) { d.schedule.range_test.interval_steps = as_count(v); }},
      {.path = "scheduler.params.lr_range_test_step_rate",
       .type = ValueType::number,
       .default_value = "1.0",
       .meaning = "Growth of an interval, in units of the first rate. LRRangeTest.",
       .apply = [](Draft& d, const Value& v) { d.schedule.range_test.growth = as_number(v); }},
      {.path = "scheduler.params.lr_range_test_staircase",
       .type = ValueType::boolean,
       .default_value = "false",
       .meaning = "Whether the rate grows at the end of an interval only. LRRangeTest.",
       .apply = [](Draft& d, const Value& v) { d.schedule.range_test.staircase = as_bool(v); }},
  };
}

}  // namespace

std::vector<KeyRow> schedule_rows() {
  return joined({}, {type_rows, warmup_rows, cycle_rate_rows, cycle_momentum_rows, range_test_rows});
}

}  // namespace hoist::config::detail
