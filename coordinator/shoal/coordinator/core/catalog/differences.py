"""What changed between two revisions of a document, field by field."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.coordinator.core.catalog.model import StoredDocument
from shoal.policies import canonical


@dataclass(frozen=True, slots=True)
class DocumentChange:
    """One document that a proposal adds, changes or removes."""

    # `+` added, `~` changed or `-` removed.
    sign: str
    kind: str
    name: str
    # All fields of an added document; for a changed one each field that differs (`differences`).
    lines: tuple[str, ...]


def differences(before: StoredDocument, after: StoredDocument) -> Iterator[str]:
    """Each field that differs: `~ NAME: OLD -> NEW`, `- NAME: OLD` if removed, `+ NAME: NEW` if added."""
    old, new = dict(_fields(before)), dict(_fields(after))
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) == new.get(name):
            continue
        if name not in new:
            yield f"- {name}: {old[name]}"
        elif name not in old:
            yield f"+ {name}: {new[name]}"
        else:
            yield f"~ {name}: {old[name]} -> {new[name]}"


def lines(stored: StoredDocument) -> Iterator[str]:
    """All fields of a document, `NAME: VALUE` each."""
    return (f"{name}: {value}" for name, value in _fields(stored))


def _fields(stored: StoredDocument) -> Iterator[tuple[str, str]]:
    """Each leaf of the document by its path, then the pinned digests."""
    yield from _leaves("spec", canonical(stored.value).get("spec", {}))
    labels = canonical(stored.value)["metadata"].get("labels", {})
    yield from _leaves("metadata.labels", labels)
    for source, digest in stored.pinned.items():
        yield f"pinned {source}", digest


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    elif isinstance(value, list | tuple) and any(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(f"{path}[{index}]", inner)
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)
