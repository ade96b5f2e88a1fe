"""A hash chain: every entry carries the digest of the one before it, so nothing inside can be changed unseen.

That the tail was cut is seen by who keeps the last digest: each region keeps its counterparts' (`Renewal.ledger_head`).
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from shoal.types.units import Wall


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One transition of one agreement (or bid), as this region saw it.

    what: offered | awarded | granted | renewed | noticed | released | expired | breached | ended. counterpart: the
    other region. evidence: base64 of what the counterpart signed, empty where it said nothing. terms: for people and
    sums. previous: digest of the entry before, empty for the first.

    Its fields stay as they are: one more, and no other version finds the digests that entries were chained by.
    """

    sequence: int
    at: Wall
    what: str
    agreement: str
    counterpart: str
    workload: str
    code: str
    terms: str
    evidence: str
    previous: str


def digest(entry: LedgerEntry) -> str:
    """SHA-256, hex, over the entry's fields as canonical JSON."""
    return hashlib.sha256(json.dumps(asdict(entry), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def first_broken(entries: Iterable[LedgerEntry], head: str | None = None) -> int | None:
    """Sequence of the first entry that does not follow from the one before it; None when all do.

    head: a digest that somebody else was shown: it must be among them, else the tail was cut or forked (the sequence
    after the last is returned). Entries may begin late: old ones are dropped.
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
