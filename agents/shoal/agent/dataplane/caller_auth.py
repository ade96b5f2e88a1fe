"""Who calls this front, by the credentials and the certificates that its region configured."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from shoal.agent.dataplane.auth import INFER_ROLES, READ_ROLES, Caller, Credentials, by_digest, caller_of, check_revoked
from shoal.agent.dataplane.forward_auth import ForwardAuth, extras_of
from shoal.agent.dataplane.transport import InboundCall
from shoal.types.assignment import Credential, Forwarding, PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
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


class CallerAuth:
    """Authenticates callers, and counts the forwards that it refuses.

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
        rules = self.rules
        caller = caller_of(
            call, rules.credentials, self._region, self._origin, self._dates_at(), roles, rules.revoked, rules.peers
        )
        if not caller.is_forwarded:
            return caller
        try:
            workload = self._forward_auth.check(call, caller.name, extras_of(call.agreement, call.step))
        except ShoalError:
            self._denied[caller.name] += 1
            raise
        return replace(caller, workload=workload)

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
            if caller.workload and caller.workload != key.name:
                raise refuse(
                    Code.FORWARD_DENIED,
                    f"a request for {key} that {caller.name} signed for {caller.workload!r:.80}",
                    "the workload that was signed",
                    "sign what is sent",
                )
            self._forward_auth.check_workload(caller.name, key)
        except ShoalError:
            self._denied[caller.name] += 1
            raise
