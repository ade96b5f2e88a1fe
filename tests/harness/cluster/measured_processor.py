"""What an agent of a test measured of this machine's processor, for the agents of later tests.

Its probe keeps a core busy for 3.5 s (measured), in each region again, and finds the same. An agent takes what its
journal has, as after a restart, and signs it with its own key; where it does not fit its device, it measures.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from shoal.agent.journal.files import FileJournal
from shoal.types.receipt import Receipt
from shoal.wire import nouns

DEVICE: Final = "cpu0"
_measured: list[Receipt] = []
"""None before an agent of this process has told one; then one."""


def keep(receipts: Iterable[Receipt]) -> None:
    """Keep the first that was measured of the processor."""
    own = [each for each in receipts if each.device == DEVICE and not each.emulated]
    if not _measured:
        _measured.extend(own[:1])


def hand_to(node: str, state: Path) -> None:
    """Put it into the journal of an agent that has not started yet."""
    if _measured:
        signed = nouns.make_signed_receipt(replace(_measured[0], node=node), b"")
        journal = FileJournal(state / "journal", structlog.get_logger(__name__), reserve_bytes=0)
        asyncio.run(journal.save_receipts((signed,)))
