"""The devices of a region as arrays, so that the best places of a workload are found without a look at each device.

Devices that differ in names and places alone are of one kind, for one model: same hardware, same receipt but for its
time, same measurement of the model. What a model does on a device, and which constraints it violates there whatever
else is placed, is computed by `feasible` and `rank` for one device of each kind, as `explain` computes it for every
device. What differs within a kind are columns: whether the node takes new work, what a selector says of it, and what is
taken of the device.

Columns propose: `Solver` checks each place by the functions for one device before it takes it. So a column may admit
too much, but it never leaves out a place that fits, and the objective that it ranks by is exact.
"""

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from immutables import Map
from numpy.typing import NDArray

from shoal.coordinator.core.fleet.commitments import admissible_bytes
from shoal.coordinator.core.fleet.state import NEVER, NodeState
from shoal.coordinator.core.placement.allocations import Allocations, busy_share, memory_requirement
from shoal.coordinator.core.placement.changes import is_same, is_same_host
from shoal.coordinator.core.placement.contention import UTILISATION_MOST
from shoal.coordinator.core.placement.domains import is_label
from shoal.coordinator.core.placement.feasible import (
    Constraint,
    Option,
    PlacementFault,
    Scope,
    does_not_answer,
    node_fault,
)
from shoal.coordinator.core.placement.model import Inputs, Poisoning, Slot, Trial, Triple, requester_of
from shoal.coordinator.core.placement.rank import objectives, place_number, tie_breaks, variant_number, weighed_values
from shoal.coordinator.core.prediction.residuals import Residual
from shoal.policies.cel import Expression, device_fields, node_fields
from shoal.policies.resolve import RTT_LABEL
from shoal.types.assignment import Measured
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Device
from shoal.types.receipt import Receipt, RuntimeSupport
from shoal.types.units import Seconds
from shoal.types.workload import Intent, Limits, ModelRef, Requirements

MOST_TABLES: Final = 128
"""Requests whose figures are kept, each a few figures for each kind."""
MOST_PREPARED: Final = MOST_TABLES // 2
"""Requests whose figures are kept before a step asked for them."""
KIND_DEVICES: Final = 128
"""To judge a request on one kind takes as long as to look at so many devices."""
SELECTOR_DEVICES: Final = 4
"""The same of asking a selector about one device."""
MOST_JUDGED_ANEW: Final = 8
"""Requests that are judged anew at once when the region learnt something, those that were asked last."""
MOST_COLUMNS: Final = 64
"""Models, and selectors, of which a column is kept: 8 bytes and one byte for each device."""
MOST_AUDITED: Final = 8
"""Searches between two updates that check what columns say, the first ones: what one of them checks takes a quarter as
long as the search, and a step about hundreds of workloads would check as many nodes."""
MOST_SEARCHES: Final = 32
"""Requests of which the objective of each device is kept: 8 bytes for each device and model."""
MOST_DOUBTED: Final = 8
"""Devices of those where a request that nothing can take is feasible by columns, at which an audit looks."""
NONE: Final = -1
_FIGURES: Final = ("judged", "feasible", "awake", "asleep", "memory", "busy")
"""Arrays of `_Figures`, by kind."""
_FIGURES_OF: Final[Callable[[Measured], tuple[Any, ...]]] = attrgetter(*(each.name for each in fields(Measured)))
_OF_ROWS: Final = ("_classes", "_places", "_open", "_sleeps", "_occupied", "_admissible", "_booked")
"""Arrays of `DeviceColumns`, by row."""
KindKey = tuple[int, tuple[object, ...]]
"""Class of the device, and the figures of the model's measurement there; none where it was not measured."""
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]
Numbers = NDArray[np.uint64]


class _Failures(NamedTuple):
    """What excludes models because they failed."""

    # Of `Inputs.poisoned`.
    poisoned: frozenset[Poisoning]
    # Of `Inputs.unloadable`.
    unloadable: tuple[tuple[Triple, Refusal], ...]


class Request(NamedTuple):
    """What a workload asks, without its name: workloads that ask the same share figures."""

    models: tuple[ModelRef, ...]
    require: Requirements
    limits: Limits
    # The rest of what predictions, constraints and the objective read of it.
    other: tuple[object, ...]
    # Of its models.
    failures: _Failures


class KnownOption(NamedTuple):
    """A candidate whose figures are its own, not those of its kind: a current replica runs there."""

    option: Option
    # Logarithm of its objective; inf: it is not feasible by itself.
    objective: float


class Nowhere(NamedTuple):
    """What a request finds that no device can take whatever else is placed."""

    # As `explain.refusal` has it.
    refusal: Refusal
    # As `explain.is_permanent` has it.
    is_permanent: bool


class Excluded(NamedTuple):
    """Devices that a request finds excluded by the same constraints, whatever else is placed."""

    # What excludes one of them. What is said of the others differs in names alone, and comes after it by its text.
    faults: tuple[PlacementFault, ...]
    # How many they are.
    number: int


class _KnownNowhere(NamedTuple):
    """That, and what it was found from."""

    found: Nowhere
    # Of the workload that asked first.
    tenant: str
    # Of the devices, as `DeviceColumns` counts it.
    version: int
    # Of each model, how often a device had become of another kind.
    changes: tuple[int, ...]
    # The same columns, the residuals and the profiles.
    learnt: tuple[object, ...]


class ModelFigures(NamedTuple):
    """What a workload finds with one of its models: by row, one for each device and some without a device."""

    model: ModelRef
    # False: it may not run there, or nothing new may be placed there.
    feasible: Flags
    # Logarithm of the objective on a device that is awake anyway.
    awake: Floats
    # The same where the device would sleep otherwise.
    asleep: Floats
    # Bytes that a new replica is committed.
    memory: Floats
    # Share of the device's time that declared traffic takes.
    busy: Floats

    def of_rows(self, rows: Ints) -> "ModelFigures":
        """Of these rows alone, in their order."""
        return ModelFigures(
            self.model, self.feasible[rows], self.awake[rows], self.asleep[rows], self.memory[rows], self.busy[rows]
        )


class Preparation(enum.Enum):
    """How far what the search for a place of a workload needs was prepared."""

    PART = enum.auto()
    """Something was built; there may be more."""
    DONE = enum.auto()
    """All of it was there, or no column says it."""
    NO_ROOM = enum.auto()
    """Others are kept in its place."""


