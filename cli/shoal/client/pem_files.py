"""Reads a context's files although whoever keeps them fresh may be replacing them, one after the other. Blocking."""

import ssl
import time
from contextlib import suppress
from typing import Final

from shoal.wire.handshake import PemFiles

WHOLE_WITHIN_S: Final = 1.0
"""For the rest of the files to be replaced: each is synced to its disk before the next."""
PAUSE_S: Final = 0.005
_MISMATCH: Final = "KEY_VALUES_MISMATCH"
"""X509_R_KEY_VALUES_MISMATCH of OpenSSL's x509err.h, as the ssl module names it."""


def read_pem_files(files: PemFiles, within_s: float = WHOLE_WITHIN_S) -> tuple[bytes, bytes, bytes]:
    """(CAs, key, certificate) that were there together, of a key and its certificate; after so many seconds, what is
    there. Raises OSError."""
    end = time.monotonic() + within_s  # noqa: TID251 - a command's own deadline
    while True:
        found = _read(files)
        with suppress(OSError):  # what stays unfit is for the handshake to report
            load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files, end - time.monotonic())  # noqa: TID251
        # Unchanged since: what was loaded is what was read.
        if _read(files) == found or time.monotonic() >= end:  # noqa: TID251
            return found


def load_pair(context: ssl.SSLContext, files: PemFiles, within_s: float = WHOLE_WITHIN_S) -> None:
    """Load key and certificate, again while they do not belong together, for so many seconds. Raises OSError (including
    ssl.SSLError)."""
    end = time.monotonic() + within_s  # noqa: TID251 - a command's own deadline
    while True:
        try:
            context.load_cert_chain(files.certificate, files.key)
        except ssl.SSLError as cause:
            if cause.reason != _MISMATCH or time.monotonic() >= end:  # noqa: TID251
                raise
            time.sleep(PAUSE_S)  # noqa: TID251
        else:
            return


def _read(files: PemFiles) -> tuple[bytes, bytes, bytes]:
    return files.ca.read_bytes(), files.key.read_bytes(), files.certificate.read_bytes()
