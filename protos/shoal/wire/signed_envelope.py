"""Signed messages from one region to another, whoever relays them (`shoal.v1.Said`).

The certificate is part of the message. It must be that of a coordinator of the sending region, issued by a CA that the
reader knows as that region's. So neither the federation nor a third region can send in its name.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Wall
from shoal.v1 import federation_pb2
from shoal.wire import nouns
from shoal.wire.certificates import CERTIFICATE_ERRORS, GrpcContext, identity_of_certificate
from shoal.wire.request_limits import ENVELOPE_CONTENT
from shoal.wire.signing import sign, verify
from shoal.wire.trust import check_certificate, check_issuer

Noun = TypeVar("Noun")
Other = TypeVar("Other")

ANYONE: Final = "*"
"""Recipient of messages for any region that the federation asks."""
JOIN: Final = "join"
"""Kind of the proof in a JoinRequest, whose content is the token."""
COORDINATORS: Final = frozenset({Role.COORDINATOR})

RootsOf = Callable[[str], Sequence[str]]
"""CAs (PEM) of a region by its name; empty for an unknown region."""


class RegionSigner:
    """Signs messages of one region with its coordinator's key."""

    def __init__(self, region: str, certificate_pem: bytes, key_pem: bytes) -> None:
        self.region = region
        leaf = x509.load_pem_x509_certificate(certificate_pem)
        key = serialization.load_pem_private_key(key_pem, password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        self._certificate = leaf.public_bytes(serialization.Encoding.DER)

    def sign(self, noun: object, to: str) -> federation_pb2.Said:
        return self.sign_bytes(kind_of(type(noun)), nouns.encode(noun), to)

    def sign_bytes(self, kind: str, content: bytes, to: str) -> federation_pb2.Said:
        return federation_pb2.Said(
            by=self.region,
            to=to,
            kind=kind,
            content=content,
            signature=sign(self._key, self.region, to, kind, content),
            certificate=self._certificate,
        )


def kind_of(noun: type) -> str:
    return noun.__name__.lower()


def verify_envelope(said: federation_pb2.Said, kind: type[Noun], *, to: str, roots_of: RootsOf, wall: Wall) -> Noun:
    """The noun inside, sent by the region `said.by`.

    Raises ShoalError(MESSAGE_INVALID | FIELD_TOO_MANY | REGION_UNKNOWN | REGION_MISMATCH | CERT_* | ROLE_DENIED |
    SIGNATURE_INVALID).
    """
    check(said, kind_of(kind), to=to, roots_of=roots_of, wall=wall)
    return nouns.decode(kind, said.content, ENVELOPE_CONTENT)


def verify_either(
    said: federation_pb2.Said, kind: type[Noun], other: type[Other], *, to: str, roots_of: RootsOf, wall: Wall
) -> Noun | Other:
    """As `verify_envelope`, for an answer that may be of two kinds."""
    if said.kind == kind_of(other):
        return verify_envelope(said, other, to=to, roots_of=roots_of, wall=wall)
    return verify_envelope(said, kind, to=to, roots_of=roots_of, wall=wall)


def check(said: federation_pb2.Said, kind: str, *, to: str, roots_of: RootsOf, wall: Wall) -> Identity:
    """Identity of the signer. Raises as `verify_envelope`."""
    if said.kind != kind:
        raise refuse(Code.MESSAGE_INVALID, f"a signed {said.kind!r:.40}", f"a signed {kind}", "update the sender")
    if said.to != to:
        raise region_mismatch(f"a {kind} for {said.to!r:.80}", to)
    certificate = _certificate(said.certificate)
    if (region := identity_of_certificate(certificate).region) != said.by:
        raise region_mismatch(f"a {kind} in the name of {said.by!r:.80} by {region}", said.by)
    authorities = known_roots(said.by, roots_of)
    identity = check_certificate(certificate, authorities, region=said.by, roles=COORDINATORS, wall=wall)
    verify(certificate, said.signature, said.by, to, kind, said.content)
    return identity


def region_mismatch(found: str, region: str) -> ShoalError:
    """Error for a message that one region sent in another's name."""
    return refuse(Code.REGION_MISMATCH, found, f"{region:.80} itself", "a region speaks for itself alone")


def check_roots(context: GrpcContext, region: str, roots_of: RootsOf) -> None:
    """Checks that the caller's certificate was issued by a CA of this region, which its name states.

    Raises ShoalError(CERT_UNTRUSTED | REGION_UNKNOWN).
    """
    pem = context.auth_context()["x509_pem_cert"][0]
    check_issuer(x509.load_pem_x509_certificate(pem), known_roots(region, roots_of), region)


def known_roots(region: str, roots_of: RootsOf) -> list[x509.Certificate]:
    """Raises ShoalError(REGION_UNKNOWN)."""
    pems = roots_of(region)
    if not pems:
        raise refuse(
            Code.REGION_UNKNOWN,
            f"region {region!r:.80}",
            "a member of the federation",
            "see `shoal federation regions`; it joins by: shoal federation join",
        )
    return [_root(pem) for pem in pems]


def _certificate(der: bytes) -> x509.Certificate:
    try:
        return x509.load_der_x509_certificate(der)
    except CERTIFICATE_ERRORS as cause:
        raise refuse(
            Code.CERT_UNTRUSTED, "no readable certificate in it", "the coordinator's", "update the sender"
        ) from cause


@lru_cache(maxsize=1024)
def _root(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())
