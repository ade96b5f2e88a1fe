"""Connections to replicas: a worker of this node over its Unix socket, or another front over gRPC with mTLS.

Requests and answers pass as bytes. Every failure is raised as `AttemptFailed`, with what routing needs: the code, and
whether the replica may have begun to run the request.
"""

import asyncio
import json
import math
import ssl
from collections import Counter, deque
from collections.abc import Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from shoal.agent.dataplane.begun_forward import BegunForward
from shoal.agent.dataplane.forward_auth import ForwardAuth, extras_of
from shoal.agent.dataplane.grpc_methods import SERVICE
from shoal.agent.dataplane.request import MAX_FIELDS, MAX_RANK, MAX_TENSORS
from shoal.agent.dataplane.tracing import AttemptSpan
from shoal.agent.dataplane.transport import (
    AGREEMENT_KEY,
    FORWARD_KEY,
    HOP_KEY,
    MAX_MESSAGE,
    ORIGIN_KEY,
    REQUEST_KEY,
    STEP_KEY,
    SUSPECT_KEY,
    TENANT_KEY,
    TRACE_KEY,
    TlsFiles,
)
from shoal.agent.dataplane.trust import Authorities
from shoal.agent.frames import ConnectionLost, FrameClient, FrameMessage, PendingCall
from shoal.agent.ports import LocalWorker
from shoal.agent.timeouts import within
from shoal.host import file_descriptors
from shoal.host.egress_guard import refusal_of_peer
from shoal.host.grpc_client import (
    ANSWER_WINDOW_BYTES,
    CallError,
    ChannelClosed,
    ChannelState,
    GrpcChannel,
    MakeMetadata,
    Metadata,
)
from shoal.host.tls import client_context
from shoal.http2.grpc_messages import GrpcStatus
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.route import Endpoint, EndpointKind
from shoal.types.units import Seconds
from shoal.wire import limits, status
from shoal.wire.field_limits import CountLimits, parse
from shoal.wire.identity import dns_of

T = TypeVar("T")

WITNESS_SERVICE: Final = "shoal.v1.Witness"
SESSIONS_SERVICE: Final = "shoal.v1.Sessions"
_INFER: Final = f"/{SERVICE}/ModelInfer"
CONNECT_TIMEOUT_S: Final = 1.2
PING_EVERY_S: Final = 0.4
SILENT_S: Final = 1.2
"""A worker with requests in flight that answers no ping for this long is given up: its requests go elsewhere."""
CALLS_GRACE_S: Final = 120.0
"""A retired channel stays open this long for the calls on it."""
CONNECT_WAIT_S: Final = 0.75
"""A request waits this long for a connection to a peer, then it goes elsewhere; the connection keeps opening."""
REGION_CONNECT_WAIT_S: Final = 1.5
"""The same for a connection to another region, which may be on the other side of the world."""
REGION_RECONNECT_S: Final = 5.0
"""How long the ping connection to another region may take to reopen, over a link that large requests fill."""
MAX_RECONNECT_S: Final = 5.0
"""The longest such time inside a region, where large requests have been in transit for long."""
OPENED_AT_ONCE: Final = 8
OPENING_TURN_S: Final = 0.25
"""This many peers of other regions are connected to at once, and the next ones at the latest after this long."""
RTT_PROBE_EVERY_S: Final = 15.0
RTT_SAMPLES: Final = 8
"""RTT is the minimum of this many probes: queueing at the peer must not count as distance, and an old minimum must age
out."""
RTT_PROBE_TIMEOUT_S: Final = 5.0
FILES_CHECK_S: Final = 0.25
"""A renewed certificate counts for connections from this long after it was written: looking at the files takes 6 us,
which is a tenth of a forward."""
LARGE_BYTES: Final = 64 * 2**10
"""Requests from this size on are large: a sender may have this many bytes in transit before the receiver grants more
(RFC 9113, section 6.9.2: 65,535 bytes)."""
_CONNECTING: Final = (ChannelState.IDLE, ChannelState.CONNECTING)
_STATUSES_ABOUT_THE_REQUEST: Final = frozenset(
    {
        GrpcStatus.DEADLINE_EXCEEDED,
        GrpcStatus.RESOURCE_EXHAUSTED,
        GrpcStatus.INVALID_ARGUMENT,
        GrpcStatus.UNIMPLEMENTED,
    }
)


