"""Who calls this front, by the credentials and the certificates that its region configured."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from shoal.agent.dataplane.auth import (
    INFER_ROLES,
    READ_ROLES,
    Caller,
    Credentials,
    by_digest,
    caller_of,
    check_revoked,
    credential_of,
)
from shoal.agent.dataplane.forward_auth import ForwardAuth, extras_of
from shoal.agent.dataplane.transport import InboundCall
from shoal.types.assignment import Credential, Forwarding, PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey


@dataclass(frozen=True, slots=True)
class CallerRules:
    """What decides who may call. While it is the same, so is every answer."""

    # Bearer tokens by digest.
    credentials: Credentials = field(default_factory=dict)
    # Serials of certificates to refuse.
    revoked: frozenset[str] = frozenset()
    # Other regions by name.
    peers: Mapping[str, PeerTrust] = field(default_factory=dict)


_KEPT_CALLERS: Final = 4096
"""Callers that are remembered; an operator may act for any number of tenants."""


@dataclass(frozen=True, slots=True)
class _KnownCaller:
    """A caller, for as long as its certificate or its token is valid."""

    caller: Caller
    # Of its certificate; it keeps the object alive, by whose address the caller is found.
    identity: Identity | None
    not_before: Wall
    not_after: Wall


class CallerAuth:
    """Authenticates callers, and counts the forwards that it refuses. Who calls again is found by what it showed, until
    the rules change or that expires.

    `origin` is the node's name: requests that enter here count under it. `dates_at` gives the time at which a
    certificate must be valid. `forward_auth` says who may forward here; None: everybody.
    """

    def __init__(
        self, region: str, origin: str, dates_at: Callable[[], Wall], forward_auth: ForwardAuth | None = None
    ) -> None:
        self._region = region
        self._origin = origin
        self._dates_at = dates_at
        self._forward_auth = forward_auth or ForwardAuth(region, origin, b"", dates_at)
        self._denied: Counter[str] = Counter()
        self._known: dict[tuple[int, str, str, frozenset[Role]], _KnownCaller] = {}
        """By address of the identity, token, claimed tenant and roles."""
        self.rules = CallerRules()

    def configure(
        self,
        credentials: Iterable[Credential],
        revoked: Iterable[str],
        peers: Iterable[PeerTrust],
        forwarding: Forwarding | None,
    ) -> None:
        """Apply a complete configuration."""
        self._forward_auth.configure(forwarding)
        self.rules = CallerRules(by_digest(credentials), frozenset(revoked), {peer.region: peer for peer in peers})
        self._known.clear()

    def denied_counts(self) -> tuple[tuple[str, int], ...]:
        """Refused forwards, by the front that sent them."""
        return tuple(sorted(self._denied.items()))

    def check_revoked(self, serial: str) -> Refusal | None:
        """Why a certificate of this serial is refused; None if it is not."""
        return check_revoked(serial, self.rules.revoked)

    def may_enter(self, tenant: str) -> bool:
        """Whether that tenant's clients may call this node for any workload."""
        return self._forward_auth.may_enter(tenant)

    def authenticate(self, call: InboundCall, roles: frozenset[Role] = INFER_ROLES) -> Caller:
        """The caller. A forward is accepted by `consume_forward`. Raises ShoalError, as `auth.caller_of`, and
        ShoalError(FORWARD_DENIED)."""
        caller = self._identify(call, roles)
        if not caller.is_forwarded:
            return caller
        try:
            return replace(caller, workload=self._signed_workload(call, caller.name))
        except ShoalError:
            self._denied[caller.name] += 1
            raise

    def find_caller(self, call: InboundCall) -> Caller | None:
        """As `authenticate`; None where that refuses the call, which nothing counts yet."""
        try:
            caller = self._identify(call, INFER_ROLES)
            if not caller.is_forwarded:
                return caller
            return replace(caller, workload=self._signed_workload(call, caller.name))
        except ShoalError:
            return None

    def _identify(self, call: InboundCall, roles: frozenset[Role]) -> Caller:
        """The caller, as far as its certificate or token says. Raises as `auth.caller_of`."""
        rules, wall, key = self.rules, self._dates_at(), (id(call.identity), call.bearer, call.tenant, roles)
        known = self._known.get(key)
        if known is not None and not call.hop and known.not_before <= wall <= known.not_after:
            return known.caller
        caller = caller_of(call, rules.credentials, self._region, self._origin, wall, roles, rules.revoked, rules.peers)
        if not call.hop:
            self._keep(key, call, caller)
        return caller

    def _signed_workload(self, call: InboundCall, front: str) -> str:
        """As `ForwardAuth.check`. Raises ShoalError(FORWARD_DENIED)."""
        return self._forward_auth.check(call, front, extras_of(call.agreement, call.step))

    def _keep(self, key: tuple[int, str, str, frozenset[Role]], call: InboundCall, caller: Caller) -> None:
        if call.identity is not None:
            validity = call.identity.not_before, call.identity.not_after
        else:
            credential = credential_of(call.bearer, self.rules.credentials)
            assert credential is not None
            validity = Wall(-math.inf), credential.expires_at
        if len(self._known) >= _KEPT_CALLERS:
            self._known.clear()
        self._known[key] = _KnownCaller(caller, call.identity, *validity)

    def authenticate_reader(self, call: InboundCall) -> Caller:
        """As `authenticate`, for a call that runs nothing. Raises also what `consume_forward` does."""
        caller = self.authenticate(call, READ_ROLES)
        self.consume_forward(call, caller)
        return caller

    def consume_forward(self, call: InboundCall, caller: Caller) -> None:
        """Accept each forward only once. Raises ShoalError(MESSAGE_REPLAYED)."""
        if caller.is_forwarded:
            self._forward_auth.consume(call, caller.name)

    def check_forward(self, caller: Caller, key: WorkloadKey) -> None:
        """Raises ShoalError(FORWARD_DENIED) if the front may not forward a request for that workload here."""
        try:
            self._check_signed(caller.name, caller.workload, key)
        except ShoalError:
            self._denied[caller.name] += 1
            raise

    def may_forward(self, call: InboundCall, front: str, key: WorkloadKey) -> bool:
        """Whether `front`, which is authenticated, signed this forward of a request for that workload, and may. Nothing
        is counted or accepted yet."""
        try:
            self._check_signed(front, self._signed_workload(call, front), key)
        except ShoalError:
            return False
        return True

    def _check_signed(self, front: str, signed: str, key: WorkloadKey) -> None:
        """Raises ShoalError(FORWARD_DENIED)."""
        if signed and signed != key.name:
            raise refuse(
                Code.FORWARD_DENIED,
                f"a request for {key} that {front} signed for {signed!r:.80}",
                "the workload that was signed",
                "sign what is sent",
            )
        self._forward_auth.check_workload(front, key)
