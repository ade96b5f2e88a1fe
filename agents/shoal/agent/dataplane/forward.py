"""The ways to a replica: a worker of this node over its Unix socket, or another front over gRPC with mTLS.

Requests and answers pass as bytes. Whatever goes wrong is raised as `AttemptFailed`, with what routing must know: the
code, and whether the replica may have begun to work on the request.
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

from shoal.agent.dataplane.grpc import SERVICE
from shoal.agent.dataplane.tracing import Attempt
from shoal.agent.dataplane.transport import (
    AGREEMENT_KEY,
    HOP_KEY,
    MAX_MESSAGE,
    ORIGIN_KEY,
    REQUEST_KEY,
    STEP_KEY,
    TENANT_KEY,
    TRACE_KEY,
    TlsFiles,
)
from shoal.agent.dataplane.trust import Authorities
from shoal.agent.frames import ConnectionLost, FrameClient, Message
from shoal.agent.ports import LocalWorker
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.route import Endpoint, EndpointKind
from shoal.types.units import Seconds
from shoal.wire import cancelled, descriptors, limits, status
from shoal.wire.identity import dns_of
from shoal.wire.outbound import target_of_peer

WITNESS: Final = "shoal.v1.Witness"
SESSIONS: Final = "shoal.v1.Sessions"
CONNECT_TIMEOUT_S: Final = 1.2
PING_EVERY_S: Final = 0.4
SILENT_S: Final = 1.2
"""A worker with requests inside that does not answer a ping for so long gets no more time: they go elsewhere."""
CALLS_END_S: Final = 120.0
"""A channel that is left for another lasts so long for the calls inside."""
WAY_OPENS_S: Final = 0.75
"""A request waits so long for the way to a peer to open, then it goes elsewhere; the way is opened all the same."""
REGION_OPENS_S: Final = 1.5
"""As long for the way to another region, which may be on the other side of the world."""
REGION_BACK_S: Final = 5.0
"""And as long for the pings' connection to come back there, over a road that large requests fill."""
LONGEST_BACK_S: Final = 5.0
"""As long at the most inside a region, where large requests have been under way for long."""
TIMED_EVERY_S: Final = 15.0
TIMES: Final = 8
"""A road takes the least of so many times measured: it may have got longer; how busy who answers was is no road."""
TIMED_WITHIN_S: Final = 5.0
LARGE_BYTES: Final = 64 * 2**10
"""From here on a request is large: as much as may be under way before the other side says that it takes more (RFC 9113,
section 6.9.2: 65,535 bytes)."""
_OPENING: Final = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
_UNCONNECTED: Final = ("failed to connect", "errors resolving", "DNS resolution failed")
"""What grpc says, at the beginning, of a call that did not leave for want of a connection."""
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
class Errand:
    """What travels beside a request. left_s: until its deadline, from now. agreement: of a guest's. step: of a
    session's, the token by which it is known when it comes again. attempt: of a request that is traced."""

    tenant: str
    origin: str
    request_id: str
    left_s: Seconds
    agreement: str = ""
    step: str = ""
    attempt: Attempt | None = None


class AttemptFailed(ShoalError):
    """One attempt on one replica. sent: the replica may have begun to work on it."""

    def __init__(self, refusal: Refusal, *, sent: bool, retry_after_s: Seconds | None = None) -> None:
        super().__init__(refusal)
        self.sent = sent
        self.retry_after_s = retry_after_s


