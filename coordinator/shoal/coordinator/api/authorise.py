"""Who may call what: one table, checked on every call and again while a stream is open.

A method without a rule is refused, and a test compares the table with the services' descriptors.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.controllers.finish import finish
from shoal.coordinator.ports import Clock, Meter, StaleRevision
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Elapsed
from shoal.wire.identity import GrpcContext, Identity, check_validity, identity_of_context, require
from shoal.wire.status import abort

Roles = frozenset[Role]

_NODES: Final[Roles] = frozenset({Role.AGENT, Role.GATEWAY})
_WRITE: Final[Roles] = frozenset({Role.OPERATOR})
_READ: Final[Roles] = frozenset({Role.OPERATOR, Role.VIEWER})

RULES: Final[dict[str, Roles]] = {
    "/shoal.v1.AgentLink/Session": _NODES,
    "/shoal.v1.Artifacts/Fetch": _NODES | _WRITE,
    "/shoal.v1.Artifacts/Push": _WRITE,
    "/shoal.v1.Artifacts/Inspect": _WRITE,
    "/shoal.v1.Artifacts/List": _READ,
    "/shoal.v1.Artifacts/Remove": _WRITE,
    "/shoal.v1.Operator/WhoAmI": _READ,
    "/shoal.v1.Operator/Plan": _READ,
    "/shoal.v1.Operator/Apply": _WRITE,
    "/shoal.v1.Operator/Get": _READ,
    "/shoal.v1.Operator/Delete": _WRITE,
    "/shoal.v1.Operator/Explain": _READ,
    "/shoal.v1.Operator/Cordon": _WRITE,
    "/shoal.v1.Operator/Events": _READ,
    "/shoal.v1.Operator/CreateToken": _WRITE,
    "/shoal.v1.Operator/Doctor": _READ,
}
AUDIT_EVERY_S: Final = 60.0
"""One audit entry for each (caller, code) in this time, however often it is refused."""

log: Final = structlog.get_logger("shoal.coordinator.api")


class Authorisation(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs only
    """Checks region, role and validity of the caller's certificate; turns refusals into statuses."""

    def __init__(self, region: str, clock: Clock, meter: Meter, audit: AuditTrail) -> None:
        self._region = region
        self._clock = clock
        self._meter = meter
        self._audit = audit
        self._audited: dict[tuple[str, str], Elapsed] = {}

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        call = _Call(self, handler_call_details.method, handler)
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        behaviour = call.stream if handler.response_streaming else call.single
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    def admit(self, method: str, context: GrpcContext) -> Identity:
        """Raises ShoalError(UNAUTHENTICATED | CERT_* | REGION_MISMATCH | ROLE_DENIED)."""
        identity = identity_of_context(context)
        if (refusal := check_validity(identity, self._clock.wall())) is not None:
            raise ShoalError(refusal)
        require(identity, region=self._region, roles=RULES.get(method, frozenset()))
        return identity

    def remaining(self, identity: Identity) -> float:
        """Seconds that the caller's certificate is still good for."""
        return max(0.0, identity.not_after - self._clock.wall())

    async def refused(self, actor: str, method: str, refusal: Refusal) -> None:
        self._meter.count("calls_refused", method=method.rsplit("/", 1)[-1], code=refusal.code)
        now = self._clock.now()
        last = self._audited.get((actor, refusal.code))
        if last is not None and now - last < AUDIT_EVERY_S:
            return
        if len(self._audited) > 10_000:
            self._audited.clear()
        self._audited[actor, refusal.code] = now
        await self._audit.note(actor, method.rsplit("/", 1)[-1], "", str(refusal.code))


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
            async with self._while_valid(identity):
                if self._handler.request_streaming:
                    return await behaviour(request, context)  # an upload ends with its caller, and finishes by itself
                return await finish(behaviour(request, context))
        except Exception as error:
            await self._end(actor, context, error)

    async def stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        behaviour = self._handler.stream_stream if self._handler.request_streaming else self._handler.unary_stream
        actor = "anonymous"
        try:
            identity = self._guard.admit(self._method, context)
            actor = identity.uri
            messages = behaviour(request, context)
            try:
                while True:
                    async with self._while_valid(identity):
                        message = await anext(messages)
                    yield message
            except StopAsyncIteration:
                return
            finally:
                await messages.aclose()
        except Exception as error:
            await self._end(actor, context, error)

    @asynccontextmanager
    async def _while_valid(self, identity: Identity) -> AsyncIterator[None]:
        """Raises ShoalError(CERT_EXPIRED) inside once the caller's certificate ends; other time-outs stay their own."""
        limit = asyncio.timeout(self._guard.remaining(identity))
        try:
            async with limit:
                yield
        except TimeoutError as cause:
            if not limit.expired():
                raise
            raise refuse(
                Code.CERT_EXPIRED,
                f"the certificate of {identity.uri} ended",
                "a valid certificate",
                "renew it, or enrol again with a join token",
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
            case _:
                log.exception("call failed", method=self._method, actor=actor, exc_info=error)
                refusal = Refusal(Code.INTERNAL, "an unforeseen error", "", "look at the coordinator's log")
        await self._guard.refused(actor, self._method, refusal)
        await abort(context, refusal)
