"""Signs with the node's key."""

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.types.codes import Code, refuse
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.wire import nouns, signing


class KeySigner:
    """Signs receipts with the key of the node's current certificate. Notices a renewed key by itself."""

    def __init__(self, key: Path, *, region: str, node: str) -> None:
        """`key` is its PEM file. Raises ShoalError(UNAUTHENTICATED) for a key that is not P-256."""
        self._path = key
        self._region = region
        self._node = node
        self._mtime_ns = -1
        self._key = self._current_key()

    def sign_receipt(self, receipt: Receipt) -> SignedReceipt:
        """Raises ShoalError(UNAUTHENTICATED)."""
        content = nouns.encode(receipt)
        key = self._current_key()
        return nouns.make_signed_receipt(receipt, signing.sign(key, self._region, self._node, "receipt", content))

    def _current_key(self) -> ec.EllipticCurvePrivateKey:
        try:
            stamp = self._path.stat().st_mtime_ns
            if stamp != self._mtime_ns:
                self._key, self._mtime_ns = _parse_key(self._path.read_bytes()), stamp
        except OSError as cause:
            raise refuse(Code.UNAUTHENTICATED, f"key.pem: {cause.strerror}", "the node's key", "join again") from cause
        return self._key


def _parse_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except ValueError as cause:
        raise refuse(Code.UNAUTHENTICATED, "an unreadable key.pem", "the node's key", "join again") from cause
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise refuse(Code.UNAUTHENTICATED, "a key that is not P-256", "the node's key", "join again")
    return key
