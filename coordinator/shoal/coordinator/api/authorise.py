"""Who may call what: one table, checked on every call and again while a stream is open.

A method without a rule is refused, and a test compares the table with the services' descriptors.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.controllers.finish import finish
from shoal.coordinator.ports import Clock, Meter, StaleRevision
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Elapsed
from shoal.wire.identity import GrpcContext, Identity, check_validity, identity_of_context, require
from shoal.wire.said import COORDINATORS, RootsOf, check_roots
from shoal.wire.status import abort

Roles = frozenset[Role]

_END: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]  # public, and not in the stubs

_NODES: Final[Roles] = frozenset({Role.AGENT, Role.GATEWAY})
_WRITE: Final[Roles] = frozenset({Role.OPERATOR})
_READ: Final[Roles] = frozenset({Role.OPERATOR, Role.VIEWER})

FETCH: Final = "/shoal.v1.Artifacts/Fetch"
RECORD: Final = "/shoal.v1.Artifacts/Record"
"""Also the rules of models over HTTPS."""
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
    "/shoal.v1.Operator/Doctor": _READ,
    "/shoal.v1.Operator/Revoke": _WRITE,
    "/shoal.v1.Operator/Settle": _WRITE,
    "/shoal.v1.Operator/Release": _WRITE,
    "/shoal.v1.Operator/ClearModel": _WRITE,
    "/shoal.v1.Operator/GetAuthority": _READ,
    "/shoal.v1.Operator/RotateAuthority": _WRITE,
    "/shoal.v1.Operator/SetSignal": _WRITE,
    "/shoal.v1.Operator/JoinFederation": _WRITE,
    "/shoal.v1.Operator/LeaveFederation": _WRITE,
    "/shoal.v1.Operator/GetFederation": _READ,
    "/shoal.v1.Operator/Backup": _WRITE,
    "/shoal.v1.Operator/Logs": _WRITE,
    "/shoal.v1.Operator/Trace": _READ,
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
FOREIGN: Final = ("/shoal.v1.Federation/", "/shoal.v1.Peer/")
"""Services that other regions call; all others are for the port's own region."""
MESSAGE_S: Final = 10.0
"""For the message of a call that has one, and for each of an upload; a session keeps its own time."""
AUDIT_EVERY_S: Final = 60.0
"""One audit entry for each (caller, code) in this time, however often it is refused."""

log: Final = structlog.get_logger("shoal.coordinator.api")


