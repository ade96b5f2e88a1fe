"""Documents of the region: what applying them would change, and applying them.

A plan decides nothing: the next step places what is applied. Documents are written against the revisions that they were
planned on, and a stale plan is refused, because only its author can say whether it still holds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from shoal.coordinator import codec
from shoal.coordinator.controllers.documents import revisions
from shoal.coordinator.controllers.documents.publishers import verify_bundle
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent, StoreWrites
from shoal.coordinator.controllers.runner import Compute, inline
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.catalog.differences import DocumentChange
from shoal.coordinator.core.catalog.model import DOCUMENTS, Catalog, DocumentKey, StoredDocument
from shoal.coordinator.core.catalog.propose import DocumentProposal, propose, without_document
from shoal.coordinator.core.placement.model import PlacementPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.signals.model import Signal, SignalName
from shoal.coordinator.core.workloads.changed import difference
from shoal.coordinator.ports import StaleRevision, StoreRecord
from shoal.host import gc_freeze
from shoal.policies import Problem
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.workload import WorkloadKey

PLANS_KEPT: Final = 32
MOST_CANDIDATES, MOST_CANDIDATES_APPLIED = 20_000, 256
"""Candidates that a plan lists, and that the answer to an apply lists: with more, it lists none, and `shoal explain`
has those of one workload. Each takes about 0.2 ms."""
MOST_PLANNED: Final = 256
"""Workloads that an apply plans before it stores them, unless a plan's hash is to be compared: of more, the next steps
alone decide. Otherwise each of them would be decided twice."""

MOST_DUMPED: Final = 256
"""Documents of which the loop itself makes what is stored: with its event each takes 8 us of a busy AMD EPYC. Whatever
their number, the loop numbers the events and makes their bytes as they are stored, some at a time."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """What applying the documents would do."""

    # The catalog with the documents merged in.
    proposal: DocumentProposal
    # None where there are problems, and in an apply that asked for none or is of more than MOST_PLANNED workloads.
    plan: PlacementPlan | None
    # Price and carbon as the plan uses them.
    signals: Mapping[SignalName, Signal] = field(default_factory=dict)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self.proposal.problems

    @property
    def documents(self) -> tuple[DocumentChange, ...]:
        return self.proposal.changes


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """What was applied, or why nothing was."""

    # The plan as computed at apply time.
    plan_result: PlanResult
    # Decisions that differ from the plan whose hash was given; if not empty, nothing was applied.
    plan_differences: tuple[str, ...]
    # Store revision of the commit; 0: nothing was applied.
    revision: int


class DocumentsController:
    """Plans and applies documents, one change at a time."""

    def __init__(
        self,
        context: RegionContext,
        workloads: WorkloadsController,
        signals: Callable[[Catalog], Mapping[SignalName, Signal]],
    ) -> None:
        """signals: current values under the documents of a catalog."""
        self._region = context.name
        self._store = context.store
        self._fence = context.fence
        self._clock = context.clock
        self._workloads = workloads
        self._signals = signals
        self._revisions: dict[str, int] = {}
        self._plans: dict[str, tuple[str, ...]] = {}

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE): also where a document is of a newer version."""
        self._revisions = {}
        await self._adopt_stored(inline)

    async def _adopt_stored(self, compute: Compute) -> None:
        """Takes over all documents that the store has otherwise than this process knows. Raises as `start` does."""
        catalog, records = self.catalog, {record.key: record for record in await self._store.scan(DOCUMENTS)}
        changed = [each for key, each in records.items() if self._revisions.get(key) != each.revision]

        def load_all() -> Catalog:
            documents = [_stored_document(each) for each in changed]
            gone = [key for key in catalog.documents if key.store_key not in records]
            found = catalog.with_documents({each.key: each for each in documents}, gone)
            _ = found.intents  # resolves what changed; the catalog keeps it
            return found

        self._workloads.adopt(await compute(load_all))
        self._revisions = {key: record.revision for key, record in records.items()}

    @property
    def catalog(self) -> Catalog:
        """All that is applied."""
        return self._workloads.catalog

    async def plan(
        self,
        texts: Sequence[tuple[str, str]],
        digests: Mapping[str, str],
        actor: str,
        *,
        back: bool = False,
        compute: Compute = inline,
    ) -> PlanResult:
        """What applying would do, with the candidates of workloads that the texts concern; changes nothing. No texts:
        what would change now, with all candidates. back: by a rollback. compute: runs
        the parts whose cost grows with the texts, all of them pure.
        """
        proposal = await self._propose(texts, digests, actor, back, compute)
        if proposal.problems:
            return PlanResult(proposal, None)
        return await self._place(proposal, True if not texts else MOST_CANDIDATES, compute)

    async def _propose(
        self, texts: Sequence[tuple[str, str]], digests: Mapping[str, str], actor: str, back: bool, compute: Compute
    ) -> DocumentProposal:
        catalog, wall = self.catalog, self._clock.wall()

        def propose_all() -> DocumentProposal:
            with gc_freeze.pause():
                found = propose(
                    catalog, texts, digests, region=self._region, actor=actor, wall=wall, verify=verify_bundle,
                    back=back,
                )  # fmt: skip
                if not found.problems:
                    _ = found.catalog.intents  # resolves what changed; the catalog keeps it
                return found

        return await compute(propose_all)

    async def _place(self, proposal: DocumentProposal, candidates: Literal[True] | int, compute: Compute) -> PlanResult:
        """candidates: the most to list, of the workloads that the documents concern; True: all, of all workloads."""
        catalog = proposal.catalog
        if candidates is True:
            inputs = self._workloads.inputs(catalog)
            plan = await compute(lambda: place(inputs, explain=True))
        else:
            changed = _changed_workloads(self.catalog, catalog)
            explain = changed if self._has_at_most(candidates // max(1, len(changed))) else False
            asked = await self._workloads.next_placement(catalog)
            plan = await compute(lambda: asked.plan(explain))
        self._remember_plan(plan)
        return PlanResult(proposal, plan, self._signals(catalog))

    def propose(self, texts: Sequence[tuple[str, str]]) -> DocumentProposal:
        """Merges documents into the applied ones; changes nothing."""
        wall = self._clock.wall()
        catalog = self.catalog
        return propose(catalog, texts, {}, region=self._region, actor="", wall=wall, verify=verify_bundle)

    async def apply(
        self,
        texts: Sequence[tuple[str, str]],
        digests: Mapping[str, str],
        plan_hash: str,
        actor: str,
        *,
        back: bool = False,
        with_plan: bool = True,
        compute: Compute = inline,
    ) -> ApplyResult:
        """back, compute: as in `plan`. with_plan: False where nobody wants to know what the documents change; a plan's
        hash is compared all the same. Raises ShoalError(CONFLICT | STORE_FULL | STORE_UNAVAILABLE)."""
        async with self._fence.documents_lock:
            return await self._apply(texts, digests, plan_hash, actor, back, with_plan, compute)

    async def delete(self, key: DocumentKey, actor: str) -> int:
        """Raises ShoalError(NOT_FOUND | WORKLOAD_UNKNOWN | IN_USE | CONFLICT)."""
        async with self._fence.documents_lock:
            left = without_document(self.catalog, key)
            event = LogEvent("DELETED", f"{key.kind} {key.name}", "", actor, "", _workload_of(key))
            kept = revisions.revision_keys(self.catalog.documents[key])
            revision = await self._commit_documents({}, (key.store_key, *kept), (key,), [event], inline)
            self._workloads.adopt(left)
            return revision

    async def _apply(
        self,
        texts: Sequence[tuple[str, str]],
        digests: Mapping[str, str],
        plan_hash: str,
        actor: str,
        back: bool,
        with_plan: bool,
        compute: Compute,
    ) -> ApplyResult:
        before = self._plans.get(plan_hash)
        proposal = await self._propose(texts, digests, actor, back, compute)
        planned = PlanResult(proposal, None)
        if proposal.problems:
            return ApplyResult(planned, (), 0)
        with_plan = with_plan and len(_changed_workloads(self.catalog, proposal.catalog)) <= MOST_PLANNED
        if plan_hash or with_plan:
            planned = await self._place(proposal, MOST_CANDIDATES_APPLIED, compute)
        if plan_hash and planned.plan is not None and plan_hash != planned.plan.hash:
            return ApplyResult(planned, _differences(before, _decisions(planned.plan)), 0)
        documents, held = proposal.catalog.documents, self.catalog.documents
        keys = proposal.changed_keys
        if not keys:
            return ApplyResult(planned, (), 0)
        run = compute if len(keys) > MOST_DUMPED else inline
        writes, events = await run(lambda: _writes_of(keys, documents, held, actor))
        revision = await self._commit_documents(writes.puts, writes.deletes, keys, events, compute)
        self._workloads.adopt(proposal.catalog)
        return ApplyResult(planned, (), revision)

    async def _commit_documents(
        self,
        puts: Mapping[str, bytes],
        deletes: tuple[str, ...],
        keys: Sequence[DocumentKey],
        events: list[LogEvent],
        compute: Compute,
    ) -> int:
        """compute: as in `plan`. Raises ShoalError(CONFLICT | STORE_FULL | STORE_UNAVAILABLE)."""
        expect = {key.store_key: self._revisions.get(key.store_key, 0) for key in keys}
        try:
            revision = await self._fence.commit(puts, deletes=deletes, expect=expect, events=events)
        except StaleRevision as cause:
            # One whose answer was lost may have taken effect, and none after it would succeed.
            await self._adopt_stored(compute)
            raise refuse(
                Code.CONFLICT, f"{cause} changed meanwhile", "documents as they were planned", "plan again, then apply"
            ) from cause
        for stored_at in expect:
            if stored_at in puts:
                self._revisions[stored_at] = revision
            else:
                self._revisions.pop(stored_at, None)
        return revision

    def _has_at_most(self, devices: int) -> bool:
        """Whether the region has no more devices; they are counted as far as that matters."""
        counted = 0
        for state in self._workloads.fleet.nodes.values():
            counted += len(state.node.devices)
            if counted > devices:
                return False
        return True

    def _remember_plan(self, plan: PlacementPlan) -> None:
        self._plans.pop(plan.hash, None)
        self._plans[plan.hash] = _decisions(plan)
        while len(self._plans) > PLANS_KEPT:
            del self._plans[next(iter(self._plans))]


def _stored_document(record: StoreRecord) -> StoredDocument:
    """Raises ShoalError(STATE_CORRUPT)."""
    stored = codec.load(StoredDocument, record.value)
    try:
        _ = stored.value
    except ShoalError as cause:
        raise codec.unreadable(f"{stored.kind} {stored.name}", str(cause)) from cause
    return stored


def _changed_workloads(before: Catalog, after: Catalog) -> frozenset[WorkloadKey]:
    """Workloads that are new, or that ask for something else."""
    new, gone = difference(before.intents, after.intents)
    known = {each.key: each for each in gone}
    return frozenset(each.key for each in new if known.get(each.key) != each)


def _writes_of(
    keys: Sequence[DocumentKey],
    documents: Mapping[DocumentKey, StoredDocument],
    held: Mapping[DocumentKey, StoredDocument],
    actor: str,
) -> tuple[StoreWrites, list[LogEvent]]:
    """What applying the documents of these keys stores, and its events. held: documents before that."""
    left = revisions.revision_writes([held[key] for key in keys if key in held])
    puts = {**{key.store_key: codec.dump(documents[key]) for key in keys}, **left.puts}
    events = [
        LogEvent(
            "APPLIED", f"{key.kind} {key.name}", f"revision {documents[key].revision}", actor, "", _workload_of(key)
        )
        for key in keys
    ]
    return StoreWrites(puts, left.deletes), events


def _decisions(plan: PlacementPlan) -> tuple[str, ...]:
    """One line for each change, to compare plans."""
    return tuple(
        f"{change.sign} {workload.workload} {change.model[:19]} {change.precision} on {change.node}/{change.device}"
        for workload in plan.workloads
        for change in workload.changes
    )


def _differences(before: tuple[str, ...] | None, after: tuple[str, ...]) -> tuple[str, ...]:
    if before is None:
        return ("that plan is not known any more; now it would be:", *after)
    gone = [f"no more: {line}" for line in before if line not in after]
    new = [f"now: {line}" for line in after if line not in before]
    return (*gone, *new) or ("the documents or the region's state differ; the placements do not",)


def _workload_of(key: DocumentKey) -> WorkloadKey | None:
    return WorkloadKey(*key.name.split("/", 1)) if key.kind == "Workload" else None
