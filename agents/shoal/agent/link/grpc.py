"""`ports.CoordinatorLink` over gRPC, and model bytes from the same coordinator."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Final

import grpc
import grpc.aio

from shoal.agent.link.credentials import CredentialFiles, check_coordinator, open_channel
from shoal.agent.ports import AgentClock, LinkRefused, Log
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.link import FromAgent, Hello, Refused, ToAgent, Welcome
from shoal.types.units import Elapsed
from shoal.v1 import artifacts_pb2, artifacts_pb2_grpc, link_pb2, link_pb2_grpc
from shoal.wire import grpc_cancellation, nouns
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.limits import BULK, CHUNK_BYTES, HANDSHAKE_S, LINK_BYTES

WELCOME_S: Final = HANDSHAKE_S + 10.0
DIAGNOSE_EVERY_S: Final = 10.0
"""Seconds between plain TLS handshakes that find out why there is no session."""
_TRY_ANOTHER: Final = (Code.COORDINATOR_UNREACHABLE, Code.NOT_LEADER)
"""Errors after which another coordinator of the region is tried."""
_Call = grpc.aio.StreamStreamCall[link_pb2.FromAgent, link_pb2.ToAgent]


class GrpcSession:
    """One session of the AgentLink service."""

    def __init__(self, welcome: Welcome, call: _Call, channel: grpc.aio.Channel, log: Log) -> None:
        self.welcome = welcome
        self._call = call
        self._channel = channel
        self._log = log
        self._closing: asyncio.Future[None] | None = None

    async def send(self, message: FromAgent) -> None:
        wire = nouns.from_agent_to_wire(message)
        if (size := wire.ByteSize()) > LINK_BYTES:  # the coordinator would end the stream without a reason
            raise refuse(Code.TOO_LARGE, f"{size} bytes", f"at most {LINK_BYTES}", "report less at once")
        try:
            with grpc_cancellation.as_refusal():
                await self._call.write(wire)
        except (grpc.RpcError, asyncio.InvalidStateError) as cause:
            raise ShoalError(await _end_reason(self._call)) from cause

    async def receive(self) -> ToAgent:
        while True:
            message = await _read(self._call)
            try:
                return nouns.to_agent_from_wire(message)
            except ShoalError as error:
                self._log.warning("message_dropped", code=error.code, error=str(error))

    def half_close(self) -> None:
        """Stop sending. The coordinator then ends the stream too, and `receive` raises.

        Cancelling the call instead would cancel the task that waits in `receive`.
        """
        self._closing = asyncio.ensure_future(self._done_writing())

    async def _done_writing(self) -> None:
        with suppress(grpc.RpcError, asyncio.InvalidStateError):  # the call is over already
            await self._call.done_writing()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close(None)


class GrpcLink:
    """Connects to the leading coordinator, with a new channel per session, so that no state of a dead one remains.

    `addresses`: all coordinators of the region, separated by commas. `connect` tries each once; the one whose session
    ended last comes last.
    """

    def __init__(self, files: CredentialFiles, addresses: str, clock: AgentClock, log: Log) -> None:
        self._files = files
        self._addresses = addresses.split(",")
        self._clock = clock
        self._log = log
        self._session: GrpcSession | None = None
        # By address: time of the last plain handshake there, and its result.
        self._diagnoses: dict[str, tuple[Elapsed, Refusal | None]] = {}

    def on_certificate_renewed(self) -> None:
        """The node has a new certificate: end the open session, so that the next one presents it."""
        self._diagnoses.clear()
        if self._session is not None:
            self._session.half_close()

    @property
    def address(self) -> str:
        """Address of the coordinator that answered last, or is tried next."""
        return self._addresses[0]

    async def connect(self, hello: Hello) -> GrpcSession:
        # The last coordinator may hang and take long to refuse; another one answers at once.
        if self._session is not None:
            self._session = None
            self._rotate_addresses()
        for _ in self._addresses[1:]:
            try:
                return await self._connect(hello)
            except LinkRefused:
                raise
            except ShoalError as error:
                if error.code not in _TRY_ANOTHER:
                    raise
                self._log.warning("coordinator_skipped", address=self.address, code=error.code, error=str(error))
                self._rotate_addresses()
        return await self._connect(hello)

    def _rotate_addresses(self) -> None:
        self._addresses.append(self._addresses.pop(0))

    async def _connect(self, hello: Hello) -> GrpcSession:
        channel = open_channel(self._files, self.address, LINK_BYTES)
        try:
            call, welcome = await _open_session(channel, hello)
        except ShoalError as error:
            await channel.close(None)
            # it accepted the call; another handshake would not be quicker
            is_slow = isinstance(error.__cause__, TimeoutError)
            if error.code is not Code.COORDINATOR_UNREACHABLE or is_slow:
                raise
            raise ShoalError(await self._diagnose() or error.refusal) from error
        except BaseException:
            await channel.close(None)
            raise
        self._session = GrpcSession(welcome, call, channel, self._log)
        return self._session

    async def _diagnose(self) -> Refusal | None:
        """Why the coordinator cannot be reached. Cached for a while: in a reconnect storm, nodes whose handshake took
        too long must not each call it twice."""
        now, address = self._clock.now(), self.address
        known = self._diagnoses.get(address)
        if known is None or now - known[0] > DIAGNOSE_EVERY_S:
            known = now, await check_coordinator(self._files, address, self._clock.wall())
            self._diagnoses[address] = known
        return known[1]


class GrpcModels:
    """Artifacts.Fetch: the bytes of a model from an offset on. Artifacts.Record: uploads a recording."""

    def __init__(self, files: CredentialFiles, address: Callable[[], str]) -> None:
        """`address` returns the coordinator that leads, as far as known."""
        self._files = files
        self._address = address

    async def fetch(self, digest: str, offset: int) -> AsyncGenerator[bytes, None]:
        """Raises ShoalError(FETCH_FAILED | MODEL_UNKNOWN | ...)."""
        async with open_channel(self._files, self._address(), 2 * CHUNK_BYTES + LINK_BYTES, BULK) as channel:
            call = artifacts_pb2_grpc.ArtifactsStub(channel).Fetch(
                artifacts_pb2.FetchRequest(digest=digest, offset=offset)
            )
            try:
                async for chunk in call:
                    yield chunk.data
            except grpc.RpcError as cause:
                raise ShoalError(_fetch_refusal(refusal_of(cause))) from cause

    async def record(self, assignment: str, model: str, digest: str, content: bytes) -> None:
        """Upload a recording (Artifacts.Record). Raises ShoalError."""
        head = artifacts_pb2.PushHead(size=len(content), digest=digest, samples_of=model, recorded_by=assignment)

        async def chunks() -> AsyncGenerator[artifacts_pb2.PushChunk, None]:
            yield artifacts_pb2.PushChunk(head=head)
            for start in range(0, len(content), CHUNK_BYTES):
                yield artifacts_pb2.PushChunk(data=content[start : start + CHUNK_BYTES])

        async with open_channel(self._files, self._address(), 2 * CHUNK_BYTES + LINK_BYTES, BULK) as channel:
            try:
                await artifacts_pb2_grpc.ArtifactsStub(channel).Record(chunks())
            except grpc.RpcError as cause:
                raise ShoalError(refusal_of(cause)) from cause


async def _open_session(channel: grpc.aio.Channel, hello: Hello) -> tuple[_Call, Welcome]:
    try:
        async with asyncio.timeout(WELCOME_S):
            call: _Call = link_pb2_grpc.AgentLinkStub(channel).Session(None)
            try:
                await call.write(nouns.from_agent_to_wire(hello))
            except (grpc.RpcError, asyncio.InvalidStateError):
                pass  # the read reports the cause
            first = nouns.to_agent_from_wire(await _read(call))
    except TimeoutError as cause:
        raise refuse(
            Code.COORDINATOR_UNREACHABLE, "no welcome", f"one within {WELCOME_S:g}s", "it is tried again"
        ) from cause
    match first:
        case Welcome():
            return call, first
        case Refused():
            raise LinkRefused(first)
        case _:
            raise refuse(Code.MESSAGE_INVALID, type(first).__name__, "a welcome", "update the coordinator")


def _fetch_refusal(refusal: Refusal) -> Refusal:
    if refusal.code in (Code.MODEL_UNKNOWN, Code.MODEL_DIGEST, Code.ROLE_DENIED):
        return refusal
    return Refusal(Code.FETCH_FAILED, str(refusal), "the model's bytes", "it is resumed by itself")


async def _read(call: _Call) -> link_pb2.ToAgent:
    try:
        with grpc_cancellation.as_refusal():
            message = await call.read()
    except (grpc.RpcError, asyncio.InvalidStateError) as cause:
        raise ShoalError(await _end_reason(call)) from cause
    if not isinstance(message, link_pb2.ToAgent):
        raise ShoalError(await _end_reason(call))  # grpc's EOF
    return message


async def _end_reason(call: _Call) -> Refusal:
    """Why the stream is over, from the coordinator or from grpc."""
    code, details, trailing = await call.code(), await call.details(), await call.trailing_metadata()
    if code is grpc.StatusCode.OK:
        return Refusal(Code.COORDINATOR_UNREACHABLE, "it ended the session", "a session", "it is tried again")
    initial = grpc.aio.Metadata()
    return refusal_of(
        grpc.aio.AioRpcError(code, initial, trailing or initial, details=details, debug_error_string=None)
    )
