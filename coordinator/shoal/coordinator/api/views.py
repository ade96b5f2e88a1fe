"""The region's state as the operator API shows it. Pure: values in, messages out."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from types import MappingProxyType
from typing import Final, Self

from shoal.coordinator.controllers.documents.publishers import verify_bundle
from shoal.coordinator.controllers.documents.revisions import Revision
from shoal.coordinator.controllers.federation.membership import FederationMembership
from shoal.coordinator.controllers.identity.enrolment import Token
from shoal.coordinator.controllers.identity.revocation import RevokedItem
from shoal.coordinator.controllers.identity.rotation import Rotation
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.controllers.queries.delegation import DelegationPreview, IndicativeBid
from shoal.coordinator.controllers.workloads.apply import PlanResult
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.core.catalog.differences import DocumentChange
from shoal.coordinator.core.catalog.model import Catalog, DocumentKey, ModelRecord, Provenance, StoredDocument
from shoal.coordinator.core.catalog.publishers import SignatureCheck
from shoal.coordinator.core.fleet.commitments import memory_of
from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.migration.model import Cause
from shoal.coordinator.core.migration.reference import with_reference
from shoal.coordinator.core.negotiation.hold import BidState, ClosedBid, GrantedBid, HeldBid, StoppingBid
from shoal.coordinator.core.negotiation.model import (
    Active,
    Awarding,
    IdleTrade,
    OriginAgreement,
    RegionAnswer,
    Soliciting,
    Withdrawing,
    WorkloadTrade,
)
from shoal.coordinator.core.placement.explain import STAYS_WITHOUT_TRIGGER
from shoal.coordinator.core.placement.model import Candidate, PlacementPlan, Slot, WorkloadPlan
from shoal.coordinator.core.placement.tenant_cost import TenantBudget
from shoal.coordinator.core.prediction.exchange import ImportedMeasurements, ReadMeasurements
from shoal.coordinator.core.prediction.model import Interval, Prediction
from shoal.coordinator.core.signals.decide import describe_source
from shoal.coordinator.core.signals.model import Signal, SignalName
from shoal.coordinator.core.timeline import Series
from shoal.coordinator.core.workloads.model import DelegatedWorkload, WorkloadWait
from shoal.coordinator.core.workloads.routes import is_status_current
from shoal.policies import Problem
from shoal.types.agreement import ServiceReport
from shoal.types.assignment import Assignment, DesiredSet, Ingress, Observed, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.migration import Against, PackRef, has_answers
from shoal.types.offer import Member, Offer
from shoal.types.tenant import TenantUse
from shoal.types.units import Elapsed, Seconds, UsdPerHour, Wall
from shoal.types.workload import DelegationMode, Intent, Quota, WorkloadKey
from shoal.v1 import artifacts_pb2, nouns_pb2, operator_pb2
from shoal.wire.nouns import fill_view, to_wire

VERSION: Final = version("shoal-orchestrator-coordinator")
READY: Final = "ready"
PROGRESSING: Final = "progressing"
PENDING: Final = "pending"
DELETING: Final = "deleting"


def refusal_view(refusal: Refusal) -> nouns_pb2.Refusal:
    return fill_view(nouns_pb2.Refusal(), refusal)


def imported_view(imported: ImportedMeasurements) -> operator_pb2.ImportedMeasurementsView:
    return operator_pb2.ImportedMeasurementsView(
        region=imported.region,
        exported_at=imported.exported_at,
        imported_at=imported.imported_at,
        actor=imported.actor,
        rows=len(imported.rows),
        models=imported.models,
        device_classes=imported.classes,
    )


def import_view(found: ReadMeasurements, kept: ImportedMeasurements | None) -> operator_pb2.ImportMeasurementsReply:
    """kept: None where nothing was to be kept."""
    shown = kept or ImportedMeasurements(found.region, found.exported_at, Wall(0.0), "", found.rows)
    return operator_pb2.ImportMeasurementsReply(
        imported=imported_view(shown), left_out=found.left_out, reasons=map(refusal_view, found.reasons)
    )


def key_view(key: WorkloadKey) -> nouns_pb2.WorkloadKey:
    return fill_view(nouns_pb2.WorkloadKey(), key)


def event_view(event: LogEvent) -> operator_pb2.Event:
    return fill_view(operator_pb2.Event(), event)


def revocation_view(ended: Iterable[RevokedItem]) -> operator_pb2.RevokeReply:
    reply = operator_pb2.RevokeReply()
    for each in ended:
        reply.serials.extend(each.serials)
        reply.ended.append(
            operator_pb2.EndedView(
                kind=each.kind, name=each.name, serials=each.serials, because=each.cause, about=each.about
            )
        )
    return reply


def token_view(token: Token) -> operator_pb2.TokenView:
    return fill_view(operator_pb2.TokenView(), token)


def document_view(stored: StoredDocument) -> operator_pb2.DocumentView:
    return fill_view(operator_pb2.DocumentView(), stored)


def tenant_view(
    stored: StoredDocument,
    quota: Quota,
    desired: Mapping[str, DesiredSet],
    fleet: Fleet,
    plan: PlacementPlan | None,
) -> operator_pb2.DocumentView:
    """A tenant's document, with its limits, what it costs, and what its clients did at each entry. plan: of the last
    step; None: there was none here."""
    view = document_view(stored)
    fill_view(view.tenant_quota, quota)
    for budget in plan.budgets if plan is not None else ():
        if budget.tenant == quota.tenant:
            view.tenant_quota.budget.CopyFrom(budget_view(budget))
    shares = {node: each for node, told in desired.items() for each in told.tenants if each.tenant == quota.tenant}
    for node, share in sorted(shares.items()):
        uses = fleet.nodes[node].tenants if node in fleet.nodes else ()
        use = next((each for each in uses if each.tenant == quota.tenant), TenantUse(quota.tenant))
        view.tenant_quota.entries.add(node=node, limit=to_wire(share), use=to_wire(use))
    return view


def budget_view(budget: TenantBudget) -> operator_pb2.TenantBudgetView:
    return operator_pb2.TenantBudgetView(
        tenant=budget.tenant,
        limit=budget.limit,
        used=round(budget.cost.usd_per_h, 9),  # prices are kept as multiples of 2^-40
        unpriced=budget.cost.unpriced,
        exceeded=budget.is_exceeded,
    )


def revision_view(revision: Revision) -> operator_pb2.RevisionView:
    stored = revision.document
    return operator_pb2.RevisionView(
        kind=stored.kind,
        name=stored.name,
        revision=stored.revision,
        applied_at=stored.applied_at,
        applied_by=stored.applied_by,
        current=revision.is_current,
        changes=revision.lines,
        pinned=stored.pinned,
        gone=revision.missing_sources,
        repeats=revision.repeats,
        document=stored.text,
    )


def model_view(catalog: Catalog, model: ModelRecord, region: str, name: str | None = None) -> artifacts_pb2.Model:
    shown = name if name is not None else next(iter(model.names), "")
    return artifacts_pb2.Model(
        name="" if shown == model.digest else shown,
        digest=model.digest,
        size_bytes=model.profile.size_bytes,
        pushed_at=model.pushed_at,
        pushed_by=model.pushed_by,
        profile=to_wire(model.profile),
        used_by=[key_view(WorkloadKey(*user.split("/", 1))) for user in catalog.users_of(model.digest)],
        signatures=[_signature_view(judged) for judged in catalog.signature_checks(region, model, verify_bundle)],
    )


def pack_view(catalog: Catalog, pack: PackRef, model: str) -> artifacts_pb2.Pack:
    """model: its digest, or the name in the request."""
    recorded = catalog.provenance(pack.digest, catalog.digest_of(model) or model)
    return artifacts_pb2.Pack(
        digest=pack.digest,
        size_bytes=pack.size_bytes,
        model=model,
        count=pack.count,
        answers=pack.answers,
        recorded=_provenance_view(recorded) if recorded is not None else None,
    )


def _provenance_view(by: Provenance) -> artifacts_pb2.Provenance:
    return fill_view(artifacts_pb2.Provenance(), by)


def _signature_view(judged: SignatureCheck) -> artifacts_pb2.ModelSignature:
    if judged.statement is None:
        return artifacts_pb2.ModelSignature(refusal=refusal_view(judged.refusal) if judged.refusal else None)
    return artifacts_pb2.ModelSignature(
        key=judged.key,
        fingerprint=judged.statement.fingerprint,
        model=judged.statement.model,
        version=judged.statement.version,
        expires_at=judged.statement.expires_at or 0.0,
    )


def node_view(state: NodeState, desired: DesiredSet | None, certificate_ends: Wall | None) -> operator_pb2.NodeView:
    view = operator_pb2.NodeView(
        node=to_wire(state.node),
        liveness=state.liveness,
        cordoned=state.cordoned,
        quarantined=state.quarantined,
        last_seen=state.last_seen,
        joined_at=state.joined_at,
        epoch=state.epoch,
        certificate_expires_at=certificate_ends or 0.0,
        front_ready=state.front_ready,
        revoked=state.revoked,
        duplicate=f"{state.duplicate.running} has the session, {state.duplicate.other} was refused"
        if state.duplicate
        else "",
    )
    if (reason := _node_reason(state)) is not None:
        view.reason.CopyFrom(refusal_view(reason))
    if desired is not None:
        view.desired.CopyFrom(to_wire(desired.version))
    if state.version is not None:
        view.observed.CopyFrom(to_wire(state.version))
    return view


def device_views(
    state: NodeState, desired: DesiredSet | None, costs: Mapping[Slot, UsdPerHour]
) -> Iterable[operator_pb2.DeviceView]:
    assignments = desired.assignments if desired is not None else ()
    for device in state.node.devices:
        here = [each for each in assignments if each.device == device.name]
        view = operator_pb2.DeviceView(
            node=state.name,
            device=to_wire(device),
            committed_bytes=sum(memory_of(each, state.observed.get(each.id)) for each in here),
            liveness=state.liveness,
            cost_usd_per_h=costs.get(Slot(state.name, device.name), float("nan")),
            assignments=[each.id for each in here],
        )
        if (reading := state.readings.get(device.name)) is not None:
            view.reading.CopyFrom(to_wire(reading))
        if (receipt := state.receipts.get(device.name)) is not None:
            view.receipt.CopyFrom(to_wire(receipt))
        if (silent := state.silent.get(device.name)) is not None:
            view.reason.CopyFrom(refusal_view(Refusal.parse(silent.reason, silent.code)))
            view.since = silent.since
        yield view


def placement_views(
    desired_sets: Mapping[str, DesiredSet], fleet: Fleet, plan: PlacementPlan | None, only: WorkloadKey | None = None
) -> list[operator_pb2.PlacementView]:
    """plan: the source of predictions; None: without predictions."""
    predictions, stays = _predictions(plan), stay_reasons(plan)
    routed = _route_targets(desired_sets, fleet)
    views = []
    for node, desired in sorted(desired_sets.items()):
        state = fleet.nodes.get(node)
        for each in desired.assignments:
            if only is not None and each.workload != only:
                continue
            view = placement_view(
                node, each, state, predictions, routed=each.id in routed, stays=stays.get(each.id, "")
            )
            views.append(view)
    return sorted(views, key=lambda view: (view.assignment.workload.tenant, view.assignment.workload.name, view.node))


@dataclass(slots=True)
class WorkloadIndex:
    """What the views of all workloads need of the whole region, gathered in one pass.

    A list is made in slices, and steps and documents change the region between them: all of its views are as of this
    pass, so that no plan is shown with documents that it does not know, and no workload twice.
    """

    # Applied workloads.
    intents: tuple[Intent, ...]
    # Of these, and of the references of their models.
    catalog: Catalog
    # Of the last step.
    plans: Mapping[WorkloadKey, WorkloadPlan]
    # What these plans were computed from.
    planned: Mapping[WorkloadKey, Intent]
    # Workloads that other regions run, or are to run.
    delegations: Mapping[WorkloadKey, DelegatedWorkload]
    # Of these, those whose requests may be routed to another region.
    routed_away: frozenset[WorkloadKey]
    # What each region answered about a workload that found no region.
    region_answers: Mapping[WorkloadKey, tuple[RegionAnswer, ...]]
    # Replicas for requests that are ready on a connected node and not about to be removed.
    ready: Counter[WorkloadKey] = field(default_factory=Counter)
    # Of these, those that are scaled to zero, or load for a request.
    unloaded: dict[WorkloadKey, list[Observed]] = field(default_factory=dict)
    # Workloads with assignments.
    assigned: set[WorkloadKey] = field(default_factory=set)
    # Of the oldest documents that a replica in service belongs to.
    revisions: dict[WorkloadKey, int] = field(default_factory=dict)
    # Workloads that a migration to newer documents is under way for.
    moving: set[WorkloadKey] = field(default_factory=set)
    # What each waits for.
    waits: dict[WorkloadKey, list[WorkloadWait]] = field(default_factory=dict)
    # By origin, summed over the nodes where requests entered.
    ingress: dict[WorkloadKey, dict[str, Ingress]] = field(default_factory=dict)

    @classmethod
    def of_region(cls, controller: WorkloadsController, fleet: Fleet) -> Self:
        plans = controller.last_plan.workloads if controller.last_plan is not None else ()
        index = cls(
            controller.intents,
            controller.catalog,
            {plan.workload: plan for plan in plans},
            controller.last_intents,
            controller.delegations,
            frozenset(filter(controller.routes_to_other_region, controller.delegations)),
            controller.region_answers,
        )
        for node, desired in controller.desired.items():
            state = fleet.nodes.get(node)
            for each in desired.assignments:
                index._add_assignment(each, state)
        for move in controller.migrations.live:
            if move.cause is Cause.DOCUMENTS:
                index.moving.add(move.workload)
        for wait in controller.waits:
            index.waits.setdefault(wait.workload, []).append(wait)
        for state in fleet.nodes.values():
            for entered in state.ingress:
                sums = index.ingress.setdefault(entered.workload, {})
                sums[entered.origin] = _sum_ingress(sums.get(entered.origin), entered)
        return index

    def _add_assignment(self, one: Assignment, state: NodeState | None) -> None:
        key = one.workload
        self.assigned.add(key)
        if one.draining:
            return
        self.revisions[key] = min(one.revision, self.revisions.get(key, one.revision))
        if one.standby or state is None or state.liveness not in (Liveness.READY, Liveness.NEVER_SEEN):
            return
        observed = state.observed.get(one.id)
        if observed is not None and observed.phase is Phase.READY:
            self.ready[key] += 1
            if observed.is_unloaded:
                self.unloaded.setdefault(key, []).append(observed)

    def is_behind(self, intent: Intent) -> bool:
        """True if a replica that serves, or a migration that is under way, belongs to previous documents."""
        return self.revisions.get(intent.key, intent.revision) < intent.revision or intent.key in self.moving

    def ingress_of(self, key: WorkloadKey) -> tuple[Ingress, ...]:
        """Of each origin, by name."""
        return tuple(each for _, each in sorted(self.ingress.get(key, {}).items()))


def workload_views(controller: WorkloadsController, fleet: Fleet) -> Iterator[operator_pb2.WorkloadView]:
    """Every applied workload, and deleted ones that still have assignments; each is made when it is asked for."""
    index = WorkloadIndex.of_region(controller, fleet)
    for intent in index.intents:
        yield workload_view(intent, index)
    for key in leaving_workloads(index):
        yield leaving_view(key, index)


def one_workload_view(
    controller: WorkloadsController, fleet: Fleet, key: WorkloadKey
) -> operator_pb2.WorkloadView | None:
    """As `workload_views` has it; None: it is not applied, and has no assignments."""
    index, intent = WorkloadIndex.of_region(controller, fleet), controller.intent_of(key)
    if intent is not None:
        return workload_view(intent, index)
    return leaving_view(key, index) if key in index.assigned else None


def leaving_workloads(index: WorkloadIndex) -> list[WorkloadKey]:
    """Deleted workloads that still have assignments."""
    return sorted(index.assigned - {intent.key for intent in index.intents})


def leaving_view(key: WorkloadKey, index: WorkloadIndex) -> operator_pb2.WorkloadView:
    view = operator_pb2.WorkloadView(workload=key_view(key), state=DELETING)
    _explain_wait(view, index.waits.get(key, []))
    return view


def signal_views(
    signals: Mapping[SignalName, Signal], refusals: Mapping[SignalName, Refusal], wall: Wall
) -> list[operator_pb2.SignalView]:
    """Every signal, including those without a value."""
    return [_signal(name, signals.get(name), refusals.get(name), wall) for name in SignalName]


def _signal(name: SignalName, signal: Signal | None, refusal: Refusal | None, wall: Wall) -> operator_pb2.SignalView:
    view = operator_pb2.SignalView(
        name=name,
        value=signal.value if signal is not None else math.nan,
        unit=name.unit,
        source=signal.source if signal is not None else "",
        taken_at=(signal.taken_at or 0.0) if signal is not None else 0.0,
        stale=signal is not None and signal.stale,
        fallback=signal is not None and signal.fallback,
        why=describe_source(signal, wall) if signal is not None else "nobody says",
    )
    if refusal is not None:
        view.refusal.CopyFrom(refusal_view(refusal))
    return view


def plan_view(
    planned: PlanResult,
    fleet: Fleet,
    wall: Wall,
    refusals: Mapping[SignalName, Refusal],
    previews: Mapping[WorkloadKey, DelegationPreview] = MappingProxyType({}),
) -> operator_pb2.PlanReply:
    """refusals: of the signals' sources. previews: delegation previews of the workloads for which other regions were
    asked."""
    reply = operator_pb2.PlanReply(
        problems=[problem_view(problem) for problem in planned.problems],
        documents=[_change(change) for change in planned.documents],
        computed_at=wall,
    )
    if planned.plan is not None:
        reply.workloads.extend(
            workload_plan_view(workload, fleet, previews.get(workload.workload)) for workload in planned.plan.workloads
        )
        reply.hash = planned.plan.hash
        reply.signals.extend(signal_views(planned.signals, refusals, wall))
        reply.budgets.extend(budget_view(budget) for budget in planned.plan.budgets)
    if not planned.problems:
        reply.changes = bool(planned.documents) or (planned.plan is not None and planned.plan.has_changes)
    return reply


def problem_view(problem: Problem) -> operator_pb2.Problem:
    return operator_pb2.Problem(
        document=problem.document, line=problem.line, column=problem.column, refusal=refusal_view(problem.refusal)
    )


def workload_plan_view(
    plan: WorkloadPlan, fleet: Fleet, preview: DelegationPreview | None = None
) -> operator_pb2.WorkloadPlan:
    view = operator_pb2.WorkloadPlan(
        workload=key_view(plan.workload),
        policy=plan.policy,
        wanted=plan.wanted,
        placed=plan.placed,
        candidates=[_candidate(candidate) for candidate in plan.candidates],
        changes=[
            operator_pb2.PlacementChange(
                sign=change.sign,
                node=change.node,
                device=change.device,
                model=change.model,
                precision=change.precision,
                assignment=change.assignment,
                why=change.why,
                stand_in=fleet.stand_in(change.node, change.device),
            )
            for change in plan.changes
        ],
        relaxed=plan.relaxed,
        nearest=plan.nearest,
        compared_with=plan.compared_with,
    )
    if plan.refusal is not None:
        view.refusal.CopyFrom(refusal_view(plan.refusal))
    if plan.no_standby is not None:
        view.no_standby.CopyFrom(refusal_view(plan.no_standby))
    if preview is not None:
        view.delegate = preview.mode
        view.delegated_to, view.agreement = preview.region, preview.agreement
        view.bids.extend(bid_view(bid, preview.winner) for bid in preview.bids)
        view.relaxed.extend([f"elsewhere: {preview.relaxation}"] if preview.relaxation else [])
        if preview.refusal is not None:
            view.undelegated.CopyFrom(refusal_view(preview.refusal))
    return view


def bid_view(bid: IndicativeBid, winner: str) -> operator_pb2.BidView:
    answer, believed = bid.assessment.answer, bid.assessment.believed
    view = operator_pb2.BidView(
        region=answer.region,
        offer=to_wire(answer) if isinstance(answer, Offer) else None,
        latency_p95_s=believed.latency_p95_s if believed is not None else math.nan,
        way_s=bid.rtt_s,
        trust=bid.trust,
        gain=bid.assessment.gain,
        chosen=answer.region == winner,
    )
    if bid.assessment.refusal is not None:
        view.refusal.CopyFrom(refusal_view(bid.assessment.refusal))
    return view


def check_view(component: str, name: str, refusal: Refusal | None) -> operator_pb2.Check:
    return operator_pb2.Check(
        component=component,
        name=name,
        ok=refusal is None,
        refusal=refusal_view(refusal) if refusal is not None else None,
    )


def agreement_views(
    trades: Mapping[WorkloadKey, WorkloadTrade],
    bid_states: Iterable[BidState],
    now: Elapsed,
    service_report: Callable[[str], ServiceReport],
) -> Iterable[operator_pb2.AgreementView]:
    """trades: workloads that other regions run, or are awarded. bid_states: what this region runs for others.
    service_report: what this region's gateways counted under an agreement."""
    for view in agreements(trades, bid_states, now):
        view.delivered.CopyFrom(to_wire(service_report(view.agreement)))
        yield view


