"""Authentication of forwards between the fronts of a region: who may forward what to this node, and its proof.

The coordinator lists for each node the fronts that may forward to it, for which workloads, and each front's X25519
public key. Two fronts that know each other's key derive a secret without a message. The entering front authenticates
each forward with an HMAC under that secret, over receiver, tenant, workload, origin, request and a stamp that never
repeats. The receiver accepts each stamp once. An HMAC takes two microseconds a forward; a signature would take 150.
"""

import hashlib
import hmac
import secrets
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.agent.dataplane.transport import InboundCall
from shoal.host.x25519 import KEY_BYTES, make_exchange
from shoal.types.assignment import Forwarding
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

MAX_STAMPS: Final = 16_384
"""Stamps remembered for one front. A stamp older than these is refused, so a forward is accepted at most once."""
STAMP_TTL_US: Final = 300 * 10**6
"""A forward whose stamp is this much older than the newest of its front is refused; a request takes at most as long
(`max_timeout_s`)."""
_CONTEXT: Final = b"shoal forward 1"


@dataclass(slots=True)
class _ForwardPeer:
    """A front that may forward here."""

    # Secret shared with it; empty where either side has no key.
    secret: bytes
    # Begins an HMAC under the secret: to copy it takes half as long as to begin another. None without a secret.
    mac: hmac.HMAC | None
    # Workloads whose requests it may forward.
    workloads: frozenset[WorkloadKey]
    # Stamps up to this one are refused.
    floor: int = 0
    # Accepted stamps above `floor`, ascending.
    used_stamps: list[int] = field(default_factory=list)


