"""Answers of can-move carried out in a region of real processes: were they right, and how long did the moves take?"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

from _prediction.live_models import LiveModel

from harness.cluster.stack import DevStack, documents, policy, region, workload
from shoal.types.codes import ShoalError

_ALLOWED: Final = ("node-a", "node-b")
_FORBIDDEN: Final = "node-c"
_FORBIDDEN_EVERY: Final = 4
"""One move in so many goes where the policy forbids it."""
_STEPS: Final = "shift: {steps: [25%, 100%], hold: 2s}"
"""The shortest steps that a coordinator allows; the estimate counts them."""
_SIDES_WITHIN: Final = 0.3


@dataclass(frozen=True, slots=True)
class MoveTrial:
    """One answer, and what came of it."""

    # The workload's name.
    workload: str
    # The node that it was to move to.
    target: str
    # Of can-move: `yes`, `yes-with` or `no`.
    answer: str
    # Code of why it did not move; empty: it moved.
    code: str
    # Seconds that the migration expected; NaN where none began.
    expected_s: float
    # Seconds that it took; NaN where it did not move.
    took_s: float
    # Its stages, with the seconds that each took.
    stages: tuple[tuple[str, float], ...] = ()

    @property
    def is_verdict_right(self) -> bool:
        return (self.answer != "no") is (self.code == "")

    @property
    def error(self) -> float:
        """Of the seconds, relative to what it took; NaN where it did not move, or nothing was expected."""
        return self.expected_s / self.took_s - 1


def move_trials(
    folder: Path, models: Sequence[LiveModel], count: int, budget_s: float, seed: int
) -> Iterator[MoveTrial]:
    """At most `count` moves, none begun after `budget_s` seconds. Each model is a workload of its own."""
    rng, fleet = random.Random(seed), tuple((name, "") for name in (*_ALLOWED, _FORBIDDEN))
    with region(folder, len(fleet), fleet=fleet) as stack:
        for each in models:
            stack.push(each.content, each.name)
        where = ", ".join(repr(name) for name in _ALLOWED)
        spec = f'  require:\n    where: "node.name in [{where}]"\n  migration: {{{_STEPS}}}\n'
        stack.apply(documents(policy("bench", spec), *(workload(each.name, each.name, "bench") for each in models)))
        ends = time.monotonic() + budget_s
        for number in range(count):
            if time.monotonic() >= ends:
                return
            name = rng.choice(models).name
            (row,) = stack.wait_serving(name)
            here = next(node for node in _ALLOWED if node == row.node)
            other = next(node for node in _ALLOWED if node != here)
            yield _carry_out(stack, name, _FORBIDDEN if number % _FORBIDDEN_EVERY == 0 else other)


def _carry_out(stack: DevStack, name: str, target: str) -> MoveTrial:
    with stack.api() as api:
        answer = api.can_move("default", name, target).answer
    try:
        ended = stack.migrate(name, target)
    except ShoalError as error:
        return MoveTrial(name, target, answer, error.code, math.nan, math.nan)
    expected_s = ended.expected.seconds if ended.HasField("expected") else math.nan
    if ended.stage != "done":
        return MoveTrial(name, target, answer, ended.reason.code, expected_s, math.nan)
    stages = tuple((now.stage, after.at - now.at) for now, after in pairwise(ended.stages))
    return MoveTrial(name, target, answer, "", expected_s, math.fsum(took for _, took in stages), stages)


def summary(trials: Sequence[MoveTrial]) -> dict[str, float]:
    """The object of the last line. Shares are of 1, the error is percent."""
    errors = [abs(each.error) for each in trials if math.isfinite(each.error)]
    return {
        "moves": len(trials),
        "moved": sum(each.code == "" for each in trials),
        "verdicts_right": sum(each.is_verdict_right for each in trials) / max(1, len(trials)),
        "seconds_within_30": sum(each <= _SIDES_WITHIN for each in errors) / max(1, len(errors)),
        "seconds_median_error": round(100 * median(errors), 1) if errors else math.nan,
    }
