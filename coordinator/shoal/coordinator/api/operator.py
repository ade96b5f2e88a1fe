"""The operator API for the command line, scripts and the dashboard. Each change leaves an audit entry."""

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from shoal.coordinator.api import views
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.backup import Backups, stream_backup
from shoal.coordinator.api.can_move import can_move_view
from shoal.coordinator.api.compute_pool import ComputePool
from shoal.coordinator.api.dashboard.dashboard import Dashboard
from shoal.coordinator.api.diagnostics import AddressableProcess, diagnostics, stream_logs
from shoal.coordinator.api.events import stream_events
from shoal.coordinator.api.migrations import held_move_view
from shoal.coordinator.api.region_views import RegionViews, unknown_kind
from shoal.coordinator.controllers.documents import revisions
from shoal.coordinator.controllers.federation.membership import FederationMembership
from shoal.coordinator.controllers.identity.enrolment import BEARER, Enrolment
from shoal.coordinator.controllers.queries.can_move import CanMoveResult, can_move
from shoal.coordinator.controllers.queries.delegation import delegation_previews
from shoal.coordinator.controllers.region import doctor
from shoal.coordinator.controllers.region.follower import Follower
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.controllers.region.trust import TrustController
from shoal.coordinator.core import timeline
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.core.fleet.labels import LabelGrant
from shoal.coordinator.core.migration.model import Migration
from shoal.coordinator.core.migration.queue import QueuedMove
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.core.prediction.exchange import read_measurements
from shoal.coordinator.core.signals.model import SignalName
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.workload import WorkloadKey
from shoal.v1 import nouns_pb2, operator_pb2, operator_pb2_grpc
from shoal.wire.certificates import identity_of_context
from shoal.wire.nouns import to_wire

KINDS: Final = {"workload": "Workload", "policy": "Policy", "tenant": "Tenant", "region": "Region"}
"""Kinds that `Delete` takes, as documents name them."""


class FederationJoiner(Protocol):
    """A region's membership of a federation, which the API shows and changes."""

    @property
    def membership(self) -> FederationMembership: ...
    async def join(self, address: str, token: str, actor: str) -> None:
        """Raises ShoalError as `FederationMembership.join` does."""
        ...


