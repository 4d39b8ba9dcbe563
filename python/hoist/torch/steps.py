# SPDX-License-Identifier: Apache-2.0
"""What an engine remembers of its steps: the last report, and how many were skipped."""

from __future__ import annotations

import logging

from hoist import _hoist

_log = logging.getLogger("hoist")


class StepRecord:
    """`ordinary_skips`: so many skipped steps in a row are expected, because a dynamic loss scale falls with each."""

    def __init__(self, ordinary_skips: int):
        self._ordinary_skips = ordinary_skips
        self._skipped_in_a_row = 0
        self.last_report: _hoist.StepReport | None = None  # of a step that counts: restore() gives later ones up
        self.was_applied = False  # whether the last call of step() changed the model
        self.step = 0  # steps applied, also when the engine cannot be asked
        self.left_out = 0  # micro-batches of steps that the program ended early, since this engine began or went back
        self.skipped = 0  # since the first step of the run, also where it was resumed

    def restored(self, step: int, skipped: int) -> None:
        """The run continues from a commit after so many steps."""
        self.last_report, self.was_applied, self._skipped_in_a_row = None, False, 0
        self.step, self.skipped, self.left_out = step, skipped, 0

    def note(self, report: _hoist.StepReport) -> None:
        """Takes a step's report. Warns when more steps in a row were skipped than `ordinary_skips`: at the first of these, the
        second, the fourth and so on."""
        self.last_report, self.was_applied, self.step = report, report.applied, report.step
        if report.applied:
            self._skipped_in_a_row = 0
            return
        self.skipped += 1
        self._skipped_in_a_row += 1
        beyond = self._skipped_in_a_row - self._ordinary_skips
        if beyond > 0 and beyond.bit_count() == 1:
            _log.warning("step %d was skipped, %d in a row: a gradient was not finite, and the weights stay as they were",
                         self.step + self.skipped, self._skipped_in_a_row)
