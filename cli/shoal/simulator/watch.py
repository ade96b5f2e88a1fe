"""The region's invariants, checked after every step that its controller takes."""

from typing import TYPE_CHECKING

from shoal.coordinator.controllers.region import Region
from shoal.coordinator.core.workloads.invariants import Violation, check
from shoal.simulator.world import World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

PASSING_S = 3.0
"""Reports come in while a step is written. What one of these invariants finds must stand for so long to count."""
STEPS_A_SECOND = 200
"""More in one virtual second, and the controller chases its own tail."""
DRAINED_S = 60.0
"""A draining replica of a node that was lost meanwhile is gone by then."""
OF_REPORTS = frozenset({"I3", "I4", "I5", "I8", "I10"})


class Restless(RuntimeError):
    """Step follows on step, and time stands almost still."""


class Watch:
    """Runs `check` after every step of one region; remembers what is not settled yet."""

    def __init__(self, world: World, region: Region, deleted: "Mapping[str, float]") -> None:
        """deleted: workload -> when an operator last asked for its deletion."""
        self._world = world
        self._region = region
        self._deleted = deleted
        self._since: dict[tuple[str, str, str], float] = {}
        self.clocks_stepped = any(event.kind == "fault.clock" for event in world.history.events)
        self._second = 0
        self._steps = 0
        self._told: set[tuple[str, str, str]] = set()
        self._step: Callable[[], Awaitable[None]] = region.workloads.step
        region.workloads.step = self._stepped  # type: ignore[method-assign]

    async def _stepped(self) -> None:
        second = int(self._world.now())
        self._steps = self._steps + 1 if second == self._second else 1
        self._second = second
        if self._steps > STEPS_A_SECOND:
            raise Restless(f"{self._steps} steps in one second")
        await self._step()
        self.look()

    def look(self) -> None:
        now = self._world.now()
        found = {_name(violation): violation for violation in check(self._region.workloads.snapshot())}
        self._since = {name: self._since.get(name, now) for name in found}
        for name, since in self._since.items():
            passing = found[name].invariant in OF_REPORTS and now - since < PASSING_S
            if self.clocks_stepped and found[name].invariant == "I5":
                continue  # waits are told on the wall clock, for people: theirs cannot be judged now
            if found[name].invariant == "I10" and now - self._deleted.get(found[name].subject, -DRAINED_S) < DRAINED_S:
                continue  # it drains because the workload was deleted, before it was applied again
            if not passing and name not in self._told:
                self._told.add(name)
                self._world.fail(f"{found[name].invariant} {found[name].subject}: {found[name].message}")


def _name(violation: Violation) -> tuple[str, str, str]:
    return violation.invariant, violation.subject, violation.message