def agreements(
    trades: Mapping[WorkloadKey, WorkloadTrade], bid_states: Iterable[BidState], now: Elapsed
) -> Iterable[operator_pb2.AgreementView]:
    """Like `agreement_views`, without the service reports."""
    for key, trade in sorted(trades.items()):
        match trade.phase:
            case Awarding(offer=offer, award=award, until=until, awarded_at=at):
                yield _agreement(award.agreement, "origin", offer.region, key, "awarding", "", offer, until - now, at)
            case Withdrawing(offer=offer, agreement=name, until=until, code=code, awarded_at=at):
                yield _agreement(name, "origin", offer.region, key, "withdrawing", "", offer, until - now, at, code)
            case Active(agreement=agreement):
                yield _origin_agreement(agreement, key, "active", agreement.lease_until - now)
            case IdleTrade() | Soliciting():
                pass
        for each in trade.leaving:
            left = min(each.ends_at, each.agreement.lease_until) - now
            yield _origin_agreement(each.agreement, key, each.stage, left, each.code)
    for state in bid_states:
        match state:
            case GrantedBid(offer=offer, award=award, until=until, granted_at=at):
                asked, left = state.asked.workload, until - now
                yield _agreement(award.agreement, "delegate", offer.origin, asked, "granted", "", offer, left, at)
            case StoppingBid(granted=granted, code=code, ends=ends):
                name, offer, asked = granted.award.agreement, granted.offer, granted.asked.workload
                left, at = min(ends, granted.until) - now, granted.granted_at
                yield _agreement(name, "delegate", offer.origin, asked, "stopping", "", offer, left, at, code)
            case HeldBid() | ClosedBid():
                pass


