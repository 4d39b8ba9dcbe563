# SPDX-License-Identifier: Apache-2.0
"""Prints the values of learning_rate_golden.hpp: pip install torch deepspeed==0.19.8; python learning_rate_golden.py"""

import torch
from deepspeed.runtime import lr_schedules as schedules

STEPS = 41
WARMUP_DECAY = {"total_num_steps": 30, "warmup_min_lr": 1e-6, "warmup_max_lr": 3e-4, "warmup_num_steps": 8,
                "warmup_type": "linear"}
WARMUP_COSINE = {"total_num_steps": 25, "warmup_min_ratio": 0.1, "warmup_num_steps": 5, "cos_min_ratio": 0.05}
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
RANGE = {"lr_range_test_min_lr": 1e-5, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.5}
CASES = {
    "warmup_log": (schedules.WarmupLR, 5e-4, {"warmup_min_lr": 1e-5, "warmup_max_lr": 2e-3, "warmup_num_steps": 10}),
    "warmup_group_rate": (schedules.WarmupLR, 5e-4, {"warmup_num_steps": 7, "warmup_type": "linear"}),
    "warmup_one_step": (schedules.WarmupLR, 5e-4, {"warmup_max_lr": 1e-3, "warmup_num_steps": 1}),
    "decay_linear": (schedules.WarmupDecayLR, 1e-3, WARMUP_DECAY),
    "decay_log": (schedules.WarmupDecayLR, 1e-2, {"total_num_steps": 20, "warmup_max_lr": 1e-3, "warmup_num_steps": 5}),
    "decay_too_short": (schedules.WarmupDecayLR, 1e-2, {"total_num_steps": 3, "warmup_max_lr": 1e-3, "warmup_num_steps": 6}),
    "cosine": (schedules.WarmupCosineLR, 6e-4, WARMUP_COSINE),
    "cosine_linear": (schedules.WarmupCosineLR, 6e-4, {"total_num_steps": 25, "warmup_num_steps": 6, "warmup_type": "linear"}),
    "cosine_too_short": (schedules.WarmupCosineLR, 6e-4, {"total_num_steps": 2, "warmup_num_steps": 6}),
    "cycle": (schedules.OneCycle, 1, {**CYCLE, "cycle_first_step_size": 8, "decay_lr_rate": 0.5, "decay_step_size": 3}),
    "cycle_uneven": (schedules.OneCycle, 1, {**CYCLE, "cycle_first_step_size": 5, "cycle_second_step_size": 11,
                                             "cycle_min_mom": 0.85, "cycle_max_mom": 0.99}),
    "cycle_stairs": (schedules.OneCycle, 1, {**CYCLE, "cycle_first_step_size": 9, "cycle_second_step_size": 6,
                                             "cycle_first_stair_count": 3, "cycle_second_stair_count": 2,
                                             "cycle_momentum": False}),
    "range_continuous": (schedules.LRRangeTest, 1, RANGE),
    "range_staircase": (schedules.LRRangeTest, 1, {**RANGE, "lr_range_test_staircase": True}),
}

for name, (schedule_class, rate, parameters) in CASES.items():
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=rate)
    schedule, group = schedule_class(optimizer, **parameters), optimizer.param_groups[0]
    rates, beta1 = [], []
    for _ in range(STEPS):
        rates.append(group["lr"])
        beta1.append(group["betas"][0])
        optimizer.step()
        schedule.step()
    print(name, rates, *([beta1] if getattr(schedule, "cycle_momentum", False) else []))