class _Model:
    """One model, on every device."""

    def __init__(self, rows: int, devices: Iterable[int]) -> None:
        """devices: rows that have one."""
        self.kinds: Ints = np.full(rows, NONE, dtype=np.int64)
        """Of each row; NONE: it has no device, or nobody looked yet."""
        self.unknown = dict.fromkeys(devices)
        """Rows that nobody looked at yet."""
        self.ids: dict[KindKey, int] = {}
        """Number of a kind, by class of the device and measurement."""
        self.counts: list[int] = []
        """Of each kind: its rows."""
        self.version = 0
        """Grows when a kind gets its first row."""
        self.changes = 0
        """Grows when a row becomes of another kind."""
        self.samples: list[int] = []
        """Of each kind: a row that was of it, if it has any."""

    def copy(self) -> "_Model":
        found = copy(self)
        found.kinds, found.ids = self.kinds.copy(), dict(self.ids)
        found.counts, found.samples = [*self.counts], [*self.samples]
        found.unknown = dict(self.unknown)
        return found

    @property
    def unmeasured_kinds(self) -> list[int]:
        """Kinds of devices where the model was not measured."""
        return [kind for (_, measured), kind in self.ids.items() if not measured]

    def row_of(self, kind: int) -> int:
        """One device of a kind that has any."""
        if self.kinds[self.samples[kind]] != kind:
            self.samples[kind] = int(np.argmax(self.kinds == kind))
        return self.samples[kind]

    def put(self, row: int, key: KindKey | None) -> None:
        """The kind of a row from now on; None: it has no device any more."""
        kind = NONE if key is None else self._number_of(key, row)
        before = int(self.kinds[row])
        if kind != before:
            self.changes += 1
        if before != NONE:
            self.counts[before] -= 1
        if kind != NONE:
            self._count(kind, 1)
        self.kinds[row] = kind
        self.unknown.pop(row, None)

    def put_unmeasured(self, rows: Ints, classes: Ints) -> None:
        """The kinds of some rows that nobody looked at yet, where the model was not measured. classes: of the
        devices."""
        found, first, inverse, counts = np.unique(classes, return_index=True, return_inverse=True, return_counts=True)
        kinds = [
            self._number_of((each, ()), row) for each, row in zip(found.tolist(), rows[first].tolist(), strict=True)
        ]
        for kind, count in zip(kinds, counts.tolist(), strict=True):
            self._count(kind, count)
        self.changes += len(rows)
        self.kinds[rows] = np.array(kinds, dtype=np.int64)[inverse]
        for row in rows.tolist():
            del self.unknown[row]

    def _number_of(self, key: KindKey, row: int) -> int:
        """Of a kind. row: one that becomes of it."""
        kind = self.ids.setdefault(key, len(self.counts))
        if kind == len(self.counts):
            self.counts.append(0)
            self.samples.append(row)
        return kind

    def _count(self, kind: int, rows: int) -> None:
        self.version += not self.counts[kind]
        self.counts[kind] += rows


class _Selector:
    """One selector, on every device."""

    def __init__(self, devices: Iterable[int]) -> None:
        """devices: rows that have one."""
        self.unknown = dict.fromkeys(devices)
        """Rows that nobody looked at yet."""
        self.answers: dict[str, Refusal | None] = {}
        """Meanwhile, by what the selector reads of a device."""
        self.admits: Flags = np.zeros(0, dtype=np.bool_)
        """Of which rows it is true."""
        self.refusals: list[Refusal] = []
        """Why it is not true of others; each once."""
        self._numbers: dict[Refusal, int] = {}
        """Where each is among them."""
        self._of_rows: Ints = np.zeros(0, dtype=np.int64)
        """Of the other rows, which it is; NONE: it is true, or nobody looked yet."""

    def copy(self) -> "_Selector":
        found = copy(self)
        found.admits, found.refusals, found._of_rows = self.admits.copy(), [*self.refusals], self._of_rows.copy()
        found.unknown, found.answers, found._numbers = dict(self.unknown), dict(self.answers), dict(self._numbers)
        return found

    def put(self, row: int, refusal: Refusal | None) -> None:
        number = NONE if refusal is None else self._numbers.setdefault(refusal, len(self.refusals))
        if refusal is not None and number == len(self.refusals):
            self.refusals.append(refusal)
        self.admits[row], self._of_rows[row] = refusal is None, number
        self.unknown.pop(row, None)

    def refusal_of(self, row: int) -> Refusal | None:
        """Why it is not true of a row; None: it is."""
        number = int(self._of_rows[row])
        return None if number == NONE else self.refusals[number]

    def by_code(self, rows: Ints) -> Sequence[tuple[Refusal, Ints]]:
        """These rows, of which it is not true, by the code of its refusal, with the first one by its text."""
        of_rows, found = self._of_rows[rows], dict[Code, list[int]]()
        for number in np.unique(of_rows).tolist():
            found.setdefault(self.refusals[number].code, []).append(number)
        return [
            (min((self.refusals[number] for number in part), key=str), rows[np.isin(of_rows, part)])
            for part in found.values()
        ]

    def grow(self, rows: int) -> None:
        self.admits, self._of_rows = _longer(self.admits, rows), _longer(self._of_rows, rows, NONE)


class _Figures:
    """What one request finds on each kind of device for one of its models."""

    def __init__(self, model: _Model) -> None:
        self.model = model
        """Whose kinds these are."""
        self.version = -1
        """Of the model, when all kinds were judged that had a row."""
        self.changes = 0
        """Grows when a kind is judged."""
        self.residuals: object = None
        """From what the figures of kinds that were not measured are learnt."""
        self.repeats: object = None
        """From what the intervals of the others are."""
        self.judged: Flags = np.zeros(0, dtype=np.bool_)
        self.feasible: Flags = np.zeros(0, dtype=np.bool_)
        self.awake: Floats = np.zeros(0)
        """Logarithm of the objective on a device that is awake anyway."""
        self.asleep: Floats = np.zeros(0)
        """The same where the device would sleep otherwise."""
        self.memory: Floats = np.zeros(0)
        """Bytes that a new replica is committed."""
        self.busy: Floats = np.zeros(0)
        """Share of the device's time that declared traffic takes."""
        self.samples: list[Option | None] = []
        """On one device of each kind that is feasible; None: it is not, and what excludes it names the device."""

    def copy(self, model: _Model) -> "_Figures":
        """Of a copy of the model."""
        found = copy(self)
        found.model, found.samples = model, [*self.samples]
        for name in _FIGURES:
            setattr(found, name, getattr(self, name).copy())
        return found

    def forget(self, kinds: Sequence[int]) -> None:
        """They are judged anew."""
        self.version = -1
        for kind in kinds:
            if kind < len(self.judged):
                self.judged[kind] = False

    def grow(self, kinds: int) -> None:
        self.samples += [None] * (kinds - len(self.samples))
        for name in _FIGURES:
            setattr(self, name, _longer(getattr(self, name), kinds))


class _Search:
    """The objectives that one request finds on all devices, where one more replica fits."""

    def __init__(self) -> None:
        self.basis: tuple[object, ...] = ()
        """What columns and figures they were computed from, as they were then."""
        self.stamps: tuple[int, ...] = ()
        """How many rows there were, and how often each of the figures had changed."""
        self.position = 0
        """Up to where changes of rows were taken over, as `DeviceColumns` counts them."""
        self.scores: Floats = np.zeros(0)
        """By model and row; inf: it does not fit there."""

    def is_of(self, basis: tuple[object, ...], stamps: tuple[int, ...]) -> bool:
        is_same = self.stamps == stamps and len(self.basis) == len(basis)
        return is_same and all(one is other for one, other in zip(self.basis, basis, strict=True))