class CallContext(NamedTuple):
    """What is sent along with a request."""

    # Tenant of the request.
    tenant: str
    # Origin under which its ingress was counted.
    origin: str
    # Request id for logs.
    request_id: str
    # Seconds from now to its deadline.
    remaining_s: Seconds
    # Agreement of a guest's request; else empty.
    agreement: str = ""
    # Token of a session's step, which identifies it when it is repeated; else empty.
    step_token: str = ""
    # Span of this attempt, for a traced request; else None.
    attempt: AttemptSpan | None = None
    # Name of its workload; for a guest's request, the agreement.
    workload: str = ""
    # Whose share of a connection's streams it uses; empty for a call that the agent makes for itself.
    payer: str = ""
    # A worker crashed under it before.
    is_suspect: bool = False


METADATA_LIMITS: Final = CountLimits(
    fields=MAX_FIELDS,
    repeated=2 * MAX_TENSORS,
    by_field={"inference.ModelMetadataResponse.TensorMetadata.shape": 2 * MAX_TENSORS * MAX_RANK},
)
"""Limits for another front's answer about a model: as many inputs and outputs as a request may name."""


class AttemptFailed(ShoalError):
    """One attempt on one replica failed. `was_sent` is True if the replica may have begun to run the request."""

    def __init__(self, refusal: Refusal, *, was_sent: bool, retry_after_s: Seconds | None = None) -> None:
        super().__init__(refusal)
        self.was_sent = was_sent
        self.retry_after_s = retry_after_s


class OpenReplica(Protocol):
    """A replica with an open connection, for requests without a task."""

    @property
    def rtt_s(self) -> Seconds:
        """RTT to it; 0 where it is unknown, and for a local worker."""
        ...

    def begin_infer(self, pending: PendingCall, endpoint: Endpoint, request: bytes, context: CallContext) -> object:
        """Send a request; `pending` gets an InferAnswer, or why there is none. Returns what `end_infer` takes.

        Raises ShoalError.
        """
        ...

    def end_infer(self, call: object) -> None:
        """Nobody waits for the outcome any more. Idempotent; None is no call."""
        ...

    def after_call(self) -> None:
        """A call has ended."""
        ...