def _origin_agreement(
    agreement: OriginAgreement, workload: WorkloadKey, state: str, left_s: float, code: Code | None = None
) -> operator_pb2.AgreementView:
    """One that was granted, as its origin sees it."""
    return _agreement(
        agreement.id,
        "origin",
        agreement.region,
        workload,
        state,
        agreement.service,
        agreement.offer,
        left_s,
        agreement.awarded_at,
        code,
    )


def _agreement(
    name: str,
    side: str,
    counterpart: str,
    workload: WorkloadKey,
    state: str,
    service: str,
    offer: Offer,
    left_s: float,
    agreed_at: Wall,
    code: Code | None = None,
) -> operator_pb2.AgreementView:
    view = operator_pb2.AgreementView(
        agreement=name,
        side=side,
        counterpart=counterpart,
        workload=key_view(workload),
        state=state,
        service=service,
        offer=to_wire(offer),
        lease_s=max(0.0, left_s),
        agreed_at=agreed_at,
    )
    if code is not None:
        view.reason.CopyFrom(refusal_view(Refusal(code)))
    return view


def _candidate(candidate: Candidate) -> operator_pb2.Candidate:
    view = operator_pb2.Candidate(
        node=candidate.node,
        device=candidate.device,
        model=candidate.model,
        precision=candidate.precision,
        stand_in=candidate.stand_in,
        chosen=candidate.chosen,
        current=candidate.current,
        score=candidate.score,
        terms=[
            operator_pb2.ScoreTerm(
                name=term.name, weight=term.weight, value=term.value, unit=term.unit, normalised=term.normalised
            )
            for term in candidate.terms
        ],
        cost_usd_per_h=candidate.cost_usd_per_h,
        carbon_g_per_h=candidate.carbon_g_per_h,
        nearest=candidate.nearest,
        pareto=candidate.pareto,
        standby=candidate.standby,
        preference=candidate.preference,
    )
    if candidate.prediction is not None:
        view.prediction.CopyFrom(_prediction(candidate.prediction))
    if candidate.refusal is not None:
        view.refusal.CopyFrom(refusal_view(candidate.refusal))
    return view


