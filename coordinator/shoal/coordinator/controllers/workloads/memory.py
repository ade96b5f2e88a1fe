"""The reconciler's memory in the store: one record for what is small, one for each workload, one for each node that
measured something, one for each region whose measurements were imported. A step writes those that changed, but for the
last.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from immutables import Map

from shoal.coordinator import codec
from shoal.coordinator.core.placement.model import Trial
from shoal.coordinator.core.prediction.exchange import ImportedMeasurements
from shoal.coordinator.core.prediction.residuals import Residual
from shoal.coordinator.core.workloads.model import (
    Crashes,
    Mark,
    PendingMove,
    ReconcilerMemory,
    RouteTable,
    Unloadable,
)
from shoal.coordinator.ports import Store
from shoal.types.assignment import Assignment, Measured
from shoal.types.units import Elapsed
from shoal.types.workload import WorkloadKey

MEMORY: Final = "reconciler"
OF_WORKLOADS: Final = "reconciler-workloads/"
OF_NODES: Final = "reconciler-measured/"
OF_REGIONS: Final = "reconciler-imported/"


@dataclass(frozen=True, slots=True)
class WarmUpRecord:
    """What a model's warm-up on a device measured."""

    # Model, node and device.
    trial: Trial
    # Load time, memory, latencies and energy that it showed.
    measured: Measured
    # Its latency against what the device's receipt promised; None without a receipt, or from an older coordinator.
    residual: Residual | None = None


@dataclass(frozen=True, slots=True)
class MeasuredOnNode:
    """What warm-ups on one node measured."""

    records: tuple[WarmUpRecord, ...]


@dataclass(frozen=True, slots=True)
class WorkloadMemory:
    """What is remembered of one workload."""

    # Where its requests go; None: it was deleted.
    table: RouteTable | None
    # Of its assignments, by id.
    marks: Mapping[str, Mark]


@dataclass(frozen=True, slots=True)
class SmallMemory:
    """Everything else, as in `ReconcilerMemory`. Up to version 0.1 the last three held what has records of its own now;
    they are empty since."""

    # As in ReconcilerMemory.
    issued: int = 0
    # As in ReconcilerMemory.
    crashes: tuple[Crashes, ...] = ()
    # As in ReconcilerMemory.
    short: Mapping[str, Elapsed] = field(default_factory=dict)
    # As in ReconcilerMemory.
    without_ready: Mapping[str, Elapsed] = field(default_factory=dict)
    # As in ReconcilerMemory.
    away: Mapping[str, Elapsed] = field(default_factory=dict)
    # As in ReconcilerMemory.
    back: Mapping[str, Elapsed] = field(default_factory=dict)
    # As in ReconcilerMemory.
    pending: Mapping[str, PendingMove] = field(default_factory=dict)
    # As in ReconcilerMemory.
    idle: Mapping[str, Elapsed] = field(default_factory=dict)
    # As in ReconcilerMemory.
    unloadable: tuple[Unloadable, ...] = ()
    # As in ReconcilerMemory.
    over_budget: Mapping[str, Elapsed] = field(default_factory=dict)
    # Marks by assignment.
    marks: Mapping[str, Mark] = field(default_factory=dict)
    # Tables by workload.
    tables: Mapping[str, RouteTable] = field(default_factory=dict)
    # Warm-up figures.
    measured: tuple[WarmUpRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """The memory as the store has it."""

    memory: ReconcilerMemory = field(default_factory=ReconcilerMemory)
    # True: it is stored as up to version 0.1, and is to be written anew as a whole.
    is_old: bool = False


async def load_memory(store: Store) -> StoredMemory:
    """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
    found = await store.read(MEMORY)
    small = codec.load(SmallMemory, found.value) if found is not None else SmallMemory()
    marks, tables = dict(small.marks), dict(small.tables)
    warm_ups = list(small.measured)
    for record in await store.scan(OF_WORKLOADS):
        stored = codec.load(WorkloadMemory, record.value)
        marks |= stored.marks
        if stored.table is not None:
            tables[record.key.removeprefix(OF_WORKLOADS)] = stored.table
    for record in await store.scan(OF_NODES):
        warm_ups += codec.load(MeasuredOnNode, record.value).records
    imported = [codec.load(ImportedMeasurements, record.value) for record in await store.scan(OF_REGIONS)]
    memory = ReconcilerMemory(
        **{name: getattr(small, name) for name in _SMALL},
        marks=Map(marks),
        tables=Map(tables),
        measured=Map({each.trial: each.measured for each in warm_ups}),
        residuals=Map({each.trial: each.residual for each in warm_ups if each.residual is not None}),
        imported=Map({each.region: each for each in imported}),
    )
    return StoredMemory(memory, is_old=bool(small.marks or small.tables or small.measured))


class TrialsByNode:
    """Which trials may be known of a node, so that those of others are not looked at. Trials that are forgotten stay in
    it until the coordinator starts again."""

    def __init__(self, trials: Iterable[Trial] = ()) -> None:
        self._trials = defaultdict[str, set[Trial]](set)
        self.add(trials)

    def add(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            self._trials[trial.node].add(trial)

    def of(self, node: str) -> Iterable[Trial]:
        return self._trials.get(node, ())


def memory_writes(
    before: ReconcilerMemory,
    after: ReconcilerMemory,
    workloads: Mapping[WorkloadKey, Iterable[Assignment]],
    nodes: Iterable[str],
    trials: TrialsByNode | None = None,
) -> tuple[Mapping[str, bytes], tuple[str, ...]]:
    """Puts and deletes. workloads: those whose marks or table may be others than before, with all of their assignments
    after the step. nodes: those that measured something. trials: all of theirs; None: all are looked at."""
    puts, deletes = dict[str, bytes](), list[str]()
    small, known = _small(after), _small(before)
    if small != known:
        puts[MEMORY] = codec.dump(small)
    for key, assignments in workloads.items():
        marks = {one.id: mark for one in assignments if (mark := after.marks.get(one.id)) is not None}
        stored = WorkloadMemory(after.tables.get(str(key)), marks)
        if stored.table is None and not marks:
            deletes.append(OF_WORKLOADS + str(key))
        else:
            puts[OF_WORKLOADS + str(key)] = codec.dump(stored)
    wanted = frozenset(nodes)
    by_node = TrialsByNode(after.measured) if trials is None and wanted else trials
    for node in sorted(wanted):
        assert by_node is not None
        found = sorted(trial for trial in by_node.of(node) if trial in after.measured)
        records = [WarmUpRecord(trial, after.measured[trial], after.residuals.get(trial)) for trial in found]
        puts[OF_NODES + node] = codec.dump(MeasuredOnNode(tuple(records)))
    return puts, tuple(deletes)


_SMALL: Final = tuple(each.name for each in fields(SmallMemory) if each.name not in ("marks", "tables", "measured"))
"""What has no records of its own."""


def _small(memory: ReconcilerMemory) -> SmallMemory:
    return SmallMemory(**{name: getattr(memory, name) for name in _SMALL})
