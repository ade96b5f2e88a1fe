"""Signs with the node's key, in the program of the identity."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from shoal.agent.identity.orders import SignOrder
from shoal.agent.identity.programs import run_order
from shoal.types.codes import Code, refuse
from shoal.types.receipt import Receipt, SignedReceipt
from shoal.wire import nouns

TOPIC = "receipt"


class KeySigner:
    """Signs receipts with the key of the node's current certificate. Notices a renewed key by itself.

    A receipt that it has signed with this key is not signed again: a session that opens asks for all of them.
    """

    def __init__(self, key: Path, *, region: str, node: str) -> None:
        """`key` is its PEM file."""
        self._path = key
        self._region = region
        self._node = node
        self._mtime_ns = -1
        # By device: the newest receipt that this key has signed.
        self._signed: dict[str, SignedReceipt] = {}

    async def sign_receipts(self, receipts: Sequence[Receipt]) -> tuple[SignedReceipt, ...]:
        """Raises ShoalError(UNAUTHENTICATED) for a key that is missing or not P-256, and INTERNAL."""
        try:
            stamp = self._path.stat().st_mtime_ns
        except OSError as cause:
            raise refuse(Code.UNAUTHENTICATED, f"key.pem: {cause.strerror}", "the node's key", "join again") from cause
        if stamp != self._mtime_ns:
            self._signed, self._mtime_ns = {}, stamp
        known = self._signed
        contents = {each.device: nouns.encode(each) for each in receipts}
        missing = [each for each in receipts if not _is_signed(known.get(each.device), contents[each.device])]
        if missing:
            wanted = tuple(contents[each.device] for each in missing)
            order = SignOrder(str(self._path), self._region, self._node, TOPIC, wanted)
            answer = await asyncio.to_thread(run_order, order)
            for receipt, signature in zip(missing, answer.signatures, strict=True):
                known[receipt.device] = nouns.make_signed_receipt(receipt, signature)
        return tuple(known[each.device] for each in receipts)


def _is_signed(known: SignedReceipt | None, content: bytes) -> bool:
    return known is not None and known.content == content
