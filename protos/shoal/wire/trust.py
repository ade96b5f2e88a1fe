"""Whom to believe where no TLS handshake stands for it: a certificate that came inside a message."""

from collections.abc import Iterable, Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire.identity import Identity, check_validity, identity_of_certificate, require


def check_certificate(
    certificate: x509.Certificate,
    authorities: Sequence[x509.Certificate],
    *,
    region: str,
    roles: frozenset[Role],
    wall: Wall,
) -> Identity:
    """Issued directly by one of `authorities`, valid now, of this region and one of these roles.

    Raises ShoalError(CERT_UNTRUSTED | CERT_NAME_INVALID | CERT_EXPIRED | CERT_NOT_YET_VALID | REGION_MISMATCH |
    ROLE_DENIED).
    """
    check_issued(certificate, authorities, region)
    identity = identity_of_certificate(certificate)
    if (refusal := check_validity(identity, wall)) is not None:
        raise ShoalError(refusal)
    require(identity, region=region, roles=roles)
    return identity


def check_issued(certificate: x509.Certificate, authorities: Sequence[x509.Certificate], region: str) -> None:
    """Raises ShoalError(CERT_UNTRUSTED)."""
    if not is_issued(certificate, authorities):
        raise refuse(
            Code.CERT_UNTRUSTED,
            f"a certificate that the authority of {region} did not issue",
            "one of its region",
            "enrol again with a join token",
        )


def is_issued(certificate: x509.Certificate, authorities: Iterable[x509.Certificate]) -> bool:
    """Directly, by one of these. Its dates and name are not looked at."""
    return any(_issued(certificate, authority) for authority in authorities)


def _issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True
