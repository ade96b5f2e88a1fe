"""Calls to whichever member of an etcd cluster answers.

Every request made here may be carried out twice without harm (what writes carries a guard of its own, `store.py`), so
one that gets no answer goes to the next member. Whether it was carried out after all is then for the guard to tell:
`Doubtful` says that nobody did in time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import grpc
import grpc.aio

from shoal.etcd import etcd_pb2, etcd_pb2_grpc
from shoal.types.codes import Code, Refusal, ShoalError

TRY_S: Final = 1.5
"""A member's time to answer; the first ones have less, since what is sent while etcd elects its leader gets none."""
FIRST_TRY_S: Final = 0.4
"""Also all the time that a member has which is not connected: it is most likely the one that died."""
PATIENCE_S: Final = 5.0
PAUSE_S: Final = 0.05
ANSWER_BYTES: Final = 512 * 2**20
NEEDS_LEADER: Final = (("hasleader", "true"),)
"""etcd's own: a member that is cut off from the others says so at once."""

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", ANSWER_BYTES),
    ("grpc.max_send_message_length", ANSWER_BYTES),
    # A member ends the connection of whoever pings more often than every 5 s, or without a call.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_500),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


class Answer(Protocol):
    @property
    def header(self) -> etcd_pb2.ResponseHeader: ...


R = TypeVar("R", bound=Answer)


class Doubtful(ShoalError):
    """No answer in time: the request was carried out, will be, or never is."""


class Replaced(ShoalError):
    """The cluster is not the one that it was, or has gone back in time: what is remembered of it no longer counts."""


@dataclass(frozen=True, slots=True)
class Pem:
    """Whom to trust, and who one is."""

    ca: bytes
    certificate: bytes
    key: bytes

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)


@dataclass(frozen=True, slots=True)
class Member:
    endpoint: str
    channel: grpc.aio.Channel
    kv: "etcd_pb2_grpc.KVAsyncStub"  # the stubs' classes for asyncio are known to type checkers only
    watch: "etcd_pb2_grpc.WatchAsyncStub"
    lease: "etcd_pb2_grpc.LeaseAsyncStub"

    @property
    def connected(self) -> bool:
        return self.channel.get_state() is grpc.ChannelConnectivity.READY


