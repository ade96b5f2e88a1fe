"""One region's controllers, joined. `main` and the simulator build it from ports, and only from ports.

Every method is a coroutine on one event loop: no threads, no clock but the port's, no chance but the port's. What a
restart finds is what the store holds; nothing else is remembered.
"""

import asyncio
from dataclasses import dataclass

from shoal.coordinator.controllers.events import EventLog
from shoal.coordinator.ports import AgentLinks, Blobs, Clock, Ids, Inspector, Store
from shoal.types.codes import Refusal
from shoal.types.units import Seconds


@dataclass(frozen=True, slots=True)
class RegionConfig:
    """name: the region's. seed: of every choice that placement leaves open. tick_s: how often time is looked at.

    events_kept, audit_kept: entries, the oldest go first. missed: beats until a node is suspect.
    """

    name: str
    heartbeat_s: Seconds = Seconds(1.0)
    missed: int = 3
    lost_after_s: Seconds = Seconds(10.0)
    tick_s: Seconds = Seconds(0.5)
    seed: int = 0
    events_kept: int = 10_000
    audit_kept: int = 100_000


class Region:
    """The regional coordinator behind its ports. fleet implements ports.LinkEvents: give it to the link adapter."""

    def __init__(
        self,
        store: Store,
        links: AgentLinks,
        blobs: Blobs,
        inspector: Inspector,
        clock: Clock,
        ids: Ids,
        config: RegionConfig,
        *,
        restored: Refusal | None = None,
    ) -> None:
        """restored: why the store is a copy that is older than what was acknowledged; opens a new history."""
        self.config = config
        self.events = EventLog(store, clock, kept=config.events_kept, audit_kept=config.audit_kept)

    async def start(self) -> None:
        """Reads the store and opens (or resumes) the history. Call once, before any link is served."""

    async def run(self) -> None:
        """Ticks until stopped: liveness, deadlines, reconcile."""

    async def stop(self) -> None:
        """Ends `run`; nothing needs saving, since everything was saved before it was done."""
