"""Checks a certificate that came inside a message, without a TLS handshake that vouches for it."""

from collections.abc import Iterable, Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Wall
from shoal.wire.certificates import CERTIFICATE_ERRORS, ca_fingerprint, identity_of_certificate
from shoal.wire.identity import check_validity, require


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


def check_authorities(pems: Sequence[str]) -> None:
    """Raises ShoalError(FIELD_INVALID) if one of these is something else than one CA's certificate in PEM."""
    authority_fingerprints(pems)


def authority_fingerprints(pems: Sequence[str]) -> tuple[str, ...]:
    """SHA-256 of each CA's certificate (DER), hex. Raises as `check_authorities`."""
    return tuple(_authority_fingerprint(pem) for pem in pems)


def _authority_fingerprint(pem: str) -> str:
    try:
        (certificate,) = x509.load_pem_x509_certificates(pem.encode())
        if certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            return ca_fingerprint(certificate)
    except CERTIFICATE_ERRORS:
        pass  # refused below
    raise refuse(Code.FIELD_INVALID, "something else than a CA's certificate", "the CAs, each in PEM", "")


def has_known_issuer(certificate: x509.Certificate, authorities: Iterable[x509.Certificate]) -> bool:
    """Whether one of these issued it directly. Does not check its dates or its name."""
    return any(_is_issued_by(certificate, authority) for authority in authorities)


def _is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True
