"""Checks the region's invariants after every step of its controller."""

from typing import TYPE_CHECKING

from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.core.workloads.invariants import Violation, check
from shoal.coordinator.ports import StaleRevision
from shoal.simulator.world.world import SimWorld
from shoal.types.codes import ShoalError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

TRANSIENT_S = 3.0
"""Reports arrive while a step is written, so a violation of `REPORT_INVARIANTS` counts only if it lasts this long."""
MAX_STEPS_PER_S = 200
"""More steps than this in one virtual second means that the controller triggers itself."""
AUDIT_EVERY = 4
"""Of so many steps one is compared with a decision about everything, which takes as long as the rest of the step. What
an earlier one should have noticed differs then, too; unit tests compare every step (`CoreRegion`)."""
DRAIN_GRACE_S = 60.0
"""Seconds within which a draining replica of a node that was lost meanwhile is gone."""
REPORT_INVARIANTS = frozenset({"I3", "I4", "I5", "I8", "I10"})


class StepLivelock(RuntimeError):
    """Steps follow each other while time hardly advances."""


class InvariantMonitor:
    """Runs `check` after every step of one region and remembers violations that may still pass."""

    def __init__(self, world: SimWorld, region: RegionalCoordinator, deleted: "Mapping[str, float]") -> None:
        """deleted: workload -> when an operator last asked for its deletion."""
        self._world = world
        self._region = region
        self._deleted = deleted
        self._since: dict[tuple[str, str, str], float] = {}
        self.clocks_stepped = any(event.kind == "fault.clock" for event in world.history.events)
        self._second = 0
        self._steps = 0
        self._steps_in_all = 0
        self._reported: set[tuple[str, str, str]] = set()
        self._step: Callable[[], Awaitable[None]] = region.workloads.step
        region.workloads.step = self._step_and_check  # type: ignore[method-assign]

    async def _step_and_check(self) -> None:
        self._steps_in_all += 1
        self._region.workloads.auditor = self._on_audit if self._steps_in_all % AUDIT_EVERY == 0 else None
        try:
            self._count_step()
            await self._step()
            self.check_now()
        except (ShoalError, StaleRevision):
            raise
        except Exception as error:  # a region goes on after such a step, but none may come
            self._world.fail(f"a step ended with {error!r}", error)
            raise

    def _count_step(self) -> None:
        second = int(self._world.now())
        self._steps = self._steps + 1 if second == self._second else 1
        self._second = second
        if self._steps > MAX_STEPS_PER_S:
            raise StepLivelock(f"{self._steps} steps in one second")

    def _on_audit(self, differing: tuple[str, ...]) -> None:
        if differing:
            self._world.fail(f"I8 a decision about everything would differ in {', '.join(differing)}")

    def check_now(self) -> None:
        now = self._world.now()
        found = {_violation_key(violation): violation for violation in check(self._region.workloads.snapshot())}
        self._since = {name: self._since.get(name, now) for name in found}
        for name, since in self._since.items():
            passing = found[name].invariant in REPORT_INVARIANTS and now - since < TRANSIENT_S
            if self.clocks_stepped and found[name].invariant == "I5":
                continue  # waits carry wall-clock times, which are meaningless after a clock step
            if (
                found[name].invariant == "I10"
                and now - self._deleted.get(found[name].subject, -DRAIN_GRACE_S) < DRAIN_GRACE_S
            ):
                continue  # it drains because the workload was deleted and then applied again
            if not passing and name not in self._reported:
                self._reported.add(name)
                self._world.fail(f"{found[name].invariant} {found[name].subject}: {found[name].message}")


def _violation_key(violation: Violation) -> tuple[str, str, str]:
    return violation.invariant, violation.subject, violation.message
