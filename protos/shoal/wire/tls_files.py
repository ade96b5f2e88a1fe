"""Reads this process's own certificate and CAs by the ssl module alone.

The cryptography library takes 9 MB of memory, so a process that stays small does without it. The ssl module decodes
only a certificate that a peer has shown and that was verified. So the own one is shown to ourselves: both ends of a
TLS handshake in memory, of some milliseconds. Dates are not checked in it; callers check them by their own clock.
"""

import hashlib
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shoal.host.peer_certificate import identity_of_peer, verified_chain
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.identity import Identity

NO_CHECK_TIME: Final = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which the ssl module does not name."""
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_MOST_FLIGHTS: Final = 3
"""Turns of both ends: hello, certificates, finished (RFC 8446, figure 1)."""


def read_identity(certificate: Path, key: Path) -> Identity:
    """The identity in the first certificate of this file (PEM), whoever issued it and whenever it was valid.

    Raises ShoalError(CERT_NAME_INVALID) for a certificate that is unreadable, of another key or without one URI name,
    and OSError.
    """
    leaf = split_certificates(certificate.read_text(errors="replace"))[:1]
    try:
        peer, _ = _show(certificate, key, "".join(leaf))
    except ssl.SSLError as cause:
        raise refuse(
            Code.CERT_NAME_INVALID, "not a readable certificate of its key", "one in PEM", "enrol again"
        ) from cause
    return identity_of_peer(peer)


def is_issued_by(certificate: Path, key: Path, authority: str) -> bool:
    """Whether this authority (PEM) issued the first certificate of the file directly. Dates do not matter. Raises
    OSError."""
    try:
        _, length = _show(certificate, key, authority)
    except ssl.SSLError:
        return False
    return length in (1, 2)  # longer, where a certificate beside the first one leads to that authority


def split_certificates(text: str) -> tuple[str, ...]:
    """Each certificate (PEM) in the text of a file, in one spelling. Raises ShoalError(MESSAGE_INVALID)."""
    return tuple(ssl.DER_cert_to_PEM_cert(_der_of(pem)) for pem in _CERTIFICATE.findall(text))


def authorities_of(content: bytes) -> tuple[bytes, ...]:
    """Each certificate (DER) in a file of CAs. Raises ShoalError(MESSAGE_INVALID) for a file without one, or with one
    that cannot be read."""
    pems = split_certificates(content.decode(errors="replace"))
    _check_readable("".join(pems))
    return tuple(map(_der_of, pems))


def fingerprint_of(pem: str) -> str:
    """SHA-256 of one certificate (DER), hex, as in a join token. Raises ShoalError(MESSAGE_INVALID) for one that cannot
    be read."""
    _check_readable(pem)
    return hashlib.sha256(_der_of(pem)).hexdigest()


def _check_readable(pem: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem)
    except (ssl.SSLError, ValueError) as cause:
        raise _unreadable() from cause


def _der_of(pem: str) -> bytes:
    try:
        return ssl.PEM_cert_to_DER_cert(pem)
    except ValueError as cause:
        raise _unreadable() from cause


def _unreadable() -> ShoalError:
    return refuse(Code.MESSAGE_INVALID, "a CA that is no certificate", "PEM", "update the coordinator")


def _show(certificate: Path, key: Path, trusted: str) -> tuple[Mapping[str, Any], int]:
    """What the ssl module tells of the certificate, and how many certificates lead to one that is `trusted` (PEM), both
    ends included. Raises ssl.SSLError where none do, and OSError."""
    shown, checking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.check_hostname, shown.verify_mode = False, ssl.CERT_NONE
    for context in (shown, checking):
        context.load_cert_chain(certificate, key)
    checking.verify_mode = ssl.CERT_REQUIRED
    checking.verify_flags = ssl.VerifyFlags(int(ssl.VERIFY_X509_PARTIAL_CHAIN) | NO_CHECK_TIME)
    if not trusted:
        raise ssl.SSLError("no authority")
    checking.load_verify_locations(cadata=trusted)
    to_checking, to_shown = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        shown.wrap_bio(to_shown, to_checking),
        checking.wrap_bio(to_checking, to_shown, server_side=True),
    )
    for _ in range(_MOST_FLIGHTS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return ends[1].getpeercert() or {}, len(verified_chain(ends[1]))
