// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <hoist/config/detail/rules.hpp>

namespace hoist::config::detail {

namespace {

constexpr std::string_view kSchedulerParams = "scheduler.params.";

struct ScheduleKind {
  std::string_view type;
  std::vector<std::string_view> parameters;
  std::vector<std::string_view> required{};
};

// The parameters of DeepSpeed's constructors.
const std::vector<ScheduleKind>& schedule_kinds() {
  static const std::vector<ScheduleKind> kinds{
      {"WarmupLR", {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"}},
      {"WarmupDecayLR",
       {"total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"},
       {"total_num_steps"}},
      {"WarmupCosineLR",
       {"total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"},
       {"total_num_steps"}},
      {"OneCycle",
       {"cycle_min_lr", "cycle_max_lr", "cycle_first_step_size", "cycle_second_step_size", "cycle_first_stair_count",
        "cycle_second_stair_count", "decay_step_size", "decay_lr_rate", "cycle_momentum", "cycle_min_mom",
        "cycle_max_mom", "decay_mom_rate"},
       {"cycle_min_lr", "cycle_max_lr"}},
      {"LRRangeTest",
       {"lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase"}},
  };
  return kinds;
}

class ScheduleRules {
 public:
  ScheduleRules(Draft& draft, ReadResult& read, RunLength run_length, RuleNotes& notes)
      : draft_(draft), read_(read), run_length_(run_length), notes_(notes) {}

  void apply() {
    const ScheduleKind* kind = nullptr;
    for (const ScheduleKind& candidate : schedule_kinds()) {
      if (candidate.type == draft_.schedule.type) kind = &candidate;
    }
    if (kind == nullptr) {
      without_type();
    } else {
      check_parameters(*kind);
      if (!length_is_missing_) {
        draft_.engine.learning_rate_schedule = schedule(kind->type);
        remarks(kind->type);
      }
    }
    std::erase_if(read_.settings, [&](const ConfigSetting& s) {
      return s.row->path.starts_with(kSchedulerParams) && (kind == nullptr || !counts(*kind, s));
    });
  }

 private:
  static bool counts(const ScheduleKind& kind, const ConfigSetting& setting) {
    return std::ranges::find(kind.parameters, last_part(setting.row->path)) != kind.parameters.end();
  }

  bool is_automatic(std::string_view name) const {
    const std::string path = std::string(kSchedulerParams) + std::string(name);
    return std::ranges::find(read_.automatic, path) != read_.automatic.end();
  }

  bool is_given(std::string_view name) const {
    const std::string path = std::string(kSchedulerParams) + std::string(name);
    return read_.in_file(path) ||
           std::ranges::any_of(read_.problems, [&](const ConfigProblem& p) { return p.key == path; });
  }

  void without_type() {
    const bool said =
        std::ranges::any_of(read_.problems, [](const ConfigProblem& p) { return p.key == "scheduler.type"; });
    if (said) return;
    for (const ConfigSetting& s : read_.settings) {
      if (s.row->path.starts_with(kSchedulerParams) && s.source == ConfigSetting::Source::file) {
        read_.refuse(s.row->path, "belongs to a schedule, but scheduler.type is missing");
      }
    }
  }

  void check_parameters(const ScheduleKind& kind) {
    refuse_other_parameters(read_, kSchedulerParams, kind.type, kind.parameters);
    for (const std::string_view name : kind.required) {
      if (is_given(name)) continue;
      if (is_automatic(name) && run_length_ == RunLength::left_to_the_trainer) {
        length_is_missing_ = true;
        notes_.notes.push_back(fmt::format(
            "{}{} \"auto\" is left to a trainer that knows the run's length; a program without one needs a number",
            kSchedulerParams, name));
        continue;
      }
      read_.refuse(
          "scheduler.type",
          is_automatic(name)
              ? fmt::format("{} needs {} as a number; only a trainer that knows the run's length can resolve \"auto\"",
                            kind.type, name)
              : fmt::format("{} needs {} in scheduler.params", kind.type, name));
    }
  }

  LearningRateSchedule schedule(std::string_view type) const {
    const ScheduleDraft& s = draft_.schedule;
    if (type == "WarmupLR") return s.warmup;
    if (type == "WarmupDecayLR") {
      WarmupDecayRate decay{.warmup = s.warmup, .total_steps = s.total_steps.value_or(0)};
      const bool asks_for_optimizers = is_automatic("warmup_max_lr");
      if (!s.warmup.max_rate && !asks_for_optimizers) decay.warmup.max_rate = WarmupDecayRate{}.warmup.max_rate;
      return decay;
    }
    if (type == "WarmupCosineLR") {
      WarmupCosineRate cosine = s.cosine;
      cosine.total_steps = s.total_steps.value_or(0);
      return cosine;
    }
    if (type == "LRRangeTest") return s.range_test;
    OneCycleRate cycle = s.cycle;
    cycle.momentum = s.cycle_momentum ? std::optional(s.momentum) : std::nullopt;
    return cycle;
  }

  void remarks(std::string_view type) {
    const ScheduleDraft& s = draft_.schedule;
    const bool has_both = s.total_steps && !is_automatic("warmup_num_steps");
    if (has_both && *s.total_steps < s.warmup.steps && (type == "WarmupDecayLR" || type == "WarmupCosineLR")) {
      notes_.warnings.push_back(
          fmt::format("scheduler.params.total_num_steps {} ends before the warm-up of {} steps; the rate then drops at "
                      "once, as in DeepSpeed",
                      *s.total_steps, s.warmup.steps));
    }
    if (type == "OneCycle" && s.cycle_momentum && read_.in_file("optimizer.params.betas")) {
      notes_.warnings.push_back(
          fmt::format("optimizer.params.betas is not used: OneCycle with cycle_momentum sets beta1 by the cycle and "
                      "beta2 to {}, as "
                      "in DeepSpeed",
                      kOneCycleBeta2));
    }
  }

  Draft& draft_;
  ReadResult& read_;
  RunLength run_length_;
  bool length_is_missing_ = false;  // and left to the trainer
  RuleNotes& notes_;
};

}  // namespace

void apply_schedule(Draft& draft, ReadResult& read, RunLength run_length, RuleNotes& notes) {
  ScheduleRules(draft, read, run_length, notes).apply();
}

}  // namespace hoist::config::detail