class _Turn:
    """Nodes in turn."""

    def __init__(self) -> None:
        self._left: Iterator[str] = iter(())

    def take(self, nodes: Iterable[str], most: int) -> Sequence[str]:
        """At most so many, the next by name; after the last one the first."""
        names = [*islice(self._left, most)]
        if len(names) < most:
            self._left = iter(sorted(nodes))
            names += islice(self._left, most - len(names))
        return names


class _Table(NamedTuple):
    """The figures of one request, by model."""

    figures: tuple[_Figures, ...]
    # Of the models, that the figures were computed from.
    profiles: tuple[object, ...]
    # What was asked last.
    asked: tuple[Intent, Requirements, Limits]

    def is_of(self, columns: tuple[_Model, ...], profiles: tuple[object, ...]) -> bool:
        same = zip((*(each.model for each in self.figures), *self.profiles), (*columns, *profiles), strict=True)
        return all(one is other for one, other in same)


class DeviceColumns:
    """Of one region. `mark` says what changed, and `update` takes it over; `Solver` asks for `places` then.

    What is taken of devices is as of one `Allocations` at a time. `touch` names the nodes where the next one differs.
    """

    def __init__(self, audited_per_search: int = 0) -> None:
        """audited_per_search: nodes of which each search checks what columns say, in turn; between two updates, of the
        first MOST_AUDITED searches."""
        self._audited_per_search = audited_per_search
        self._audits = 0
        """Searches since the last update that did."""
        self._audited: Sequence[str] = ()
        """Nodes of the last audit, of which the search that follows checks what it kept."""
        self._audit_turn, self._doubt_turn = _Turn(), _Turn()
        self._doubted: Sequence[str] = ()
        """Nodes whose turn it is to be looked at for each request that no device can take."""
        self.is_audited = False
        """Whether anything was checked since the last update."""
        self.refuted = set[str]()
        """Nodes of which columns said something else than is so: nothing that they say is to be relied on."""
        self._forget()

    def _forget(self) -> None:
        self._rows: dict[Slot, int] = {}
        self._slots: list[Slot | None] = []
        self._free: list[int] = []
        self._states: dict[str, NodeState] = {}
        self._devices: list[Device | None] = []
        self._class_ids: dict[tuple[object, ...], list[tuple[RuntimeSupport | None, int]]] = {}
        self._classes: Ints = np.zeros(0, dtype=np.int64)
        self._places: Numbers = np.zeros(0, dtype=np.uint64)
        """`place_number` of each slot."""
        self._open: Flags = np.zeros(0, dtype=np.bool_)
        self._sleeps: Flags = np.zeros(0, dtype=np.bool_)
        self._occupied: Flags = np.zeros(0, dtype=np.bool_)
        self._admissible: Floats = np.zeros(0)
        self._booked: Floats = np.zeros(0)
        self._models: dict[str, _Model] = {}
        self._selectors: dict[str, _Selector] = {}
        self._tables: dict[Request, _Table] = {}
        self._nowhere: dict[Request, _KnownNowhere] = {}
        """Of requests that no device can take."""
        self._may_be_outdated = False
        """Whether some of that may not hold any more, so that to drop it may make room."""
        self._is_nowhere_audited = False
        """Whether one of these requests was checked since the last update."""
        self._audited_nowhere = set[Request]()
        """Those whose turn it was; none of them has another until an update after which no other was asked for."""
        self._asked: dict[Request, None] = {}
        """The last requests, the newest last."""
        self._inputs: Inputs | None = None
        """Of the last update."""
        self._version = 0
        """Grows when a node comes, goes or is another by more than what its replicas and figures are."""
        self._searches: dict[Request, _Search] = {}
        """Of the requests that were searched for last, the newest last."""
        self._changed_rows: list[int] = []
        """Rows of which something is another that a search reads, one after the other."""
        self._changed_from = 0
        """How many of these are not listed any more."""
        self._touched: set[str] = set()
        self._marked: set[str] = set()
        self._is_all_marked = True
        self._measured: Mapping[Trial, Measured] = {}
        self._shared: tuple[object, ...] = ()
        self._class_count = 0

    def __len__(self) -> int:
        """Number of devices."""
        return len(self._rows)

    def copy(self) -> "DeviceColumns":
        """The same for a search of its own, whose changes are not seen here. It audits nothing."""
        found = copy(self)
        found._audited_per_search, found.refuted = 0, {*self.refuted}
        found._rows, found._slots, found._free = dict(self._rows), [*self._slots], [*self._free]
        found._states, found._devices = dict(self._states), [*self._devices]
        found._class_ids = {key: [*each] for key, each in self._class_ids.items()}
        for name in _OF_ROWS:
            setattr(found, name, getattr(self, name).copy())
        models = {id(each): each.copy() for each in self._models.values()}
        found._models = {name: models[id(each)] for name, each in self._models.items()}
        found._selectors = {name: each.copy() for name, each in self._selectors.items()}
        found._tables = {
            request: table._replace(figures=tuple(each.copy(models[id(each.model)]) for each in table.figures))
            for request, table in self._tables.items()
            if all(id(each.model) in models for each in table.figures)
        }
        found._nowhere = {
            request: known._replace(learnt=tuple(models.get(id(each), each) for each in known.learnt))
            for request, known in self._nowhere.items()
        }
        found._touched, found._marked, found._asked = {*self._touched}, {*self._marked}, {}
        found._searches, found._changed_rows = {}, [*self._changed_rows]
        return found

    # -- what changed ------------------------------------------------------------------------------------------------

    def mark(self, node: str) -> None:
        """The node came, went, or is another than in the last update."""
        self._marked.add(node)

    def mark_all(self) -> None:
        """Any node may be another, with anything taken of it. What no device can take is searched for again."""
        self._is_all_marked = True
        self._nowhere.clear()

    def update(self, inputs: Inputs, was_measured: Mapping[Trial, Measured], remeasured: Collection[str]) -> None:
        """Takes over the nodes that are marked. was_measured: measurements of models before those of the inputs.
        remeasured: nodes with others since."""
        shared, scope, self.is_audited, self._audits = _shared(inputs), Scope(inputs), False, 0
        if self._shared != shared:
            self._forget()
        if self._measured is not was_measured:
            self._models.clear()
        known = self._inputs
        if known is None or (known.poisoned, known.unloadable) != (inputs.poisoned, inputs.unloadable):
            self._tables = {each: table for each, table in self._tables.items() if _may_be_asked(inputs, each)}
            self._nowhere = {each: found for each, found in self._nowhere.items() if _may_be_asked(inputs, each)}
        self._shared, self._measured, self._inputs = shared, inputs.measured, inputs
        if not self._is_nowhere_audited:
            self._audited_nowhere = set()
        self._is_nowhere_audited, self._may_be_outdated = False, True
        names = {*self._states, *inputs.fleet.nodes} if self._is_all_marked else {*self._marked, *remeasured}
        for name in sorted(names):
            before, after = self._states.get(name), inputs.fleet.nodes.get(name)
            if after is not None and (after is not before or name in remeasured):
                self._put(scope, before, after, is_remeasured=name in remeasured)
            elif after is None and before is not None:
                self._remove(before)
        if len(self._changed_rows) > len(self._slots):
            self._changed_from += len(self._changed_rows)
            self._changed_rows.clear()
        if self._is_all_marked:
            self._touched.update(self._states)
        self._marked, self._is_all_marked = set(), False
        for variant in [name for name, each in self._models.items() if len(each.counts) > 2 * len(self._slots)]:
            del self._models[variant]  # most of its kinds have no device any more
        for where in [name for name, each in self._selectors.items() if len(each.refusals) > 2 * len(self._rows)]:
            del self._selectors[where]  # most of its refusals are of no device any more

    def audit(self, scope: Scope, allocations: Allocations, where: str) -> None:
        """Checks what columns say of some nodes, in turn: of what is taken of them, and by this selector."""
        self.is_audited = True
        if not self._audited_per_search or self._audits >= MOST_AUDITED:
            return
        self._audits += 1
        self._refresh(allocations)
        self._audited = self._audit_turn.take(scope.inputs.fleet.nodes, self._audited_per_search)
        self.refuted |= {name for name in self._audited if not self._agrees(scope, allocations, where, name)}

    def audit_nowhere(self, scope: Scope, intent: Intent, require: Requirements, limits: Limits) -> None:
        """Checks for one request in each step, in turn, that no device can take it, although that is remembered: where
        columns that are kept now say that some can, and on some nodes, in turn, whatever they say."""
        if self._is_nowhere_audited or not self._audited_per_search:
            return
        request = self._request_of(scope, intent, require, limits)
        if request in self._audited_nowhere:
            return
        if not self._audited_nowhere:
            self._doubted = self._doubt_turn.take(scope.inputs.fleet.nodes, self._audited_per_search)
        self._is_nowhere_audited = True
        self._audited_nowhere.add(request)
        states = [scope.inputs.fleet.nodes.get(name) for name in self._doubted]
        turn = [(state, device) for state in states if state is not None for device in state.node.devices]
        doubted = [(model, *place) for model in request.models for place in turn]
        # Otherwise they would be built in each step for what nobody searches for, in place of what is searched for.
        if request in self._tables and {require.where} <= {"", *self._selectors}:
            for figures in self.figures(scope, intent, require, limits):
                rows = np.flatnonzero(figures.feasible)[:MOST_DOUBTED].tolist()
                doubted += [(figures.model, *self._place(row)) for row in rows]
        for model, state, device in doubted:
            if not scope.faults(scope.option(intent, model, state, device), intent, require, limits):
                self.refuted.add(state.name)

    def _agrees(self, scope: Scope, allocations: Allocations, where: str, name: str) -> bool:
        """Whether columns say of a node what its state says."""
        state = scope.inputs.fleet.nodes.get(name)
        if state is None:
            return name not in self._states
        closed = node_fault(state) is not None
        for device in state.node.devices:
            slot = Slot(name, device.name)
            row = self._rows.get(slot)
            if row is None:
                return False
            found = (
                *(self._states.get(name) is state, self._devices[row] is device, bool(self._open[row])),
                *(bool(self._sleeps[row]), int(self._classes[row]), float(self._admissible[row])),
                *(float(self._booked[row]), bool(self._occupied[row])),
            )
            known = (
                *(True, True, not (closed or does_not_answer(state, device)), scope.may_sleep(device)),
                self._class_of(scope.inputs, state, device, state.receipts.get(device.name)),
                float(admissible_bytes(device, state, allocations.memory_of(state, device))),
                *(allocations.time_of(state, device), bool(allocations.occupants.get(slot))),
            )
            kinds = all(
                row in each.unknown or each.ids.get(self._kind_key(variant, row, slot)) == each.kinds[row]
                for variant, each in self._models.items()
            )
            if found != known or not kinds:
                return False
            selector = self._selectors.get(where)
            if selector is None or row in selector.unknown:
                continue
            if selector.refusal_of(row) != _selector_refusal(scope, where, state, device):
                return False
        return True

    def learn(self, residuals: Map[Any, Residual]) -> None:
        """Judges by other residuals what was asked last, so that the next such request need not wait."""
        if self._inputs is None or self._is_all_marked:
            return
        scope = _scope_of_requests(self._inputs, residuals)
        for request in [*self._asked]:
            table = self._tables.get(request)
            # A model may have been removed since it was asked for.
            if table is not None and all(each.digest in scope.inputs.profiles for each in request.models):
                intent, require, limits = table.asked
                now_asked = _request(scope.inputs, intent, require, limits, request.models)
                self._judged(now_asked, scope, intent, require, limits, request.models)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Models, selectors and requests that are kept: where one is less than before, there is room again."""
        return len(self._models), len(self._selectors), len(self._tables)

    def prepare(self, intent: Intent, residuals: Map[Any, Residual], most: int) -> Preparation:
        """Builds a part of what the search for a place of this workload needs. most: devices that are looked at."""
        if self._inputs is None or self._is_all_marked or self.refuted:
            return Preparation.DONE
        scope, require = _scope_of_requests(self._inputs, residuals), intent.require
        models = [each for each in intent.models if each.digest in self._inputs.profiles]
        if not (models and self._rows and is_uniform(scope, intent, require, intent.limits)):
            return Preparation.DONE
        request = _request(self._inputs, intent, require, intent.limits, models)
        if request not in self._tables and len(self._tables) >= MOST_PREPARED:
            return Preparation.NO_ROOM
        columns = {each.variant for each in models} - self._models.keys()
        selectors = {require.where} - {"", *self._selectors}
        if len(self._models) + len(columns) > MOST_COLUMNS or len(self._selectors) + len(selectors) > MOST_COLUMNS:
            return Preparation.NO_ROOM
        left = most
        if require.where:
            left -= SELECTOR_DEVICES * self._look_at_selector(scope, require.where, left // SELECTOR_DEVICES)
        for model in models:
            left -= self._look_at_model(model.variant, left)
        if left > 0:
            table = self._table(request, scope, intent, require, intent.limits)
            left -= KIND_DEVICES * self._fill_table(
                table, scope, intent, require, intent.limits, models, left // KIND_DEVICES
            )
        return Preparation.PART if left < most else Preparation.DONE

    def refresh(self, allocations: Allocations, most: int) -> None:
        """Takes over what is taken on some of the touched nodes, if these allocations are asked about next."""
        if self._is_all_marked or not self._touched:
            return
        names = [*islice(self._touched, most)]
        self._touched.difference_update(names)
        self._refresh_nodes(names, allocations)

    def touch(self, nodes: Iterable[str]) -> None:
        """What is taken on these nodes differs in the allocations that are asked about next."""
        self._touched.update(nodes)

    def _put(self, scope: Scope, before: NodeState | None, state: NodeState, *, is_remeasured: bool) -> None:
        name = state.name
        # Each session describes the node anew, mostly as before.
        is_described = before is None or not is_same(before.node, state.node)
        if before is not None and is_described:
            self._remove(before, but=[device.name for device in state.node.devices])
        self._states[name] = state
        # Of what the device takes or does, nothing excludes all that asks for the same.
        self._version += not (before and is_same_host(before, state) and before.refusal == state.refusal)
        self._touched.add(name)
        closed = node_fault(state) is not None
        for device in state.node.devices:
            slot = Slot(name, device.name)
            known = self._rows.get(slot)
            row = self._new_row(slot) if known is None else known
            self._devices[row] = device
            self._changed_rows.append(row)
            self._open[row] = not (closed or does_not_answer(state, device))
            self._sleeps[row] = scope.may_sleep(device)
            receipt = state.receipts.get(device.name)
            is_other = is_described or before is None or before.receipts.get(device.name) is not receipt
            if is_other:
                self._classes[row] = self._class_of(scope.inputs, state, device, receipt)
            for variant, model in self._models.items() if is_other or is_remeasured else ():
                model.put(row, self._kind_key(variant, row, slot))
            if is_described:
                for selector in self._selectors.values():
                    selector.unknown[row] = None  # most are not asked for again soon

    def _remove(self, state: NodeState, but: Sequence[str] = ()) -> None:
        """Takes out a node's devices. but: names of those that stay."""
        self._version += 1
        for device in state.node.devices:
            slot = Slot(state.name, device.name)
            if device.name not in but and slot in self._rows:
                row = self._rows.pop(slot)
                self._slots[row], self._devices[row], self._open[row] = None, None, False
                self._changed_rows.append(row)
                self._free.append(row)
                for model in self._models.values():
                    model.put(row, None)
        if not but:
            self._states.pop(state.name, None)
            self._touched.discard(state.name)

    def _new_row(self, slot: Slot) -> int:
        if not self._free:
            self._grow(max(64, 2 * len(self._slots)))
        row = self._free.pop()
        self._rows[slot], self._slots[row], self._places[row] = row, slot, place_number(*slot)
        return row

    def _grow(self, rows: int) -> None:
        more = rows - len(self._slots)
        self._free += range(rows - 1, len(self._slots) - 1, -1)
        self._slots += [None] * more
        self._devices += [None] * more
        for name in _OF_ROWS:
            setattr(self, name, _longer(getattr(self, name), rows))
        for model in self._models.values():
            model.kinds = _longer(model.kinds, rows, NONE)
        for selector in self._selectors.values():
            selector.grow(rows)

    def _class_of(self, inputs: Inputs, state: NodeState, device: Device, receipt: Receipt | None) -> int:
        """The number of all devices that differ from this one in names, places and times alone."""
        alike = replace(device, name="", hardware="", memory_in="", power_in="")
        price = inputs.costs.get(Slot(state.name, device.name))
        # What a model takes depends on the architecture (`block_channels`).
        key = (repr(alike), state.node.arch, _without_names(receipt), state.node.labels.get(RTT_LABEL), price)
        runtime = receipt.runtime if receipt is not None else None
        known = self._class_ids.setdefault(key, [])
        for other, number in known:
            if other is runtime or other == runtime:
                return number
        self._class_count += 1
        known.append((runtime, self._class_count))
        return self._class_count

    def _kind_key(self, variant: str, row: int, slot: Slot) -> KindKey:
        measured = self._measured.get(Trial(variant, *slot))
        if measured is None:
            return int(self._classes[row]), ()
        # An unknown figure (NaN) is not equal to itself.
        return int(self._classes[row]), tuple([None if each != each else each for each in _FIGURES_OF(measured)])

    # -- places ------------------------------------------------------------------------------------------------------

    def places(
        self, scope: Scope, intent: Intent, require: Requirements, limits: Limits, allocations: Allocations,
        known: Sequence[KnownOption],
    ) -> Iterator[tuple[ModelRef, NodeState, Device, Option | None]]:  # fmt: skip
        """Places for one more replica, the best first, each with what was found of a device of its kind; None: nothing.
        Each may turn out not to fit, for reasons of its own.

        The request is uniform (`is_uniform`). allocations: without this workload. known: where its replicas run."""
        self._refresh(allocations)
        models = [each for each in intent.models if each.digest in scope.inputs.profiles]
        if not (models and self._rows):
            return
        selector = self._selector(scope, require.where) if require.where else None
        request = _request(scope.inputs, intent, require, limits, models)
        of_models = self._judged(request, scope, intent, require, limits, models)
        scores, rows = self._scores(request, of_models, selector), len(self._slots)
        self._audit_scores(scores, of_models, selector)
        quota = scope.inputs.quotas.get(intent.key.tenant)
        if known or (quota is not None and quota.memory is not None):
            scores = scores.copy()  # what is of this workload alone
        if quota is not None and quota.memory is not None:
            most = quota.memory - allocations.usage(intent.key.tenant).memory
            for at, each in enumerate(of_models):
                scores[at * rows : (at + 1) * rows][each.memory[each.model.kinds] > most] = np.inf
        for option, objective in known:
            row = self._rows.get(option.slot)
            for at, model in enumerate(models):
                if row is not None and option.model.variant == model.variant:
                    scores[at * rows + row] = objective
        seed, name = scope.inputs.seed, str(intent.key)
        variants = np.array([variant_number(each.variant) for each in models], dtype=np.uint64)

        def order_of(equals: Ints) -> Numbers:
            return tie_breaks(seed, name, self._places[equals % rows] ^ variants[equals // rows])

        for at in _best_first(scores, order_of):
            figures, row = of_models[at // rows], at % rows
            yield (models[at // rows], *self._place(row), figures.samples[figures.model.kinds[row]])

    def are_best(
        self, scope: Scope, intent: Intent, require: Requirements, limits: Limits, allocations: Allocations,
        known: Sequence[KnownOption], chosen: Sequence[Option], nodes: Collection[str],
    ) -> bool:  # fmt: skip
        """Whether nothing is better for a replica of this workload than each of these places: no device with room
        beside these allocations, nor one on these nodes, whatever is taken there. Of a uniform request, while no device
        may sleep.

        known: as in `places`. chosen: where the allocations have replicas of it."""
        self._refresh(allocations)
        models = [each for each in intent.models if each.digest in scope.inputs.profiles]
        if not (models and self._rows):
            return False
        selector = self._selector(scope, require.where) if require.where else None
        request = _request(scope.inputs, intent, require, limits, models)
        of_models = self._judged(request, scope, intent, require, limits, models)
        states = [self._states[name] for name in nodes if name in self._states]
        slots = [Slot(state.name, device.name) for state in states for device in state.node.devices]
        rows, found = self.rows_of(slots), dict[tuple[str, str, str], float]()
        for model, figures in zip(models, of_models, strict=True):
            kinds = figures.model.kinds[rows]
            fits = self._open[rows] & figures.feasible[kinds]
            if selector is not None:
                fits &= selector.admits[rows]
            values = np.where(fits, figures.awake[kinds], np.inf).tolist()
            found |= {(*slot, model.variant): value for slot, value in zip(slots, values, strict=True)}
        found |= {each.option.key: each.objective for each in known}
        least = min(float(self._scores(request, of_models, selector).min()), *found.values())
        return all(found.get(option.key, np.inf) <= least < np.inf for option in chosen)

    def _scores(self, request: Request, of_models: Sequence[_Figures], selector: _Selector | None) -> Floats:
        """As `_Search` has them, for what is taken now. Not to be changed; computed again for rows that are others."""
        rows, basis = len(self._slots), (selector, *of_models)
        stamps = (rows, *(each.changes for each in of_models))
        end = self._changed_from + len(self._changed_rows)
        search = self._searches.pop(request, None) or _Search()
        _make_room(self._searches, MOST_SEARCHES)
        self._searches[request] = search
        changed, missed = None, search.position - self._changed_from
        if search.is_of(basis, stamps) and missed >= 0 and len(self._changed_rows) - missed <= rows:
            changed = np.array(sorted({*self._changed_rows[missed:]}), dtype=np.int64)
        if changed is None or 2 * len(changed) > rows:
            search.scores = np.concatenate([self._scores_of(each, selector, np.arange(rows)) for each in of_models])
        elif len(changed):
            for at, each in enumerate(of_models):
                search.scores[at * rows + changed] = self._scores_of(each, selector, changed)
        search.basis, search.stamps, search.position = basis, stamps, end
        return search.scores

    def _audit_scores(self, scores: Floats, of_models: Sequence[_Figures], selector: _Selector | None) -> None:
        """Checks what was kept for the nodes of the audit that belongs to this search."""
        names, self._audited = self._audited, ()
        for name in names:
            state = self._states.get(name)
            slots = [] if state is None else [Slot(name, each.name) for each in state.node.devices]
            found = np.array([self._rows[each] for each in slots if each in self._rows], dtype=np.int64)
            for at, each in enumerate(of_models):
                kept = scores[at * len(self._slots) + found]
                if not np.array_equal(kept, self._scores_of(each, selector, found), equal_nan=True):
                    self.refuted.add(name)

    def _scores_of(self, figures: _Figures, selector: _Selector | None, rows: Ints) -> Floats:
        """Of one model on these rows."""
        kinds = figures.model.kinds[rows]
        memory, busy = figures.memory[kinds], figures.busy[kinds]
        fits = self._open[rows] & figures.feasible[kinds] & (memory <= self._admissible[rows])
        fits &= (busy <= 0) | (self._booked[rows] + busy <= UTILISATION_MOST)
        if selector is not None:
            fits &= selector.admits[rows]
        asleep = self._sleeps[rows] & ~self._occupied[rows]
        return np.where(fits, np.where(asleep, figures.asleep[kinds], figures.awake[kinds]), np.inf)

    def figures(self, scope: Scope, intent: Intent, require: Requirements, limits: Limits) -> Sequence[ModelFigures]:
        """What the workload finds on each device with each of its models, whatever else is placed; of a uniform
        request."""
        models = [each for each in intent.models if each.digest in scope.inputs.profiles]
        if not (models and self._rows):
            return ()
        open_to = self._open & self._selector(scope, require.where).admits if require.where else self._open
        request = _request(scope.inputs, intent, require, limits, models)
        return [
            ModelFigures(
                model,
                open_to & each.feasible[kinds],
                each.awake[kinds],
                each.asleep[kinds],
                each.memory[kinds],
                each.busy[kinds],
            )
            for model, each in zip(models, self._judged(request, scope, intent, require, limits, models), strict=True)
            for kinds in (each.model.kinds,)
        ]

    def candidates(
        self, scope: Scope, intent: Intent, require: Requirements, limits: Limits
    ) -> Iterator[tuple[Option, tuple[PlacementFault, ...]]]:
        """Every device with each model, and what excludes it whatever else is placed: as `Scope.option` and
        `Scope.faults` have them, in the order of `Scope.devices`. Of a uniform request of a workload that has and had
        no replica, while no device may sleep."""
        models = [each for each in intent.models if each.digest in scope.inputs.profiles]
        if not (models and self._rows):
            return
        selector = self._selector(scope, require.where) if require.where else None
        request = _request(scope.inputs, intent, require, limits, models)
        for model, figures in zip(models, self._judged(request, scope, intent, require, limits, models), strict=True):
            kinds = figures.model.kinds.tolist()
            for state, device in scope.devices:
                row = self._rows[Slot(state.name, device.name)]
                sample = figures.samples[kinds[row]]
                if sample is None:
                    option = scope.option(intent, model, state, device)
                    yield option, scope.faults(option, intent, require, limits)
                    continue
                option = replace(sample, state=state, device=device, receipt=state.receipts.get(device.name))
                yield option, scope.faults_of_place(option, None if selector is None else selector.refusal_of(row))

    def list_excluded(
        self, scope: Scope, intent: Intent, require: Requirements, limits: Limits
    ) -> Sequence[Excluded] | None:
        """What `candidates` says of each device with each model, of devices of a kind at once; None: some device is not
        excluded. Of such a request as `candidates` is."""
        models = [each for each in intent.models if each.digest in scope.inputs.profiles]
        if not (models and self._rows):
            return None
        selector = self._selector(scope, require.where) if require.where else None
        request = _request(scope.inputs, intent, require, limits, models)
        found = list[Excluded]()
        for model, figures in zip(models, self._judged(request, scope, intent, require, limits, models), strict=True):
            kinds = figures.model.kinds
            usual = self._open & (kinds != NONE)
            admits = usual if selector is None else usual & selector.admits
            if (admits & figures.feasible[kinds]).any():
                return None
            for row in np.flatnonzero(~self._open & (kinds != NONE)).tolist():
                option = scope.option(intent, model, *self._place(row))
                found.append(Excluded(scope.faults(option, intent, require, limits), 1))
            # What the selector alone excludes is of one sort, whatever its kind.
            sorts = 2 * np.where(figures.feasible[kinds], NONE, kinds) + admits
            for sort in np.unique(sorts[usual]).tolist():
                rows = np.flatnonzero(usual & (sorts == sort))
                parts = [(None, rows)] if selector is None or sort % 2 else selector.by_code(rows)
                for refused, part in parts:
                    named = part[:1].tolist() if figures.feasible[kinds[part[0]]] else self._first_by_name(part)
                    for number, row in enumerate(named):
                        option = scope.option(intent, model, *self._place(row))
                        own = scope.faults(option, intent, replace(require, where=""), limits)
                        faults = (*scope.faults_of_place(option, refused), *own)
                        found.append(Excluded(faults, 0 if number else len(part)))
        return found

    def _first_by_name(self, rows: Ints) -> Sequence[int]:
        """Those of these devices of which a text comes first that differs in names alone: one that names the place, the
        node, or the device alone, each with what follows the name there."""
        slots = [(slot.node, slot.device, row) for row in rows.tolist() if (slot := self._slots[row]) is not None]
        firsts = (
            min((f"{node}/{name} ", row) for node, name, row in slots),
            min((f"{node} ", row) for node, _, row in slots),
            min((f"{name};", row) for _, name, row in slots),
        )
        return [*dict.fromkeys(row for _, row in firsts)]

    def nowhere(self, scope: Scope, intent: Intent, require: Requirements, limits: Limits) -> Nowhere | None:
        """What was found for such a request, if nothing that it depends on is another. Of a uniform request of a
        workload that has and had no replica, while no device may sleep."""
        if not self._nowhere:
            return None
        request = self._request_of(scope, intent, require, limits)
        known = self._nowhere.get(request)
        if known is None or not self._is_current(scope, request, known):
            return None
        return known.found

    def _is_current(self, scope: Scope, request: Request, known: _KnownNowhere) -> bool:
        """Whether nothing that it was found from is another. A column that is not kept any more is not built again for
        that."""
        models = [self._models.get(each.variant) for each in request.models]
        changes = tuple(each.changes for each in models if each is not None)
        same = zip(known.learnt, (*models, *_learnt(scope, request.models)), strict=True)
        is_same = known.version == self._version and known.changes == changes
        return is_same and all(one is other for one, other in same)

    def remember_nowhere(
        self, scope: Scope, intent: Intent, require: Requirements, limits: Limits, found: Nowhere
    ) -> None:
        """For the next workload that asks for the same, in this step or a later one, if there is room."""
        request = self._request_of(scope, intent, require, limits)
        self._nowhere.pop(request, None)
        if len(self._nowhere) >= MOST_TABLES and not self._has_made_room(scope, intent.key.tenant):
            return
        models = self._known_models(request)
        changes, learnt = tuple(each.changes for each in models), (*models, *_learnt(scope, request.models))
        self._nowhere[request] = _KnownNowhere(found, intent.key.tenant, self._version, changes, learnt)

    def _has_made_room(self, scope: Scope, tenant: str) -> bool:
        """Whether there is room for one more request of a tenant that no device can take: in place of what does not
        hold any more, else of the newest of a tenant that has more. All are asked in the same order in each step, so
        that none would be found if the oldest left."""
        if self._may_be_outdated:
            self._may_be_outdated = False
            known = self._nowhere.items()
            self._nowhere = {each: found for each, found in known if self._is_current(scope, each, found)}
        if len(self._nowhere) < MOST_TABLES:
            return True
        counts = Counter(each.tenant for each in self._nowhere.values())
        most, count = max(counts.items(), key=lambda each: each[1])
        if count <= counts[tenant] + 1:
            return False
        del self._nowhere[next(each for each, found in reversed(self._nowhere.items()) if found.tenant == most)]
        return True

    def _known_models(self, request: Request) -> Sequence[_Model]:
        """The columns of its models."""
        return [self._model(each.variant) for each in request.models]

    def _request_of(self, scope: Scope, intent: Intent, require: Requirements, limits: Limits) -> Request:
        models = [each for each in intent.models if each.digest in scope.inputs.profiles]
        return _request(scope.inputs, intent, require, limits, models)

    def rows_of(self, slots: Iterable[Slot]) -> Ints:
        """Where the arrays have these devices."""
        return np.array([self._rows[slot] for slot in slots], dtype=np.int64)

    @property
    def may_sleep(self) -> bool:
        """Whether any device sleeps while nothing is on it."""
        return bool(self._sleeps.any())

    def _place(self, row: int) -> tuple[NodeState, Device]:
        slot, device = self._slots[row], self._devices[row]
        assert slot is not None  # a row without a device is closed
        assert device is not None
        return self._states[slot.node], device

    def _refresh(self, allocations: Allocations) -> None:
        self._refresh_nodes(self._touched, allocations)
        self._touched.clear()

    def _refresh_nodes(self, names: Iterable[str], allocations: Allocations) -> None:
        for name in names:
            state = self._states.get(name)
            for device in state.node.devices if state is not None else ():
                assert state is not None
                slot = Slot(name, device.name)
                row = self._rows[slot]
                self._changed_rows.append(row)
                self._admissible[row] = admissible_bytes(device, state, allocations.memory_of(state, device))
                self._booked[row] = allocations.time_of(state, device)
                self._occupied[row] = bool(allocations.occupants.get(slot))

    # -- what is the same for all devices of a kind ------------------------------------------------------------------

    def _selector(self, scope: Scope, where: str) -> "_Selector":
        self._look_at_selector(scope, where)
        return self._selectors[where]

    def _look_at_selector(self, scope: Scope, where: str, most: int | None = None) -> int:
        """Adds the devices that nobody looked at yet, at most so many; None: all. Returns how many."""
        known = self._selectors.get(where)
        if known is None:
            _make_room(self._selectors, MOST_COLUMNS)
            known = self._selectors[where] = _Selector(self._rows.values())
            known.grow(len(self._slots))
        rows = [*islice(known.unknown, most)]
        self._changed_rows += rows
        for row in rows:
            if self._slots[row] is None:
                del known.unknown[row]  # it has no device any more
                continue
            known.put(row, _selector_refusal(scope, where, *self._place(row), known.answers))
        if not known.unknown:
            known.answers = {}
        return len(rows)

    def _model(self, variant: str) -> _Model:
        self._look_at_model(variant)
        return self._models[variant]

    def _look_at_model(self, variant: str, most: int | None = None) -> int:
        """Adds the devices that nobody looked at yet, at most so many; None: all. Returns how many."""
        known = self._models.get(variant)
        if known is None:
            _make_room(self._models, MOST_COLUMNS)
            known = self._models[variant] = _Model(len(self._slots), self._rows.values())
        rows = [*islice(known.unknown, most)]
        self._changed_rows += rows
        unmeasured, measured = list[int](), self._measured
        for row in rows:
            slot = self._slots[row]
            found = None if slot is None else measured.get(Trial(variant, *slot))
            if slot is not None and found is None:
                unmeasured.append(row)
            else:
                known.put(row, None if slot is None else self._kind_key(variant, row, slot))
        if unmeasured:
            known.put_unmeasured(np.array(unmeasured, dtype=np.int64), self._classes[unmeasured])
        return len(rows)

    def _judged(
        self, request: Request, scope: Scope, intent: Intent, require: Requirements, limits: Limits,
        models: Sequence[ModelRef],
    ) -> tuple[_Figures, ...]:  # fmt: skip
        """What this workload's request finds on every kind of device, for each of its models."""
        table = self._table(request, scope, intent, require, limits)
        self._asked.pop(request, None)
        _make_room(self._asked, MOST_JUDGED_ANEW)
        self._asked[request] = None
        self._fill_table(table, scope, intent, require, limits, models)
        return table.figures

    def _table(self, request: Request, scope: Scope, intent: Intent, require: Requirements, limits: Limits) -> _Table:
        """What is known of a request, perhaps nothing yet."""
        columns = tuple(self._model(each.variant) for each in request.models)
        profiles = tuple(scope.inputs.profiles[each.digest] for each in request.models)
        known = self._tables.get(request)
        if known is None or not known.is_of(columns, profiles):
            _make_room(self._tables, MOST_TABLES)
            known = self._tables[request] = _Table(tuple(map(_Figures, columns)), profiles, (intent, require, limits))
        return known

    def _fill_table(
        self, table: _Table, scope: Scope, intent: Intent, require: Requirements, limits: Limits,
        models: Sequence[ModelRef], most: int | None = None,
    ) -> int:  # fmt: skip
        """Adds the kinds that were not judged yet, at most so many; None: all. Returns how many."""
        judged = 0
        for model, figures in zip(models, table.figures, strict=True):
            if figures.residuals is not scope.inputs.residuals:
                repeats = scope.residuals.repeats
                is_same = repeats == figures.repeats
                figures.forget(figures.model.unmeasured_kinds if is_same else range(len(figures.judged)))
                figures.residuals, figures.repeats = scope.inputs.residuals, repeats
            if figures.version != figures.model.version:
                left = None if most is None else most - judged
                judged += self._fill_kinds(figures, scope, intent, require, limits, model, left)
        return judged

    def _fill_kinds(
        self, figures: _Figures, scope: Scope, intent: Intent, require: Requirements, limits: Limits, model: ModelRef,
        most: int | None,
    ) -> int:  # fmt: skip
        """Adds the kinds that got their first device since, at most so many; returns how many."""
        column, anywhere = figures.model, replace(require, where="")
        figures.grow(len(column.counts))
        missing = [kind for kind, count in enumerate(column.counts) if count and not figures.judged[kind]]
        for kind in missing[:most]:
            row = column.row_of(kind)
            slot, device = self._slots[row], self._devices[row]
            assert slot is not None
            assert device is not None
            option = scope.option(intent, model, self._states[slot.node], device)
            faults = scope.faults(option, intent, anywhere, limits)
            values = [
                weighed_values(scope, replace(option, wakes=is_alone), intent, require.replicas)
                for is_alone in (False, True)
            ]
            figures.judged[kind] = True
            figures.changes += 1
            figures.feasible[kind] = all(fault.constraint is Constraint.NODE for fault in faults)
            figures.samples[kind] = option if figures.feasible[kind] else None
            figures.awake[kind], figures.asleep[kind] = objectives(values, intent.weights)
            figures.memory[kind] = memory_requirement(option)
            figures.busy[kind] = busy_share(scope, intent, option, require.replicas)
        if most is None or len(missing) <= most:
            figures.version = column.version
        return len(missing[:most])


def _best_first(scores: Floats, order_of: Callable[[Ints], Numbers]) -> Iterator[int]:
    """Indexes by ascending score, without those of infinite score. order_of: what equals are ordered by."""
    is_own = False
    while (best := float(scores.min())) < np.inf:
        equals = np.flatnonzero(scores == best)
        order = order_of(equals)
        # Mostly the first one is taken, so the others are put in order only where it is not.
        yield int(equals[order.argmin()])
        yield from equals[order.argsort(kind="stable")[1:]].tolist()
        if not is_own:  # others search it too
            scores, is_own = scores.copy(), True
        scores[equals] = np.inf


def is_uniform(scope: Scope, intent: Intent, require: Requirements, limits: Limits) -> bool:
    """Whether all that a request asks of a place is the same for all devices of a kind, but for what columns say."""
    return (
        not require.signed_by
        and not is_label(require.spread)
        and not intent.prefer
        and require.measured_within_s is None
        and limits.node_power is None
        and not any(key == intent.key for key, _ in scope.inputs.blocked)
        and (not require.where or all(map(_is_in_column, Expression.compile(require.where).variables)))
    )


def _scope_of_requests(inputs: Inputs, residuals: Map[Any, Residual]) -> Scope:
    """To judge requests while nobody asks. Places are blocked for one workload, but figures serve all that ask the
    same: also this one once nothing is blocked for it any more. Meanwhile it is not uniform, and does not use them."""
    return Scope(replace(inputs, residuals=residuals, blocked={}))


def _is_in_column(variable: str) -> bool:
    """Whether its value changes with a node's description alone."""
    return variable.startswith(("node.", "device.", "region."))


def _selector_refusal(
    scope: Scope, where: str, state: NodeState, device: Device, answers: dict[str, Refusal | None] | None = None
) -> Refusal | None:
    """Why a selector does not admit a device; None: it does. answers: for devices of which it reads the same."""
    given = {"node": node_fields(state.node), "device": device_fields(device), "region": scope.region}
    expression, read = Expression.compile(where), ""
    if answers is not None:
        read = expression.reads_of(**given)
        if read in answers:
            return answers[read]
    try:
        found = expression.refusal(**given)
    except ShoalError as error:
        found = error.refusal
    if answers is not None:
        answers[read] = found
    return found


def _request(
    inputs: Inputs, intent: Intent, require: Requirements, limits: Limits, models: Sequence[ModelRef]
) -> Request:
    rule = intent.migration
    return Request(
        tuple(models),
        require,
        limits,
        (
            tuple(sorted(intent.weights.items())),
            intent.traffic,
            intent.max_batch,
            tuple(sorted(intent.shapes.items())),
            tuple(sorted((name, pack.digest) for name, pack in intent.packs.items())),
            intent.require.latency_from_origin,
            (rule.against, rule.tolerances, rule.samples, rule.advisory),
        ),
        _failures(inputs, {each.digest for each in models}, requester_of(intent.key)),
    )


def _failures(inputs: Inputs, models: Collection[str], requester: str) -> _Failures:
    """Those of these models that count for this requester."""
    asked = ("", requester)
    return _Failures(
        frozenset(each for each in inputs.poisoned if each.triple.model in models and each.requester in asked),
        tuple(sorted(each for each in inputs.unloadable.items() if each[0].model in models)),
    )


def _may_be_asked(inputs: Inputs, request: Request) -> bool:
    """Whether a request can be asked again, because what it knows of failures is so."""
    known = request.failures
    requester = next((each.requester for each in known.poisoned if each.requester), "")
    return known == _failures(inputs, {each.digest for each in request.models}, requester)


def _learnt(scope: Scope, models: Iterable[ModelRef]) -> tuple[object, ...]:
    """What predictions for these models are made from, besides the devices and what was measured on them."""
    inputs = scope.inputs
    return inputs.residuals, *(inputs.profiles.get(each.digest) for each in models)


def _shared(inputs: Inputs) -> tuple[object, ...]:
    """What the figures of all devices depend on."""
    return repr(inputs.region), inputs.costs, dict(inputs.rtt_s)


def _without_names(receipt: Receipt | None) -> str:
    """A receipt but for whose it is, when it was measured, and what the runtime supports."""
    if receipt is None:
        return ""
    return repr(replace(receipt, node="", device="", measured_at=NEVER, probe_s=Seconds(0.0), runtime=None))


def _make_room(kept: dict[Any, Any], most: int) -> None:
    """Drops the oldest entry where there is no room for another."""
    if len(kept) >= most:
        del kept[next(iter(kept))]


def _longer(array: NDArray[Any], rows: int, fill: int = 0) -> NDArray[Any]:
    return np.concatenate([array, np.full(rows - len(array), fill, dtype=array.dtype)])