class Workers:
    """Connections to the workers of this node, each made when first needed and again after it broke."""

    def __init__(self) -> None:
        self._workers: dict[str, LocalWorker] = {}
        self._clients: dict[LocalWorker, FrameClient] = {}
        self._connecting: dict[LocalWorker, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def assignments(self) -> Collection[str]:
        return self._workers.keys()

    def configure(self, workers: Iterable[LocalWorker]) -> None:
        """A worker that is left out finishes what it has; then its connection is closed."""
        self._workers = {worker.assignment: worker for worker in workers}
        kept = set(self._workers.values())
        for worker in [known for known in self._clients if known not in kept]:
            self._connecting.pop(worker, None)
            self._close_if_idle(self._clients.pop(worker))

    async def infer(self, assignment: str, request: bytes, errand: Errand) -> bytes:
        """Raises AttemptFailed."""
        header: dict[str, Any] = {"deadline_s": errand.left_s, "origin": errand.origin, "request_id": errand.request_id}
        if errand.attempt is not None:
            header["trace"] = errand.attempt.traceparent
        answer = await self._call(assignment, "infer", request, header, errand.left_s)
        if errand.attempt is not None:
            errand.attempt.told(answer.header)
        return answer.payload

    async def answer(self, assignment: str, request: bytes, errand: Errand) -> bytes:
        """As `infer`, for a comparison: counted as nobody's request. Raises AttemptFailed."""
        return (await self._call(assignment, "answer", request, {"deadline_s": errand.left_s}, errand.left_s)).payload

    async def metadata(self, assignment: str, errand: Errand) -> oip.ModelMetadataResponse:
        """Inputs and outputs alone. Raises AttemptFailed."""
        loaded = json.loads((await self._call(assignment, "metadata", b"", {}, errand.left_s)).payload)
        return oip.ModelMetadataResponse(
            inputs=[_tensor(spec) for spec in loaded["inputs"]], outputs=[_tensor(spec) for spec in loaded["outputs"]]
        )

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        for task in tuple(self._tasks):
            task.cancel()

    async def _call(
        self, assignment: str, kind: str, payload: bytes, header: dict[str, Any], left_s: Seconds
    ) -> Message:
        worker, client = await self._client(assignment)
        try:
            return await client.call(kind, payload, header={**header, "assignment": assignment}, timeout=left_s)
        except ConnectionLost as error:
            refusal = Refusal(Code.WORKER_CRASHED, error.refusal.found, "an answer", "retry")
            raise AttemptFailed(refusal, sent=True) from error
        except ShoalError as error:
            raise AttemptFailed(error.refusal, sent=True) from error
        finally:
            if self._clients.get(worker) is not client:
                self._close_if_idle(client)

    async def _client(self, assignment: str) -> tuple[LocalWorker, FrameClient]:
        worker = self._workers.get(assignment)
        if worker is None:
            raise AttemptFailed(
                Refusal(Code.MODEL_NOT_READY, f"{assignment} has no worker here", "a ready replica", "retry elsewhere"),
                sent=False,
            )
        client = self._clients.get(worker)
        if client is not None and not client.closed:
            return worker, client
        async with self._connecting.setdefault(worker, asyncio.Lock()):
            client = self._clients.get(worker)
            if client is not None and not client.closed:
                return worker, client
            try:
                client = await FrameClient.connect(worker.socket, worker.nonce, timeout=CONNECT_TIMEOUT_S)
            except ShoalError as error:
                raise AttemptFailed(error.refusal, sent=False) from error
            if self._workers.get(assignment) is worker:
                self._clients[worker] = client
            self._beside(_watch(client))
            return worker, client

    def _close_if_idle(self, client: FrameClient) -> None:
        if client.in_flight == 0:
            self._beside(client.close())

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True, slots=True)
class _Way:
    """Where to, and who must answer there. roots: its region's authorities (PEM); of our own region the node's file."""

    address: str
    name: str
    roots: bytes