class WorkerClients:
    """Connections to the workers of this node, each opened when first needed and again after it broke."""

    def __init__(self) -> None:
        self._workers: dict[str, LocalWorker] = {}
        self._connected: dict[str, ConnectedWorker] = {}
        """By assignment."""
        self._connecting: dict[LocalWorker, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def assignments(self) -> Collection[str]:
        return self._workers.keys()

    def configure(self, workers: Iterable[LocalWorker]) -> None:
        """Set the workers. A removed worker finishes its requests; then its connection is closed."""
        self._workers = {worker.assignment: worker for worker in workers}
        for name, known in tuple(self._connected.items()):
            if self._workers.get(name) != known.worker:
                self._connecting.pop(known.worker, None)
                del self._connected[name]
                self._close_if_idle(known.client)

    def connection_to(self, assignment: str) -> "ConnectedWorker | None":
        """The open connection to the worker; None where there is none yet."""
        at = self._connected.get(assignment)
        return None if at is None or at.client.is_closed else at

    async def infer(self, assignment: str, request: bytes, context: CallContext) -> bytes:
        """Raises AttemptFailed."""
        trace = context.attempt.traceparent if context.attempt is not None else ""
        at = self.connection_to(assignment) or await self._connect(assignment)
        try:
            answer = await at.client.infer(assignment, request, context.remaining_s, context.origin, trace)
        except ShoalError as error:
            raise failed_attempt(error) from error
        finally:
            self.after_call(at)
        if context.attempt is not None:
            context.attempt.add_worker_stages(answer.header)
        return bytes(answer.payload)  # a small one is no copy

    async def answer(self, assignment: str, request: bytes, context: CallContext) -> bytes:
        """As `infer`, for a comparison; it counts as no client's request. Raises AttemptFailed."""
        header = {"deadline_s": context.remaining_s}
        return (await self._call(assignment, "answer", request, header, context.remaining_s)).payload

    async def metadata(self, assignment: str, context: CallContext) -> oip.ModelMetadataResponse:
        """The model's inputs and outputs only. Raises AttemptFailed."""
        loaded = json.loads((await self._call(assignment, "metadata", b"", {}, context.remaining_s)).payload)
        return oip.ModelMetadataResponse(
            inputs=[_tensor(spec) for spec in loaded["inputs"]], outputs=[_tensor(spec) for spec in loaded["outputs"]]
        )

    async def close(self) -> None:
        for each in self._connected.values():
            await each.client.close()
        for task in tuple(self._tasks):
            task.cancel()

    async def _call(
        self, assignment: str, kind: str, payload: bytes, header: dict[str, Any], timeout_s: Seconds
    ) -> FrameMessage:
        named = {**header, "assignment": assignment}
        at = await self._connect(assignment)
        try:
            return await at.client.call(kind, payload, header=named, timeout=timeout_s)
        except ShoalError as error:
            raise failed_attempt(error) from error
        finally:
            self.after_call(at)

    def after_call(self, at: "ConnectedWorker") -> None:
        """A call on the connection has ended."""
        if self._connected.get(at.worker.assignment) is not at:
            self._close_if_idle(at.client)

    async def _connect(self, assignment: str) -> "ConnectedWorker":
        """The connection to the worker, opened if there is none. Raises AttemptFailed."""
        worker = self._workers.get(assignment)
        if worker is None:
            raise AttemptFailed(
                Refusal(Code.MODEL_NOT_READY, f"{assignment} has no worker here", "a ready replica", "retry elsewhere"),
                was_sent=False,
            )
        known = self._connected.get(assignment)
        if known is not None and not known.client.is_closed:
            return known
        async with self._connecting.setdefault(worker, asyncio.Lock()):
            known = self._connected.get(assignment)
            if known is not None and known.worker == worker and not known.client.is_closed:
                return known
            try:
                client = await FrameClient.connect(worker.socket, worker.nonce, timeout=CONNECT_TIMEOUT_S)
            except ShoalError as error:
                raise AttemptFailed(error.refusal, was_sent=False) from error
            connected = ConnectedWorker(self, worker, client)
            if self._workers.get(assignment) is worker:
                self._connected[assignment] = connected
            self._spawn(_watch(client))
            return connected

    def _close_if_idle(self, client: FrameClient) -> None:
        if client.in_flight == 0:
            self._spawn(client.close())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True, slots=True, eq=False)
class ConnectedWorker:
    """A connection to one worker process. It is an `OpenReplica`."""

    owner: WorkerClients
    worker: LocalWorker
    client: FrameClient
    # Always: it is on this node.
    rtt_s: Seconds = Seconds(0.0)

    def begin_infer(self, pending: PendingCall, endpoint: Endpoint, request: bytes, context: CallContext) -> int:
        return self.client.begin_infer(pending, endpoint.assignment, request, context.remaining_s, context.origin)

    def end_infer(self, call: object) -> None:
        if isinstance(call, int):
            self.client.end_infer(call)

    def after_call(self) -> None:
        self.owner.after_call(self)


def failed_attempt(error: ShoalError) -> AttemptFailed:
    """The attempt that ended in `error` of the replica, or of the connection to it."""
    if isinstance(error, AttemptFailed):
        return error
    if isinstance(error, ConnectionLost):
        refusal = Refusal(Code.WORKER_CRASHED, error.refusal.found, "an answer", "retry")
        return AttemptFailed(refusal, was_sent=True)
    return AttemptFailed(error.refusal, was_sent=True)


class _PeerAddress(NamedTuple):
    """Address and identity of a peer."""

    # Host and port.
    address: str
    # DNS name that its certificate must prove.
    name: str
    # CAs of its region, PEM; empty for this region, where the node's own file is used.
    roots: bytes


