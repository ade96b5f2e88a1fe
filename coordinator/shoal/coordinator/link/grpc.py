"""The agents' other end over gRPC: one stream a session, one outbox a node.

A slow or hostile node costs itself only: its messages are read one by one, its outbox holds the newest desired set and
a bounded number of other messages, and what it sends is checked before anything hears of it. Who may call, and how long
a certificate lasts on an open stream, is the interceptor's business (`api/authorise.py`); the name in the certificate
is the only name a session has.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import structlog
from cryptography import x509

from shoal.coordinator.controllers.finish import finish
from shoal.coordinator.ports import LinkEvents, Meter
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.link import FromAgent, Hello, Receipts, Refused, ToAgent
from shoal.v1 import link_pb2, link_pb2_grpc
from shoal.wire import nouns
from shoal.wire.identity import Identity, identity_of_context
from shoal.wire.signing import verify

HELLO_S: Final = 10.0
OUTBOX: Final = 32
"""Messages other than the desired set that may wait for one node; more, and the session ends: it does not read."""
MOST_INVALID: Final = 20
"""Messages that cannot be read, in one session, before it ends."""

log: Final = structlog.get_logger("shoal.coordinator.link")


class GrpcLinks(link_pb2_grpc.AgentLinkServicer):
    """ports.AgentLinks, and the servicer that feeds ports.LinkEvents."""

    def __init__(self, region: str, meter: Meter) -> None:
        self._region = region
        self._meter = meter
        self._events: LinkEvents | None = None
        self._outboxes: dict[str, _Outbox] = {}

    def bind(self, events: LinkEvents) -> None:
        """Once, before serving."""
        self._events = events

    @property
    def connected(self) -> int:
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
        hello = await self._hello(request_iterator, identity)
        outbox = _Outbox()
        try:
            refusal = await finish(self._open(events, identity, hello, outbox))
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
                log.info("session closed", node=identity.name, epoch=outbox.epoch)
                await events.closed(identity.name, outbox.epoch)

    async def _open(self, events: LinkEvents, identity: Identity, hello: Hello, outbox: "_Outbox") -> Refusal | None:
        answer = await events.opened(identity.name, identity.role, hello)
        if isinstance(answer, Refusal):
            self._meter.count("sessions_refused", code=answer.code)
            log.warning("session refused", node=identity.name, code=answer.code, found=answer.found)
            return answer
        # No await between `opened` and here: whoever sends to this node from now on reaches this session.
        outbox.epoch = answer.epoch
        outbox.put(answer)
        self._outboxes[identity.name] = outbox
        log.info("session opened", node=identity.name, role=identity.role, epoch=answer.epoch)
        return None

    async def _hello(self, messages: AsyncIterator[link_pb2.FromAgent], identity: Identity) -> Hello:
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
        node = first.node
        if (node.region, node.role, node.name) != (identity.region, identity.role, identity.name):
            raise refuse(
                Code.NODE_MISMATCH,
                f"a hello of shoal://{node.region}/{node.role}/{node.name}",
                identity.uri,
                "a node speaks for itself only",
            )
        return first

    async def _read(
        self,
        messages: AsyncIterator[link_pb2.FromAgent],
        events: LinkEvents,
        identity: Identity,
        epoch: int,
        certificate: x509.Certificate,
        outbox: "_Outbox",
    ) -> None:
        invalid = 0
        try:
            async for message in messages:
                try:
                    noun = nouns.from_agent_from_wire(message)
                    self._check_signatures(noun, identity, certificate)
                except ShoalError as error:
                    invalid += 1
                    self._meter.count("messages_refused", code=error.code)
                    outbox.put(Refused(error.refusal, fatal=False))
                    if invalid >= MOST_INVALID:
                        break
                    continue
                refusal = await finish(events.received(identity.name, epoch, noun))
                if refusal is not None:
                    outbox.put(Refused(refusal, fatal=False))
        except Exception:
            log.exception("session failed", node=identity.name, epoch=epoch)
        finally:
            outbox.close()

    def _check_signatures(self, message: FromAgent, identity: Identity, certificate: x509.Certificate) -> None:
        """Receipts are stored, so they are signed by the key of the certificate that this stream was opened with."""
        if isinstance(message, Receipts):
            for each in message.receipts:
                verify(certificate, each.signature, self._region, identity.name, "receipt", each.content)


class _Outbox:
    """What waits for one node. A newer desired set takes the place of an older one that was not sent yet.

    epoch: of its session; 0 until that is open.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._waiting: deque[ToAgent] = deque()
        self._desired: DesiredSet | None = None
        self._closed = False
        self._wake = asyncio.Event()
        self._wake.set()

    def put(self, message: ToAgent) -> None:
        if isinstance(message, DesiredSet):
            self._desired = message
        elif len(self._waiting) < OUTBOX:
            self._waiting.append(message)
        else:
            self._closed = True
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[ToAgent]:
        while True:
            self._wake.clear()
            while self._waiting:
                yield self._waiting.popleft()
            if self._desired is not None:
                desired, self._desired = self._desired, None
                yield desired
                continue
            if self._closed:
                return
            await self._wake.wait()


def _certificate(context: Any) -> x509.Certificate:
    return x509.load_pem_x509_certificate(context.auth_context()["x509_pem_cert"][0])
