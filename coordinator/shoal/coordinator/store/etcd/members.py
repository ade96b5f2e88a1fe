"""Calls to any member of an etcd cluster that answers.

Every request made here may be executed twice without harm, because writes carry a guard of their own (`store.py`). A
request that gets no answer therefore goes to the next member. The guard then tells whether the first attempt was
executed; `OutcomeUnknown` means that no member answered in time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import grpc
import grpc.aio
from cryptography import x509
from cryptography.x509.oid import NameOID

from shoal.coordinator.store.etcd.options import EtcdOptions
from shoal.etcd import etcd_pb2, etcd_pb2_grpc
from shoal.types.codes import Code, Refusal, ShoalError, refuse

TRY_S: Final = 1.5
"""A member's time to answer, in seconds. First attempts have less, because a request that is sent while etcd elects its
leader gets no answer."""
FIRST_TRY_S: Final = 0.4
"""Seconds for a first attempt, and for a member without a connection, which most likely died."""
CALL_TIMEOUT_S: Final = 5.0
PAUSE_S: Final = 0.05
ANSWER_BYTES: Final = 512 * 2**20
NEEDS_LEADER: Final = (("hasleader", "true"),)
"""etcd's own metadata: a member that is cut off from the others refuses at once instead of waiting."""

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", ANSWER_BYTES),
    ("grpc.max_send_message_length", ANSWER_BYTES),
    # A member closes the connection of a client that pings more often than every 5 s, or without a call.
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


class EtcdResponse(Protocol):
    """Any response of etcd: all carry a header."""

    @property
    def header(self) -> etcd_pb2.ResponseHeader: ...


R = TypeVar("R", bound=EtcdResponse)


class OutcomeUnknown(ShoalError):
    """No answer in time: the request was executed, will be, or never is."""


class ClusterReplaced(ShoalError):
    """The cluster is another one, or its revision went back: everything cached from it is invalid."""


@dataclass(frozen=True, slots=True)
class Pem:
    """The CA to trust, and the client's certificate and key, each PEM."""

    ca: bytes
    certificate: bytes
    key: bytes

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)

    @property
    def user(self) -> str:
        """The etcd user: the certificate's common name; "" without one, or if the certificate cannot be read."""
        try:
            subject = x509.load_pem_x509_certificate(self.certificate).subject
        except ValueError:
            return ""
        return next((str(each.value) for each in subject.get_attributes_for_oid(NameOID.COMMON_NAME)), "")


@dataclass(frozen=True, slots=True)
class EtcdMember:
    """One member of the cluster, with the stubs of its channel."""

    # HOST:PORT.
    endpoint: str
    # Channel that all stubs share; connects at the first call.
    channel: grpc.aio.Channel
    # Reads and transactions.
    kv: "etcd_pb2_grpc.KVAsyncStub"  # only type checkers know the stubs' asyncio classes
    # Streams of changes.
    watch: "etcd_pb2_grpc.WatchAsyncStub"
    # Leases, which elections use.
    lease: "etcd_pb2_grpc.LeaseAsyncStub"
    # Users and roles.
    auth: "etcd_pb2_grpc.AuthAsyncStub"

    @property
    def is_connected(self) -> bool:
        return self.channel.get_state() is grpc.ChannelConnectivity.READY


