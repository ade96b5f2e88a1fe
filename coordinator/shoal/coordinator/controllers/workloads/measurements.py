"""Measurements of other regions, as operators import and forget them, and this region's own for others."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.coordinator import codec
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.runner import Transition
from shoal.coordinator.controllers.workloads.memory import OF_REGIONS
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.controllers.workloads.transitions import RegionWrites
from shoal.coordinator.core.prediction.exchange import (
    MOST_REGIONS,
    ImportedMeasurements,
    ReadMeasurements,
    measurements_document,
)
from shoal.types.codes import Code, refuse


class MeasurementsController:
    """They are part of the reconciler's memory, which steps read: it changes between two steps."""

    def __init__(self, workloads: WorkloadsController, context: RegionContext, on_change: Callable[[], None]) -> None:
        """on_change: called when predictions may be others."""
        self._workloads = workloads
        self._region = context.name
        self._clock = context.clock
        self._on_change = on_change

    @property
    def imports(self) -> Sequence[ImportedMeasurements]:
        """By region, in order of their names."""
        return [each for _, each in sorted(self._workloads.memory.imported.items())]

    def document(self) -> Callable[[], bytes]:
        """Writes what this region measured until now. It reads nothing that changes afterwards, so it may run in a
        thread."""
        residuals, wall = self._workloads.memory.residuals, self._clock.wall()
        return lambda: measurements_document(self._region, wall, (residuals[key] for key in sorted(residuals)))

    def check_room(self, region: str) -> None:
        """Raises ShoalError(FIELD_TOO_MANY) where so many regions' measurements are kept that another's are not."""
        known = self._workloads.memory.imported
        if region not in known and len(known) >= MOST_REGIONS:
            raise refuse(
                Code.FIELD_TOO_MANY,
                f"measurements of {len(known)} regions, and of {region}",
                f"at most {MOST_REGIONS} regions",
                "shoal region measurements rm REGION, of one that counts least",
            )

    async def put(self, found: ReadMeasurements, actor: str) -> ImportedMeasurements:
        """Keeps what a region measured, instead of what it exported earlier.

        Raises ShoalError(FIELD_TOO_MANY | STORE_FULL | STORE_UNAVAILABLE).
        """
        kept = ImportedMeasurements(found.region, found.exported_at, self._clock.wall(), actor, found.rows)
        left_out = f", {found.left_out} left out ({found.reasons[0].code})" if found.left_out else ""
        message = f"{len(kept.rows)} of {kept.models} models on {kept.classes} device classes{left_out}"

        def change() -> Transition[RegionWrites, None]:
            self.check_room(found.region)
            memory = self._workloads.memory
            after = replace(memory, imported=memory.imported.set(found.region, kept))
            event = LogEvent("MEASUREMENTS_IMPORTED", f"region {found.region}", message, actor)
            writes = RegionWrites({OF_REGIONS + found.region: codec.dump(kept)}, events=[event])
            return Transition(None, writes, lambda _: self._workloads.adopt_memory(after))

        await self._run(change)
        return kept

    async def remove(self, region: str, actor: str) -> None:
        """Raises ShoalError(NOT_FOUND | STORE_FULL | STORE_UNAVAILABLE)."""

        def change() -> Transition[RegionWrites, None]:
            memory = self._workloads.memory
            if region not in memory.imported:
                known = ", ".join(sorted(memory.imported)) or "nothing was imported"
                raise refuse(
                    Code.NOT_FOUND, f"no measurements of region {region!r:.80}", known, "shoal region measurements ls"
                )
            after = replace(memory, imported=memory.imported.delete(region))
            event = LogEvent("MEASUREMENTS_REMOVED", f"region {region}", "", actor)
            writes = RegionWrites({}, (OF_REGIONS + region,), [event])
            return Transition(None, writes, lambda _: self._workloads.adopt_memory(after))

        await self._run(change)

    async def _run(self, change: Callable[[], Transition[RegionWrites, None]]) -> None:
        async with self._workloads.step_lock:
            await self._workloads.transitions.run(change)
        self._on_change()
