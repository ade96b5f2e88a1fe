"""The operator API: what the command line, scripts and the dashboard call. Each change leaves an audit entry."""

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from shoal.coordinator.api import views
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.backup import Backups, backup
from shoal.coordinator.api.diagnostics import Diagnosed, diagnostics, logs
from shoal.coordinator.api.events import events, newest
from shoal.coordinator.api.migrations import migration_view, migration_views, unmoved_view
from shoal.coordinator.api.prospects import prospect_view
from shoal.coordinator.controllers import doctor, revisions
from shoal.coordinator.controllers.catalog import DocumentKey
from shoal.coordinator.controllers.enrolment import BEARER, Enrolment
from shoal.coordinator.controllers.following import Following
from shoal.coordinator.controllers.members import Members
from shoal.coordinator.controllers.membership import Membership
from shoal.coordinator.controllers.outlook import outlooks
from shoal.coordinator.controllers.prospects import prospect
from shoal.coordinator.controllers.region import Region
from shoal.coordinator.core.migration.model import Migration
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.core.signals.model import SignalName
from shoal.coordinator.core.workloads.delivered import delivered
from shoal.coordinator.ports import Clock, Store
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.workload import WorkloadKey
from shoal.v1 import nouns_pb2, operator_pb2, operator_pb2_grpc
from shoal.wire.identity import identity_of_context
from shoal.wire.nouns import to_wire

KINDS: Final = {"workload": "Workload", "policy": "Policy", "tenant": "Tenant", "region": "Region"}
LISTS: Final = {"policies": "Policy", "tenants": "Tenant"}
_KINDS_LISTED: Final = (
    "nodes",
    "devices",
    "workloads",
    "placements",
    "tokens",
    "events",
    "regions",
    "agreements",
    "migrations",
    "ledger",
    *LISTS,
)
LEDGER_MOST: Final = 2_000
"""The newest; an entry carries what its counterpart signed, and one answer holds 4 MiB."""


class Trading(Protocol):
    """What the API shows and changes of a region that is, or may come to be, in a federation."""

    @property
    def membership(self) -> Membership: ...
    async def join(self, address: str, token: str, actor: str) -> None:
        """Raises ShoalError as `Membership.join` does."""
        ...


class Seat(Protocol):
    """Where this coordinator listens for operators; and where all of the region do, for these and for who enrols or
    renews (with commas)."""

    @property
    def link_address(self) -> str: ...
    @property
    def links(self) -> str: ...
    @property
    def enrols(self) -> str: ...