class OperatorService(operator_pb2_grpc.OperatorServicer):
    """follower: set for a coordinator that does not lead, else None."""

    def __init__(
        self,
        region: RegionalCoordinator,
        enrolment: Enrolment,
        members: TrustController,
        audit: AuditTrail,
        process: AddressableProcess,
        *,
        follower: Follower | None = None,
        federation: FederationJoiner | None = None,
        backups: Backups | None = None,
        dashboard: Dashboard | None = None,
    ) -> None:
        self._region = region
        self._backups = backups
        self._dashboard = dashboard
        self._process = process
        self._federation_or_none = federation
        self._members = members
        self._audit = audit
        self._enrolment = enrolment
        self._store = region.context.store
        self._clock = region.clock
        self._follower = follower
        self._views = RegionViews(region, enrolment, process)
        self._compute_pool = ComputePool()

    async def WhoAmI(self, request: operator_pb2.WhoAmIRequest, context: Any) -> operator_pb2.WhoAmIReply:
        identity = identity_of_context(context)
        gateways = [
            state.node
            for _, state in sorted(self._region.fleet.fleet.nodes.items())
            if state.node.role is Role.GATEWAY and state.connected
        ]
        return operator_pb2.WhoAmIReply(
            region=identity.region,
            role=identity.role,
            name=identity.name,
            certificate_expires_at=identity.not_after,
            version=views.VERSION,
            history=self._region.fence.history,
            term=self._region.fence.term,
            gateways=[node.data_address for node in gateways],
            enrol_address=self._process.enrol_addresses,
            leader=self._follower.leader if self._follower is not None else "",
            follows=self._follower is not None,
            coordinators=self._process.link_addresses.split(","),
        )

    async def Plan(self, request: operator_pb2.PlanRequest, context: Any) -> operator_pb2.PlanReply:
        return await self.plan(request, identity_of_context(context).uri)

    async def plan(self, request: operator_pb2.PlanRequest, actor: str) -> operator_pb2.PlanReply:
        """actor: whose computation it is."""
        texts, digests = await self._read_documents(request)
        back = request.HasField("rollback")
        compute = partial(self._compute_pool.run, actor)
        planned = await self._region.documents.plan(texts, digests, actor, back=back, compute=compute)
        plans = planned.plan.workloads if planned.plan is not None else ()
        # Without plans there may be problems, such as a model that nobody pushed, by which no catalog can be read.
        found = await delegation_previews(self._region.origin, planned.proposal.catalog, plans) if plans else {}
        fleet, wall, refusals = self._region.fleet.fleet, self._clock.wall(), dict(self._region.signals.refusals)
        return await compute(lambda: views.plan_view(planned, fleet, wall, refusals, found))

    async def Apply(self, request: operator_pb2.ApplyRequest, context: Any) -> operator_pb2.ApplyReply:
        actor = identity_of_context(context).uri
        texts, digests = await self._read_documents(request)
        back = request.HasField("rollback")
        compute = partial(self._compute_pool.run, actor)
        with_plan = not request.without_plan
        applied = await self._region.documents.apply(
            texts, digests, request.plan_hash, actor, back=back, with_plan=with_plan, compute=compute
        )
        outcome = "stale" if applied.plan_differences else "refused" if applied.plan_result.problems else "applied"
        names = ", ".join(f"{change.kind} {change.name}" for change in applied.plan_result.documents)
        await self._audit.note(actor, "Rollback" if back else "Apply", names, outcome)
        fleet, wall, refusals = self._region.fleet.fleet, self._clock.wall(), dict(self._region.signals.refusals)
        plan = await self._compute_pool.run(
            actor, lambda: views.plan_view(applied.plan_result, fleet, wall, refusals), limited=False
        )
        return operator_pb2.ApplyReply(
            problems=[views.problem_view(problem) for problem in applied.plan_result.problems],
            plan=plan,
            stale=applied.plan_differences,
            revision=applied.revision,
        )

    async def _read_documents(
        self, request: operator_pb2.PlanRequest | operator_pb2.ApplyRequest
    ) -> tuple[Sequence[tuple[str, str]], Mapping[str, str]]:
        """Texts and digests, as sent or as an earlier revision has them."""
        if not request.HasField("rollback"):
            return [(document.name, document.text) for document in request.documents], dict(request.digests)
        if request.documents or request.digests:
            raise refuse(Code.INVALID_ARGUMENT, "documents beside a rollback", "one of them", "ask for one at a time")
        catalog, to = self._region.workloads.catalog, request.rollback
        return await revisions.rollback_documents(self._store, catalog, _key(to.workload), to.revision)

    async def History(self, request: operator_pb2.HistoryRequest, context: Any) -> operator_pb2.HistoryReply:
        catalog = self._region.workloads.catalog
        found = await revisions.history(self._store, catalog, _key(request.workload))
        return operator_pb2.HistoryReply(revisions=[views.revision_view(revision) for revision in found])

    async def Get(self, request: operator_pb2.GetRequest, context: Any) -> operator_pb2.GetReply:
        return await self.get(request, identity_of_context(context).uri)

    async def get(self, request: operator_pb2.GetRequest, actor: str) -> operator_pb2.GetReply:
        if self._follower is not None and (refusal := self._follower.redirect("Get", request.kind)) is not None:
            raise ShoalError(refusal)
        as_of = self._follower.revision if self._follower is not None else 0
        compute = partial(self._compute_pool.run, actor)
        found = await self._views.find(request.kind, request.name, request.tenant, compute)
        if self._follower is not None:
            found.served_by, found.as_of = self._process.link_address, as_of
        return found

    async def Delete(self, request: operator_pb2.DeleteRequest, context: Any) -> operator_pb2.DeleteReply:
        actor = identity_of_context(context).uri
        match request.kind:
            case "node":
                revision = await self._region.fleet.forget(request.name, actor)
            case "token":
                revision = await self._enrolment.revoke(request.name, actor)
                await self._region.workloads.load_credentials()
            case "workload":
                name = str(WorkloadKey(request.tenant or "default", request.name))
                revision = await self._region.documents.delete(DocumentKey("Workload", name), actor)
            case kind if kind in KINDS:
                revision = await self._region.documents.delete(DocumentKey(KINDS[kind], request.name), actor)
            case _:
                raise unknown_kind(request.kind, (*KINDS, "node", "token"))
        await self._audit.note(actor, "Delete", f"{request.kind} {request.name}", "deleted")
        return operator_pb2.DeleteReply(revision=revision)

    async def Explain(self, request: operator_pb2.ExplainRequest, context: Any) -> operator_pb2.ExplainReply:
        return await self.explain(request, identity_of_context(context).uri)

    async def explain(self, request: operator_pb2.ExplainRequest, actor: str) -> operator_pb2.ExplainReply:
        controller, placement, key = self._region.workloads, self._region.placement, _key(request.workload)
        compute = partial(self._compute_pool.run, actor)
        planned = await placement.explain(key, compute=compute)
        plan, fleet = planned.of(key), self._region.fleet.fleet
        assert plan is not None, "`explain` refuses a workload without one"
        found = await delegation_previews(self._region.origin, controller.catalog, (plan,))
        holds = await placement.reasons_to_stay(key, compute=compute)
        desired = dict(controller.desired)
        return operator_pb2.ExplainReply(
            plan=await compute(lambda: views.workload_plan_view(plan, fleet, found.get(key))),
            placements=await compute(lambda: views.placement_views(desired, fleet, planned, key)),
            workload=views.one_workload_view(controller, fleet, key),
            signals=self._views.signals(),
            move_holds=[held_move_view(each, fleet) for each in holds],
        )

    async def CanMove(self, request: operator_pb2.CanMoveRequest, context: Any) -> operator_pb2.CanMoveReply:
        return await self.can_move(request, identity_of_context(context).uri)

    async def can_move(self, request: operator_pb2.CanMoveRequest, actor: str) -> operator_pb2.CanMoveReply:
        key = WorkloadKey(request.tenant or "default", request.name)
        return can_move_view(await self._can_move(key, request.to, actor), self._region.fleet.fleet)

    async def _can_move(self, key: WorkloadKey, to: str, actor: str) -> CanMoveResult:
        region, compute = self._region, partial(self._compute_pool.run, actor)
        return await can_move(region.documents, region.placement, region.origin, region.regions, key, to, compute)

    async def Cordon(self, request: operator_pb2.CordonRequest, context: Any) -> operator_pb2.CordonReply:
        actor = identity_of_context(context).uri
        await self._region.fleet.cordon(request.node, request.cordoned, actor)
        await self._audit.note(actor, "Cordon", request.node, "cordoned" if request.cordoned else "uncordoned")
        return operator_pb2.CordonReply(node=await self._views.node(request.node))

    async def Migrate(self, request: operator_pb2.MigrateRequest, context: Any) -> operator_pb2.MigrateReply:
        actor = identity_of_context(context).uri
        key = _key(request.workload)
        aim = Aim.parse(request.to)
        begun: Migration | QueuedMove
        compute = partial(self._compute_pool.run, actor)
        regions = {*self._region.regions, self._region.config.name}
        if aim.node not in self._region.fleet.fleet.nodes and aim.node in regions:
            if request.queue:
                raise refuse(
                    Code.FIELD_INVALID, f"queue with region {aim.node}", "NODE or NODE/DEVICE of this region",
                    "migrate without it: that region is asked for a minute",
                )  # fmt: skip
            self._region.moves.cross_region_source(key, aim, request.replica)
            if aim.node != self._region.config.name:
                found = await self._can_move(key, request.to, actor)
                if found.refusal is not None:
                    raise ShoalError(found.refusal)
            begun = await self._region.moves.migrate_to_region(key, aim, actor, replica=request.replica)
        elif request.queue:
            begun = await self._region.queued_moves.migrate(key, aim, actor, replica=request.replica, compute=compute)
        else:
            begun = await self._region.moves.migrate(key, aim, actor, replica=request.replica, compute=compute)
        outcome = begun.id if isinstance(begun, Migration) else f"{begun.id} queued"
        await self._audit.note(actor, "Migrate", f"{key} to {request.to}", outcome)
        return operator_pb2.MigrateReply(migration=self._views.migration(begun))

    async def CancelMigration(
        self, request: operator_pb2.CancelMigrationRequest, context: Any
    ) -> operator_pb2.CancelMigrationReply:
        actor = identity_of_context(context).uri
        key = _key(request.workload) if request.HasField("workload") else None
        after = await self._region.queued_moves.cancel(request.id, actor, key)
        await self._audit.note(actor, "CancelMigration", request.id, after.stage)
        return operator_pb2.CancelMigrationReply(migration=self._views.migration(after))

    async def Drain(self, request: operator_pb2.DrainRequest, context: Any) -> operator_pb2.DrainReply:
        actor = identity_of_context(context).uri
        drained = await self._region.moves.drain(request.node, actor)
        await self._audit.note(actor, "Drain", request.node, f"{len(drained.migrations)} moves begun")
        return operator_pb2.DrainReply(
            node=await self._views.node(request.node),
            migrations=[self._views.migration(each) for each in drained.migrations],
            refusals=[
                operator_pb2.DrainRefusal(assignment=name, reason=views.refusal_view(refusal))
                for name, refusal in sorted(drained.refusals.items())
            ],
        )

    async def Events(self, request: operator_pb2.EventsRequest, context: Any) -> AsyncIterator[operator_pb2.Event]:
        async for event in stream_events(self._region.events, request):
            yield event

    async def Logs(self, request: operator_pb2.LogsRequest, context: Any) -> AsyncIterator[operator_pb2.LogsReply]:
        async for reply in stream_logs(self._region, self._process, self._audit, request, context):
            yield reply

    async def Trace(self, request: operator_pb2.TraceRequest, context: Any) -> operator_pb2.TraceReply:
        found = await self._region.traces.find(request.id)
        return operator_pb2.TraceReply(trace=found.trace, spans=map(to_wire, found.spans), silent=found.silent_nodes)

    async def Timeline(self, request: operator_pb2.TimelineRequest, context: Any) -> operator_pb2.TimelineReply:
        subject = str(_key(request.workload)) if request.HasField("workload") else timeline.REGION
        resolution = timeline.COARSE if request.coarse else timeline.FINE
        return views.timeline_view(self._region.timeline.timeline.series(subject, self._clock.wall(), resolution))

    async def GetDiagnostics(
        self, request: operator_pb2.GetDiagnosticsRequest, context: Any
    ) -> operator_pb2.GetDiagnosticsReply:
        return diagnostics(self._process)

    async def Backup(
        self, request: operator_pb2.BackupRequest, context: Any
    ) -> AsyncIterator[operator_pb2.BackupChunk]:
        assert self._backups is not None  # never None here: the guard redirects this call on a follower
        async for chunk in stream_backup(self._backups, self._audit, request, context):
            yield chunk

    async def OpenDashboard(
        self, request: operator_pb2.OpenDashboardRequest, context: Any
    ) -> operator_pb2.OpenDashboardReply:
        assert self._dashboard is not None  # never None here: the guard redirects this call on a follower
        link = await self._dashboard.open_link(identity_of_context(context))
        return operator_pb2.OpenDashboardReply(address=link.address, secret=link.secret, valid_s=link.valid_s)

    async def CreateToken(
        self, request: operator_pb2.CreateTokenRequest, context: Any
    ) -> operator_pb2.CreateTokenReply:
        actor = identity_of_context(context).uri
        grant = LabelGrant(dict(request.labels), tuple(request.allow_labels))
        created = await self._enrolment.create(request.role, request.name, request.valid_s, actor, grant)
        if request.role == BEARER:
            await self._region.workloads.load_credentials()
        await self._audit.note(actor, "CreateToken", created.id, f"{request.role} {request.name}".strip())
        return operator_pb2.CreateTokenReply(id=created.id, token=created.text, expires_at=created.expires_at)

    async def Doctor(self, request: operator_pb2.DoctorRequest, context: Any) -> operator_pb2.DoctorReply:
        reply, compute = operator_pb2.DoctorReply(), partial(self._compute_pool.run, identity_of_context(context).uri)
        for checks in (
            doctor.examine(self._region, self._store, compute),
            doctor.examine_certificates(self._members),
        ):
            async for check in checks:
                reply.checks.append(views.check_view(check.component, check.name, check.refusal))
        for name, refusal in (
            self._federation_or_none.membership.examine() if self._federation_or_none is not None else ()
        ):
            reply.checks.append(views.check_view("federation", name, refusal))
        return reply

    async def Revoke(self, request: operator_pb2.RevokeRequest, context: Any) -> operator_pb2.RevokeReply:
        actor = identity_of_context(context).uri
        if not request.reason.strip():
            raise refuse(Code.FIELD_MISSING, "no reason", "why, for the audit log", "add --reason TEXT")
        keeps = request.keep_enrolled
        if request.dry_run:
            return views.revocation_view(
                await self._members.preview_revocation(request.name, request.role, keep_enrolled=keeps)
            )
        ended = await self._members.revoke(
            request.name, request.role, request.reason, actor, keep_enrolled=keeps, force=request.force
        )
        outcome = f"{len(ended)} ended: {request.reason[:200]}"
        await self._audit.note(actor, "Revoke", f"{request.role} {request.name}".strip(), outcome)
        return views.revocation_view(ended)

    async def Settle(self, request: operator_pb2.SettleRequest, context: Any) -> operator_pb2.SettleReply:
        actor = identity_of_context(context).uri
        keep = request.keep or "running"
        await self._members.resolve_duplicate(request.node, keep, actor)
        await self._audit.note(actor, "Settle", request.node, f"keep {keep}")
        return operator_pb2.SettleReply(node=await self._views.node(request.node))

    async def Release(self, request: operator_pb2.ReleaseNodeRequest, context: Any) -> operator_pb2.ReleaseNodeReply:
        actor = identity_of_context(context).uri
        await self._region.fleet.release(request.node, actor)
        await self._audit.note(actor, "Release", request.node, "released")
        return operator_pb2.ReleaseNodeReply(node=await self._views.node(request.node))

    async def Measure(self, request: operator_pb2.MeasureNodeRequest, context: Any) -> operator_pb2.MeasureNodeReply:
        actor = identity_of_context(context).uri
        fleet = self._region.fleet.fleet
        devices = await self._region.measuring.ask(fleet, request.node, request.device)
        await self._audit.note(actor, "Measure", request.node, ", ".join(devices))
        return operator_pb2.MeasureNodeReply(devices=devices)

    async def Label(self, request: operator_pb2.LabelNodeRequest, context: Any) -> operator_pb2.LabelNodeReply:
        actor = identity_of_context(context).uri
        if not request.set and not request.remove:
            raise refuse(Code.FIELD_MISSING, "no label", "labels to set or remove", "shoal node label NODE site=shop")
        await self._region.fleet.label(request.node, dict(request.set), set(request.remove), actor)
        words = [*sorted(request.set), *(f"{name}-" for name in sorted(request.remove))]
        await self._audit.note(actor, "Label", request.node, " ".join(words)[:200])
        return operator_pb2.LabelNodeReply(node=await self._views.node(request.node))

    async def ClearModel(self, request: operator_pb2.ClearModelRequest, context: Any) -> operator_pb2.ClearModelReply:
        actor = identity_of_context(context).uri
        if request.allow_version:
            lines = await self._region.models.allow_rollback(request.model, request.allow_version, actor)
            allowed = f"version {request.allow_version} allowed again for {'; '.join(lines)}"
            await self._audit.note(actor, "ClearModel", request.model, allowed)
            return operator_pb2.ClearModelReply()
        poisoned = await self._region.workloads.clear(request.model, actor)
        cleared = (*poisoned, *await self._region.moves.clear(request.model, actor))
        await self._audit.note(actor, "ClearModel", request.model, "; ".join(cleared) or "nothing was held against it")
        return operator_pb2.ClearModelReply(cleared=cleared)

    async def GetAuthority(
        self, request: operator_pb2.GetAuthorityRequest, context: Any
    ) -> operator_pb2.GetAuthorityReply:
        return views.authority_view(await self._members.rotation(), len(self._members.revocation_list))

    async def RotateAuthority(
        self, request: operator_pb2.RotateAuthorityRequest, context: Any
    ) -> operator_pb2.RotateAuthorityReply:
        actor = identity_of_context(context).uri
        await self._members.rotate(request.stage, actor)
        await self._audit.note(actor, "RotateAuthority", self._region.config.name, request.stage or "begun")
        rotation = views.authority_view(await self._members.rotation(), len(self._members.revocation_list))
        return operator_pb2.RotateAuthorityReply(authority=rotation)

    async def SetSignal(self, request: operator_pb2.SetSignalRequest, context: Any) -> operator_pb2.SetSignalReply:
        actor = identity_of_context(context).uri
        if request.name not in tuple(SignalName):
            raise refuse(
                Code.FIELD_INVALID,
                f"signal {request.name!r:.40}",
                f"one of {', '.join(SignalName)}",
                "choose one of these",
            )
        name = SignalName(request.name)
        if request.value:
            await self._region.signals.set_override(name, request.value, actor)
            outcome = f"set to {request.value:.80}"
        else:
            cleared = await self._region.signals.clear_override(name, actor)
            outcome = "cleared" if cleared else "nothing was set"
        await self._audit.note(actor, "SetSignal", name, outcome)
        shown = next(view for view in self._views.signals() if view.name == name)
        return operator_pb2.SetSignalReply(signal=shown)

    async def ExportMeasurements(
        self, request: operator_pb2.ExportMeasurementsRequest, context: Any
    ) -> operator_pb2.ExportMeasurementsReply:
        write = self._region.measurements.document()
        return operator_pb2.ExportMeasurementsReply(
            document=await self._compute_pool.run(identity_of_context(context).uri, write)
        )

    async def ImportMeasurements(
        self, request: operator_pb2.ImportMeasurementsRequest, context: Any
    ) -> operator_pb2.ImportMeasurementsReply:
        actor, controller = identity_of_context(context).uri, self._region.measurements
        found = await self._compute_pool.run(actor, lambda: read_measurements(request.document))
        if request.dry_run:
            controller.check_room(found.region)
            return views.import_view(found, None)
        kept = await controller.put(found, actor)
        outcome = f"{len(kept.rows)} rows, {found.left_out} left out"
        await self._audit.note(actor, "ImportMeasurements", found.region, outcome)
        return views.import_view(found, kept)

    async def ListMeasurements(
        self, request: operator_pb2.ListMeasurementsRequest, context: Any
    ) -> operator_pb2.ListMeasurementsReply:
        imported = self._region.measurements.imports
        return operator_pb2.ListMeasurementsReply(imported=map(views.imported_view, imported))

    async def RemoveMeasurements(
        self, request: operator_pb2.RemoveMeasurementsRequest, context: Any
    ) -> operator_pb2.RemoveMeasurementsReply:
        actor = identity_of_context(context).uri
        await self._region.measurements.remove(request.region, actor)
        await self._audit.note(actor, "RemoveMeasurements", request.region, "removed")
        return operator_pb2.RemoveMeasurementsReply()

    async def JoinFederation(
        self, request: operator_pb2.JoinFederationRequest, context: Any
    ) -> operator_pb2.JoinFederationReply:
        actor = identity_of_context(context).uri
        await self._federation.join(request.address, request.token, actor)
        federation = views.federation_view(self._federation.membership)
        await self._audit.note(actor, "JoinFederation", federation.federation, request.address[:120])
        return operator_pb2.JoinFederationReply(federation=federation)

    async def LeaveFederation(
        self, request: operator_pb2.LeaveFederationRequest, context: Any
    ) -> operator_pb2.LeaveFederationReply:
        actor = identity_of_context(context).uri
        joined = self._federation.membership.current
        if request.drain and joined is not None:
            return operator_pb2.LeaveFederationReply(agreements=self._region.drain())
        await self._federation.membership.leave(actor, forget=request.forget)
        await self._audit.note(actor, "LeaveFederation", joined.federation if joined else "", "left")
        return operator_pb2.LeaveFederationReply()

    async def GetFederation(
        self, request: operator_pb2.GetFederationRequest, context: Any
    ) -> operator_pb2.GetFederationReply:
        membership = self._federation.membership
        if membership.current is None:
            return operator_pb2.GetFederationReply()
        return operator_pb2.GetFederationReply(federation=views.federation_view(membership))

    @property
    def _federation(self) -> FederationJoiner:
        assert self._federation_or_none is not None, "a follower's guard says who leads"
        return self._federation_or_none


def _key(key: nouns_pb2.WorkloadKey) -> WorkloadKey:
    return WorkloadKey(key.tenant or "default", key.name)
