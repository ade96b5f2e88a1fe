"""How many new workloads a step takes up, so that whatever else the region has to decide does not wait for long for one
large apply.

A step that decides about everything takes up all: after a restart, while the region trades, where quotas or devices of
replicas without a measurement changed, or where a workload displaces others."""

from dataclasses import dataclass
from typing import Final

from shoal.types.units import Seconds

MOST_S: Final = Seconds(0.03)
"""Seconds that a step should take for new workloads. It takes as long again for those that it confirms, and what
follows its commit a third of that."""
LEAST_NEW: Final = 32
"""Taken up by each step, however long it takes."""
FIRST_NEW: Final = 32
"""Taken up before anything is known of how long they take."""
LEAST_MEASURED: Final = 8
"""A step about fewer workloads says little of how long one takes."""
NEWS: Final = 0.5
"""Weight of the newest step in the average."""


@dataclass(frozen=True, slots=True)
class StepPace:
    """What steps took lately."""

    # Seconds for each workload that was decided about; None: not known yet.
    each_s: float | None = None

    def after(self, workloads: int, took_s: Seconds) -> "StepPace":
        """After a step about so many workloads."""
        if workloads < LEAST_MEASURED:
            return self
        each_s = took_s / workloads
        return StepPace(each_s if self.each_s is None else NEWS * each_s + (1 - NEWS) * self.each_s)

    @property
    def most(self) -> int | None:
        """New workloads that the next step should take up; None: all, since steps take no time."""
        if self.each_s is None:
            return FIRST_NEW
        return max(LEAST_NEW, int(MOST_S / self.each_s)) if self.each_s > 0 else None