class _PeerConnection:
    """The connection to one peer, of three channels: data, large requests, and pings.

    So pings wait behind no request, and small requests behind no large one. Each channel connects when first used.
    """

    def __init__(self, data: GrpcChannel, large: GrpcChannel, ping: GrpcChannel, reconnect_s: Seconds) -> None:
        """`reconnect_s` is how long the ping connection may be down before the peer counts as silent.

        The time for which the oldest large call has been in transit is added, because that call would start over
        elsewhere. The sum is at most MAX_RECONNECT_S.
        """
        self.data = data
        self.large = large
        self.is_silent = False
        """The peer answers no ping: a new connection must open before anything is sent there."""
        self._ping = ping
        self._reconnect_s = reconnect_s
        self._rtts: deque[float] = deque(maxlen=RTT_SAMPLES)
        self._large_since: dict[object, float] = {}
        """When each large call began, by the event loop's clock. Only large calls fill a link for long."""
        self.rtt_s = Seconds(0.0)
        """RTT of a call that does no work at the peer; 0 before the first measurement."""
        self._watching = asyncio.create_task(self._watch())
        self._measuring = asyncio.create_task(self._measure_rtt())

    def channel(self, request: bytes) -> GrpcChannel:
        return self.large if len(request) >= LARGE_BYTES else self.data

    async def call(
        self, path: str, request: bytes, timeout_s: Seconds, make_metadata: MakeMetadata, payer: str
    ) -> bytes:
        """Raises AttemptFailed."""
        channel, call = self.channel(request), object()
        if channel is self.large:
            self._large_since[call] = asyncio.get_running_loop().time()
        try:
            return await channel.unary(path, request, timeout_s, make_metadata, payer)
        except (CallError, ChannelClosed) as error:
            raise self.failure_of(channel, error) from error
        finally:
            self._large_since.pop(call, None)

    def begin_call(
        self,
        pending: PendingCall,
        path: str,
        request: bytes,
        timeout_s: Seconds,
        make_metadata: MakeMetadata,
        payer: str,
    ) -> BegunForward | None:
        """As `call`, without a task: `pending` gets an InferAnswer. None where it would have to wait."""
        channel, now = self.channel(request), asyncio.get_running_loop().time()
        call = BegunForward(self, channel, pending, path, request, make_metadata, payer)
        if not call.begin(now, timeout_s):
            return None
        if channel is self.large:
            self._large_since[call] = now
        return call

    def on_call_end(self, call: object) -> None:
        """A begun call has ended."""
        self._large_since.pop(call, None)

    def failure_of(self, channel: GrpcChannel, error: CallError | ChannelClosed) -> AttemptFailed:
        if isinstance(error, CallError) and channel.state is not ChannelState.CLOSED:
            return _failure(error, channel.failure)
        found = "a front that answers no ping" if self.is_silent else "a way that another one has followed"
        was_sent = isinstance(error, CallError) and error.was_processed  # a closed channel sends nothing
        return AttemptFailed(Refusal(Code.REPLICA_UNREACHABLE, found, "an answer", "retry"), was_sent=was_sent)

    async def close(self, grace_s: float | None) -> None:
        """Close the channels; calls in flight have `grace_s` to end."""
        try:
            await asyncio.gather(self.data.close(grace_s), self.large.close(grace_s))
        finally:
            self._watching.cancel()
            self._measuring.cancel()
            await self._ping.close(None)

    async def _watch(self) -> None:
        """Wait until the ping connection broke and does not reopen; then end the calls in flight."""
        with suppress(ChannelClosed):
            await self._wait_until_open()
            while not self.is_silent:
                await self._ping.wait_for_change(ChannelState.READY)
                try:
                    async with asyncio.timeout(self._reconnect_timeout_s()):
                        await self._wait_until_open()
                except TimeoutError:
                    self.is_silent = True
            self._measuring.cancel()  # else it would keep reopening a connection that nobody uses
            await asyncio.gather(self.data.close(), self.large.close())

    def _reconnect_timeout_s(self) -> float:
        now = asyncio.get_running_loop().time()
        under_way_s = max((now - since for since in self._large_since.values()), default=0.0)
        return max(self._reconnect_s, min(self._reconnect_s + under_way_s, MAX_RECONNECT_S))

    async def _measure_rtt(self) -> None:
        """Probe the RTT periodically while the peer answers."""
        loop = asyncio.get_running_loop()
        with suppress(ChannelClosed):
            while True:
                await self._wait_until_open()
                started = loop.time()
                with suppress(CallError):
                    await self._ping.unary(f"/{SERVICE}/ServerLive", b"", RTT_PROBE_TIMEOUT_S)
                    self._rtts.append(loop.time() - started)
                    self.rtt_s = Seconds(min(self._rtts))
                await asyncio.sleep(RTT_PROBE_EVERY_S)

    async def _wait_until_open(self) -> None:
        """Raises ChannelClosed."""
        while (state := self._ping.connect()) is not ChannelState.READY:
            if state is ChannelState.CLOSED:
                raise ChannelClosed
            await self._ping.wait_for_change(state)


