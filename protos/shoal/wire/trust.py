"""Checks a certificate that came inside a message, without a TLS handshake that vouches for it."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Wall
from shoal.wire.certificates import CERTIFICATE_ERRORS, ca_fingerprint, identity_of_certificate
from shoal.wire.identity import ca_common_name_of, check_validity, require

_KEPT_CHECKS: Final = 8192
"""More than all CAs of a whole federation: each handshake asks for the CAs of every member."""


def check_certificate(
    certificate: x509.Certificate,
    authorities: Sequence[x509.Certificate],
    *,
    region: str,
    roles: frozenset[Role],
    wall: Wall,
) -> Identity:
    """Identity of a certificate that one of `authorities` issued directly, that is valid now, and that is of this
    region and one of these roles.

    Raises ShoalError(CERT_UNTRUSTED | CERT_NAME_INVALID | CERT_EXPIRED | CERT_NOT_YET_VALID | REGION_MISMATCH |
    ROLE_DENIED).
    """
    check_issuer(certificate, authorities, region)
    identity = identity_of_certificate(certificate)
    if (refusal := check_validity(identity, wall)) is not None:
        raise ShoalError(refusal)
    require(identity, region=region, roles=roles)
    return identity


def check_issuer(certificate: x509.Certificate, authorities: Sequence[x509.Certificate], region: str) -> None:
    """Raises ShoalError(CERT_UNTRUSTED)."""
    if not has_known_issuer(certificate, authorities):
        raise refuse(
            Code.CERT_UNTRUSTED,
            f"a certificate that the authority of {region} did not issue",
            "one of its region",
            "enrol again with a join token",
        )


def check_authorities(pems: Sequence[str], region: str) -> None:
    """Raises ShoalError(FIELD_INVALID) if one of these is something else than the certificate of one CA of this region
    or federation, in PEM as a coordinator writes it.

    One text that does not end where it should hides all CAs that are joined after it, and one that has another region's
    name is taken for that region's CA.
    """
    authority_fingerprints(pems, region)


def authority_fingerprints(pems: Sequence[str], region: str) -> tuple[str, ...]:
    """SHA-256 of each CA's certificate (DER), hex. Raises as `check_authorities`."""
    return tuple(_authority_fingerprint(pem, region) for pem in pems)


def bundle_of_authorities(authorities: Iterable[tuple[str, str]]) -> str:
    """The CAs as one PEM text, each once, without those that `check_authorities` refuses, which may be from before it
    did. authorities: (region, PEM)."""
    return "".join(dict.fromkeys(pem for region, pem in authorities if _is_authority(pem, region)))


@lru_cache(maxsize=_KEPT_CHECKS)
def _is_authority(pem: str, region: str) -> bool:
    try:
        check_authorities((pem,), region)
    except ShoalError:
        return False
    return True


def _authority_fingerprint(pem: str, region: str) -> str:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ca_common_name_of(region))])
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
        is_ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        is_canonical = certificate.public_bytes(Encoding.PEM).decode() == pem
        is_of_region = certificate.subject == certificate.issuer == name
        if is_ca and is_canonical and is_of_region and isinstance(certificate.public_key(), ec.EllipticCurvePublicKey):
            return ca_fingerprint(certificate)
    except (*CERTIFICATE_ERRORS, UnsupportedAlgorithm):
        pass  # refused below
    found = f"something else than the certificate of a CA of {region}"
    raise refuse(Code.FIELD_INVALID, found, "its CAs, each in PEM as it wrote them", "look at its ca/: shoal ca status")


def has_known_issuer(certificate: x509.Certificate, authorities: Iterable[x509.Certificate]) -> bool:
    """Whether one of these issued it directly. Does not check its dates or its name."""
    return any(_is_issued_by(certificate, authority) for authority in authorities)


def _is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True
