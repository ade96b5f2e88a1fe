"""A hash chain: each entry carries the digest of the one before it, so a change inside shows.

A cut tail shows to whoever keeps the last digest: each region keeps its counterparts' (`Renewal.ledger_head`).
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Final

from shoal.types.units import Wall

EVIDENCE_CHARS: Final = 4096
"""Of an entry's evidence. Federations of older versions take no longer ones, and with one of them no report at all."""
EVIDENCE_CHARS_TAKEN: Final = 16_384
"""Older versions wrote longer ones, such as an award with 80 gateways (4,304)."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One transition of one agreement (or bid), as this region saw it.

    Its fields must stay as they are: with one more, other versions would not compute the digests that link existing
    entries.
    """

    # Number of the entry, from 1.
    sequence: int
    # When it was written.
    at: Wall
    # offered | awarded | granted | renewed | noticed | released | expired | breached | ended
    what: str
    # Name of the agreement (or bid).
    agreement: str
    # The other region.
    counterpart: str
    # Workload that it is about.
    workload: str
    # Why, as a code; empty where the transition needs no reason.
    code: str
    # Terms in words, for people and totals.
    terms: str
    # Base64 of what the counterpart signed, or its digest where that is too long; empty where it sent nothing.
    evidence: str
    # Digest of the entry before; empty for the first.
    previous: str


def show_evidence(message: bytes) -> str:
    """What an entry says of a signed message. The digest proves which message it was to whoever has that."""
    text = b64encode(message).decode()
    return text if len(text) <= EVIDENCE_CHARS else f"sha256:{hashlib.sha256(message).hexdigest()}"


def digest(entry: LedgerEntry) -> str:
    """SHA-256, hex, over the entry's fields as canonical JSON."""
    return hashlib.sha256(json.dumps(asdict(entry), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def first_break(entries: Iterable[LedgerEntry], head: str | None = None) -> int | None:
    """Sequence number of the first entry that does not follow from the one before it; None when all do.

    head: a digest that another party was shown. It must be among the entries; otherwise the tail was cut or forked, and
    the result is the sequence number after the last. Entries need not start at 1, because old ones are dropped.
    """
    before: LedgerEntry | None = None
    before_digest = ""
    seen = set[str]()
    for entry in entries:
        if before is not None and (entry.sequence, entry.previous) != (before.sequence + 1, before_digest):
            return entry.sequence
        if before is None and entry.sequence == 1 and entry.previous:
            return entry.sequence
        before, before_digest = entry, digest(entry)
        seen.add(before_digest)
    if head and head not in seen:
        return before.sequence + 1 if before is not None else 1
    return None