class ConnectedPeer:
    """An open connection to another front. It is an `OpenReplica`. One is made for each request, which takes a frozen
    dataclass longer."""

    __slots__ = ("connection", "owner")

    def __init__(self, owner: "PeerClients", connection: _PeerConnection) -> None:
        self.owner = owner
        self.connection = connection

    @property
    def rtt_s(self) -> Seconds:
        return self.connection.rtt_s

    def begin_infer(
        self, pending: PendingCall, endpoint: Endpoint, request: bytes, context: CallContext
    ) -> BegunForward:
        make_metadata = partial(self.owner.metadata_of, endpoint, context)
        begun = self.connection.begin_call(pending, _INFER, request, context.remaining_s, make_metadata, context.payer)
        if begun is None:
            raise _connect_failure("no connection", 0.0)
        return begun

    def end_infer(self, call: object) -> None:
        if isinstance(call, BegunForward):
            call.withdraw()

    def after_call(self) -> None:
        pass


class PeerClients:
    """Channels from this node to other fronts.

    Each peer must prove the name that the route gives it, by a CA of its own region.
    """

    def __init__(
        self, region: str, tls: TlsFiles, authorities: Authorities, forward_auth: ForwardAuth | None = None
    ) -> None:
        """`forward_auth` signs what is forwarded inside the region; by default nothing is signed."""
        self._forward_auth = forward_auth
        self._region = region
        self._tls = tls
        self._authorities = authorities
        self._stamp: tuple[int, ...] = ()
        self._checked_at = -math.inf
        """When the files were last looked at, by the event loop's clock."""
        self._contexts: dict[bytes, ssl.SSLContext] | None = None
        """TLS of this node's files, by the CAs (PEM) that the peer must be of; empty for this region's own."""
        self._connections: dict[_PeerAddress, _PeerConnection] = {}
        self._addresses: dict[int, tuple[Endpoint, _PeerAddress]] = {}
        """Of the routes' endpoints, by `id` of the endpoint."""
        self._unopened: dict[_PeerAddress, Endpoint] = {}
        """In other regions, those to connect to yet."""
        self._opening: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    def configure(self, endpoints: Iterable[Endpoint]) -> None:
        """Retire the channels to peers in no route; they close when their calls have ended.

        Channels to other regions are opened before a request needs them, because opening one takes too long for it to
        wait. They are opened in turns: how many there are is for other regions to say.
        """
        listed = [(each, self._make_address(each)) for each in endpoints if each.kind is not EndpointKind.LOCAL]
        self._addresses = {id(endpoint): (endpoint, address) for endpoint, address in listed}
        remote = {address: endpoint for endpoint, address in listed}
        for key in [known for known in self._connections if known not in remote]:
            self._retire(self._connections.pop(key))
        self._unopened = dict(_in_turns_of_regions(remote))
        if self._unopened and (self._opening is None or self._opening.done()):
            self._opening = asyncio.create_task(self._open_in_turns())

    def is_connecting(self, endpoint: Endpoint) -> bool:
        """Whether a request would have to wait for the connection. The check starts opening it.

        False for a local worker, and for a connection that failed: it reports its error at once.
        """
        if endpoint.kind is EndpointKind.LOCAL:
            return False
        with suppress(AttemptFailed):
            return self._connection(endpoint).data.connect() in _CONNECTING
        return False

    def connection_to(self, endpoint: Endpoint, request: bytes, payer: str) -> ConnectedPeer | None:
        """The connection for a request, if that can be sent at once. None begins to open one where there is none."""
        try:
            connection = self._connection(endpoint)
        except AttemptFailed:
            return None
        return ConnectedPeer(self, connection) if connection.channel(request).can_begin(payer) else None

    def rtt_s(self, endpoint: Endpoint) -> Seconds:
        """RTT to the endpoint; 0 where it is unknown, and for a local worker."""
        connection = None if endpoint.kind is EndpointKind.LOCAL else self._connections.get(self._address_of(endpoint))
        return Seconds(0.0) if connection is None else connection.rtt_s

    async def infer(self, endpoint: Endpoint, request: bytes, context: CallContext) -> bytes:
        """Raises AttemptFailed."""
        return await self._forward(endpoint, _INFER, request, context)

    async def metadata(self, endpoint: Endpoint, name: str, context: CallContext) -> oip.ModelMetadataResponse:
        """Raises AttemptFailed."""
        request = oip.ModelMetadataRequest(name=name).SerializeToString()
        answer = await self._forward(endpoint, f"/{SERVICE}/ModelMetadata", request, context)
        try:
            return parse(oip.ModelMetadataResponse, answer, METADATA_LIMITS)
        except ShoalError as error:
            raise AttemptFailed(replace(error.refusal, code=Code.INTERNAL), was_sent=True) from error

    async def call_verification_source(
        self, endpoint: Endpoint, method: str, request: bytes, timeout_s: Seconds
    ) -> bytes:
        """Call the verification source at an agent of this region; the answer is serialized. Raises AttemptFailed."""
        return await self._call_own(endpoint, WITNESS_SERVICE, method, request, timeout_s)

    async def hand_over(self, endpoint: Endpoint, method: str, request: bytes, timeout_s: Seconds) -> bytes:
        """Call the sessions service at an agent of this region; the answer is serialized. Raises AttemptFailed."""
        return await self._call_own(endpoint, SESSIONS_SERVICE, method, request, timeout_s)

    async def close(self) -> None:
        self._unopened.clear()
        for connection in self._connections.values():
            await connection.close(None)
        for task in tuple(self._retiring):
            task.cancel()

    async def _open_in_turns(self) -> None:
        """Connect to all that are listed. A turn ends when each of its connections is open or failed, or with its
        time: a peer that does not answer must not keep others waiting for long."""
        while self._unopened:
            opening = list[GrpcChannel]()
            for address in tuple(islice(self._unopened, OPENED_AT_ONCE)):
                endpoint = self._unopened.pop(address)
                with suppress(AttemptFailed):
                    connection = self._connection(endpoint)
                    opening += [connection.data, connection.large]
            for channel in opening:
                channel.connect()
            with suppress(TimeoutError):
                async with asyncio.timeout(OPENING_TURN_S):
                    for channel in opening:
                        await channel.wait_for_change(ChannelState.CONNECTING)

    async def _forward(self, endpoint: Endpoint, path: str, request: bytes, context: CallContext) -> bytes:
        connection = await self._open_connection(endpoint, request)
        make_metadata = partial(self.metadata_of, endpoint, context)
        return await connection.call(path, request, context.remaining_s, make_metadata, context.payer)

    async def _call_own(
        self, endpoint: Endpoint, service: str, method: str, request: bytes, timeout_s: Seconds
    ) -> bytes:
        """A call that the agent makes for itself. All of these share streams as one payer's."""
        connection = await self._open_connection(endpoint, request)
        make_metadata = partial(self._own_metadata, endpoint, method)
        return await connection.call(f"/{service}/{method}", request, timeout_s, make_metadata, "")

    async def _open_connection(self, endpoint: Endpoint, request: bytes) -> _PeerConnection:
        """An open connection for the request, or one whose call reports why it is not open. Raises AttemptFailed."""
        while True:
            connection = self._connection(endpoint)
            await _wait_until_connected(
                connection.channel(request), REGION_CONNECT_WAIT_S if endpoint.region else CONNECT_WAIT_S
            )
            if self._connections.get(self._address_of(endpoint)) is connection and not connection.is_silent:
                return connection

    def _connection(self, endpoint: Endpoint) -> _PeerConnection:
        contexts = self._load_files()
        key = self._address_of(endpoint)
        connection = self._connections.get(key)
        if connection is not None and connection.is_silent:
            self._retire(self._connections.pop(key))
            connection = None
        if connection is None:
            if endpoint.region and not key.roots:
                found = f"{endpoint.node} of {endpoint.region}, which no agreement names"
                raise AttemptFailed(Refusal(Code.CERT_UNTRUSTED, found, "its region's authorities"), was_sent=False)
            context = self._context(contexts, key.roots)
            keepalives = (
                limits.FORWARD,
                limits.FORWARD_LARGE,
                limits.LIVENESS_REMOTE if endpoint.region else limits.LIVENESS,
            )
            if endpoint.region and (denied := refusal_of_peer(key.address)) is not None:
                raise AttemptFailed(denied, was_sent=False)
            data, large, life = (
                GrpcChannel(
                    key.address,
                    key.name,
                    lambda: context,
                    keepalive,
                    MAX_MESSAGE,
                    is_shared=True,
                    answer_window=ANSWER_WINDOW_BYTES,
                )
                for keepalive in keepalives
            )
            connection = _PeerConnection(
                data, large, life, Seconds(REGION_RECONNECT_S if endpoint.region else CONNECT_WAIT_S)
            )
            self._connections[key] = connection
        return connection

    def _load_files(self) -> dict[bytes, ssl.SSLContext]:
        """TLS by this node's files. After they changed every connection is replaced; its calls end on the old one. They
        are looked at every FILES_CHECK_S.

        Raises AttemptFailed.
        """
        now = asyncio.get_running_loop().time()
        if self._contexts is not None and now - self._checked_at < FILES_CHECK_S:
            return self._contexts
        self._checked_at = now
        try:
            stamp = self._tls.stamp()
            if self._contexts is None or stamp != self._stamp:
                self._contexts, self._stamp = (
                    {b"": client_context(self._tls.authority, self._tls.certificate, self._tls.key)},
                    stamp,
                )
                while self._connections:
                    self._retire(self._connections.popitem()[1])
        except OSError as cause:
            if self._contexts is None:
                raise _files_failure(cause) from cause
        return self._contexts

    def _context(self, contexts: dict[bytes, ssl.SSLContext], roots: bytes) -> ssl.SSLContext:
        """Raises AttemptFailed."""
        found = contexts.get(roots)
        if found is None:
            try:
                found = contexts[roots] = self._make_context(roots)
            except OSError as cause:  # half replaced
                raise _files_failure(cause) from cause
        return found

    def _make_context(self, roots: bytes = b"") -> ssl.SSLContext:
        """Raises OSError."""
        return client_context(self._tls.authority, self._tls.certificate, self._tls.key, roots)

    def _address_of(self, endpoint: Endpoint) -> _PeerAddress:
        known = self._addresses.get(id(endpoint))
        return known[1] if known is not None and known[0] is endpoint else self._make_address(endpoint)

    def _make_address(self, endpoint: Endpoint) -> _PeerAddress:
        role = Role.GATEWAY if endpoint.kind is EndpointKind.GATEWAY else Role.AGENT
        name = dns_of(endpoint.region or self._region, role, endpoint.node)
        roots = self._authorities.roots_of(endpoint.region, endpoint.node) if endpoint.region else None
        return _PeerAddress(endpoint.address, name, roots or b"")

    def metadata_of(self, endpoint: Endpoint, context: CallContext) -> Metadata:
        """Metadata of a forwarded request, signed anew.

        Another region learns neither tenants nor nodes of this one. A trace id reveals nothing: it is random or the
        client's.
        """
        own: tuple[tuple[str, str], ...] = ((REQUEST_KEY, context.request_id),)
        if context.attempt is not None:
            own = (*own, (TRACE_KEY, context.attempt.traceparent))
        if endpoint.region:
            return ((HOP_KEY, "1"), (AGREEMENT_KEY, endpoint.agreement), *own)
        # What other requests have too comes first: the receiver reads that once (`HeaderDecoder`).
        inside = ((HOP_KEY, "1"), (TENANT_KEY, context.tenant), (ORIGIN_KEY, context.origin), *own)
        if context.step_token:
            inside = (*inside, (STEP_KEY, context.step_token))
        if context.agreement:
            inside = (*inside, (AGREEMENT_KEY, context.agreement))
        if context.is_suspect:
            inside = (*inside, (SUSPECT_KEY, "1"))
        if self._forward_auth is None:
            return inside
        beside = extras_of(context.agreement, context.step_token)
        proof = self._forward_auth.sign(
            endpoint.node, context.tenant, context.workload, context.origin, context.request_id, beside
        )
        return (*inside, (FORWARD_KEY, proof)) if proof else inside

    def _own_metadata(self, endpoint: Endpoint, method: str) -> Metadata:
        """Metadata of a call that the agent makes for itself, signed anew."""
        proof = "" if self._forward_auth is None else self._forward_auth.sign(endpoint.node, "", "", "", "", method)
        return ((FORWARD_KEY, proof),) if proof else ()

    def _retire(self, connection: _PeerConnection) -> None:
        task = asyncio.create_task(connection.close(CALLS_GRACE_S))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


