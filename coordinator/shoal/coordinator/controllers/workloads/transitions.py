"""Commits of the region's step and of what operators ask between two steps: one transaction each, by the one loop."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.runner import Compute, Transition, TransitionRunner
from shoal.coordinator.controllers.workloads.migrations import verdict_digest
from shoal.coordinator.core.migration.model import Migration
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.identity import uri_of

T = TypeVar("T")

REGION: Final = "region"
"""The one key of these transitions: each step of the region decides about everything."""


@dataclass(frozen=True, slots=True)
class RegionWrites:
    """One fenced transaction."""

    # Values by key.
    puts: Mapping[str, bytes] = field(default_factory=dict)
    # Keys to delete.
    deletes: tuple[str, ...] = ()
    # For the region's event log.
    events: Sequence[LogEvent] = ()
    # Migrations with a new verdict: the audit log has it before anything acts on it.
    new_verdicts: Sequence[Migration] = ()


class RegionTransitions:
    """Of desired sets, the reconciler's memory and migrations."""

    def __init__(self, context: RegionContext) -> None:
        self.lock = asyncio.Lock()
        """Held while that state is computed and committed, and while capacity of the region is promised to others."""
        self._region = context.name
        self._store = context.store
        self._fence = context.fence
        self._runner = TransitionRunner[str, RegionWrites](self._commit, self._read_outcome)

    @property
    def is_uncertain(self) -> bool:
        """Whether the last commit failed, so that memory and store may differ."""
        return bool(self._runner.uncertain)

    async def run(self, step: Callable[[], Transition[RegionWrites, T]]) -> T:
        """As `TransitionRunner.run`; call it under `lock`."""
        return await self._runner.run(REGION, step)

    async def run_beside(self, begin: Callable[[], Callable[[], Transition[RegionWrites, T]]], compute: Compute) -> T:
        """As `TransitionRunner.run_beside`; call it under `lock`."""
        return await self._runner.run_beside(REGION, begin, compute)

    async def _commit(self, writes: RegionWrites) -> int:
        await self._attest(writes.new_verdicts)
        return await self._fence.commit(writes.puts, deletes=writes.deletes, events=writes.events)

    async def _attest(self, judged: Sequence[Migration]) -> None:
        """Audits verdicts before anything acts on them: twice after a crash in between, never not at all. Raises
        ShoalError(STORE_FULL | STORE_UNAVAILABLE).
        """
        for each in judged:
            if each.verdict is not None and each.target is not None:
                actor = uri_of(self._region, Role.AGENT, each.target.node)
                came = "passed" if each.verdict.passed else str(each.verdict.code or Code.VERIFY_FAILED)
                await self._fence.attest(actor, "Verify", each.id, f"{came} sha256:{verdict_digest(each.verdict)}")

    async def _read_outcome(self, key: str, doubtful: Transition[RegionWrites, Any]) -> Callable[[], None]:
        """By one key of the transaction, which wrote all of them or none, and only values that were not stored yet."""
        writes = doubtful.writes
        at = next((each for each in (*writes.puts, *writes.deletes)), None) if writes is not None else None
        if writes is None or at is None:
            return lambda: None
        record = await self._store.read(at)
        if (record.value if record is not None else None) != writes.puts.get(at):
            return lambda: None

        def adopt() -> None:
            doubtful.settle()
            doubtful.adopt(record.revision if record is not None else 0)

        return adopt
