"""`ports.CoordinatorLink` over gRPC, and model bytes from the same coordinator."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

from google.protobuf.message import DecodeError

from shoal.agent.link.credentials import CredentialFiles, check_coordinator, open_channel
from shoal.agent.ports import AgentClock, LinkRefused, Log
from shoal.host.grpc_client import CallError, ChannelClosed, ClientCall, GrpcChannel
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.link import FromAgent, Hello, Refused, ToAgent, Welcome
from shoal.types.units import Elapsed
from shoal.v1 import artifacts_pb2, link_pb2
from shoal.wire import nouns
from shoal.wire.limits import BULK, CHUNK_BYTES, HANDSHAKE_S, LINK_BYTES
from shoal.wire.status import refusal_of_status

WELCOME_S: Final = HANDSHAKE_S + 10.0
DIAGNOSE_EVERY_S: Final = 10.0
"""Seconds between plain TLS handshakes that find out why there is no session."""
_TRY_ANOTHER: Final = (Code.COORDINATOR_UNREACHABLE, Code.NOT_LEADER)
"""Errors after which another coordinator of the region is tried."""
_SESSION: Final = "/shoal.v1.AgentLink/Session"
_FETCH: Final = "/shoal.v1.Artifacts/Fetch"
_RECORD: Final = "/shoal.v1.Artifacts/Record"


class GrpcSession:
    """One session of the AgentLink service."""

    def __init__(self, welcome: Welcome, call: ClientCall, channel: GrpcChannel, log: Log) -> None:
        self.welcome = welcome
        self._call = call
        self._channel = channel
        self._log = log
        self._sending = asyncio.Lock()

    async def send(self, message: FromAgent) -> None:
        wire = nouns.from_agent_to_wire(message)
        if (size := wire.ByteSize()) > LINK_BYTES:  # the coordinator would end the stream without a reason
            raise refuse(Code.TOO_LARGE, f"{size} bytes", f"at most {LINK_BYTES}", "report less at once")
        try:
            async with self._sending:
                await self._call.write(wire.SerializeToString())
        except CallError as cause:
            raise ShoalError(_refusal(cause)) from cause

    async def receive(self) -> ToAgent:
        while True:
            message = await _read(self._call)
            try:
                return nouns.to_agent_from_wire(message)
            except ShoalError as error:
                self._log.warning("message_dropped", code=error.code, error=str(error))

    def half_close(self) -> None:
        """Stop sending. The coordinator then ends the stream too, and `receive` raises."""
        self._call.half_close()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


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
            await channel.close()
            # it accepted the call; another handshake would not be quicker
            is_slow = isinstance(error.__cause__, TimeoutError)
            if error.code is not Code.COORDINATOR_UNREACHABLE or is_slow:
                raise
            raise ShoalError(await self._diagnose() or error.refusal) from error
        except BaseException:
            await channel.close()
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
        request = artifacts_pb2.FetchRequest(digest=digest, offset=offset).SerializeToString()
        async with open_channel(self._files, self._address(), 2 * CHUNK_BYTES + LINK_BYTES, BULK) as channel:
            try:
                call = await channel.stream(_FETCH, request=request)
                try:
                    while (chunk := await call.read()) is not None:
                        yield artifacts_pb2.FetchChunk.FromString(chunk).data
                finally:
                    call.cancel()
            except CallError as cause:
                raise ShoalError(_fetch_refusal(_refusal(cause))) from cause

    async def record(self, assignment: str, model: str, digest: str, content: bytes) -> None:
        """Upload a recording (Artifacts.Record). Raises ShoalError."""
        head = artifacts_pb2.PushHead(size=len(content), digest=digest, samples_of=model, recorded_by=assignment)

        chunks = [artifacts_pb2.PushChunk(head=head)]
        chunks += (
            artifacts_pb2.PushChunk(data=content[start : start + CHUNK_BYTES])
            for start in range(0, len(content), CHUNK_BYTES)
        )
        async with open_channel(self._files, self._address(), 2 * CHUNK_BYTES + LINK_BYTES, BULK) as channel:
            try:
                call = await channel.stream(_RECORD)
                try:
                    for chunk in chunks:
                        await call.write(chunk.SerializeToString())
                    call.half_close()
                    await call.read()
                finally:
                    call.cancel()
            except CallError as cause:
                raise ShoalError(_refusal(cause)) from cause


async def _open_session(channel: GrpcChannel, hello: Hello) -> tuple[ClientCall, Welcome]:
    try:
        async with asyncio.timeout(WELCOME_S):
            call = await channel.stream(_SESSION)
            await call.write(nouns.from_agent_to_wire(hello).SerializeToString())
            first = nouns.to_agent_from_wire(await _read(call))
    except TimeoutError as cause:
        raise refuse(
            Code.COORDINATOR_UNREACHABLE, "no welcome", f"one within {WELCOME_S:g}s", "it is tried again"
        ) from cause
    except (CallError, ChannelClosed) as cause:
        raise ShoalError(_refusal(cause)) from cause
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


async def _read(call: ClientCall) -> link_pb2.ToAgent:
    """Raises ShoalError, also at the end of the session."""
    try:
        message = await call.read()
    except CallError as cause:
        raise ShoalError(_refusal(cause)) from cause
    if message is None:
        raise refuse(Code.COORDINATOR_UNREACHABLE, "it ended the session", "a session", "it is tried again")
    try:
        return link_pb2.ToAgent.FromString(message)
    except DecodeError as cause:
        raise refuse(
            Code.MESSAGE_INVALID, f"{cause}"[:200], "a message of the link", "update the coordinator"
        ) from cause


def _refusal(error: CallError | ChannelClosed) -> Refusal:
    """Why a call is over, from the coordinator or from the transport."""
    if isinstance(error, CallError):
        return refusal_of_status(error.status, error.details, error.metadata)
    return Refusal(Code.COORDINATOR_UNREACHABLE, "the channel was closed", "a session", "it is tried again")