class Members:
    """endpoints: HOST:PORT of each. newest: the highest revision that any answer told; cluster: its id, 0 unknown.
    outdated: set once what is remembered of this cluster no longer counts."""

    def __init__(self, endpoints: Sequence[str], read: Callable[[], Pem]) -> None:
        """read: the files, as they are now. Raises OSError as it does."""
        self._endpoints = tuple(endpoints)
        self._read = read
        self._pem = read()
        self._members = self._dialled(self._pem)
        self._preferred = 0
        self.newest = 0
        self.cluster = 0
        self.outdated = asyncio.Event()

    @property
    def preferred(self) -> Member:
        return self._members[self._preferred]

    def avoid(self, member: Member) -> None:
        """Another one is asked first from now on. With a certificate that has replaced the one in use meanwhile, where
        there is one: perhaps that is what this member asked for."""
        if member is self.preferred:
            self._preferred = (self._preferred + 1) % len(self._members)
        with suppress(OSError):
            pem = self._read()
            if pem != self._pem:  # the old channels end with the last call on them
                self._pem, self._members = pem, self._dialled(pem)

    def _dialled(self, pem: Pem) -> tuple[Member, ...]:
        return tuple(_member(endpoint, pem.credentials) for endpoint in self._endpoints)

    async def call(
        self, ask: Callable[[Member, float], Awaitable[R]], *, patience_s: float = PATIENCE_S, exact: bool = True
    ) -> R:
        """The answer of the first member that gives one. ask: a member and the seconds that it has.

        exact: the answer is as new as any before it (reads and transactions are). Raises Doubtful; Replaced;
        ShoalError(STORE_FULL | STORE_CORRUPT | STORE_UNAVAILABLE | TOO_LARGE) when it was surely not carried out;
        AioRpcError with OUT_OF_RANGE, NOT_FOUND or FAILED_PRECONDITION, of which the caller knows what it means.
        """
        clock = asyncio.get_running_loop()
        ends, doubtful, seen, limit_s = clock.time() + patience_s, False, self.newest, FIRST_TRY_S
        while True:
            member = self.preferred
            tries_s = limit_s if member.connected else FIRST_TRY_S
            try:
                answer = await ask(member, min(tries_s, max(0.05, ends - clock.time())))
            except grpc.aio.AioRpcError as error:
                refusal = _refusal_of(error)
                if refusal is not None:
                    raise (Doubtful if doubtful else ShoalError)(refusal) from error
                if error.code() in _CALLERS:
                    raise
                doubtful = True
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    limit_s = min(max(limit_s, 1.5 * tries_s), TRY_S)
                self.avoid(member)
                if clock.time() >= ends:
                    raise Doubtful(self._silent(error)) from error
                await asyncio.sleep(PAUSE_S)
            else:
                self._check(answer.header, seen if exact else 0)
                return answer

    async def range(self, request: etcd_pb2.RangeRequest, *, patience_s: float = PATIENCE_S) -> etcd_pb2.RangeResponse:
        """Raises as `call` does."""
        return await self.call(
            lambda member, limit_s: member.kv.Range(request, timeout=limit_s, metadata=NEEDS_LEADER),
            patience_s=patience_s,
        )

    async def txn(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        """Raises as `call` does."""
        return await self.call(lambda member, limit_s: member.kv.Txn(request, timeout=limit_s, metadata=NEEDS_LEADER))

    def _check(self, header: etcd_pb2.ResponseHeader, at_least: int) -> None:
        if self.cluster not in (0, header.cluster_id) or header.revision < at_least:
            self.outdated.set()
            raise Replaced(went_back(at_least, header.revision))
        self.cluster = header.cluster_id
        self.newest = max(self.newest, header.revision)

    async def close(self) -> None:
        await asyncio.gather(*(member.channel.close(None) for member in self._members))

    def _silent(self, error: grpc.aio.AioRpcError) -> Refusal:
        asked = ", ".join(member.endpoint for member in self._members)
        return Refusal(
            Code.STORE_UNAVAILABLE,
            f"no answer from etcd at {asked}: {str(error.details())[:120]}",
            "more than half of its members, running and reachable",
            "see `etcdctl endpoint status`; it is tried again, and works by itself once they are back",
        )


def is_at(key: bytes, revision: int) -> etcd_pb2.Compare:
    """A transaction's condition; 0: the key is not there."""
    return etcd_pb2.Compare(result=etcd_pb2.Compare.EQUAL, target=etcd_pb2.Compare.MOD, key=key, mod_revision=revision)


_CALLERS: Final = frozenset(
    {grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION}
)


def _member(endpoint: str, credentials: grpc.ChannelCredentials) -> Member:
    channel = grpc.aio.secure_channel(endpoint, credentials, options=_OPTIONS)
    return Member(
        endpoint,
        channel,
        etcd_pb2_grpc.KVStub(channel),
        etcd_pb2_grpc.WatchStub(channel),
        etcd_pb2_grpc.LeaseStub(channel),
    )


def went_back(seen: int, found: int) -> Refusal:
    return Refusal(
        Code.STORE_CORRUPT,
        f"etcd stands at revision {found}, this coordinator has seen {seen}: it is another cluster, or an old copy",
        "the state that was acknowledged",
        "what was written after that copy is lost: compare what agents run, apply your documents again",
    )


def _refusal_of(error: grpc.aio.AioRpcError) -> Refusal | None:
    """What asking again would not change. Texts: etcd's api/v3rpc/rpctypes/error.go."""
    details = str(error.details())
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "space exceeded" in details:
            return Refusal(
                Code.STORE_FULL,
                f"etcd has raised its space alarm: {details}",
                "room below its --quota-backend-bytes",
                "`etcdctl compact REVISION`, `etcdctl defrag`, `etcdctl alarm disarm`; writes resume by themselves",
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "too many requests" not in details:
            return Refusal(Code.TOO_LARGE, details[:120], "an answer that fits", "list less at once")
        case grpc.StatusCode.INVALID_ARGUMENT if "too many operations" in details or "too large" in details:
            return Refusal(
                Code.TOO_LARGE,
                details[:120],
                "one transaction of etcd",
                "start its members with --max-txn-ops=10240 --max-request-bytes=10485760",
            )
        case grpc.StatusCode.DATA_LOSS:
            return Refusal(Code.STORE_CORRUPT, details[:120], "members that agree", "see `etcdctl alarm list`")
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return Refusal(
                Code.STORE_UNAVAILABLE,
                f"etcd: {details[:120]}",
                "read and write rights under the prefix",
                "give the name in this coordinator's certificate a role: `etcdctl role grant-permission`",
            )
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.UNIMPLEMENTED:
            return Refusal(Code.STORE_UNAVAILABLE, f"etcd: {details[:120]}", "etcd 3.4 or later", "update etcd")
        case _:
            return None
