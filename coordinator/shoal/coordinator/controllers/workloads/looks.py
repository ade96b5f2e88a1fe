"""Changes that depend on an answer which takes as long as a plan of the region, so that it is computed beside the loop.

The answer is about the region as it was when the look began. Before the change is committed, what the answer names must
be the same still, or there is another look. A refusal needs no such check: it was true when it was asked for, and it
changes nothing.

The last look counts whatever changed meanwhile. So nobody who asks waits for ever where nodes change all the time, and
the loop computes nothing. What is left to go wrong is what a change of the region after the commit does as well:
placement decides in the next step whether a move gets its place, and one that does not waits and says why.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from shoal.coordinator.controllers.runner import Compute, Transition
from shoal.coordinator.controllers.workloads.transitions import RegionTransitions, RegionWrites

A = TypeVar("A")
T = TypeVar("T")

MOST_LOOKS: Final = 3
"""Looks in a row while what they name changes: then the last one counts."""


@dataclass(frozen=True, slots=True, eq=False)
class Look(Generic[A]):
    """An answer about the region as of now."""

    # Computes it, from what does not change any more: it may run in a thread.
    compute: Callable[[], A]
    # Whether it has to be computed again, because what it names is another by now.
    is_outdated: Callable[[A], bool]


async def run_after_look(
    transitions: RegionTransitions,
    look: Callable[[], Look[A]],
    step: Callable[[A], Transition[RegionWrites, T]],
    compute: Compute,
) -> T:
    """The result of the step that acts on an answer. look: begins a look. step: decides from memory, under the lock.

    Raises what looks and steps raise, and as `RegionTransitions.run`.
    """
    for left in range(MOST_LOOKS - 1, -1, -1):
        begun = look()
        answer = await compute(begun.compute)
        found = await _run(transitions, begun, answer, step, is_last=not left)
        if found is not None:
            return found[0]
    raise AssertionError("the last look counts")


async def _run(
    transitions: RegionTransitions,
    look: Look[A],
    answer: A,
    step: Callable[[A], Transition[RegionWrites, T]],
    *,
    is_last: bool,
) -> tuple[T] | None:
    """The result of the step; None: the answer is outdated."""

    def run_step() -> Transition[RegionWrites, tuple[T] | None]:
        if not is_last and look.is_outdated(answer):
            return Transition(None)
        found = step(answer)
        return Transition((found.effects,), found.writes, found.adopt)

    async with transitions.lock:
        return await transitions.run(run_step)
