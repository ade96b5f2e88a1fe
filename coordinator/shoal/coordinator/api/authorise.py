"""Authorisation: one table of methods and roles, checked on every call and again while a stream is open.

A method without a rule is refused. A test compares the table with the services' descriptors.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from shoal.coordinator import metrics
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.ports import Clock, Meter, StaleRevision
from shoal.coordinator.uncancelled import run_to_completion
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Elapsed
from shoal.wire.certificates import GrpcContext, identity_of_context
from shoal.wire.grpcio_status import abort
from shoal.wire.identity import check_validity, require
from shoal.wire.request_limits import make_reader
from shoal.wire.signed_envelope import COORDINATORS, RootsOf, check_roots

Roles = frozenset[Role]

_END: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]  # public, and not in the stubs

_NODES: Final[Roles] = frozenset({Role.AGENT, Role.GATEWAY})
_WRITE: Final[Roles] = frozenset({Role.OPERATOR})
_READ: Final[Roles] = frozenset({Role.OPERATOR, Role.VIEWER})

FETCH: Final = "/shoal.v1.Artifacts/Fetch"
RECORD: Final = "/shoal.v1.Artifacts/Record"
"""The rules of FETCH and RECORD also apply to models over HTTPS (`models.py`)."""
REVOKE: Final = "/shoal.v1.Operator/Revoke"
"""The only call that does not end with its caller's certificate, so that callers who revoke themselves get the
reply."""
RULES: Final[dict[str, Roles]] = {
    "/shoal.v1.AgentLink/Session": _NODES,
    FETCH: _NODES | _WRITE,
    "/shoal.v1.Artifacts/Push": _WRITE,
    "/shoal.v1.Artifacts/Inspect": _WRITE,
    RECORD: frozenset({Role.AGENT}),
    "/shoal.v1.Artifacts/List": _READ,
    "/shoal.v1.Artifacts/Remove": _WRITE,
    "/shoal.v1.Operator/WhoAmI": _READ | COORDINATORS,
    "/shoal.v1.Operator/Plan": _READ,
    "/shoal.v1.Operator/Apply": _WRITE,
    "/shoal.v1.Operator/Get": _READ,
    "/shoal.v1.Operator/History": _READ,
    "/shoal.v1.Operator/Delete": _WRITE,
    "/shoal.v1.Operator/Explain": _READ,
    "/shoal.v1.Operator/CanMove": _READ,
    "/shoal.v1.Operator/Cordon": _WRITE,
    "/shoal.v1.Operator/Migrate": _WRITE,
    "/shoal.v1.Operator/CancelMigration": _WRITE,
    "/shoal.v1.Operator/Drain": _WRITE,
    "/shoal.v1.Operator/Events": _READ,
    "/shoal.v1.Operator/CreateToken": _WRITE,
    "/shoal.v1.Operator/OpenDashboard": _READ,
    "/shoal.v1.Operator/Doctor": _READ,
    "/shoal.v1.Operator/Revoke": _WRITE,
    "/shoal.v1.Operator/Settle": _WRITE,
    "/shoal.v1.Operator/Release": _WRITE,
    "/shoal.v1.Operator/Measure": _WRITE,
    "/shoal.v1.Operator/Label": _WRITE,
    "/shoal.v1.Operator/ClearModel": _WRITE,
    "/shoal.v1.Operator/GetAuthority": _READ,
    "/shoal.v1.Operator/RotateAuthority": _WRITE,
    "/shoal.v1.Operator/SetSignal": _WRITE,
    "/shoal.v1.Operator/ExportMeasurements": _READ,
    "/shoal.v1.Operator/ImportMeasurements": _WRITE,
    "/shoal.v1.Operator/ListMeasurements": _READ,
    "/shoal.v1.Operator/RemoveMeasurements": _WRITE,
    "/shoal.v1.Operator/JoinFederation": _WRITE,
    "/shoal.v1.Operator/LeaveFederation": _WRITE,
    "/shoal.v1.Operator/GetFederation": _READ,
    "/shoal.v1.Operator/Backup": _WRITE,
    "/shoal.v1.Operator/Logs": _WRITE,
    "/shoal.v1.Operator/Trace": _READ,
    "/shoal.v1.Operator/Timeline": _READ,
    "/shoal.v1.Operator/GetDiagnostics": _WRITE,
    "/shoal.v1.Federation/Advertise": COORDINATORS,
    "/shoal.v1.Federation/Solicit": COORDINATORS,
    "/shoal.v1.Federation/Report": COORDINATORS,
    "/shoal.v1.Federation/Update": COORDINATORS,
    "/shoal.v1.Federation/Leave": COORDINATORS,
    "/shoal.v1.Peer/Bid": COORDINATORS | {Role.FEDERATION},
    "/shoal.v1.Peer/Award": COORDINATORS,
    "/shoal.v1.Peer/Release": COORDINATORS,
    "/shoal.v1.Peer/Renew": COORDINATORS,
    "/shoal.v1.Peer/Notify": COORDINATORS,
    "/shoal.v1.Peer/Fetch": COORDINATORS,
    "/shoal.v1.Peer/Measure": COORDINATORS,
}
CROSS_REGION_SERVICES: Final = ("/shoal.v1.Federation/", "/shoal.v1.Peer/")
"""Services that other regions call; all others serve only the port's own region."""
MESSAGE_S: Final = 10.0
"""Seconds for the message of a call that has one, and for each message of an upload; a session has timeouts of its
own."""
AUDIT_EVERY_S: Final = 60.0
"""Seconds covered by one audit entry for each (caller, code), however many refusals there are."""

