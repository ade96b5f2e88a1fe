"""The private keys of a node. For the program of the identity alone: it imports the cryptography library."""

import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from shoal.agent.identity.forward_key import public_file
from shoal.host.private_files import write_private
from shoal.types.codes import Code, refuse


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The key that a node signs with (PEM). Raises ShoalError(UNAUTHENTICATED)."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as cause:
        raise refuse(Code.UNAUTHENTICATED, f"key.pem: {cause.strerror}", "the node's key", "join again") from cause
    except ValueError as cause:
        raise refuse(Code.UNAUTHENTICATED, "an unreadable key.pem", "the node's key", "join again") from cause
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise refuse(Code.UNAUTHENTICATED, "a key that is not P-256", "the node's key", "join again")
    return key


def make_forward_key(path: Path) -> None:
    """Write the private key if there is none, and the public one beside it. Raises OSError."""
    if not path.exists():
        write_private(path, X25519PrivateKey.generate().private_bytes_raw())
    private = path.read_bytes()
    public = X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
    known = {"of": hashlib.sha256(private).hexdigest(), "public": public.hex()}
    write_private(public_file(path), json.dumps(known).encode())