def _prediction(prediction: Prediction) -> operator_pb2.Prediction:
    return operator_pb2.Prediction(
        latency_p50_s=estimate_view(prediction.latency_p50_s),
        latency_p95_s=estimate_view(prediction.latency_p95_s),
        memory_bytes=estimate_view(prediction.memory_bytes),
        load_s=estimate_view(prediction.load_s),
        joules=estimate_view(prediction.joules),
        energy_source=prediction.energy_source,
        basis=prediction.basis,
    )


def estimate_view(interval: Interval) -> operator_pb2.Estimate:
    return operator_pb2.Estimate(low=interval.low, mid=interval.mid, high=interval.high)


def _change(change: DocumentChange) -> operator_pb2.DocumentChange:
    return operator_pb2.DocumentChange(sign=change.sign, kind=change.kind, name=change.name, lines=change.lines)


def placement_view(
    node: str,
    assignment: Assignment,
    state: NodeState | None,
    predictions: Mapping[tuple[str, str, str], Prediction] = MappingProxyType({}),
    *,
    routed: bool = False,
    stays: str = "",
) -> operator_pb2.PlacementView:
    """state: of its node; None: the region does not know it. predictions: by (node, device, model). stays: why it stays
    although another place is better."""
    device = state.device(assignment.device) if state is not None else None
    observed = state.observed.get(assignment.id) if state is not None else None
    view = operator_pb2.PlacementView(
        assignment=to_wire(assignment),
        node=node,
        stand_in=device.stand_in if device is not None else "",
        time_scale=device.time_scale if device is not None else 1.0,
        liveness=state.liveness if state is not None else Liveness.LOST,
        routed=routed,
        stays=stays,
    )
    if observed is not None:
        view.observed.CopyFrom(to_wire(observed))
        view.observed.ClearField("latencies")  # hundreds of counts, which only a migration's guard needs
    prediction = predictions.get((node, assignment.device, assignment.model))
    if prediction is not None:
        view.prediction.CopyFrom(_prediction(prediction))
    return view


