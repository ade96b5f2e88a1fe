"""Reads the identities in certificates, by the cryptography library, which takes 9 MB of memory.

A process that only reads its own files, or peers that TLS has verified, uses `tls_files.py` and the ssl module.
"""

from functools import lru_cache
from typing import Any, Final, Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from shoal.types.codes import Code, refuse
from shoal.types.identity import Identity, parse_only_name
from shoal.types.units import Wall

CERTIFICATE_ERRORS: Final = (
    ValueError,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""Errors that reading an untrusted certificate may raise."""


class GrpcContext(Protocol):
    """The part of grpc's (sync or aio) servicer context that identifies the peer."""

    def auth_context(self) -> Any: ...


def identity_of_certificate(certificate: x509.Certificate) -> Identity:
    """Raises ShoalError(CERT_NAME_INVALID) unless the certificate has exactly one URI name, in Shoal's form."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except CERTIFICATE_ERRORS as cause:
        raise refuse(
            Code.CERT_NAME_INVALID, "no readable subject alternative name", "one URI name", "enrol again"
        ) from cause
    region, role, name = parse_only_name(uris)
    return Identity(
        region=region,
        role=role,
        name=name,
        not_before=Wall(certificate.not_valid_before_utc.timestamp()),
        not_after=Wall(certificate.not_valid_after_utc.timestamp()),
        serial=str(certificate.serial_number),
    )


@lru_cache(maxsize=1024)
def identity_of_pem(pem: bytes) -> Identity:
    """Identity of the first certificate in `pem`. Cached, because every call of a peer looks up the same one.

    Raises ShoalError(CERT_NAME_INVALID).
    """
    try:
        return identity_of_certificate(x509.load_pem_x509_certificate(pem))
    except CERTIFICATE_ERRORS as cause:
        raise refuse(Code.CERT_NAME_INVALID, "not a readable certificate", "one in PEM", "enrol again") from cause


def ca_fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of the certificate (DER), hex: what a join token pins."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def identity_of_der(der: bytes) -> Identity:
    """Takes DER, as `ssl.SSLSocket.getpeercert(binary_form=True)` returns it. Raises ShoalError(CERT_NAME_INVALID)."""
    try:
        return identity_of_certificate(x509.load_der_x509_certificate(der))
    except CERTIFICATE_ERRORS as cause:
        raise refuse(Code.CERT_NAME_INVALID, "not a readable certificate", "one in DER", "enrol again") from cause


def identity_of_context(context: GrpcContext) -> Identity:
    """The verified peer of a gRPC call. Raises ShoalError(UNAUTHENTICATED | CERT_NAME_INVALID)."""
    pems = context.auth_context().get("x509_pem_cert")
    if not pems:
        raise refuse(
            Code.UNAUTHENTICATED,
            "no client certificate",
            "a certificate of this region",
            "connect with the files of your context",
        )
    return identity_of_pem(pems[0])
