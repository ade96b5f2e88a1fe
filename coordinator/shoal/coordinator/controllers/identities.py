"""The identities of the region: which certificates each of them holds, as the store keeps it."""

from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.ports import Issued
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.wire.identity import Identity

IDENTITIES: Final = "identities/"
GRACE_S: Final = Seconds(90 * 86400.0)
"""A certificate that ended may be renewed for so long; then its holder enrols again with a token."""
EXPIRED_KEPT: Final = 2
"""Certificates that ended and may still be renewed: the newest, since an older one was followed by it."""


@dataclass(frozen=True, slots=True)
class Held:
    """One certificate. serial: decimal. issuer: the CA's fingerprint."""

    serial: str
    not_after: Wall
    issuer: str


@dataclass(frozen=True, slots=True)
class IdentityRecord:
    """serial, not_after, issuer: of the newest certificate. token: by which it enrolled. held: every certificate that
    is good for something, oldest first. revoked: all that it ever held were refused, and nothing was issued since."""

    uri: str
    serial: str
    not_after: Wall
    token: str
    issuer: str = ""
    held: tuple[Held, ...] = ()
    revoked: bool = False

    def certificates(self, wall: Wall) -> tuple[Held, ...]:
        """Those that may be shown, and the newest of those that may only be renewed."""
        known = self.held or (Held(self.serial, self.not_after, self.issuer),)
        good = tuple(each for each in known if each.not_after > wall)
        ended = tuple(each for each in known if each.not_after <= wall < each.not_after + GRACE_S)
        return (*ended[-EXPIRED_KEPT:], *good)


def shown(known: IdentityRecord | None, identity: Identity, wall: Wall) -> IdentityRecord:
    """The record with a certificate that was shown: a store that was lost may not know it, and its holder must be able
    to show it again when the reply to a renewal was lost."""
    if known is None:
        return IdentityRecord(identity.uri, identity.serial, identity.not_after, "")
    held = known.certificates(wall)
    if any(each.serial == identity.serial for each in held):
        return known
    return replace(known, held=(*held, Held(identity.serial, identity.not_after, "")))


def issued(known: IdentityRecord | None, uri: str, certificate: Issued, token: str, wall: Wall) -> IdentityRecord:
    """The record with one more certificate. A revoked identity begins anew with it."""
    before = known.certificates(wall) if known is not None and not known.revoked else ()
    held = Held(certificate.serial, certificate.not_after, certificate.issuer)
    return IdentityRecord(uri, certificate.serial, certificate.not_after, token, certificate.issuer, (*before, held))


def key_of(role: Role, name: str) -> str:
    return f"{IDENTITIES}{role}/{name}"