def stay_reasons(plan: PlacementPlan | None) -> dict[str, str]:
    """For each assignment, why it stays although another place is better."""
    return {
        change.assignment: change.why
        for workload in (plan.workloads if plan is not None else ())
        for change in workload.changes
        if change.why.startswith(STAYS_WITHOUT_TRIGGER)
    }


def _predictions(plan: PlacementPlan | None) -> dict[tuple[str, str, str], Prediction]:
    return {
        (candidate.node, candidate.device, candidate.model): candidate.prediction
        for workload in (plan.workloads if plan is not None else ())
        for candidate in workload.candidates
        if candidate.prediction is not None
    }


def _route_targets(desired: Mapping[str, DesiredSet], fleet: Fleet) -> frozenset[str]:
    """Assignments that some front routes requests to. A node's routes to its own replicas count only while its status
    is current."""
    return frozenset(
        endpoint.assignment
        for node, each in desired.items()
        for route in each.routes
        for endpoint in route.endpoints
        if endpoint.weight > 0 and (endpoint.node != node or is_status_current(fleet.nodes.get(node)))
    )


def _references(catalog: Catalog, intent: Intent) -> Iterator[operator_pb2.ReferenceView]:
    """The reference of each of the workload's models, if its policy verifies against one."""
    if intent.migration.against is not Against.REFERENCE:
        return
    for model in intent.models:
        rule = with_reference(intent.migration, model.digest, catalog.references)
        pack = pack_view(catalog, rule.pack, model.digest) if rule.pack is not None and has_answers(rule) else None
        yield operator_pb2.ReferenceView(model=model.digest, pack=pack)