def _in_turns_of_regions(remote: Mapping[_PeerAddress, Endpoint]) -> list[tuple[_PeerAddress, Endpoint]]:
    """Those in other regions: the first of each region, then the second of each. So a region of many gateways does not
    keep others waiting."""
    places, ranked = Counter[str](), list[tuple[int, tuple[_PeerAddress, Endpoint]]]()
    for address, endpoint in remote.items():
        if endpoint.region:
            ranked.append((places[endpoint.region], (address, endpoint)))
            places[endpoint.region] += 1
    return [each for _, each in sorted(ranked, key=lambda ranked: ranked[0])]


def _files_failure(cause: OSError) -> AttemptFailed:
    if file_descriptors.is_exhaustion(cause):
        return AttemptFailed(file_descriptors.NONE_LEFT, was_sent=False)
    found = f"this node's files: {cause.strerror}"
    return AttemptFailed(Refusal(Code.REPLICA_UNREACHABLE, found, "its certificate", "retry"), was_sent=False)


async def _wait_until_connected(channel: GrpcChannel, within_s: float) -> None:
    """Wait for the connection. Raises AttemptFailed after `within_s` without one, or when the channel is closed.

    A connection that fails at once is left to the call, which reports why.
    """
    if (state := channel.connect()) is ChannelState.READY:
        return
    try:
        async with asyncio.timeout(within_s):
            while (state := channel.connect()) in _CONNECTING:
                await channel.wait_for_change(state)
    except TimeoutError as cause:
        raise _connect_failure("no connection", within_s) from cause
    if state is ChannelState.CLOSED:
        raise _connect_failure("the replica left the routes", within_s)


