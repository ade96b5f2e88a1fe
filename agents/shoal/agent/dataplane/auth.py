"""Who a caller is, and for which tenant. Checked on every call, so that expiry and revocation also end access on open
connections."""

import hashlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.agent.dataplane.forward_auth import ForwardAuth
from shoal.agent.dataplane.transport import InboundCall
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Credential, PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity, check_name
from shoal.types.units import Wall
from shoal.wire.identity import check_validity, require

NO_PEERS: Final[Mapping[str, PeerTrust]] = {}
DEFAULT_TENANT: Final = "default"
INFER_ROLES: Final = frozenset({Role.TENANT, Role.OPERATOR, Role.AGENT, Role.GATEWAY})
READ_ROLES: Final = INFER_ROLES | {Role.VIEWER, Role.COORDINATOR}
_PEERS: Final = frozenset({Role.AGENT, Role.GATEWAY})
_CHOOSE_TENANT: Final = frozenset({Role.OPERATOR, Role.VIEWER, Role.COORDINATOR})


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated caller of one request."""

    # Tenant that the request counts for; GUEST_TENANT for a request of another region.
    tenant: str
    # Role in the caller's certificate; TENANT for a bearer token.
    role: Role
    # Name in the caller's certificate, or the token's tenant.
    name: str
    # 1 when another front forwards the request; then it may go on only as `front` allows. Else 0.
    hop: int
    # Name under which the request's ingress is counted: the front or region where it entered.
    origin: str
    # Region of a gateway of another region; empty for this region.
    region: str = ""
    # Agreement of a guest's request. It selects what is asked for, because the workload names of another region mean
    # nothing here. Empty otherwise.
    agreement: str = ""
    # The one workload that the forwarding front signed the request for; empty where any is allowed.
    workload: str = ""
    # Whose share of a front, and of its connections, the request uses. Guests count by region, so that one region's
    # guests do not delay another's.
    payer: str = field(init=False)
    # Whether the request enters the region here; otherwise another front has already counted its ingress.
    is_ingress: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_ingress", self.hop == 0 or bool(self.region))
        is_guest = self.tenant == GUEST_TENANT
        object.__setattr__(self, "payer", f"{self.tenant}/{self.origin}" if is_guest else self.tenant)

    @property
    def is_forwarded(self) -> bool:
        """Whether another front of this region forwarded the request here."""
        return self.hop == 1 and not self.region


Credentials = Mapping[str, Credential]


def by_digest(credentials: Iterable[Credential]) -> dict[str, Credential]:
    return {credential.token_sha256: credential for credential in credentials}


def credential_of(bearer: str, credentials: Credentials) -> Credential | None:
    """What is known of the token; None: nobody was given it."""
    return credentials.get(hashlib.sha256(bearer.encode()).hexdigest())


def caller_of(
    call: InboundCall,
    credentials: Credentials,
    region: str,
    origin: str,
    wall: Wall,
    roles: frozenset[Role] = INFER_ROLES,
    revoked: Container[str] = (),
    peers: Mapping[str, PeerTrust] = NO_PEERS,
) -> Caller:
    """Authenticate a call. A certificate takes precedence over a token.

    `origin` is the origin of requests that enter here. `revoked` are serials. `peers` are other regions, by name.

    Raises ShoalError(UNAUTHENTICATED | CERT_EXPIRED | CERT_REVOKED | CERT_NOT_YET_VALID | REGION_MISMATCH | ROLE_DENIED
    | TENANT_DENIED | NAME_INVALID | TOKEN_INVALID | TOKEN_EXPIRED | AGREEMENT_UNKNOWN).
    """
    if call.identity is not None and (refusal := check_revoked(call.identity.serial, revoked)) is not None:
        raise ShoalError(refusal)
    if call.identity is not None:
        peer = peers.get(call.identity.region) if call.identity.region != region else None
        if peer is not None:
            return _by_peer_gateway(call, call.identity, peer, wall)
        return _by_certificate(call, call.identity, region, origin, wall, roles)
    if call.bearer:
        return _by_token(call, credentials, origin, wall)
    raise refuse(
        Code.UNAUTHENTICATED,
        "neither a client certificate nor a bearer token",
        "one of them, of this region",
        "use the files or the token of your tenant",
    )


def agent_of(
    call: InboundCall,
    region: str,
    revoked: Container[str],
    wall: Wall,
    forwards: ForwardAuth | None = None,
    method: str = "",
) -> Identity:
    """Authenticate an agent of this region that calls for itself, for requests between agents.

    `forwards` checks the proof of listed agents for `method`. Raises ShoalError.
    """
    identity = call.identity
    if identity is None:
        raise refuse(Code.UNAUTHENTICATED, "no client certificate", "an agent's of this region", "use the agent's")
    refusal = check_revoked(identity.serial, revoked) or check_validity(identity, wall)
    if refusal is not None:
        raise ShoalError(refusal)
    require(identity, region=region, roles=frozenset({Role.AGENT}))
    if forwards is not None and method:
        forwards.check_own(call, identity.name, method)
    return identity


def check_revoked(serial: str, revoked: Container[str]) -> Refusal | None:
    if serial not in revoked:
        return None
    return Refusal(
        Code.CERT_REVOKED, f"certificate {serial}", "one that was not revoked", "enrol again with a new token"
    )


def _by_peer_gateway(call: InboundCall, identity: Identity, peer: PeerTrust, wall: Wall) -> Caller:
    """A gateway that an agreement names, with a request under an agreement that its region has here."""
    invalid = check_revoked(identity.serial, peer.revoked) or check_validity(identity, wall)
    if invalid is not None:
        raise ShoalError(invalid)
    if identity.role is not Role.GATEWAY or identity.name not in peer.gateways or call.hop != 1:
        raise refuse(
            Code.ROLE_DENIED,
            f"{identity.uri}, which no agreement names" if call.hop == 1 else f"{identity.uri} asks for itself",
            f"a gateway of {peer.region} that forwards, one of: {', '.join(peer.gateways) or 'none'}",
            "call your own region's gateway",
        )
    if call.agreement not in peer.agreements:
        raise refuse(
            Code.AGREEMENT_UNKNOWN,
            f"{peer.region} has no agreement {call.agreement!r:.80} here",
            "one that is in force",
            "serve it at home, or solicit again",
        )
    return Caller(GUEST_TENANT, identity.role, identity.name, 1, peer.region, peer.region, call.agreement)


def _by_certificate(
    call: InboundCall, identity: Identity, region: str, origin: str, wall: Wall, roles: frozenset[Role]
) -> Caller:
    invalid = check_validity(identity, wall)
    if invalid is not None:
        raise ShoalError(invalid)
    require(identity, region=region, roles=roles)
    if identity.role in _PEERS:
        if call.hop != 1 or not call.tenant or not call.origin:
            raise refuse(
                Code.ROLE_DENIED,
                f"{identity.uri} asks for itself",
                "a tenant's or an operator's certificate, or a forwarded request",
                "use the files of a tenant",
            )
        check_name(call.tenant, "tenant")
        check_name(call.origin, "origin")
        agreement = check_name(call.agreement, "agreement") if call.tenant == GUEST_TENANT else ""
        return Caller(call.tenant, identity.role, identity.name, 1, call.origin, agreement=agreement)
    if identity.role in _CHOOSE_TENANT:
        tenant = check_name(call.tenant, "tenant") if call.tenant else DEFAULT_TENANT
        return Caller(tenant, identity.role, identity.name, 0, origin)
    return Caller(_check_tenant(call, identity.name), identity.role, identity.name, 0, origin)


def _by_token(call: InboundCall, credentials: Credentials, origin: str, wall: Wall) -> Caller:
    credential = credential_of(call.bearer, credentials)
    if credential is None:
        raise refuse(
            Code.TOKEN_INVALID,
            "a token nobody was given",
            "a tenant's token",
            "make one: shoal token create --role bearer --name TENANT",
        )
    if wall > credential.expires_at:
        raise refuse(
            Code.TOKEN_EXPIRED,
            f"a token of {credential.tenant} that ended {wall - credential.expires_at:.0f}s ago",
            "a valid token",
            "make a new one: shoal token create --role bearer --name TENANT",
        )
    return Caller(_check_tenant(call, credential.tenant), Role.TENANT, credential.tenant, 0, origin)


def _check_tenant(call: InboundCall, tenant: str) -> str:
    if tenant == GUEST_TENANT or (call.tenant and call.tenant != tenant):
        raise refuse(
            Code.TENANT_DENIED,
            f"tenant {tenant} asks as {call.tenant!r:.80}",
            "one's own tenant, which no agreement of another region has",
            "leave shoal-tenant out, or use the other tenant's certificate",
        )
    return tenant
