"""The coordinator's side of the agent link over gRPC: one stream per session, one outbox per node.

A slow or hostile node affects only itself. Its messages are read one at a time. Its outbox holds the newest desired set
and a bounded number of other messages. Every message is checked before it reaches a controller. The interceptor
(`api/authorise.py`) decides who may call and ends streams whose certificate expires. A session's name comes from the
certificate only.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import structlog
from cryptography import x509

from shoal.coordinator import metrics
from shoal.coordinator.core.link.hello import check_hello
from shoal.coordinator.link.check import check_signatures
from shoal.coordinator.link.outbox import Outbox
from shoal.coordinator.link.rate_limiter import SessionRateLimiter
from shoal.coordinator.ports import LinkEvents, Meter
from shoal.coordinator.uncancelled import dispatch_message, run_to_completion
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.types.link import Hello, Refused, ToAgent
from shoal.v1 import link_pb2, link_pb2_grpc
from shoal.wire import nouns
from shoal.wire.certificates import identity_of_context
from shoal.wire.identity import peer_ip

HELLO_S: Final = 10.0
MAX_INVALID: Final = 20
"""Unreadable messages in one session that end it."""

log: Final = structlog.get_logger("shoal.coordinator.link")


class GrpcLinks(link_pb2_grpc.AgentLinkServicer):
    """ports.AgentLinks, and the servicer that feeds ports.LinkEvents."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._events: LinkEvents | None = None
        self._outboxes: dict[str, Outbox] = {}

    def bind(self, events: LinkEvents) -> None:
        """Call once, before serving."""
        self._events = events

    @property
    def session_count(self) -> int:
        return len(self._outboxes)

    async def send(self, node: str, message: ToAgent) -> None:
        outbox = self._outboxes.get(node)
        if outbox is not None:
            outbox.put(message)

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        outbox = self._outboxes.pop(node, None)
        if outbox is not None:
            outbox.put(Refused(refusal, fatal))
            outbox.close()

    async def Session(
        self, request_iterator: AsyncIterator[link_pb2.FromAgent], context: Any
    ) -> AsyncIterator[link_pb2.ToAgent]:
        events = self._events
        if events is None:
            raise refuse(Code.COORDINATOR_UNREACHABLE, "the coordinator is starting", "", "call again")
        identity = identity_of_context(context)
        hello = await self._read_hello(request_iterator, identity)
        outbox = Outbox()
        try:
            refusal = await run_to_completion(self._open(events, identity, hello, outbox, peer_ip(context.peer())))
            if refusal is not None:
                yield nouns.to_agent_to_wire(Refused(refusal, fatal=False))
                return
            reader = asyncio.create_task(
                self._read(request_iterator, events, identity, outbox.epoch, _certificate(context), outbox)
            )
            try:
                async for message in outbox:
                    yield nouns.to_agent_to_wire(message)
            finally:
                reader.cancel()
        finally:
            if outbox.epoch > 0:
                if self._outboxes.get(identity.name) is outbox:
                    del self._outboxes[identity.name]
                log.info("session_closed", node=identity.name, epoch=outbox.epoch, carrier="grpc")
                await events.on_close(identity.name, outbox.epoch)

    async def _open(
        self, events: LinkEvents, identity: Identity, hello: Hello, outbox: Outbox, peer: str
    ) -> Refusal | None:
        answer = await events.on_hello(identity.name, identity.role, hello, peer=peer)
        if isinstance(answer, Refusal):
            self._meter.count(metrics.SESSIONS_REFUSED, code=answer.code)
            if answer.code is not Code.OVERLOADED:  # of which there is an event a minute
                log.warning("session_refused", node=identity.name, code=answer.code, error=str(answer))
            return answer
        # No await between `on_hello` and here: messages to this node reach this session from now on.
        outbox.epoch = answer.epoch
        outbox.put(answer)
        self._outboxes[identity.name] = outbox
        log.info("session_opened", node=identity.name, role=identity.role, epoch=answer.epoch, carrier="grpc")
        return None

    async def _read_hello(self, messages: AsyncIterator[link_pb2.FromAgent], identity: Identity) -> Hello:
        try:
            async with asyncio.timeout(HELLO_S):
                first = nouns.from_agent_from_wire(await anext(messages))
        except TimeoutError as cause:
            raise refuse(Code.TOO_SLOW, f"no hello in {HELLO_S:g}s", "hello first", "update the agent") from cause
        except StopAsyncIteration as cause:
            raise refuse(
                Code.MESSAGE_INVALID, "a session without a hello", "hello first", "update the agent"
            ) from cause
        if not isinstance(first, Hello):
            raise refuse(Code.MESSAGE_INVALID, type(first).__name__, "hello first", "update the agent")
        check_hello(first, identity)
        return first

    async def _read(
        self,
        messages: AsyncIterator[link_pb2.FromAgent],
        events: LinkEvents,
        identity: Identity,
        epoch: int,
        certificate: x509.Certificate,
        outbox: Outbox,
    ) -> None:
        invalid, pace, reader = 0, SessionRateLimiter(), nouns.SessionReader()
        try:
            async for message in messages:
                await pace.wait()
                try:
                    noun = reader.read(message)
                    check_signatures(noun, identity, certificate)
                except ShoalError as error:
                    invalid += 1
                    self._meter.count(metrics.MESSAGES_REFUSED, code=error.code)
                    outbox.put(Refused(error.refusal, fatal=False))
                    if invalid >= MAX_INVALID:
                        break
                    continue
                answer = await dispatch_message(events, identity.name, epoch, noun)
                if answer is not None:
                    outbox.put(answer)
        except ShoalError as error:  # bytes that are no message: gRPC stops reading the stream after them
            self._meter.count(metrics.MESSAGES_REFUSED, code=error.code)
            outbox.put(Refused(error.refusal, fatal=False))
        except Exception:
            log.exception("session_failed", node=identity.name, epoch=epoch)
        finally:
            outbox.close()


def _certificate(context: Any) -> x509.Certificate:
    return x509.load_pem_x509_certificate(context.auth_context()["x509_pem_cert"][0])