class OperatorService(operator_pb2_grpc.OperatorServicer):
    """following: of a coordinator that does not lead."""

    def __init__(
        self,
        region: Region,
        enrolment: Enrolment,
        members: Members,
        store: Store,
        clock: Clock,
        audit: AuditTrail,
        seat: Seat,
        own: Diagnosed,
        *,
        following: Following | None = None,
        trading: Trading | None = None,
        backups: Backups | None = None,
    ) -> None:
        self._region = region
        self._backups = backups
        self._own = own
        self._trading = trading
        self._members = members
        self._seat = seat
        self._audit = audit
        self._enrolment = enrolment
        self._store = store
        self._clock = clock
        self._following = following

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
            history=self._region.truth.history,
            term=self._region.truth.term,
            gateways_grpc=[node.grpc_address for node in gateways],
            gateways_rest=[node.rest_address for node in gateways],
            gateways_token=[node.token_address for node in gateways],
            enrol_address=self._seat.enrols,
            leader=self._following.leader if self._following is not None else "",
            follows=self._following is not None,
            coordinators=self._seat.links.split(","),
        )

    async def Plan(self, request: operator_pb2.PlanRequest, context: Any) -> operator_pb2.PlanReply:
        actor = identity_of_context(context).uri
        texts, digests = await self._asked(request)
        back = request.HasField("rollback")
        planned = self._region.workloads.plan(texts, digests, actor, back=back)
        plans = planned.plan.workloads if planned.plan is not None else ()
        found = await outlooks(self._region.trades, planned.proposal.catalog, plans)
        return views.plan_view(planned, self._clock.wall(), self._region.signals.refusals, found)

    async def Apply(self, request: operator_pb2.ApplyRequest, context: Any) -> operator_pb2.ApplyReply:
        actor = identity_of_context(context).uri
        texts, digests = await self._asked(request)
        back = request.HasField("rollback")
        applied = await self._region.workloads.apply(texts, digests, request.plan_hash, actor, back=back)
        outcome = "stale" if applied.stale else "refused" if applied.planned.problems else "applied"
        names = ", ".join(f"{change.kind} {change.name}" for change in applied.planned.documents)
        await self._audit.note(actor, "Rollback" if back else "Apply", names, outcome)
        return operator_pb2.ApplyReply(
            problems=[views.problem_view(problem) for problem in applied.planned.problems],
            plan=views.plan_view(applied.planned, self._clock.wall(), self._region.signals.refusals),
            stale=applied.stale,
            revision=applied.revision,
        )

    async def _asked(
        self, request: operator_pb2.PlanRequest | operator_pb2.ApplyRequest
    ) -> tuple[Sequence[tuple[str, str]], Mapping[str, str]]:
        """Texts and digests, as they were sent or as an earlier revision has them."""
        if not request.HasField("rollback"):
            return [(document.name, document.text) for document in request.documents], dict(request.digests)
        if request.documents or request.digests:
            raise refuse(Code.INVALID_ARGUMENT, "documents beside a rollback", "one of them", "ask for one at a time")
        catalog, to = self._region.workloads.catalog, request.rollback
        return await revisions.proposed(self._store, catalog, _key(to.workload), to.revision)

    async def History(self, request: operator_pb2.HistoryRequest, context: Any) -> operator_pb2.HistoryReply:
        catalog = self._region.workloads.catalog
        found = await revisions.history(self._store, catalog, _key(request.workload))
        return operator_pb2.HistoryReply(revisions=[views.revision_view(revision) for revision in found])

    async def Get(self, request: operator_pb2.GetRequest, context: Any) -> operator_pb2.GetReply:
        if self._following is not None and (refusal := self._following.elsewhere("Get", request.kind)) is not None:
            raise ShoalError(refusal)
        as_of = self._following.revision if self._following is not None else 0
        found = await self._listed(request.kind, request.name, request.tenant)
        if request.name or request.tenant:
            _filter(found, request.name, request.tenant)
            if request.name and not found.ListFields():
                code = Code.NODE_UNKNOWN if request.kind == "nodes" else Code.NOT_FOUND
                raise refuse(
                    code,
                    f"{request.kind} {request.name!r:.120}",
                    "one that is listed",
                    f"see `shoal get {request.kind}`",
                )
        if self._following is not None:
            found.served_by, found.as_of = self._seat.link_address, as_of
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
                revision = await self._region.workloads.delete(DocumentKey("Workload", name), actor)
            case kind if kind in KINDS:
                revision = await self._region.workloads.delete(DocumentKey(KINDS[kind], request.name), actor)
            case _:
                raise _unknown_kind(request.kind, (*KINDS, "node", "token"))
        await self._audit.note(actor, "Delete", f"{request.kind} {request.name}", "deleted")
        return operator_pb2.DeleteReply(revision=revision)

    async def Explain(self, request: operator_pb2.ExplainRequest, context: Any) -> operator_pb2.ExplainReply:
        controller, fleet = self._region.workloads, self._region.fleet.fleet
        key = _key(request.workload)
        plan = controller.explain(key)
        listed = [view for view in views.workload_views(controller, fleet) if _key(view.workload) == key]
        found = await outlooks(self._region.trades, controller.catalog, (plan,))
        return operator_pb2.ExplainReply(
            plan=views.workload_plan_view(plan, found.get(key)),
            workload=listed[0] if listed else None,
            placements=views.placement_views(controller, fleet, controller.explained(), key),
            signals=self._signals(),
            unmoved=[unmoved_view(each) for each in controller.unmoved(key)],
        )

    async def CanMove(self, request: operator_pb2.CanMoveRequest, context: Any) -> operator_pb2.CanMoveReply:
        key = WorkloadKey(request.tenant or "default", request.name)
        joined = self._trading.membership.joined if self._trading is not None else None
        regions = {member.region for member in joined.directory.members} if joined is not None else set[str]()
        region = self._region
        return prospect_view(await prospect(region.workloads, region.trades, regions, key, request.to))

    async def Cordon(self, request: operator_pb2.CordonRequest, context: Any) -> operator_pb2.CordonReply:
        actor = identity_of_context(context).uri
        await self._region.fleet.cordon(request.node, request.cordoned, actor)
        await self._audit.note(actor, "Cordon", request.node, "cordoned" if request.cordoned else "uncordoned")
        return operator_pb2.CordonReply(node=await self._node(request.node))

    async def Migrate(self, request: operator_pb2.MigrateRequest, context: Any) -> operator_pb2.MigrateReply:
        actor = identity_of_context(context).uri
        key = _key(request.workload)
        aim = Aim.parse(request.to)
        if aim.node not in self._region.fleet.fleet.nodes and aim.node in self._region.regions:
            begun = await self._region.moving.cross(key, aim, actor, replica=request.replica)
        else:
            begun = await self._region.moving.migrate(key, aim, actor, replica=request.replica)
        await self._audit.note(actor, "Migrate", f"{key} to {request.to}", begun.id)
        return operator_pb2.MigrateReply(migration=self._migration(begun))

    async def CancelMigration(
        self, request: operator_pb2.CancelMigrationRequest, context: Any
    ) -> operator_pb2.CancelMigrationReply:
        actor = identity_of_context(context).uri
        key = _key(request.workload) if request.HasField("workload") else None
        after = await self._region.moving.cancel(request.id, actor, key)
        await self._audit.note(actor, "CancelMigration", request.id, after.stage)
        return operator_pb2.CancelMigrationReply(migration=self._migration(after))

    async def Drain(self, request: operator_pb2.DrainRequest, context: Any) -> operator_pb2.DrainReply:
        actor = identity_of_context(context).uri
        drained = await self._region.moving.drain(request.node, actor)
        await self._audit.note(actor, "Drain", request.node, f"{len(drained.begun)} moves begun")
        return operator_pb2.DrainReply(
            node=await self._node(request.node),
            migrations=[self._migration(each) for each in drained.begun],
            unmoved=[
                operator_pb2.UnmovedReplica(assignment=name, reason=views.refusal_view(refusal))
                for name, refusal in sorted(drained.unmoved.items())
            ],
        )

    def _migration(self, migration: Migration) -> operator_pb2.MigrationView:
        return migration_view(self._region.workloads, migration, self._clock.now(), self._clock.wall())

    async def Events(self, request: operator_pb2.EventsRequest, context: Any) -> AsyncIterator[operator_pb2.Event]:
        async for event in events(self._region.events, request):
            yield event

    async def Logs(self, request: operator_pb2.LogsRequest, context: Any) -> AsyncIterator[operator_pb2.LogsReply]:
        async for reply in logs(self._region, self._own, self._audit, request, context):
            yield reply

    async def Trace(self, request: operator_pb2.TraceRequest, context: Any) -> operator_pb2.TraceReply:
        found = await self._region.traces.find(request.id)
        return operator_pb2.TraceReply(trace=found.trace, spans=map(to_wire, found.spans), silent=found.silent)

    async def GetDiagnostics(
        self, request: operator_pb2.GetDiagnosticsRequest, context: Any
    ) -> operator_pb2.GetDiagnosticsReply:
        return diagnostics(self._own)

    async def Backup(
        self, request: operator_pb2.BackupRequest, context: Any
    ) -> AsyncIterator[operator_pb2.BackupChunk]:
        assert self._backups is not None  # what follows is not asked
        async for chunk in backup(self._backups, self._audit, request, context):
            yield chunk

    async def CreateToken(
        self, request: operator_pb2.CreateTokenRequest, context: Any
    ) -> operator_pb2.CreateTokenReply:
        actor = identity_of_context(context).uri
        created = await self._enrolment.create(request.role, request.name, request.valid_s, actor)
        if request.role == BEARER:
            await self._region.workloads.load_credentials()
        await self._audit.note(actor, "CreateToken", created.id, f"{request.role} {request.name}".strip())
        return operator_pb2.CreateTokenReply(id=created.id, token=created.text, expires_at=created.expires_at)

    async def Doctor(self, request: operator_pb2.DoctorRequest, context: Any) -> operator_pb2.DoctorReply:
        reply = operator_pb2.DoctorReply()
        for checks in (doctor.examine(self._region, self._store), doctor.examine_members(self._members)):
            async for check in checks:
                reply.checks.append(views.check_view(check.component, check.name, check.refusal))
        for name, refusal in self._trading.membership.examine() if self._trading is not None else ():
            reply.checks.append(views.check_view("federation", name, refusal))
        return reply

    async def Revoke(self, request: operator_pb2.RevokeRequest, context: Any) -> operator_pb2.RevokeReply:
        actor = identity_of_context(context).uri
        if not request.reason.strip():
            raise refuse(Code.FIELD_MISSING, "no reason", "why, for the audit log", "add --reason TEXT")
        serials = await self._members.revoke(request.name, request.role, request.reason, actor)
        await self._audit.note(actor, "Revoke", f"{request.role} {request.name}".strip(), request.reason[:200])
        return operator_pb2.RevokeReply(serials=serials)

    async def Settle(self, request: operator_pb2.SettleRequest, context: Any) -> operator_pb2.SettleReply:
        actor = identity_of_context(context).uri
        keep = request.keep or "running"
        await self._members.settle(request.node, keep, actor)
        await self._audit.note(actor, "Settle", request.node, f"keep {keep}")
        return operator_pb2.SettleReply(node=await self._node(request.node))

    async def Release(self, request: operator_pb2.ReleaseNodeRequest, context: Any) -> operator_pb2.ReleaseNodeReply:
        actor = identity_of_context(context).uri
        await self._region.fleet.release(request.node, actor)
        await self._audit.note(actor, "Release", request.node, "released")
        return operator_pb2.ReleaseNodeReply(node=await self._node(request.node))

    async def ClearModel(self, request: operator_pb2.ClearModelRequest, context: Any) -> operator_pb2.ClearModelReply:
        actor = identity_of_context(context).uri
        if request.allow_version:
            lines = await self._region.models.allow(request.model, request.allow_version, actor)
            allowed = f"version {request.allow_version} allowed again for {'; '.join(lines)}"
            await self._audit.note(actor, "ClearModel", request.model, allowed)
            return operator_pb2.ClearModelReply()
        poisoned = await self._region.workloads.clear(request.model, actor)
        cleared = (*poisoned, *await self._region.moving.clear(request.model, actor))
        await self._audit.note(actor, "ClearModel", request.model, "; ".join(cleared) or "nothing was held against it")
        return operator_pb2.ClearModelReply(cleared=cleared)

    async def GetAuthority(
        self, request: operator_pb2.GetAuthorityRequest, context: Any
    ) -> operator_pb2.GetAuthorityReply:
        return views.authority_view(await self._members.rotation(), len(self._members.revoked))

    async def RotateAuthority(
        self, request: operator_pb2.RotateAuthorityRequest, context: Any
    ) -> operator_pb2.RotateAuthorityReply:
        actor = identity_of_context(context).uri
        await self._members.rotate(request.stage, actor)
        await self._audit.note(actor, "RotateAuthority", self._region.config.name, request.stage or "begun")
        rotation = views.authority_view(await self._members.rotation(), len(self._members.revoked))
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
            await self._region.signals.set(name, request.value, actor)
            outcome = f"set to {request.value:.80}"
        else:
            cleared = await self._region.signals.clear(name, actor)
            outcome = "cleared" if cleared else "nothing was set"
        await self._audit.note(actor, "SetSignal", name, outcome)
        shown = next(view for view in self._signals() if view.name == name)
        return operator_pb2.SetSignalReply(signal=shown)

    def _signals(self) -> list[operator_pb2.SignalView]:
        signals = self._region.signals
        return views.signal_views(signals.now(), signals.refusals, self._clock.wall())

    async def JoinFederation(
        self, request: operator_pb2.JoinFederationRequest, context: Any
    ) -> operator_pb2.JoinFederationReply:
        actor = identity_of_context(context).uri
        await self._trade.join(request.address, request.token, actor)
        federation = views.federation_view(self._trade.membership)
        await self._audit.note(actor, "JoinFederation", federation.federation, request.address[:120])
        return operator_pb2.JoinFederationReply(federation=federation)

    async def LeaveFederation(
        self, request: operator_pb2.LeaveFederationRequest, context: Any
    ) -> operator_pb2.LeaveFederationReply:
        actor = identity_of_context(context).uri
        joined = self._trade.membership.joined
        if request.drain and joined is not None:
            return operator_pb2.LeaveFederationReply(agreements=self._region.drain())
        await self._trade.membership.leave(actor, forget=request.forget)
        await self._audit.note(actor, "LeaveFederation", joined.federation if joined else "", "left")
        return operator_pb2.LeaveFederationReply()

    async def GetFederation(
        self, request: operator_pb2.GetFederationRequest, context: Any
    ) -> operator_pb2.GetFederationReply:
        membership = self._trade.membership
        if membership.joined is None:
            return operator_pb2.GetFederationReply()
        return operator_pb2.GetFederationReply(federation=views.federation_view(membership))

    @property
    def _trade(self) -> Trading:
        assert self._trading is not None, "a follower's guard says who leads"
        return self._trading

    async def _node(self, name: str) -> operator_pb2.NodeView:
        state = self._region.fleet.fleet.nodes[name]
        ends = await self._enrolment.expiry_of(state.node.role, name)
        return views.node_view(state, self._region.workloads.desired.get(name), ends)

    async def _listed(self, kind: str, name: str, tenant: str) -> operator_pb2.GetReply:
        """What the caller picks those of this name and tenant from: all, or fewer where making them is dear."""
        controller, fleet = self._region.workloads, self._region.fleet.fleet
        reply = operator_pb2.GetReply()
        match kind:
            case "nodes":
                for name, state in sorted(fleet.nodes.items()):
                    ends = await self._enrolment.expiry_of(state.node.role, name)
                    reply.nodes.append(views.node_view(state, controller.desired.get(name), ends))
            case "devices":
                costs = controller.costs
                for name, state in sorted(fleet.nodes.items()):
                    reply.devices.extend(views.device_views(state, controller.desired.get(name), costs))
            case "workloads":
                reply.workloads.extend(views.workload_views(controller, fleet))
            case "placements":
                reply.placements.extend(views.placement_views(controller, fleet, controller.explained()))
            case "tokens":
                reply.tokens.extend(views.token_view(token) for token in await self._enrolment.tokens())
            case "agreements":
                trades = self._region.trades.trades if self._region.trades is not None else {}
                deals = self._region.bids.states.values() if self._region.bids is not None else ()
                seen = partial(delivered, fleet)
                reply.agreements.extend(views.agreement_views(trades, deals, self._clock.now(), seen))
            case "migrations":
                now, wall = self._clock.now(), self._clock.wall()
                reply.migrations.extend(migration_views(controller, name, tenant, now, wall))
            case "ledger":
                reply.ledger.extend(to_wire(entry) for entry in (await self._region.ledger.past(0))[-LEDGER_MOST:])
            case "events":
                reply.events.extend(await newest(self._region.events))
            case "regions":
                name = self._region.config.name
                view = reply.regions.add(name=name, signals=self._signals())
                view.leader, view.coordinators[:] = self._seat.link_address, self._seat.links.split(",")
                if (stored := controller.catalog.documents.get(DocumentKey("Region", name))) is not None:
                    view.document.CopyFrom(views.document_view(stored))
            case kind if kind in LISTS:
                reply.documents.extend(
                    views.document_view(stored)
                    for key, stored in sorted(controller.catalog.documents.items())
                    if key.kind == LISTS[kind]
                )
            case _:
                raise _unknown_kind(kind, _KINDS_LISTED)
        return reply


