"""Connections to replicas: a worker of this node over its Unix socket, or another front over gRPC with mTLS.

Requests and answers pass as bytes. Every failure is raised as `AttemptFailed`, with what routing needs: the code, and
whether the replica may have begun to run the request.
"""

import asyncio
import errno
import json
import os
from collections import deque
from collections.abc import Collection, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
import grpc.aio

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
from shoal.agent.frames import ConnectionLost, FrameClient, FrameMessage
from shoal.agent.ports import LocalWorker
from shoal.agent.timeouts import within
from shoal.host import file_descriptors
from shoal.host.egress_guard import target_of_peer
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.route import Endpoint, EndpointKind
from shoal.types.units import Seconds
from shoal.wire import grpc_cancellation, limits, status
from shoal.wire.field_limits import CountLimits, parse
from shoal.wire.identity import dns_of

WITNESS_SERVICE: Final = "shoal.v1.Witness"
SESSIONS_SERVICE: Final = "shoal.v1.Sessions"
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
RTT_PROBE_EVERY_S: Final = 15.0
RTT_SAMPLES: Final = 8
"""RTT is the minimum of this many probes: queueing at the peer must not count as distance, and an old minimum must age
out."""
RTT_PROBE_TIMEOUT_S: Final = 5.0
LARGE_BYTES: Final = 64 * 2**10
"""Requests from this size on are large: a sender may have this many bytes in transit before the receiver grants more
(RFC 9113, section 6.9.2: 65,535 bytes)."""
_CONNECTING: Final = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
_CONNECT_FAILURES: Final = ("failed to connect", "errors resolving", "DNS resolution failed")
"""Start of grpc's message for a call that was not sent because there was no connection."""
_NO_DESCRIPTOR: Final = os.strerror(errno.EMFILE)
_STATUSES_ABOUT_THE_REQUEST: Final = frozenset(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(frozen=True, slots=True)
class CallContext:
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


class WorkerClients:
    """Connections to the workers of this node, each opened when first needed and again after it broke."""

    def __init__(self) -> None:
        self._workers: dict[str, LocalWorker] = {}
        self._clients: dict[LocalWorker, FrameClient] = {}
        self._connecting: dict[LocalWorker, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def assignments(self) -> Collection[str]:
        return self._workers.keys()

    def configure(self, workers: Iterable[LocalWorker]) -> None:
        """Set the workers. A removed worker finishes its requests; then its connection is closed."""
        self._workers = {worker.assignment: worker for worker in workers}
        kept = set(self._workers.values())
        for worker in [known for known in self._clients if known not in kept]:
            self._connecting.pop(worker, None)
            self._close_if_idle(self._clients.pop(worker))

    async def infer(self, assignment: str, request: bytes, context: CallContext) -> bytes:
        """Raises AttemptFailed."""
        header: dict[str, Any] = {
            "deadline_s": context.remaining_s,
            "origin": context.origin,
            "request_id": context.request_id,
        }
        if context.attempt is not None:
            header["trace"] = context.attempt.traceparent
        answer = await self._call(assignment, "infer", request, header, context.remaining_s)
        if context.attempt is not None:
            context.attempt.add_worker_stages(answer.header)
        return answer.payload

    async def answer(self, assignment: str, request: bytes, context: CallContext) -> bytes:
        """As `infer`, for a comparison; it counts as no client's request. Raises AttemptFailed."""
        return (
            await self._call(assignment, "answer", request, {"deadline_s": context.remaining_s}, context.remaining_s)
        ).payload

    async def metadata(self, assignment: str, context: CallContext) -> oip.ModelMetadataResponse:
        """The model's inputs and outputs only. Raises AttemptFailed."""
        loaded = json.loads((await self._call(assignment, "metadata", b"", {}, context.remaining_s)).payload)
        return oip.ModelMetadataResponse(
            inputs=[_tensor(spec) for spec in loaded["inputs"]], outputs=[_tensor(spec) for spec in loaded["outputs"]]
        )

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        for task in tuple(self._tasks):
            task.cancel()

    async def _call(
        self, assignment: str, kind: str, payload: bytes, header: dict[str, Any], timeout_s: Seconds
    ) -> FrameMessage:
        worker, client = await self._client(assignment)
        try:
            return await client.call(kind, payload, header={**header, "assignment": assignment}, timeout=timeout_s)
        except ConnectionLost as error:
            refusal = Refusal(Code.WORKER_CRASHED, error.refusal.found, "an answer", "retry")
            raise AttemptFailed(refusal, was_sent=True) from error
        except ShoalError as error:
            raise AttemptFailed(error.refusal, was_sent=True) from error
        finally:
            if self._clients.get(worker) is not client:
                self._close_if_idle(client)

    async def _client(self, assignment: str) -> tuple[LocalWorker, FrameClient]:
        worker = self._workers.get(assignment)
        if worker is None:
            raise AttemptFailed(
                Refusal(Code.MODEL_NOT_READY, f"{assignment} has no worker here", "a ready replica", "retry elsewhere"),
                was_sent=False,
            )
        client = self._clients.get(worker)
        if client is not None and not client.is_closed:
            return worker, client
        async with self._connecting.setdefault(worker, asyncio.Lock()):
            client = self._clients.get(worker)
            if client is not None and not client.is_closed:
                return worker, client
            try:
                client = await FrameClient.connect(worker.socket, worker.nonce, timeout=CONNECT_TIMEOUT_S)
            except ShoalError as error:
                raise AttemptFailed(error.refusal, was_sent=False) from error
            if self._workers.get(assignment) is worker:
                self._clients[worker] = client
            self._spawn(_watch(client))
            return worker, client

    def _close_if_idle(self, client: FrameClient) -> None:
        if client.in_flight == 0:
            self._spawn(client.close())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True, slots=True)
class _PeerAddress:
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

    def __init__(
        self, data: grpc.aio.Channel, large: grpc.aio.Channel, ping: grpc.aio.Channel, reconnect_s: Seconds
    ) -> None:  # fmt: skip
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
        self._calls: set[grpc.aio.UnaryUnaryCall[bytes, bytes]] = set()
        self._large_since: dict[grpc.aio.UnaryUnaryCall[bytes, bytes], float] = {}
        """When each large call began, by the event loop's clock. Only large calls fill a link for long."""
        self._watching = asyncio.create_task(self._watch())
        self._measuring = asyncio.create_task(self._measure_rtt())

    @property
    def rtt_s(self) -> Seconds:
        """RTT of a call that does no work at the peer; 0 before the first measurement."""
        return Seconds(min(self._rtts, default=0.0))

    def channel(self, request: bytes) -> grpc.aio.Channel:
        return self.large if len(request) >= LARGE_BYTES else self.data

    async def call(self, path: str, request: bytes, timeout_s: Seconds, metadata: tuple[tuple[str, str], ...]) -> bytes:
        """Raises AttemptFailed."""
        channel = self.channel(request)
        call = channel.unary_unary(path, None, None)(request, timeout=timeout_s, metadata=metadata)
        self._calls.add(call)
        if channel is self.large:
            self._large_since[call] = asyncio.get_running_loop().time()
        try:
            answer: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        except asyncio.CancelledError as error:
            if grpc_cancellation.is_task_cancelled():
                raise
            found = "a front that answers no ping" if self.is_silent else "a way that another one has followed"
            refusal = Refusal(Code.REPLICA_UNREACHABLE, found, "an answer", "retry")
            raise AttemptFailed(refusal, was_sent=True) from error
        finally:
            self._calls.discard(call)
            self._large_since.pop(call, None)
        return answer

    async def close(self, grace_s: float | None) -> None:
        """Close the channels; calls in flight have `grace_s` to end."""
        try:
            await asyncio.gather(self.data.close(grace_s), self.large.close(grace_s))
        finally:
            self._watching.cancel()
            self._measuring.cancel()
            await self._ping.close(None)

    async def _watch(self) -> None:
        """Wait until the ping connection broke and does not reopen; then cancel the calls in flight."""
        with suppress(grpc.aio.UsageError):  # the channel was closed
            await self._wait_until_open()
            while not self.is_silent:
                await self._ping.wait_for_state_change(grpc.ChannelConnectivity.READY)
                try:
                    async with asyncio.timeout(self._reconnect_timeout_s()):
                        await self._wait_until_open()
                except TimeoutError:
                    self.is_silent = True
            self._measuring.cancel()  # else it would keep reopening a connection that nobody uses
            for call in tuple(self._calls):
                call.cancel()

    def _reconnect_timeout_s(self) -> float:
        now = asyncio.get_running_loop().time()
        under_way_s = max((now - since for since in self._large_since.values()), default=0.0)
        return max(self._reconnect_s, min(self._reconnect_s + under_way_s, MAX_RECONNECT_S))

    async def _measure_rtt(self) -> None:
        """Probe the RTT periodically while the peer answers."""
        loop = asyncio.get_running_loop()
        with suppress(grpc.aio.UsageError):  # the channel was closed
            while True:
                await self._wait_until_open()
                ask, started = self._ping.unary_unary(f"/{SERVICE}/ServerLive", None, None), loop.time()
                with suppress(grpc.aio.AioRpcError):
                    await ask(b"", timeout=RTT_PROBE_TIMEOUT_S)
                    self._rtts.append(loop.time() - started)
                await asyncio.sleep(RTT_PROBE_EVERY_S)

    async def _wait_until_open(self) -> None:
        while (state := self._ping.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            await self._ping.wait_for_state_change(state)


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
        self._files: tuple[bytes, bytes, bytes] | None = None
        self._connections: dict[_PeerAddress, _PeerConnection] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    def configure(self, endpoints: Iterable[Endpoint]) -> None:
        """Retire the channels to peers in no route; they close when their calls have ended.

        Channels to other regions are opened now, because opening one takes too long for a request to wait.
        """
        remote = {
            self._address_of(endpoint): endpoint for endpoint in endpoints if endpoint.kind is not EndpointKind.LOCAL
        }
        for key in [known for known in self._connections if known not in remote]:
            self._retire(self._connections.pop(key))
        for endpoint in remote.values():
            if endpoint.region:
                with suppress(AttemptFailed):
                    connection = self._connection(endpoint)
                    connection.data.get_state(try_to_connect=True)
                    connection.large.get_state(try_to_connect=True)

    def is_connecting(self, endpoint: Endpoint) -> bool:
        """Whether a request would have to wait for the connection. The check starts opening it.

        False for a local worker, and for a connection that failed: it reports its error at once.
        """
        if endpoint.kind is EndpointKind.LOCAL:
            return False
        with suppress(AttemptFailed):
            return self._connection(endpoint).data.get_state(try_to_connect=True) in _CONNECTING
        return False

    def rtt_s(self, endpoint: Endpoint) -> Seconds:
        """RTT to the endpoint; 0 where it is unknown, and for a local worker."""
        connection = None if endpoint.kind is EndpointKind.LOCAL else self._connections.get(self._address_of(endpoint))
        return Seconds(0.0) if connection is None else connection.rtt_s

    async def infer(self, endpoint: Endpoint, request: bytes, context: CallContext) -> bytes:
        """Raises AttemptFailed."""
        return await self._call(
            endpoint, f"/{SERVICE}/ModelInfer", request, context.remaining_s, self._metadata_of(endpoint, context)
        )

    async def metadata(self, endpoint: Endpoint, name: str, context: CallContext) -> oip.ModelMetadataResponse:
        """Raises AttemptFailed."""
        request = oip.ModelMetadataRequest(name=name).SerializeToString()
        path, said = f"/{SERVICE}/ModelMetadata", self._metadata_of(endpoint, context)
        answer = await self._call(endpoint, path, request, context.remaining_s, said)
        try:
            return parse(oip.ModelMetadataResponse, answer, METADATA_LIMITS)
        except ShoalError as error:
            raise AttemptFailed(replace(error.refusal, code=Code.INTERNAL), was_sent=True) from error

    async def call_verification_source(
        self, endpoint: Endpoint, method: str, request: bytes, timeout_s: Seconds
    ) -> bytes:
        """Call the verification source at an agent of this region; the answer is serialized. Raises AttemptFailed."""
        return await self._call(
            endpoint, f"/{WITNESS_SERVICE}/{method}", request, timeout_s, self._own_metadata(endpoint, method)
        )

    async def hand_over(self, endpoint: Endpoint, method: str, request: bytes, timeout_s: Seconds) -> bytes:
        """Call the sessions service at an agent of this region; the answer is serialized. Raises AttemptFailed."""
        return await self._call(
            endpoint, f"/{SESSIONS_SERVICE}/{method}", request, timeout_s, self._own_metadata(endpoint, method)
        )

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close(None)
        for task in tuple(self._retiring):
            task.cancel()

    async def _call(
        self, endpoint: Endpoint, path: str, request: bytes, timeout_s: Seconds, metadata: tuple[tuple[str, str], ...]
    ) -> bytes:
        return await (await self._open_connection(endpoint, request)).call(path, request, timeout_s, metadata)

    async def _open_connection(self, endpoint: Endpoint, request: bytes) -> _PeerConnection:
        """An open connection for the request, or one whose call reports why it is not open. Raises AttemptFailed."""
        while True:
            connection = self._connection(endpoint)
            with suppress(grpc.aio.UsageError):  # it was retired meanwhile
                await _wait_until_connected(
                    connection.channel(request), REGION_CONNECT_WAIT_S if endpoint.region else CONNECT_WAIT_S
                )
            if self._connections.get(self._address_of(endpoint)) is connection and not connection.is_silent:
                return connection

    def _connection(self, endpoint: Endpoint) -> _PeerConnection:
        certificate, private_key, authority = self._load_files()
        key = self._address_of(endpoint)
        connection = self._connections.get(key)
        if connection is not None and connection.is_silent:
            self._retire(self._connections.pop(key))
            connection = None
        if connection is None:
            if endpoint.region and not key.roots:
                found = f"{endpoint.node} of {endpoint.region}, which no agreement names"
                raise AttemptFailed(Refusal(Code.CERT_UNTRUSTED, found, "its region's authorities"), was_sent=False)
            credentials = grpc.ssl_channel_credentials(key.roots or authority, private_key, certificate)
            keepalives = (
                limits.FORWARD,
                limits.FORWARD_LARGE,
                limits.LIVENESS_REMOTE if endpoint.region else limits.LIVENESS,
            )
            try:
                target = target_of_peer(key.address) if endpoint.region else key.address
            except ShoalError as denied:
                raise AttemptFailed(denied.refusal, was_sent=False) from denied
            data, large, life = (
                grpc.aio.secure_channel(
                    target,
                    credentials,
                    limits.channel_options(MAX_MESSAGE, server_name=key.name, keepalive=keepalive),
                )
                for keepalive in keepalives
            )
            connection = _PeerConnection(
                data, large, life, Seconds(REGION_RECONNECT_S if endpoint.region else CONNECT_WAIT_S)
            )
            self._connections[key] = connection
        return connection

    def _load_files(self) -> tuple[bytes, bytes, bytes]:
        """This node's TLS files. After they changed every connection is replaced; its calls end on the old one."""
        try:
            stamp = self._tls.stamp()
            if self._files is None or stamp != self._stamp:
                self._files, self._stamp = self._tls.read(), stamp
                while self._connections:
                    self._retire(self._connections.popitem()[1])
        except OSError as cause:
            if self._files is None and file_descriptors.is_exhaustion(cause):
                raise AttemptFailed(file_descriptors.NONE_LEFT, was_sent=False) from cause
            if self._files is None:
                found = f"this node's files: {cause.strerror}"
                refusal = Refusal(Code.REPLICA_UNREACHABLE, found, "its certificate", "retry")
                raise AttemptFailed(refusal, was_sent=False) from cause
        return self._files

    def _address_of(self, endpoint: Endpoint) -> _PeerAddress:
        role = Role.GATEWAY if endpoint.kind is EndpointKind.GATEWAY else Role.AGENT
        name = dns_of(endpoint.region or self._region, role, endpoint.node)
        roots = self._authorities.roots_of(endpoint.region, endpoint.node) if endpoint.region else None
        return _PeerAddress(endpoint.address, name, roots or b"")

    def _metadata_of(self, endpoint: Endpoint, context: CallContext) -> tuple[tuple[str, str], ...]:
        """Metadata of a forwarded request.

        Another region learns neither tenants nor nodes of this one. A trace id reveals nothing: it is random or the
        client's.
        """
        always: tuple[tuple[str, str], ...] = ((HOP_KEY, "1"), (REQUEST_KEY, context.request_id))
        if context.attempt is not None:
            always = (*always, (TRACE_KEY, context.attempt.traceparent))
        if endpoint.region:
            return (*always, (AGREEMENT_KEY, endpoint.agreement))
        inside: tuple[tuple[str, str], ...] = (*always, (TENANT_KEY, context.tenant), (ORIGIN_KEY, context.origin))
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

    def _own_metadata(self, endpoint: Endpoint, method: str) -> tuple[tuple[str, str], ...]:
        """Metadata of a call that the agent makes for itself."""
        proof = "" if self._forward_auth is None else self._forward_auth.sign(endpoint.node, "", "", "", "", method)
        return ((FORWARD_KEY, proof),) if proof else ()

    def _retire(self, connection: _PeerConnection) -> None:
        task = asyncio.create_task(connection.close(CALLS_GRACE_S))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


async def _wait_until_connected(channel: grpc.aio.Channel, within_s: float) -> None:
    """Wait for the connection. Raises AttemptFailed after `within_s` without one, or when the channel is closed.

    A connection that fails at once is left to the call, which reports why.
    """
    try:
        async with asyncio.timeout(within_s):
            while (state := channel.get_state(try_to_connect=True)) in _CONNECTING:
                await channel.wait_for_state_change(state)
    except TimeoutError as cause:
        raise _connect_failure("no connection", within_s) from cause
    if state is grpc.ChannelConnectivity.SHUTDOWN:
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


def _failure(error: grpc.aio.AioRpcError) -> AttemptFailed:
    """Map a gRPC error to an AttemptFailed.

    A refusal of another front is taken as it is. A status of grpc itself is about the connection, except four of them.
    """
    trailing: Any = error.trailing_metadata() or ()
    said: dict[str, Any] = dict(trailing)
    refusal = status.refusal_of(error)
    if refusal.code is Code.FORWARD_DENIED:  # it does not list this front yet, or no longer has the workload
        refusal = replace(refusal, code=Code.MODEL_NOT_READY, remedy="retry")
        return AttemptFailed(refusal, was_sent=False, retry_after_s=Seconds(1.0))
    if status.CODE_KEY in said:
        retry = status.retry_after_s(error)
        return AttemptFailed(refusal, was_sent=True, retry_after_s=None if retry is None else Seconds(retry))
    details = error.details() or ""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" not in details:
        return AttemptFailed(replace(refusal, code=Code.OVERLOADED), was_sent=False)  # too many calls at once
    if error.code() in _STATUSES_ABOUT_THE_REQUEST:
        return AttemptFailed(refusal, was_sent=True)
    if details.startswith(_CONNECT_FAILURES) and (_NO_DESCRIPTOR in details or file_descriptors.are_exhausted()):
        return AttemptFailed(file_descriptors.NONE_LEFT, was_sent=False)  # local: it says nothing about the replica
    found = f"{error.code().name}: {details}"[:300]
    return AttemptFailed(Refusal(Code.REPLICA_UNREACHABLE, found, "an answer", "retry"), was_sent=True)


def _tensor(spec: dict[str, Any]) -> oip.ModelMetadataResponse.TensorMetadata:
    return oip.ModelMetadataResponse.TensorMetadata(name=spec["name"], datatype=spec["dtype"], shape=spec["shape"])
