# SPDX-License-Identifier: Apache-2.0
"""Alternating pairs, how sure their median is, and the file of figures."""
import json
import statistics


class Pairs:
    """Calls two legs `count` times, in alternating order; each returns a figure, and `ratios` are first's over second's. After
    every second pair it calls `control` twice, whose ratios show the noise."""

    def __init__(self, count, first, second, control=None):
        self.first, self.second, self.control = [], [], []
        legs = ((first, self.first), (second, self.second))
        for pair in range(count):
            for leg, figures in legs if pair % 2 == 0 else reversed(legs):
                figures.append(leg())
            if control and pair % 2 == 1:
                self.control.append(control() / control())
        self.ratios = [a / b for a, b in zip(self.first, self.second, strict=True)]

    def __str__(self):
        return f"{text_of(self.ratios)}, control {text_of(self.control)}"

    def json(self):
        return {"ratio": statistics.median(self.ratios), "interval": interval(self.ratios),
                "control": interval(self.control) if self.control else None, "ratios": self.ratios}


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
    return "{:.3f} [{:.3f}, {:.3f}]".format(statistics.median(values), *interval(values)) if values else "none"


def write_json(path, figures):
    """Without a path it writes nothing."""
    if path:
        with open(path, "w") as file:
            json.dump(figures, file, indent=1)