def _filter(reply: operator_pb2.GetReply, name: str, tenant: str) -> None:
    """Leaves what has this name and tenant, in whichever list was filled."""
    for field, values in reply.ListFields():
        kept = [value for value in values if _matches(field.name, value, name, tenant)]
        listed = getattr(reply, field.name)
        del listed[:]
        listed.extend(kept)


def _matches(field: str, value: Any, name: str, tenant: str) -> bool:
    match field:
        case "nodes":
            return value.node.name == name or not name
        case "devices":
            return name in ("", value.node, f"{value.node}/{value.device.name}")
        case "workloads":
            return name in ("", value.workload.name) and tenant in ("", value.workload.tenant)
        case "placements":
            workload = value.assignment.workload
            return name in ("", workload.name, value.assignment.id) and tenant in ("", workload.tenant)
        case "documents" | "regions":
            return name in ("", value.name)
        case "tokens":
            return name in ("", value.id, value.name)
        case "agreements":
            return name in ("", value.agreement, value.workload.name) and tenant in ("", value.workload.tenant)
        case "migrations":
            return True  # picked before they were made
        case "ledger":
            return name in ("", value.agreement)
        case "events":
            return name in ("", value.subject, value.node, value.workload.name) and tenant in (
                "",
                value.workload.tenant,
            )
    return False


def _key(key: nouns_pb2.WorkloadKey) -> WorkloadKey:
    return WorkloadKey(key.tenant or "default", key.name)


def _unknown_kind(kind: str, known: tuple[str, ...]) -> ShoalError:
    return refuse(Code.KIND_UNKNOWN, f"kind {kind!r:.40}", f"one of {', '.join(known)}", "choose one of these")
