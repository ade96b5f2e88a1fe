"""Finds out why a TLS handshake failed, because grpc reports only `unavailable`. Blocking.

The server refuses below the level at which a code can be sent, so the refused side derives the code. It looks at its
own files first, because a server may hang up on an unknown caller without a reason.
"""

import socket
import ssl
from pathlib import Path
from typing import Final, Protocol

from shoal.types.address import HostPort
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Wall
from shoal.wire.identity import check_validity
from shoal.wire.tls_files import is_issued_by, read_identity, split_certificates

HANDSHAKE_S: Final = 5.0
_OF_DATES: Final = {
    9: (Code.CERT_NOT_YET_VALID, "set the clock of that machine, or of this one"),
    10: (Code.CERT_EXPIRED, "renew that server's certificate"),
}
"""By X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL's x509_vfy.h: code and remedy."""


class PemFiles(Protocol):
    """Paths of one identity's files."""

    @property
    def certificate(self) -> Path: ...
    @property
    def key(self) -> Path: ...
    @property
    def ca(self) -> Path: ...


def check_own(files: PemFiles, wall: Wall) -> None:
    """Checks the caller's own files. Raises ShoalError(CERT_EXPIRED | CERT_NOT_YET_VALID | CERT_UNTRUSTED |
    CERT_NAME_INVALID), OSError."""
    identity = read_identity(files.certificate, files.key)
    if (refusal := check_validity(identity, wall)) is not None:
        raise ShoalError(refusal)
    try:
        # while a region changes to another CA there are several, and each is trusted
        authorities = split_certificates(files.ca.read_text(errors="replace"))
    except ShoalError:
        authorities = ()
    if not any(is_issued_by(files.certificate, files.key, each) for each in authorities):
        found = f"the certificate of {identity.uri} is not of the authority in ca.pem"
        raise refuse(Code.CERT_UNTRUSTED, found, "one of its region", "enrol again with a join token")


def check_peer(files: PemFiles, address: str, server_name: str, timeout_s: float = HANDSHAKE_S) -> None:
    """Makes a TLS handshake with the gRPC server at `address` (host:port), which must show `server_name`. timeout_s: of
    each of its steps.

    Raises ShoalError(CERT_EXPIRED | CERT_NOT_YET_VALID | CERT_UNTRUSTED | FIELD_INVALID), and OSError when nothing
    answers or the server hangs up without a reason.
    """
    server = HostPort.parse(address)
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((server.host, server.port), timeout=timeout_s) as plain,
            context.wrap_socket(plain, server_hostname=server_name) as secured,
        ):
            # With TLS 1.3 the server checks our certificate after our side is done; if it accepts, its HTTP/2 settings
            # arrive.
            if not secured.recv(1):
                raise ConnectionResetError("it closed the connection")
    except ssl.SSLError as cause:
        raise_fault(cause, address)
        raise


def raise_fault(cause: ssl.SSLError, address: str) -> None:
    """Raises ShoalError(CERT_EXPIRED | CERT_NOT_YET_VALID | CERT_UNTRUSTED) when the error was about a certificate, the
    server's or the caller's. Returns otherwise."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        untrusted = Code.CERT_UNTRUSTED, "check the address, or enrol again"
        code, remedy = _OF_DATES.get(cause.verify_code, untrusted)
        found = f"the certificate of {address}: {cause.verify_message}"
        raise refuse(code, found, "a server of this region", remedy) from cause
    reason = cause.reason or str(cause)
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
        raise refuse(
            Code.CERT_EXPIRED if "CERTIFICATE_EXPIRED" in reason else Code.CERT_UNTRUSTED,
            f"{address} refused this certificate: {reason}",
            "a valid one of its region",
            "enrol again with a join token",
        ) from cause
