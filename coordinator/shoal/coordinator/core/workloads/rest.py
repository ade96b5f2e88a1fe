"""Until when a region in which nothing happens needs no further step."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.core.placement.model import Signatures
from shoal.coordinator.core.workloads.model import Decision, RegionState
from shoal.coordinator.core.workloads.schedule import is_time_dependent
from shoal.coordinator.core.workloads.sleep import next_due
from shoal.types.assignment import Credential
from shoal.types.units import Elapsed, Wall
from shoal.types.workload import Intent

TIME_DEPENDENT: Final = re.compile(r"\bnow\b")
"""The variable of an expression that changes by itself."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The same inputs give the same decision, until one of two times."""

    # On the coordinator's clock.
    until: Elapsed
    # On the wall clock, which decides about certificates and signatures.
    until_wall: Wall
    # When it began, on the wall clock: one that shows less was set back, and everything is looked at again.
    since_wall: Wall

    def at_most(self, until: Elapsed) -> "Rest":
        return replace(self, until=min(self.until, until))

    def lasts(self, now: Elapsed, wall: Wall) -> bool:
        return now < self.until and self.since_wall <= wall < self.until_wall


def rest_after(
    world: RegionState,
    decision: Decision,
    credentials: Iterable[Credential],
    next_scan: Elapsed,
    now: Elapsed,
    wall: Wall,
) -> Rest | None:
    """The rest that follows a step which changed nothing; None where something waits for time alone.

    next_scan: when the triggers of automatic moves are evaluated next.
    """
    memory = decision.memory
    if decision.waits or memory.pending or world.delegations or world.fleet.mass_silence is not None:
        return None
    if any(_depends_on_time(each) for each in world.intents):
        return None
    after_s = world.region.sleep_after_s
    served_for = max((each.since for each in memory.marks.values()), default=Elapsed(-math.inf))
    ends = [
        next_scan if any(each.migration.automatic for each in world.intents) else Elapsed(math.inf),
        # A replica counts as in service once it has been in the routes for a while.
        *([settled] if (settled := Elapsed(served_for + world.fleet.timing.route_propagation_s)) > now else []),
        *([Elapsed(now + due)] if (due := next_due(memory.idle, after_s, now)) is not None else []),
    ]
    expiries = [*(each.expires_at for each in credentials), *_signature_ends(world.signatures)]
    until_wall = min((each for each in expiries if each > wall), default=Wall(math.inf))
    return Rest(min(ends), until_wall, wall)


def _depends_on_time(intent: Intent) -> bool:
    return is_time_dependent(intent) or TIME_DEPENDENT.search(intent.require.where) is not None


def _signature_ends(signatures: Signatures) -> list[Wall]:
    by_key: Mapping[str, Wall | None] = {name: each.until for name, each in signatures.keys.items()}
    own = [each.expires_at for signed in signatures.models.values() for each in signed]
    return [each for each in (*by_key.values(), *own) if each is not None]
