# SPDX-License-Identifier: Apache-2.0
"""How sure a median is."""

import statistics


def interval(values):
    """Holds the true median with at least 95 % confidence: order statistics, as measure/statistics.cpp has it."""
    ordered, count = sorted(values), len(values)
    probability, tail, left_out = 0.5 ** count, 0.0, 0
    for below in range(count // 2):
        tail += probability
        if tail > 0.025:
            break
        left_out = below
        probability *= (count - below) / (below + 1)
    return ordered[left_out], ordered[count - 1 - left_out]


def text_of(values):
    return "{:.3f} [{:.3f}, {:.3f}]".format(statistics.median(values), *interval(values))
