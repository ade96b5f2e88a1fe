"""The node's key, for what it signs."""

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.types.codes import Code, refuse
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.wire import nouns, signing


class KeySigner:
    """Signs receipts with the key whose certificate the node holds now; a renewed one is taken up by itself."""

    def __init__(self, key: Path, *, region: str, node: str) -> None:
        """key: its PEM file. Raises ShoalError(UNAUTHENTICATED) on a key that is not P-256."""
        self._path = key
        self._region = region
        self._node = node
        self._stamp = -1
        self._key = self._newest()

    def sign_receipt(self, receipt: Receipt) -> SignedReceipt:
        """Raises ShoalError(UNAUTHENTICATED)."""
        content = nouns.encode(receipt)
        key = self._newest()
        return nouns.signed(receipt, signing.sign(key, self._region, self._node, "receipt", content))

    def _newest(self) -> ec.EllipticCurvePrivateKey:
        try:
            stamp = self._path.stat().st_mtime_ns
            if stamp != self._stamp:
                self._key, self._stamp = _load(self._path.read_bytes()), stamp
        except OSError as cause:
            raise refuse(Code.UNAUTHENTICATED, f"key.pem: {cause.strerror}", "the node's key", "join again") from cause
        return self._key


def _load(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except ValueError as cause:
        raise refuse(Code.UNAUTHENTICATED, "an unreadable key.pem", "the node's key", "join again") from cause
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise refuse(Code.UNAUTHENTICATED, "a key that is not P-256", "the node's key", "join again")
    return key