class EtcdMembers:
    """All members of one cluster, one of them current. newest_revision: the highest revision in any answer. cluster_id:
    0 while unknown. stale: set once everything cached from this cluster is invalid."""

    def __init__(self, endpoints: Sequence[str], read: Callable[[], Pem]) -> None:
        """endpoints: HOST:PORT of each member. read: returns the current PEM files; its OSError passes through."""
        self._endpoints = tuple(endpoints)
        self._read = read
        self._pem = read()
        self._members = self._connect(self._pem)
        self._current_index = 0
        self.newest_revision = 0
        self.cluster_id = 0
        self.stale = asyncio.Event()

    @classmethod
    def from_options(cls, options: EtcdOptions) -> "EtcdMembers":
        """Connects at the first call. Raises ShoalError(FIELD_INVALID)."""
        ca, certificate, key = options.ca, options.certificate, options.key
        try:
            return cls(options.endpoints, lambda: Pem(ca.read_bytes(), certificate.read_bytes(), key.read_bytes()))
        except OSError as cause:
            found = f"{cause.filename}: {cause.strerror}"
            raise refuse(Code.FIELD_INVALID, found, "PEM files that can be read", "see --etcd-ca") from cause

    @property
    def current(self) -> EtcdMember:
        return self._members[self._current_index]

    @property
    def user(self) -> str:
        """This coordinator's etcd user, from the certificate in use."""
        return self._pem.user

    def avoid(self, member: EtcdMember) -> None:
        """Asks another member first from now on. Also reloads the certificate if its file changed, because an outdated
        one may be why this member failed."""
        if member is self.current:
            self._current_index = (self._current_index + 1) % len(self._members)
        self._reload_files()

    def _reload_files(self) -> bool:
        """True if new files have replaced those in use."""
        with suppress(OSError):
            pem = self._read()
            if pem != self._pem:  # channels with the old certificate end with their last call
                self._pem, self._members = pem, self._connect(pem)
                return True
        return False

    def _connect(self, pem: Pem) -> tuple[EtcdMember, ...]:
        return tuple(_member(endpoint, pem.credentials) for endpoint in self._endpoints)

    async def call(
        self, ask: Callable[[EtcdMember, float], Awaitable[R]], *, timeout_s: float = CALL_TIMEOUT_S, exact: bool = True
    ) -> R:
        """The answer of the first member that gives one. ask: gets a member and a timeout in seconds.

        exact: require an answer at least as new as any before it, which reads and transactions are. Raises
        OutcomeUnknown; ClusterReplaced; ShoalError(STORE_FULL | STORE_CORRUPT | STORE_DENIED | STORE_UNAVAILABLE |
        TOO_LARGE) if the request was certainly not executed; AioRpcError with OUT_OF_RANGE, NOT_FOUND or
        FAILED_PRECONDITION, which the caller interprets.
        """
        clock = asyncio.get_running_loop()
        ends, doubtful, seen, limit_s = clock.time() + timeout_s, False, self.newest_revision, FIRST_TRY_S
        while True:
            member = self.current
            tries_s = limit_s if member.is_connected else FIRST_TRY_S
            try:
                answer = await ask(member, min(tries_s, max(0.05, ends - clock.time())))
            except grpc.aio.AioRpcError as error:
                refusal = _refusal_of(error, self.user)
                if refusal is not None:
                    if refusal.code is Code.STORE_DENIED and self._reload_files():
                        continue
                    raise (OutcomeUnknown if doubtful else ShoalError)(refusal) from error
                if error.code() in _CALLER_CODES:
                    raise
                doubtful = True
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    limit_s = min(max(limit_s, 1.5 * tries_s), TRY_S)
                self.avoid(member)
                if clock.time() >= ends:
                    raise OutcomeUnknown(self._no_answer(error)) from error
                await asyncio.sleep(PAUSE_S)
            else:
                self._check(answer.header, seen if exact else 0)
                return answer

    async def range(
        self, request: etcd_pb2.RangeRequest, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> etcd_pb2.RangeResponse:
        """Raises as `call` does."""
        return await self.call(
            lambda member, limit_s: member.kv.Range(request, timeout=limit_s, metadata=NEEDS_LEADER),
            timeout_s=timeout_s,
        )

    async def txn(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        """Raises as `call` does."""
        return await self.call(lambda member, limit_s: member.kv.Txn(request, timeout=limit_s, metadata=NEEDS_LEADER))

    def _check(self, header: etcd_pb2.ResponseHeader, at_least: int) -> None:
        if self.cluster_id not in (0, header.cluster_id) or header.revision < at_least:
            self.stale.set()
            raise ClusterReplaced(rollback_refusal(at_least, header.revision))
        self.cluster_id = header.cluster_id
        self.newest_revision = max(self.newest_revision, header.revision)

    async def close(self) -> None:
        await asyncio.gather(*(member.channel.close(None) for member in self._members))

    def _no_answer(self, error: grpc.aio.AioRpcError) -> Refusal:
        asked = ", ".join(member.endpoint for member in self._members)
        return Refusal(
            Code.STORE_UNAVAILABLE,
            f"no answer from etcd at {asked}: {str(error.details())[:120]}",
            "more than half of its members, running and reachable",
            "see `etcdctl endpoint status`; it is tried again, and works by itself once they are back",
        )


def end_of(prefix: bytes) -> bytes:
    """The first key that is not under `prefix`. No byte of `prefix` is 0xFF, because keys are UTF-8."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def at_revision(key: bytes, revision: int) -> etcd_pb2.Compare:
    """A transaction's condition that `key` has this revision; 0: the key does not exist."""
    return etcd_pb2.Compare(result=etcd_pb2.Compare.EQUAL, target=etcd_pb2.Compare.MOD, key=key, mod_revision=revision)


_CALLER_CODES: Final = frozenset(
    {grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION}
)


def _member(endpoint: str, credentials: grpc.ChannelCredentials) -> EtcdMember:
    channel = grpc.aio.secure_channel(endpoint, credentials, options=_OPTIONS)
    return EtcdMember(
        endpoint,
        channel,
        etcd_pb2_grpc.KVStub(channel),
        etcd_pb2_grpc.WatchStub(channel),
        etcd_pb2_grpc.LeaseStub(channel),
        etcd_pb2_grpc.AuthStub(channel),
    )


def rollback_refusal(seen: int, found: int) -> Refusal:
    return Refusal(
        Code.STORE_CORRUPT,
        f"etcd stands at revision {found}, this coordinator has seen {seen}: it is another cluster, or an old copy",
        "the state that was acknowledged",
        "what was written after that copy is lost: compare what agents run, apply your documents again",
    )


def _refusal_of(error: grpc.aio.AioRpcError, user: str) -> Refusal | None:
    """The refusal for an error that a retry would not change, else None. user: the etcd user of the request. Texts:
    etcd's api/v3rpc/rpctypes/error.go."""
    details = str(error.details())
    is_nameless = "user name is empty" in details
    match error.code():
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return Refusal(
                Code.STORE_DENIED,
                f"etcd refuses its user {user!r:.80}: {details:.80}",
                "a user whose role may read and write what is asked for",
                "`shoal-coordinator etcd-users` makes users; --etcd-cert and --etcd-key name the certificate of one",
            )
        case grpc.StatusCode.INVALID_ARGUMENT if is_nameless and not user:
            return Refusal(
                Code.STORE_DENIED,
                "etcd knows its users by name, and this certificate has no common name",
                "the certificate of a user",
                "--etcd-cert and --etcd-key name one; `shoal-coordinator etcd-users` makes the user",
            )
        case grpc.StatusCode.INVALID_ARGUMENT if is_nameless or "auth store is old" in details:
            return None  # users changed, or authentication was enabled, while the request was in flight
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
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.UNIMPLEMENTED:
            return Refusal(Code.STORE_UNAVAILABLE, f"etcd: {details[:120]}", "etcd 3.4 or later", "update etcd")
        case _:
            return None