class _Road:
    """To one peer: requests and answers on one channel, large ones on another, and pings on a third, where they wait
    behind none of those. Each connects when first used."""

    def __init__(
        self, data: grpc.aio.Channel, large: grpc.aio.Channel, life: grpc.aio.Channel, back_s: Seconds
    ) -> None:  # fmt: skip
        """back_s: how long the pings' connection may be away before its peer counts as silent; and as long again as the
        oldest large call inside has been under way, which would begin anew elsewhere, but no longer than
        `LONGEST_BACK_S`."""
        self.data = data
        self.large = large
        self.silent = False
        """Its peer answers no ping: another road must open before anything is sent there."""
        self._life = life
        self._back_s = back_s
        self._times: deque[float] = deque(maxlen=TIMES)
        self._calls: set[grpc.aio.UnaryUnaryCall[bytes, bytes]] = set()
        self._since: dict[grpc.aio.UnaryUnaryCall[bytes, bytes], float] = {}
        """Of the large ones among them. What else is under way for long fills no road."""
        self._watching = asyncio.create_task(self._watch())
        self._timing = asyncio.create_task(self._time())

    @property
    def seconds(self) -> Seconds:
        """There and back, with nothing asked of the peer; 0 before it was measured."""
        return Seconds(min(self._times, default=0.0))

    def channel(self, request: bytes) -> grpc.aio.Channel:
        return self.large if len(request) >= LARGE_BYTES else self.data

    async def call(self, path: str, request: bytes, left_s: Seconds, said: tuple[tuple[str, str], ...]) -> bytes:
        """Raises AttemptFailed."""
        channel = self.channel(request)
        call = channel.unary_unary(path, None, None)(request, timeout=left_s, metadata=said)
        self._calls.add(call)
        if channel is self.large:
            self._since[call] = asyncio.get_running_loop().time()
        try:
            answer: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        except asyncio.CancelledError as error:
            if cancelled.is_this_task():
                raise
            found = "a front that answers no ping" if self.silent else "a way that another one has followed"
            refusal = Refusal(Code.REPLICA_UNREACHABLE, found, "an answer", "retry")
            raise AttemptFailed(refusal, sent=True) from error
        finally:
            self._calls.discard(call)
            self._since.pop(call, None)
        return answer

    async def close(self, grace_s: float | None) -> None:
        """Of calls inside."""
        try:
            await asyncio.gather(self.data.close(grace_s), self.large.close(grace_s))
        finally:
            self._watching.cancel()
            self._timing.cancel()
            await self._life.close(None)

    async def _watch(self) -> None:
        """Until the pings' connection broke and does not open again: then calls inside are given up."""
        with suppress(grpc.aio.UsageError):  # it was closed
            await self._until_open()
            while not self.silent:
                await self._life.wait_for_state_change(grpc.ChannelConnectivity.READY)
                try:
                    async with asyncio.timeout(self._patience_s()):
                        await self._until_open()
                except TimeoutError:
                    self.silent = True
            self._timing.cancel()  # else it would go on opening a way that nobody takes any more
            for call in tuple(self._calls):
                call.cancel()

    def _patience_s(self) -> float:
        now = asyncio.get_running_loop().time()
        under_way_s = max((now - since for since in self._since.values()), default=0.0)
        return max(self._back_s, min(self._back_s + under_way_s, LONGEST_BACK_S))

    async def _time(self) -> None:
        """Again and again, for as long as its peer answers."""
        loop = asyncio.get_running_loop()
        with suppress(grpc.aio.UsageError):  # it was closed
            while True:
                await self._until_open()
                ask, started = self._life.unary_unary(f"/{SERVICE}/ServerLive", None, None), loop.time()
                with suppress(grpc.aio.AioRpcError):
                    await ask(b"", timeout=TIMED_WITHIN_S)
                    self._times.append(loop.time() - started)
                await asyncio.sleep(TIMED_EVERY_S)

    async def _until_open(self) -> None:
        while (state := self._life.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            await self._life.wait_for_state_change(state)


class Peers:
    """Channels to other fronts, as this node; each peer must prove the name that the route gives it, by an authority of
    its own region."""

    def __init__(self, region: str, tls: TlsFiles, authorities: Authorities) -> None:
        self._region = region
        self._tls = tls
        self._authorities = authorities
        self._stamp: tuple[int, ...] = ()
        self._files: tuple[bytes, bytes, bytes] | None = None
        self._roads: dict[_Way, _Road] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def configure(self, endpoints: Iterable[Endpoint]) -> None:
        """Channels to who is in no route any more are closed once their calls have ended. Those to other regions are
        opened now: no request shall wait for so long a way."""
        remote = {self._key(endpoint): endpoint for endpoint in endpoints if endpoint.kind is not EndpointKind.LOCAL}
        for key in [known for known in self._roads if known not in remote]:
            self._leave(self._roads.pop(key))
        for endpoint in remote.values():
            if endpoint.region:
                with suppress(AttemptFailed):
                    road = self._road(endpoint)
                    road.data.get_state(try_to_connect=True)
                    road.large.get_state(try_to_connect=True)

    def is_opening(self, endpoint: Endpoint) -> bool:
        """Whether a request would have to wait for the way there; it begins to open. Of a worker here there is none,
        and one that failed says so at once."""
        if endpoint.kind is EndpointKind.LOCAL:
            return False
        with suppress(AttemptFailed):
            return self._road(endpoint).data.get_state(try_to_connect=True) in _OPENING
        return False

    def road_s(self, endpoint: Endpoint) -> Seconds:
        """There and back; 0 where it is not known, and on this node."""
        road = None if endpoint.kind is EndpointKind.LOCAL else self._roads.get(self._key(endpoint))
        return Seconds(0.0) if road is None else road.seconds

    async def infer(self, endpoint: Endpoint, request: bytes, errand: Errand) -> bytes:
        """Raises AttemptFailed."""
        return await self._call(endpoint, f"/{SERVICE}/ModelInfer", request, errand.left_s, _said(endpoint, errand))

    async def metadata(self, endpoint: Endpoint, name: str, errand: Errand) -> oip.ModelMetadataResponse:
        """Raises AttemptFailed."""
        request = oip.ModelMetadataRequest(name=name).SerializeToString()
        path, said = f"/{SERVICE}/ModelMetadata", _said(endpoint, errand)
        return oip.ModelMetadataResponse.FromString(await self._call(endpoint, path, request, errand.left_s, said))

    async def witness(self, endpoint: Endpoint, method: str, request: bytes, left_s: Seconds) -> bytes:
        """What an agent of this region answers to a verifier of its replica, serialized. Raises AttemptFailed."""
        return await self._call(endpoint, f"/{WITNESS}/{method}", request, left_s, ())

    async def hand_over(self, endpoint: Endpoint, method: str, request: bytes, left_s: Seconds) -> bytes:
        """What an agent of this region answers to who gives it a session, serialized. Raises AttemptFailed."""
        return await self._call(endpoint, f"/{SESSIONS}/{method}", request, left_s, ())

    async def close(self) -> None:
        for road in self._roads.values():
            await road.close(None)
        for task in tuple(self._leaving):
            task.cancel()

    async def _call(
        self, endpoint: Endpoint, path: str, request: bytes, left_s: Seconds, said: tuple[tuple[str, str], ...]
    ) -> bytes:
        return await (await self._way(endpoint, request)).call(path, request, left_s, said)

    async def _way(self, endpoint: Endpoint, request: bytes) -> _Road:
        """A road that is open for it, or one that says why it is not. Raises AttemptFailed."""
        while True:
            road = self._road(endpoint)
            with suppress(grpc.aio.UsageError):  # it was left meanwhile
                await _open(road.channel(request), REGION_OPENS_S if endpoint.region else WAY_OPENS_S)
            if self._roads.get(self._key(endpoint)) is road and not road.silent:
                return road

    def _road(self, endpoint: Endpoint) -> _Road:
        certificate, private_key, authority = self._newest()
        key = self._key(endpoint)
        road = self._roads.get(key)
        if road is not None and road.silent:
            self._leave(self._roads.pop(key))
            road = None
        if road is None:
            if endpoint.region and not key.roots:
                found = f"{endpoint.node} of {endpoint.region}, which no agreement names"
                raise AttemptFailed(Refusal(Code.CERT_UNTRUSTED, found, "its region's authorities"), sent=False)
            credentials = grpc.ssl_channel_credentials(key.roots or authority, private_key, certificate)
            patiences = limits.ROAD, limits.WIDE, limits.LIFE_AFAR if endpoint.region else limits.LIFE
            try:
                target = target_of_peer(key.address) if endpoint.region else key.address
            except ShoalError as denied:
                raise AttemptFailed(denied.refusal, sent=False) from denied
            data, large, life = (
                grpc.aio.secure_channel(
                    target,
                    credentials,
                    limits.channel_options(MAX_MESSAGE, server_name=key.name, patience=patience),
                )
                for patience in patiences
            )
            road = _Road(data, large, life, Seconds(REGION_BACK_S if endpoint.region else WAY_OPENS_S))
            self._roads[key] = road
        return road

    def _newest(self) -> tuple[bytes, bytes, bytes]:
        """Our files. After they changed every road is made anew; calls inside the old ones end there."""
        try:
            stamp = self._tls.stamp()
            if self._files is None or stamp != self._stamp:
                self._files, self._stamp = self._tls.read(), stamp
                while self._roads:
                    self._leave(self._roads.popitem()[1])
        except OSError as cause:
            if self._files is None and descriptors.are_short(cause):
                raise AttemptFailed(descriptors.NONE_LEFT, sent=False) from cause
            if self._files is None:
                found = f"this node's files: {cause.strerror}"
                refusal = Refusal(Code.REPLICA_UNREACHABLE, found, "its certificate", "retry")
                raise AttemptFailed(refusal, sent=False) from cause
        return self._files

    def _key(self, endpoint: Endpoint) -> _Way:
        role = Role.GATEWAY if endpoint.kind is EndpointKind.GATEWAY else Role.AGENT
        name = dns_of(endpoint.region or self._region, role, endpoint.node)
        roots = self._authorities.roots_of(endpoint.region, endpoint.node) if endpoint.region else None
        return _Way(endpoint.address, name, roots or b"")

    def _leave(self, road: _Road) -> None:
        task = asyncio.create_task(road.close(CALLS_END_S))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def _said(endpoint: Endpoint, errand: Errand) -> tuple[tuple[str, str], ...]:
    """Another region learns neither tenants nor nodes of ours; a trace's id is chance, or its client's word."""
    always: tuple[tuple[str, str], ...] = ((HOP_KEY, "1"), (REQUEST_KEY, errand.request_id))
    if errand.attempt is not None:
        always = (*always, (TRACE_KEY, errand.attempt.traceparent))
    if endpoint.region:
        return (*always, (AGREEMENT_KEY, endpoint.agreement))
    inside: tuple[tuple[str, str], ...] = (*always, (TENANT_KEY, errand.tenant), (ORIGIN_KEY, errand.origin))
    if errand.step:
        inside = (*inside, (STEP_KEY, errand.step))
    return (*inside, (AGREEMENT_KEY, errand.agreement)) if errand.agreement else inside


async def _open(channel: grpc.aio.Channel, within_s: float) -> None:
    """Raises AttemptFailed while nobody answers, or when the way is given up. What fails at once is left to the call,
    which tells why."""
    try:
        async with asyncio.timeout(within_s):
            while (state := channel.get_state(try_to_connect=True)) in _OPENING:
                await channel.wait_for_state_change(state)
    except TimeoutError as cause:
        raise _unopened("no connection", within_s) from cause
    if state is grpc.ChannelConnectivity.SHUTDOWN:
        raise _unopened("the replica left the routes", within_s)


def _unopened(found: str, within_s: float) -> AttemptFailed:
    refusal = Refusal(Code.REPLICA_UNREACHABLE, found, f"a connection within {within_s:g}s", "retry")
    return AttemptFailed(refusal, sent=False)


async def _watch(client: FrameClient) -> None:
    """For as long as the connection lives. A process that is stopped, or hangs, keeps its connections."""
    while not client.closed:
        await asyncio.sleep(PING_EVERY_S)
        if client.in_flight == 0:
            continue
        try:
            await client.call("ping", timeout=SILENT_S)
        except ConnectionLost:
            return
        except ShoalError as error:
            if error.code is Code.DEADLINE_EXCEEDED:
                found = f"the worker has not answered for {SILENT_S:g}s"
                client.abandon(Refusal(Code.REPLICA_UNREACHABLE, found, "a sign of life", "retry"))


def _failure(error: grpc.aio.AioRpcError) -> AttemptFailed:
    """What a front of ours refused with counts as it says; what grpc itself says is about the way, but for four."""
    trailing: Any = error.trailing_metadata() or ()
    said: dict[str, Any] = dict(trailing)
    refusal = status.refusal_of(error)
    if status.CODE_KEY in said:
        retry = status.retry_after_s(error)
        return AttemptFailed(refusal, sent=True, retry_after_s=None if retry is None else Seconds(retry))
    details = error.details() or ""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" not in details:
        return AttemptFailed(replace(refusal, code=Code.OVERLOADED), sent=False)  # too many calls at once
    if error.code() in _STATUSES_ABOUT_THE_REQUEST:
        return AttemptFailed(refusal, sent=True)
    if details.startswith(_UNCONNECTED) and (_NO_DESCRIPTOR in details or descriptors.used_up()):
        return AttemptFailed(descriptors.NONE_LEFT, sent=False)  # no word on the replica, which may be well
    found = f"{error.code().name}: {details}"[:300]
    return AttemptFailed(Refusal(Code.REPLICA_UNREACHABLE, found, "an answer", "retry"), sent=True)


def _tensor(spec: dict[str, Any]) -> oip.ModelMetadataResponse.TensorMetadata:
    return oip.ModelMetadataResponse.TensorMetadata(name=spec["name"], datatype=spec["dtype"], shape=spec["shape"])