def workload_view(intent: Intent, index: WorkloadIndex) -> operator_pb2.WorkloadView:
    key = intent.key
    stored = index.catalog.documents.get(DocumentKey("Workload", str(key)))  # a guest workload has none
    plan = index.plans.get(key)
    wanted = plan.wanted if plan is not None else intent.require.replicas
    ready = index.ready[key]
    view = operator_pb2.WorkloadView(
        workload=key_view(key),
        revision=intent.revision,
        policy=intent.policy,
        models=[model.digest for model in intent.models],
        wanted=wanted,
        ready=ready,
        state=PROGRESSING if plan is None else PENDING if plan.refusal is not None else READY,
        ingress=map(to_wire, index.ingress_of(key)),
        document=stored.text if stored is not None else "",
        relaxed=plan.relaxed if plan is not None else (),
        references=_references(index.catalog, intent),
        final=plan is not None and plan.is_final and index.planned.get(key) == intent,
        applied_at=stored.applied_at if stored is not None else 0.0,
    )
    if view.state == READY and (
        ready < wanted
        or plan is None
        or index.planned.get(key) != intent
        or any(change.sign != "=" for change in plan.changes)
        or index.is_behind(intent)
    ):
        view.state = PROGRESSING
    if view.state != READY:
        _explain_wait(view, index.waits.get(key, []))
    elif len(idle := index.unloaded.get(key, [])) == ready > 0:
        first = min(idle, key=lambda each: each.since)
        view.reason.CopyFrom(refusal_view(Refusal(first.code or Code.SCALED_TO_ZERO, first.reason)))
        view.since = first.since
    lacking = None if plan is None else plan.refusal or plan.no_standby
    if lacking is not None:
        view.reason.CopyFrom(refusal_view(lacking))
    if view.state == PENDING and intent.delegation.mode is not DelegationMode.NEVER:
        view.elsewhere.extend(
            operator_pb2.RegionAnswer(region=each.region, refusal=refusal_view(each.refusal))
            for each in index.region_answers.get(key, ())
        )
    if (delegated := index.delegations.get(key)) is not None and delegated.is_wanted:
        view.ClearField("elsewhere")
        serves = key in index.routed_away
        view.state, view.final = READY if serves else PROGRESSING, False
        view.wanted = intent.require.replicas
        view.ready = view.wanted if serves else ready
        found, remedy = f"{delegated.region} {'runs it' if serves else 'makes ready'}", "shoal get agreements"
        why = Refusal(Code.DELEGATED, found, delegated.agreement, f"{remedy} {delegated.agreement}")
        view.reason.CopyFrom(refusal_view(why))
    return view