class ForwardAuth:
    """Signs and checks the forwards of one front.

    `node` is this agent's name. `private` is its X25519 private key; empty where it signs nothing. `wall` is the clock
    for stamps.
    """

    def __init__(self, region: str, node: str, private: bytes, wall: Callable[[], Wall]) -> None:
        self._region = region
        self._node = node
        if private and len(private) != KEY_BYTES:
            raise ValueError(f"a private key of {len(private)} bytes")
        self._private = private
        self._exchange = make_exchange()
        self._wall = wall
        self._forwarding: Forwarding | None = None
        self._peers: Mapping[str, _ForwardPeer] = {}
        self._secrets: dict[str, bytes] = {}
        """Shared secrets by the other front's public key."""
        self._last = 0

    def configure(self, forwarding: Forwarding | None) -> None:
        """Apply a complete list. None: the coordinator does not say who may forward, so every front may."""
        if forwarding == self._forwarding:
            return
        known, before = forwarding.fronts if forwarding is not None else (), self._peers
        shared = {each.key: self._secret_of(each.key) for each in known}
        peers = {each.node: _make_peer(shared[each.key], each.workloads) for each in known}
        for name, peer in peers.items():
            if name in before and before[name].secret == peer.secret:
                peer.floor, peer.used_stamps = before[name].floor, before[name].used_stamps
        # All at once: a list that failed halfway would count as applied when it is told again.
        self._forwarding, self._secrets, self._peers = forwarding, shared, peers

    def may_enter(self, tenant: str) -> bool:
        """Whether that tenant's clients may call this node for any workload."""
        told = self._forwarding
        return told is None or told.may_enter(tenant)

    def sign(self, to: str, tenant: str, workload: str, origin: str, request: str, extras: str) -> str:
        """The proof of a forward for the front of `to`; empty where the two share no secret."""
        peer = self._peers.get(to)
        if peer is None or peer.mac is None:
            return ""
        stamp = self._last = max(self._last + 1, int(self._wall() * 1e6))
        proof = _proof(peer.mac, self._node, to, stamp, tenant, workload, origin, request, extras)
        return f"{stamp};{workload};{proof}"

    def check(self, call: InboundCall, front: str, extras: str) -> str:
        """The one workload that `front` signed the request for; empty where any is allowed.

        The check changes nothing; `consume` accepts the forward. Raises ShoalError(FORWARD_DENIED).
        """
        if self._forwarding is None:
            return ""
        peer = self._peers.get(front)
        if peer is None:
            raise _denial(f"agent {front}, which is listed for no workload of this node")
        if peer.mac is None:  # an earlier version: only its certificate and the list count
            return ""
        stamp, workload, proof = _parse_proof(call.forward)
        wanted = _proof(peer.mac, front, self._node, stamp, call.tenant, workload, call.origin, call.request_id, extras)
        if not hmac.compare_digest(wanted, proof):
            raise _denial(f"a forward that {front} did not sign so")
        return workload

    def check_own(self, call: InboundCall, front: str, method: str) -> None:
        """Check that `front` calls `method` for itself. Raises ShoalError(FORWARD_DENIED).

        A front that is no longer listed may still have to release a session. Whether it may is decided by the
        migrations that the coordinator named.
        """
        if front in self._peers:
            self.check(call, front, method)

    def check_workload(self, front: str, key: WorkloadKey) -> None:
        """Raises ShoalError(FORWARD_DENIED) if `front` may forward no request of that workload here."""
        peer = self._peers.get(front)
        if self._forwarding is not None and (peer is None or key not in peer.workloads):
            raise _denial(f"agent {front} forwards a request for {key}")

    def consume(self, call: InboundCall, front: str) -> None:
        """Accept a forward after `check`. Raises ShoalError(MESSAGE_REPLAYED) for a repeated or too old one."""
        peer = self._peers.get(front)
        if peer is None or not peer.secret:
            return
        stamp, _, _ = _parse_proof(call.forward)
        newest = peer.used_stamps[-1] if peer.used_stamps else 0
        at = bisect_right(peer.used_stamps, stamp)
        if stamp <= max(peer.floor, newest - STAMP_TTL_US) or (at and peer.used_stamps[at - 1] == stamp):
            raise refuse(
                Code.MESSAGE_REPLAYED, f"a forward of {front} that was taken before", "each one once", "send it anew"
            )
        insort(peer.used_stamps, stamp)
        if len(peer.used_stamps) > MAX_STAMPS:
            peer.floor = peer.used_stamps[MAX_STAMPS // 2 - 1]
            del peer.used_stamps[: MAX_STAMPS // 2]

    def _secret_of(self, key: str) -> bytes:
        if key in self._secrets:
            return self._secrets[key]
        if not self._private or not key:
            return b""
        try:
            shared = self._exchange(self._private, bytes.fromhex(key))
        except ValueError:
            return secrets.token_bytes(32)  # an invalid key: a secret that no front has, so no proof matches
        return _derive_key(shared, _CONTEXT + self._region.encode())


def extras_of(agreement: str, step: str) -> str:
    """Further claims of a forwarded request that its receiver acts on, as text to sign."""
    return f"{len(agreement)}:{agreement}{step}"


def _derive_key(secret: bytes, info: bytes) -> bytes:
    """32 bytes: HKDF with SHA-256 and without a salt (RFC 5869), whose first block is as long."""
    extracted = hmac.digest(bytes(hashlib.sha256().digest_size), secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def _make_peer(secret: bytes, workloads: Iterable[WorkloadKey]) -> _ForwardPeer:
    mac = hmac.new(secret, digestmod=hashlib.sha256) if secret else None
    return _ForwardPeer(secret, mac, frozenset(workloads))


def _proof(begun: hmac.HMAC, *parts: str | int) -> str:
    """HMAC over the parts, each with its length in front, so that no two lists of parts have the same text."""
    texts = [str(part) for part in parts]
    content = "".join([f"{len(text)}:{text}" for text in texts]).encode("utf-8", "surrogateescape")
    mac = begun.copy()
    mac.update(content)
    return mac.hexdigest()


def _parse_proof(text: str) -> tuple[int, str, str]:
    """(stamp, workload, proof). Raises ShoalError(FORWARD_DENIED)."""
    stamp, _, rest = text.partition(";")
    workload, _, proof = rest.partition(";")
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 20 and proof.isascii()):
        raise _denial("a forward without a proof of its front" if not text else "a proof that cannot be read")
    return int(stamp), workload, proof


def _denial(found: str) -> ShoalError:
    return refuse(
        Code.FORWARD_DENIED,
        found,
        "a front that the coordinator lists here for this workload",
        "it is listed a moment after it may enter; see shoal node label NODE entry=TENANT",
    )