def _connect_failure(found: str, within_s: float) -> AttemptFailed:
    refusal = Refusal(Code.REPLICA_UNREACHABLE, found, f"a connection within {within_s:g}s", "retry")
    return AttemptFailed(refusal, was_sent=False)


async def _watch(client: FrameClient) -> None:
    """Ping a worker while its connection lives, because a stopped or hung process keeps its connections."""
    while not client.is_closed:
        await asyncio.sleep(PING_EVERY_S)
        if client.in_flight == 0:
            continue
        try:
            await within(SILENT_S, client.call("ping"))
        except ConnectionLost:
            return
        except TimeoutError:
            found = f"the worker has not answered for {SILENT_S:g}s"
            client.abandon(Refusal(Code.REPLICA_UNREACHABLE, found, "a sign of life", "retry"))
        except ShoalError:
            continue  # a refusal is an answer, too


def _failure(error: CallError, connect_failure: OSError | None) -> AttemptFailed:
    """Map the end of a call to an AttemptFailed.

    A refusal of another front is taken as it is. A status of the transport itself is about the connection, except four
    of them. `connect_failure` is why the channel could not connect last.
    """
    said = dict(error.metadata)
    refusal = status.refusal_of_status(error.status, error.details, error.metadata)
    if refusal.code is Code.FORWARD_DENIED:  # it does not list this front yet, or no longer has the workload
        refusal = replace(refusal, code=Code.MODEL_NOT_READY, remedy="retry")
        return AttemptFailed(refusal, was_sent=False, retry_after_s=Seconds(1.0))
    if status.CODE_KEY in said:
        retry = status.retry_after_of(error.metadata)
        return AttemptFailed(refusal, was_sent=True, retry_after_s=None if retry is None else Seconds(retry))
    if error.status is GrpcStatus.RESOURCE_EXHAUSTED and "larger than max" not in error.details:
        return AttemptFailed(replace(refusal, code=Code.OVERLOADED), was_sent=False)  # too many calls at once
    if error.status in _STATUSES_ABOUT_THE_REQUEST:
        return AttemptFailed(refusal, was_sent=error.was_processed)
    if connect_failure is not None and file_descriptors.is_exhaustion(connect_failure):
        return AttemptFailed(file_descriptors.NONE_LEFT, was_sent=False)  # local: it says nothing about the replica
    refusal = Refusal(Code.REPLICA_UNREACHABLE, f"{error}"[:300], "an answer", "retry")
    return AttemptFailed(refusal, was_sent=error.was_processed)


def _tensor(spec: dict[str, Any]) -> oip.ModelMetadataResponse.TensorMetadata:
    return oip.ModelMetadataResponse.TensorMetadata(name=spec["name"], datatype=spec["dtype"], shape=spec["shape"])
