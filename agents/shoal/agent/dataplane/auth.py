"""Who a caller is, and as which tenant: judged for each call, so that what runs out ends on open connections too."""

import hashlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.agent.dataplane.transport import Call
from shoal.types.agreement import GUESTS
from shoal.types.assignment import Credential, PeerTrust
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire.identity import Identity, check_name, check_validity, require

NOBODY: Final[Mapping[str, PeerTrust]] = {}
DEFAULT_TENANT: Final = "default"
INFER_ROLES: Final = frozenset({Role.TENANT, Role.OPERATOR, Role.AGENT, Role.GATEWAY})
READ_ROLES: Final = INFER_ROLES | {Role.VIEWER, Role.COORDINATOR}
_PEERS: Final = frozenset({Role.AGENT, Role.GATEWAY})
_CHOOSE_TENANT: Final = frozenset({Role.OPERATOR, Role.VIEWER, Role.COORDINATOR})


@dataclass(frozen=True, slots=True)
class Caller:
    """hop: 1 when another front forwards, and the request may go on to no other but as `front` allows.

    region: of a gateway of another region, "" of our own. agreement: of a guest's request, which names what is asked
    for: what another region calls its workload is no business of ours.
    """

    tenant: str
    role: Role
    name: str
    hop: int
    origin: str
    region: str = ""
    agreement: str = ""

    @property
    def enters(self) -> bool:
        """Whether the request enters the region here; else another front's ingress has counted it already."""
        return self.hop == 0 or bool(self.region)


Credentials = Mapping[str, Credential]


def by_digest(credentials: Iterable[Credential]) -> dict[str, Credential]:
    return {credential.token_sha256: credential for credential in credentials}


def caller_of(
    call: Call,
    credentials: Credentials,
    region: str,
    origin: str,
    wall: Wall,
    roles: frozenset[Role] = INFER_ROLES,
    revoked: Container[str] = (),
    peers: Mapping[str, PeerTrust] = NOBODY,
) -> Caller:
    """origin: of requests that enter here. revoked: serials. peers: other regions, by name. A certificate counts before
    a token.

    Raises ShoalError(UNAUTHENTICATED | CERT_EXPIRED | CERT_REVOKED | CERT_NOT_YET_VALID | REGION_MISMATCH |
    ROLE_DENIED | TENANT_DENIED | NAME_INVALID | TOKEN_INVALID | TOKEN_EXPIRED | AGREEMENT_UNKNOWN)."""
    if call.identity is not None and (refusal := refused(call.identity.serial, revoked)) is not None:
        raise ShoalError(refusal)
    if call.identity is not None:
        peer = peers.get(call.identity.region) if call.identity.region != region else None
        if peer is not None:
            return _of_another_region(call, call.identity, peer, wall)
        return _by_certificate(call, call.identity, region, origin, wall, roles)
    if call.bearer:
        return _by_token(call, credentials, origin, wall)
    raise refuse(
        Code.UNAUTHENTICATED,
        "neither a client certificate nor a bearer token",
        "one of them, of this region",
        "use the files or the token of your tenant",
    )


def agent_of(call: Call, region: str, revoked: Container[str], wall: Wall) -> Identity:
    """The agent of this region that calls for itself: what agents ask of each other. Raises ShoalError."""
    identity = call.identity
    if identity is None:
        raise refuse(Code.UNAUTHENTICATED, "no client certificate", "an agent's of this region", "use the agent's")
    refusal = refused(identity.serial, revoked) or check_validity(identity, wall)
    if refusal is not None:
        raise ShoalError(refusal)
    require(identity, region=region, roles=frozenset({Role.AGENT}))
    return identity


def refused(serial: str, revoked: Container[str]) -> Refusal | None:
    if serial not in revoked:
        return None
    return Refusal(
        Code.CERT_REVOKED, f"certificate {serial}", "one that was not revoked", "enrol again with a new token"
    )


def _of_another_region(call: Call, identity: Identity, peer: PeerTrust, wall: Wall) -> Caller:
    """A gateway that an agreement names, with a request under an agreement that its region has here."""
    invalid = refused(identity.serial, peer.revoked) or check_validity(identity, wall)
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
    return Caller(GUESTS, identity.role, identity.name, 1, peer.region, peer.region, call.agreement)


def _by_certificate(
    call: Call, identity: Identity, region: str, origin: str, wall: Wall, roles: frozenset[Role]
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
        agreement = check_name(call.agreement, "agreement") if call.tenant == GUESTS else ""
        return Caller(call.tenant, identity.role, identity.name, 1, call.origin, agreement=agreement)
    if identity.role in _CHOOSE_TENANT:
        tenant = check_name(call.tenant, "tenant") if call.tenant else DEFAULT_TENANT
        return Caller(tenant, identity.role, identity.name, 0, origin)
    return Caller(_own(call, identity.name), identity.role, identity.name, 0, origin)


def _by_token(call: Call, credentials: Credentials, origin: str, wall: Wall) -> Caller:
    credential = credentials.get(hashlib.sha256(call.bearer.encode()).hexdigest())
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
    return Caller(_own(call, credential.tenant), Role.TENANT, credential.tenant, 0, origin)


def _own(call: Call, tenant: str) -> str:
    if tenant == GUESTS or (call.tenant and call.tenant != tenant):
        raise refuse(
            Code.TENANT_DENIED,
            f"tenant {tenant} asks as {call.tenant!r:.80}",
            "one's own tenant, which no agreement of another region has",
            "leave shoal-tenant out, or use the other tenant's certificate",
        )
    return tenant