def _explain_wait(view: operator_pb2.WorkloadView, waits: list[WorkloadWait]) -> None:
    """The longest wait becomes the workload's reason."""
    if waits:
        wait = min(waits, key=lambda each: each.since)
        view.reason.CopyFrom(refusal_view(Refusal(wait.code, wait.reason)))
        view.since = wait.since
        view.retry_at = wait.retry_at or 0.0
        view.gives_up_at = wait.gives_up_at or 0.0


def _sum_ingress(one: Ingress | None, other: Ingress) -> Ingress:
    if one is None:
        return other
    return Ingress(
        one.workload,
        one.origin,
        one.requests + other.requests,
        one.answered + other.answered,
        one.retried + other.retried,
        one.refused + other.refused,
        one.lost + other.lost,
        one.client_faults + other.client_faults,
    )


def timeline_view(series: Sequence[Series]) -> operator_pb2.TimelineReply:
    return operator_pb2.TimelineReply(
        start_at=series[0].start,
        step_s=series[0].step_s,
        series=[operator_pb2.TimelineSeries(figure=each.figure, values=each.values) for each in series],
    )


def authority_view(rotation: Rotation, revoked_count: int) -> operator_pb2.GetAuthorityReply:
    return operator_pb2.GetAuthorityReply(
        stage=rotation.stage,
        since=rotation.since,
        roots=[
            operator_pb2.RootView(fingerprint=root.fingerprint, expires_at=root.not_after, state=root.state)
            for root in rotation.roots
        ],
        laggards=[
            operator_pb2.LaggardView(
                uri=each.uri, lacks=each.lacks, connected=each.is_connected, certificate_expires_at=each.not_after
            )
            for each in rotation.laggards
        ],
        nodes=rotation.members,
        nodes_done=rotation.members - len(rotation.laggards),
        revoked=revoked_count,
    )