class Authorisation(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs only
    """Checks region, role and validity of the caller's certificate; turns refusals into statuses.

    revoked: why a certificate of this serial is refused, if it is. roots_of: on a port that several regions' members
    reach: the CAs of each, by which alone a name counts; None where TLS trusts one region's only.
    """

    def __init__(
        self,
        region: str,
        clock: Clock,
        meter: Meter,
        audit: AuditTrail,
        revoked: Callable[[str], Refusal | None] = lambda serial: None,
        *,
        elsewhere: Callable[[str], Refusal | None] = lambda method: None,
        roots_of: RootsOf | None = None,
    ) -> None:
        """elsewhere: why a method is not for this coordinator to answer, if it is not."""
        self._region = region
        self._roots_of = roots_of
        self._clock = clock
        self._meter = meter
        self._audit = audit
        self._revoked = revoked
        self._elsewhere = elsewhere
        self._audited: dict[tuple[str, str], Elapsed] = {}
        self._waiting: dict[str, set[asyncio.Timeout]] = {}

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        call = _Call(self, handler_call_details.method, handler)
        # A stream here whatever its caller calls it: only so is a message read after its sender was judged.
        make, behaviour = (
            (grpc.stream_stream_rpc_method_handler, call.stream)
            if handler.response_streaming
            else (grpc.stream_unary_rpc_method_handler, call.single)
        )
        return make(behaviour, _readable(handler.request_deserializer), handler.response_serializer)

    def admit(self, method: str, context: GrpcContext) -> Identity:
        """Raises ShoalError(UNAUTHENTICATED | CERT_* | REGION_MISMATCH | REGION_UNKNOWN | ROLE_DENIED |
        NOT_LEADER)."""
        identity = identity_of_context(context)
        if self._roots_of is not None:
            check_roots(context, identity.region, self._roots_of)
        self.judge(method, identity)
        if (refusal := self._elsewhere(method)) is not None:
            raise ShoalError(refusal)
        return identity

    def judge(self, method: str, identity: Identity) -> None:
        """Raises ShoalError(CERT_* | REGION_MISMATCH | ROLE_DENIED)."""
        if (refusal := check_validity(identity, self._clock.wall())) is not None:
            raise ShoalError(refusal)
        if (refusal := self._revoked(identity.serial)) is not None:
            raise ShoalError(refusal)
        region = identity.region if method.startswith(FOREIGN) else self._region
        require(identity, region=region, roles=RULES.get(method, frozenset()))

    def end(self, serials: frozenset[str]) -> None:
        """What is open with these certificates, which were just revoked, ends now."""
        now = asyncio.get_running_loop().time()
        for serial in serials:
            for waiting in self._waiting.get(serial, ()):
                waiting.reschedule(now)

    @asynccontextmanager
    async def while_good(self, identity: Identity) -> AsyncIterator[None]:
        """Raises ShoalError(CERT_EXPIRED | CERT_REVOKED) inside once the caller's certificate ends; others' time-outs
        stay their own."""
        limit = asyncio.timeout(max(0.0, identity.not_after - self._clock.wall()))
        try:
            async with limit:
                waiting = self._waiting.setdefault(identity.serial, set())
                waiting.add(limit)
                try:
                    yield
                finally:
                    waiting.discard(limit)
                    if not waiting:
                        self._waiting.pop(identity.serial, None)
        except TimeoutError as cause:
            if not limit.expired():
                raise
            if (refusal := self._revoked(identity.serial)) is not None:
                raise ShoalError(refusal) from cause
            raise refuse(
                Code.CERT_EXPIRED,
                f"the certificate of {identity.uri} ended",
                "a valid certificate",
                "renew it, or enrol again with a join token",
            ) from cause

    async def refused(self, actor: str, method: str, refusal: Refusal) -> None:
        self._meter.count("calls_refused", method=method.rsplit("/", 1)[-1], code=refusal.code)
        if refusal.code is Code.NOT_LEADER:
            return  # nothing was denied: the caller is told where to go
        now = self._clock.now()
        last = self._audited.get((actor, refusal.code))
        if last is not None and now - last < AUDIT_EVERY_S:
            return
        if len(self._audited) > 10_000:
            self._audited.clear()
        self._audited[actor, refusal.code] = now
        await self._audit.note(actor, method.rsplit("/", 1)[-1], "", str(refusal.code))


def _readable(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Bytes that are no message are refused like any other: gRPC gives no code for them, and we would log each."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as cause:
            raise refuse(
                Code.MESSAGE_INVALID, "bytes that are no such message", "see the protocol", "update whoever sent it"
            ) from cause

    return read


class _Call:
    """One method's handler between its guard and its refusals."""

    def __init__(self, guard: Authorisation, method: str, handler: Any) -> None:
        self._guard = guard
        self._method = method
        self._handler = handler

    async def single(self, request: Any, context: Any) -> Any:
        behaviour = self._handler.stream_unary if self._handler.request_streaming else self._handler.unary_unary
        actor = "anonymous"
        try:
            identity = self._guard.admit(self._method, context)
            actor = identity.uri
            async with self._guard.while_good(identity):
                if self._handler.request_streaming:
                    return await behaviour(
                        self._messages(context), context
                    )  # an upload ends with its caller, and finishes by itself
                return await finish(behaviour(await self._one(context), context))
        except Exception as error:
            await self._end(actor, context, error)

    async def stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        behaviour = self._handler.stream_stream if self._handler.request_streaming else self._handler.unary_stream
        actor = "anonymous"
        try:
            identity = self._guard.admit(self._method, context)
            actor = identity.uri
            if not self._handler.request_streaming:
                async with self._guard.while_good(identity):
                    request = await self._one(context)
            messages = behaviour(request, context)
            try:
                while True:
                    async with self._guard.while_good(identity):
                        message = await anext(messages)
                    yield message
            except StopAsyncIteration:
                return
            finally:
                await messages.aclose()
        except Exception as error:
            await self._end(actor, context, error)

    async def _messages(self, context: Any) -> AsyncIterator[Any]:
        """Of an upload, each in its time."""
        while (message := await self._next(context)) is not _END:
            yield message

    async def _one(self, context: Any) -> Any:
        message = await self._next(context)
        if message is _END:
            raise refuse(Code.MESSAGE_INVALID, "a call without a message", "one message", "see the protocol")
        return message

    async def _next(self, context: Any) -> Any:
        try:
            async with asyncio.timeout(MESSAGE_S):
                return await context.read()
        except TimeoutError as cause:
            raise refuse(
                Code.TOO_SLOW, "a message that does not arrive", f"within {MESSAGE_S:g}s", "send it faster"
            ) from cause

    async def _end(self, actor: str, context: Any, error: Exception) -> None:
        """Texts of unforeseen errors stay in the log: they may name paths."""
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
                log.exception("call failed", method=self._method, actor=actor, exc_info=error)
                refusal = Refusal(Code.INTERNAL, "an unforeseen error", "", "look at the coordinator's log")
        await self._guard.refused(actor, self._method, refusal)
        await abort(context, refusal)
