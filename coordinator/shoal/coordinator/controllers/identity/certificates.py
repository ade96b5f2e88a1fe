"""Identities of the region: which certificates each of them holds, as stored."""

from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.ports import IssuedCertificate
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Seconds, Wall

IDENTITIES: Final = "identities/"
GRACE_S: Final = Seconds(90 * 86400.0)
"""How long after its expiry a certificate may still be renewed; after that its holder enrols again with a token."""
EXPIRED_KEPT: Final = 2
"""Expired certificates kept for renewal: the newest ones, because newer ones replaced the others."""


@dataclass(frozen=True, slots=True)
class CertificateRecord:
    """One certificate that an identity holds."""

    # Decimal.
    serial: str
    # When it expires.
    not_after: Wall
    # Fingerprint of the CA that signed it; empty if unknown.
    issuer: str


@dataclass(frozen=True, slots=True)
class IdentityRecord:
    """One identity and its certificates, as stored."""

    # URI name of the identity.
    uri: str
    # Serial of the newest certificate, decimal.
    serial: str
    # When the newest certificate expires.
    not_after: Wall
    # Id of the token that it enrolled with; empty if unknown.
    token: str
    # Fingerprint of the CA that signed the newest certificate.
    issuer: str = ""
    # Every certificate that is valid or may still be renewed, oldest first. Empty in records of older versions.
    held: tuple[CertificateRecord, ...] = ()
    # True: all its certificates were revoked, and none was issued since.
    revoked: bool = False
    # URI name of who created the token. Empty for identities that this machine made itself, and in records of older
    # versions.
    made_by: str = ""

    def certificates(self, wall: Wall) -> tuple[CertificateRecord, ...]:
        """The valid certificates, after the newest of the expired ones that may still be renewed."""
        known = self.held or (CertificateRecord(self.serial, self.not_after, self.issuer),)
        good = tuple(each for each in known if each.not_after > wall)
        ended = tuple(each for each in known if each.not_after <= wall < each.not_after + GRACE_S)
        return (*ended[-EXPIRED_KEPT:], *good)


def with_presented_certificate(known: IdentityRecord | None, identity: Identity, wall: Wall) -> IdentityRecord:
    """The record with a certificate that its holder presented. A store restored from a copy may lack it. Its holder
    must be able to present it again when the reply to a renewal was lost.
    """
    if known is None:
        return IdentityRecord(identity.uri, identity.serial, identity.not_after, "")
    held = known.certificates(wall)
    if any(each.serial == identity.serial for each in held):
        return known
    return replace(known, held=(*held, CertificateRecord(identity.serial, identity.not_after, "")))


def with_issued_certificate(
    known: IdentityRecord | None, uri: str, certificate: IssuedCertificate, token: str, wall: Wall, *, made_by: str
) -> IdentityRecord:
    """The record with one more certificate. A revoked identity starts over with this certificate alone."""
    before = known.certificates(wall) if known is not None and not known.revoked else ()
    held = CertificateRecord(certificate.serial, certificate.not_after, certificate.issuer)
    return IdentityRecord(
        uri, certificate.serial, certificate.not_after, token, certificate.issuer, (*before, held), made_by=made_by
    )


def certificate_hosts(role: Role, peer: str) -> tuple[str, ...]:
    """Addresses that a certificate of this role is valid for. Clients dial a gateway at its address, so it gets that
    address. A device may share its address with others (NAT), so its certificate is valid for its name alone, by which
    other nodes check it.

    peer: the address that it enrols or renews from.
    """
    return (peer,) if peer and role is Role.GATEWAY else ()


def key_of(role: Role, name: str) -> str:
    return f"{IDENTITIES}{role}/{name}"