def _node_reason(state: NodeState) -> Refusal | None:
    if state.revoked:
        return Refusal(Code.CERT_REVOKED, "revoked", "a member of the region", "join it again with a new token")
    if state.duplicate is not None:
        return Refusal(
            Code.DUPLICATE_IDENTITY,
            f"{state.duplicate.running} has the session, {state.duplicate.other} was refused",
            "one agent for each identity",
            f"shoal node settle {state.name}",
        )
    if state.quarantined and state.refusal is not None:
        return state.refusal
    if state.link_lost:
        return state.link_lost_refusal
    if state.liveness is Liveness.LOST:
        return Refusal(Code.NODE_LOST, "silent", "a heartbeat", "start its agent, or look at its network")
    if state.liveness is Liveness.SUSPECT:
        return Refusal(Code.NODE_SUSPECT, "silent", "a heartbeat", "wait, or look at its network")
    if state.has_full_status and not state.front_ready:
        return Refusal(Code.NODE_NOT_READY, "its front does not answer", "a front that serves", "its agent restarts it")
    if state.cordoned:
        return Refusal(Code.NODE_CORDONED, "cordoned by an operator", "", f"shoal uncordon {state.name}")
    return None


def federation_view(membership: FederationMembership) -> operator_pb2.FederationView:
    """The view for a region that has joined a federation."""
    joined, rtt = membership.current, membership.rtt
    assert joined is not None
    view = operator_pb2.FederationView(
        federation=joined.federation,
        address=joined.address,
        joined_at=membership.joined_at or 0.0,
        heard_at=membership.last_answer_at or 0.0,
        reason=None if membership.refusal is None else refusal_view(membership.refusal),
    )
    view.members.extend(member_view(member, rtt) for member in joined.directory.members)
    return view


def member_view(member: Member, rtt: Mapping[str, Seconds]) -> operator_pb2.MemberView:
    advertisement = member.advertisement
    return operator_pb2.MemberView(
        region=member.region,
        address=member.address,
        residency=member.residency,
        rtt_s=rtt.get(member.region, math.nan),
        trust=member.trust,
        standing=member.standing,
        advertises=advertisement is not None,
        classes=[to_wire(each) for each in advertisement.classes] if advertisement is not None else [],
    )
