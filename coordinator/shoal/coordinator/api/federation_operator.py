"""The operator API of a federation: its members, join tokens and events."""

from collections.abc import AsyncIterator
from typing import Any

from shoal.coordinator.api import views
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.backup import Backups, stream_backup
from shoal.coordinator.api.diagnostics import AddressableProcess, diagnostics, stream_logs
from shoal.coordinator.api.events import MAX_EVENTS, newest_events, stream_events
from shoal.coordinator.api.pace import extend_in_slices
from shoal.coordinator.controllers.federation.rotation import FederationRotation
from shoal.coordinator.controllers.federation.service import FederationController
from shoal.coordinator.controllers.identity.enrolment import REGION, Enrolment
from shoal.coordinator.controllers.identity.revocation import RevocationOrder, Revocations
from shoal.coordinator.controllers.log.events import EventLog
from shoal.types.codes import Code, refuse
from shoal.types.device import Role
from shoal.types.identity import uri_of
from shoal.v1 import operator_pb2, operator_pb2_grpc
from shoal.wire.certificates import identity_of_context
from shoal.wire.nouns import to_wire


class FederationOperatorService(operator_pb2_grpc.OperatorServicer):
    """Methods not defined here are UNIMPLEMENTED. address: where members call. enrol_address: where tokens are
    redeemed."""

    def __init__(
        self,
        name: str,
        controller: FederationController,
        enrolment: Enrolment,
        revocations: Revocations,
        rotation: FederationRotation,
        events: EventLog,
        audit: AuditTrail,
        backups: Backups,
        process: AddressableProcess,
    ) -> None:
        self._name = name
        self._controller = controller
        self._enrolment = enrolment
        self._revocations = revocations
        self._rotation = rotation
        self._events = events
        self._audit = audit
        self._backups = backups
        self._process = process

    async def WhoAmI(self, request: operator_pb2.WhoAmIRequest, context: Any) -> operator_pb2.WhoAmIReply:
        identity = identity_of_context(context)
        return operator_pb2.WhoAmIReply(
            region=identity.region,
            role=identity.role,
            name=identity.name,
            certificate_expires_at=identity.not_after,
            version=views.VERSION,
            enrol_address=self._process.enrol_addresses,
            coordinators=self._process.link_addresses.split(","),
        )

    async def Get(self, request: operator_pb2.GetRequest, context: Any) -> operator_pb2.GetReply:
        reply = operator_pb2.GetReply()
        match request.kind:
            case "tokens":
                reply.tokens.extend(views.token_view(token) for token in await self._enrolment.tokens())
            case "events":
                await extend_in_slices(reply.events, await newest_events(self._events))
            case "ledger":
                copies = await self._controller.copies(request.name, MAX_EVENTS)
                await extend_in_slices(reply.ledger, (to_wire(entry) for entry in copies))
            case _:
                raise _unknown(request.kind, "tokens, events, ledger")
        return reply

    async def GetFederation(
        self, request: operator_pb2.GetFederationRequest, context: Any
    ) -> operator_pb2.GetFederationReply:
        directory = self._controller.directory()
        federation = operator_pb2.FederationView(
            federation=self._name,
            address=self._process.link_addresses,
            members=[views.member_view(member, {}) for member in directory.members],
        )
        return operator_pb2.GetFederationReply(federation=federation)

    async def CreateToken(
        self, request: operator_pb2.CreateTokenRequest, context: Any
    ) -> operator_pb2.CreateTokenReply:
        actor = identity_of_context(context).uri
        created = await self._enrolment.create(request.role, request.name, request.valid_s, actor)
        await self._audit.note(actor, "CreateToken", created.id, f"{request.role} {request.name}".strip())
        return operator_pb2.CreateTokenReply(id=created.id, token=created.text, expires_at=created.expires_at)

    async def Delete(self, request: operator_pb2.DeleteRequest, context: Any) -> operator_pb2.DeleteReply:
        actor = identity_of_context(context).uri
        match request.kind:
            case "token":
                await self._enrolment.revoke(request.name, actor)
            case "region":
                await self._controller.remove(request.name, actor)
                await self._enrolment.revoke_unused(REGION, request.name, actor)
            case kind:
                raise _unknown(kind, "token, region")
        await self._audit.note(actor, "Delete", f"{request.kind} {request.name}", "deleted")
        return operator_pb2.DeleteReply()

    async def Revoke(self, request: operator_pb2.RevokeRequest, context: Any) -> operator_pb2.RevokeReply:
        actor = identity_of_context(context).uri
        if not request.reason.strip():
            raise refuse(Code.FIELD_MISSING, "no reason", "why, for the audit log", "add --reason TEXT")
        if request.role not in (Role.OPERATOR, Role.VIEWER):
            asked = f"{Role.OPERATOR} or {Role.VIEWER}; of a region: shoal delete region"
            raise refuse(Code.FIELD_INVALID, f"role {request.role!r:.40}", asked, "add --role operator")
        role, keeps = Role(request.role), request.keep_enrolled
        if await self._enrolment.expiry_of(role, request.name) is None:
            found = f"no {role} {request.name!r:.80}"
            raise refuse(Code.NODE_UNKNOWN, found, "one that enrolled", "see `shoal get tokens`")
        uri = uri_of(self._name, role, request.name)
        if request.dry_run:
            return views.revocation_view(await self._revocations.preview(uri, keep_enrolled=keeps))
        order = RevocationOrder(uri, request.reason, actor, keeps)
        ended = await self._revocations.revoke(order, force=request.force)
        outcome = f"{len(ended)} ended: {request.reason[:200]}"
        await self._audit.note(actor, "Revoke", f"{role} {request.name}", outcome)
        return views.revocation_view(ended)

    async def GetAuthority(
        self, request: operator_pb2.GetAuthorityRequest, context: Any
    ) -> operator_pb2.GetAuthorityReply:
        return views.authority_view(await self._rotation.state(), len(self._revocations.all))

    async def RotateAuthority(
        self, request: operator_pb2.RotateAuthorityRequest, context: Any
    ) -> operator_pb2.RotateAuthorityReply:
        actor = identity_of_context(context).uri
        await self._rotation.rotate(request.stage, actor)
        await self._audit.note(actor, "RotateAuthority", self._name, request.stage or "begun")
        authority = views.authority_view(await self._rotation.state(), len(self._revocations.all))
        return operator_pb2.RotateAuthorityReply(authority=authority)

    async def Events(self, request: operator_pb2.EventsRequest, context: Any) -> AsyncIterator[operator_pb2.Event]:
        async for event in stream_events(self._events, request):
            yield event

    async def Logs(self, request: operator_pb2.LogsRequest, context: Any) -> AsyncIterator[operator_pb2.LogsReply]:
        async for reply in stream_logs(None, self._process, self._audit, request, context):
            yield reply

    async def GetDiagnostics(
        self, request: operator_pb2.GetDiagnosticsRequest, context: Any
    ) -> operator_pb2.GetDiagnosticsReply:
        return diagnostics(self._process)

    async def Backup(
        self, request: operator_pb2.BackupRequest, context: Any
    ) -> AsyncIterator[operator_pb2.BackupChunk]:
        async for chunk in stream_backup(self._backups, self._audit, request, context):
            yield chunk


def _unknown(kind: str, known: str) -> Exception:
    return refuse(Code.KIND_UNKNOWN, f"kind {kind!r:.40} at a federation", f"one of {known}", "choose one of these")