log: Final = structlog.get_logger("shoal.coordinator.api")


class Authorisation(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs only
    """Checks region, role and validity of the caller's certificate; turns refusals into statuses.

    check_serial: why a certificate with this serial is refused; None: it is not. roots_of: the CAs of each region, on a
    port that several regions' members reach. Only these CAs may vouch for a region's names. None: TLS trusts one
    region's CAs only.
    """

    def __init__(
        self,
        region: str,
        clock: Clock,
        meter: Meter,
        audit: AuditTrail,
        check_serial: Callable[[str], Refusal | None] = lambda serial: None,
        *,
        redirect: Callable[[str], Refusal | None] = lambda method: None,
        roots_of: RootsOf | None = None,
    ) -> None:
        """redirect: why this coordinator does not answer a method; None: it does."""
        self._region = region
        self._roots_of = roots_of
        self._clock = clock
        self._meter = meter
        self._audit = audit
        self._check_serial = check_serial
        self._redirect = redirect
        self._audited_at: dict[tuple[str, str], Elapsed] = {}
        self._call_timeouts: dict[str, set[asyncio.Timeout]] = {}

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        call = _Call(self, handler_call_details.method, handler)
        # Always a request stream, whatever the method is: only then is a message read after its sender was checked.
        make, behaviour = (
            (grpc.stream_stream_rpc_method_handler, call.stream)
            if handler.response_streaming
            else (grpc.stream_unary_rpc_method_handler, call.unary)
        )
        read = make_reader(handler_call_details.method, handler.request_deserializer)
        return make(behaviour, read, handler.response_serializer)

    def admit(self, method: str, context: GrpcContext) -> Identity:
        """Raises ShoalError(UNAUTHENTICATED | CERT_* | REGION_MISMATCH | REGION_UNKNOWN | ROLE_DENIED |
        NOT_LEADER)."""
        identity = identity_of_context(context)
        if self._roots_of is not None:
            check_roots(context, identity.region, self._roots_of)
        self.check_caller(method, identity)
        if (refusal := self._redirect(method)) is not None:
            raise ShoalError(refusal)
        return identity

    def check_caller(self, method: str, identity: Identity) -> None:
        """Raises ShoalError(CERT_* | REGION_MISMATCH | ROLE_DENIED)."""
        if (refusal := check_validity(identity, self._clock.wall())) is not None:
            raise ShoalError(refusal)
        if (refusal := self._check_serial(identity.serial)) is not None:
            raise ShoalError(refusal)
        region = identity.region if method.startswith(CROSS_REGION_SERVICES) else self._region
        require(identity, region=region, roles=RULES.get(method, frozenset()))

    def end_calls(self, serials: frozenset[str]) -> None:
        """Ends open calls of these certificates, which were just revoked."""
        now = asyncio.get_running_loop().time()
        for serial in serials:
            for waiting in self._call_timeouts.get(serial, ()):
                waiting.reschedule(now)

    @asynccontextmanager
    async def while_valid(self, identity: Identity) -> AsyncIterator[None]:
        """Raises ShoalError(CERT_EXPIRED | CERT_REVOKED) inside once the caller's certificate ends. A timeout of the
        inner code passes through unchanged."""
        limit = asyncio.timeout(max(0.0, identity.not_after - self._clock.wall()))
        try:
            async with limit:
                waiting = self._call_timeouts.setdefault(identity.serial, set())
                waiting.add(limit)
                try:
                    yield
                finally:
                    waiting.discard(limit)
                    if not waiting:
                        self._call_timeouts.pop(identity.serial, None)
        except TimeoutError as cause:
            if not limit.expired():
                raise
            if (refusal := self._check_serial(identity.serial)) is not None:
                raise ShoalError(refusal) from cause
            raise refuse(
                Code.CERT_EXPIRED,
                f"the certificate of {identity.uri} ended",
                "a valid certificate",
                "renew it, or enrol again with a join token",
            ) from cause

    async def report_refusal(self, actor: str, method: str, refusal: Refusal) -> None:
        self._meter.count(metrics.CALLS_REFUSED, method=method.rsplit("/", 1)[-1], code=refusal.code)
        if refusal.code is Code.NOT_LEADER:
            return  # nothing was denied: the caller is redirected to the leader
        now = self._clock.now()
        last = self._audited_at.get((actor, refusal.code))
        if last is not None and now - last < AUDIT_EVERY_S:
            return
        if len(self._audited_at) > 10_000:
            self._audited_at.clear()
        self._audited_at[actor, refusal.code] = now
        await self._audit.note(actor, method.rsplit("/", 1)[-1], "", str(refusal.code))


class _Call:
    """One method's handler, behind the check of its caller."""

    def __init__(self, guard: Authorisation, method: str, handler: Any) -> None:
        self._guard = guard
        self._method = method
        self._handler = handler

    async def unary(self, request: Any, context: Any) -> Any:
        behaviour = self._handler.stream_unary if self._handler.request_streaming else self._handler.unary_unary
        actor = "anonymous"
        try:
            identity = self._guard.admit(self._method, context)
            actor = identity.uri
            if self._method == REVOKE:
                return await run_to_completion(behaviour(await self._read_message(context), context))
            async with self._guard.while_valid(identity):
                if self._handler.request_streaming:
                    return await behaviour(
                        self._messages(context), context
                    )  # an upload ends with its caller, and completes by itself
                return await run_to_completion(behaviour(await self._read_message(context), context))
        except Exception as error:
            await self._abort(actor, context, error)

    async def stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        behaviour = self._handler.stream_stream if self._handler.request_streaming else self._handler.unary_stream
        actor = "anonymous"
        try:
            identity = self._guard.admit(self._method, context)
            actor = identity.uri
            if not self._handler.request_streaming:
                async with self._guard.while_valid(identity):
                    request = await self._read_message(context)
            messages = behaviour(request, context)
            try:
                while True:
                    async with self._guard.while_valid(identity):
                        message = await anext(messages)
                    yield message
            except StopAsyncIteration:
                return
            finally:
                await messages.aclose()
        except Exception as error:
            await self._abort(actor, context, error)

    async def _messages(self, context: Any) -> AsyncIterator[Any]:
        """The messages of an upload, each within MESSAGE_S."""
        while (message := await self._read(context)) is not _END:
            yield message

    async def _read_message(self, context: Any) -> Any:
        message = await self._read(context)
        if message is _END:
            raise refuse(Code.MESSAGE_INVALID, "a call without a message", "one message", "see the protocol")
        return message

    async def _read(self, context: Any) -> Any:
        try:
            async with asyncio.timeout(MESSAGE_S):
                return await context.read()
        except TimeoutError as cause:
            raise refuse(
                Code.TOO_SLOW, "a message that does not arrive", f"within {MESSAGE_S:g}s", "send it faster"
            ) from cause

    async def _abort(self, actor: str, context: Any, error: Exception) -> None:
        """Texts of unexpected errors go only to the log, because they may contain paths."""
        match error:
            case ShoalError():
                refusal = error.refusal
            case StaleRevision():
                refusal = Refusal(Code.CONFLICT, "it changed meanwhile", "what was read", "try again")
            case grpc.aio.AbortError():
                raise error
            case NotImplementedError():
                refusal = Refusal(Code.UNIMPLEMENTED, self._method, "a method that this port has", "see the protocol")
            case _:
                log.exception("call_failed", method=self._method, actor=actor, exc_info=error)
                refusal = Refusal(Code.INTERNAL, "an unforeseen error", "", "look at the coordinator's log")
        await self._guard.report_refusal(actor, self._method, refusal)
        await abort(context, refusal)
