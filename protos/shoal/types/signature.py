"""Publishers' signatures of models: keys as documents name them, and what a signature that was verified says."""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import Final

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Wall

_ARMOUR: Final = re.compile(r"-----BEGIN PUBLIC KEY-----\s([A-Za-z0-9+/=\s]+)-----END PUBLIC KEY-----\s*")
_SHAPES: Final = (
    (bytes.fromhex("302a300506032b6570032100"), 44),
    (bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004"), 91),
    (bytes.fromhex("3076301006072a8648ce3d020106052b8104002203620004"), 120),
    (bytes.fromhex("30819b301006072a8648ce3d020106052b81040023038186000"), 158),
)
"""How the DER of a SubjectPublicKeyInfo begins and how long it is: Ed25519 (RFC 8410), P-256, P-384 and P-521 (RFC 5480,
uncompressed points)."""
