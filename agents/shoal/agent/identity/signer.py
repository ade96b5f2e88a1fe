"""The node's key, for what it signs."""

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.types.codes import Code, refuse
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.wire import nouns, signing


class KeySigner:
    """Signs receipts with the key whose certificate the node holds."""

    def __init__(self, key_pem: bytes, *, region: str, node: str) -> None:
        """Raises ShoalError(UNAUTHENTICATED) on a key that is not P-256."""
        try:
            key = serialization.load_pem_private_key(key_pem, password=None)
        except ValueError as cause:
            raise refuse(Code.UNAUTHENTICATED, "an unreadable key.pem", "the node's key", "join again") from cause
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise refuse(Code.UNAUTHENTICATED, "a key that is not P-256", "the node's key", "join again")
        self._key = key
        self._region = region
        self._node = node

    def sign_receipt(self, receipt: Receipt) -> SignedReceipt:
        content = nouns.encode(receipt)
        return nouns.signed(receipt, signing.sign(self._key, self._region, self._node, "receipt", content))
