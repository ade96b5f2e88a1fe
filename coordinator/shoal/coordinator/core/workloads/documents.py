"""What applying documents would change in the documents themselves."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class DocumentKey(NamedTuple):
    """kind: Workload, Policy, Tenant, Region. name: of a workload `tenant/name`."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class DocumentChange:
    """sign: `+` new, `-` gone, `~` changed. lines: of the canonical text, each with its own sign and no context."""

    sign: str
    kind: str
    name: str
    lines: tuple[str, ...]


def diff(before: Mapping[DocumentKey, str], after: Mapping[DocumentKey, str]) -> tuple[DocumentChange, ...]:
    """Changes from one set of canonical texts to another, by kind and name; equal documents are left out."""
    changes = list[DocumentChange]()
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        sign = "+" if old is None else "-" if new is None else "~"
        lines = difflib.unified_diff((old or "").splitlines(), (new or "").splitlines(), n=0, lineterm="")
        shown = tuple(line for line in lines if not line.startswith(("---", "+++", "@@")))
        changes.append(DocumentChange(sign, *key, shown))
    return tuple(changes)
