"""The text form of tokens, shared by those who make and those who redeem them.

A join token is `shoal-join.REGION.FINGERPRINT.SECRET`: the region, SHA-256 of its CA's certificate (DER, hex), and 160
random bits. The joiner pins the CA by the fingerprint before it sends the secret; the enrolment server sends its CA
certificate in the TLS chain. The coordinator stores only the secret's SHA-256.
"""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, field
from typing import Final

from shoal.types.codes import Code, refuse
from shoal.types.identity import NAME_PATTERN

SECRET_BYTES: Final = 20
_PREFIX: Final = "shoal-join"
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A parsed join token."""

    region: str
    # SHA-256 of the CA's certificate (DER), hex.
    ca_sha256: str
    # Base64url without padding, of 20 bytes; repr never prints it.
    secret: str = field(repr=False)

    @property
    def text(self) -> str:
        return f"{_PREFIX}.{self.region}.{self.ca_sha256}.{self.secret}"


def parse_join_token(text: str) -> JoinToken:
    """Raises ShoalError(TOKEN_INVALID)."""
    invalid = refuse(
        Code.TOKEN_INVALID,
        "not a join token of Shoal",
        f"{_PREFIX}.REGION.FINGERPRINT.SECRET",
        "make a new one: shoal token create",
    )
    parts = text.strip().split(".") if len(text) < 256 else []
    if len(parts) != 4 or parts[0] != _PREFIX:
        raise invalid
    _, region, fingerprint, secret = parts
    if NAME_PATTERN.fullmatch(region) is None or _FINGERPRINT.fullmatch(fingerprint) is None:
        raise invalid
    try:
        size = len(base64.b64decode(secret + "=" * (-len(secret) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError) as cause:
        raise invalid from cause
    if size != SECRET_BYTES:
        raise invalid
    return JoinToken(region, fingerprint, secret)


def token_sha256(secret: str) -> str:
    """What is stored in place of a secret: of a join token's last part, or of a whole bearer token as the client sends
    it."""
    return hashlib.sha256(secret.encode()).hexdigest()
