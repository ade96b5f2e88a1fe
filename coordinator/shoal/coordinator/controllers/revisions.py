"""Earlier revisions of what was applied: kept when another takes their place, told, and brought back.

The document that holds is in the catalog; here are those before it, the newest `KEPT` of each document. They are
written in the transaction that replaces them, and go with their document.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.catalog import Catalog, DocumentKey, StoredDocument, differences
from shoal.coordinator.controllers.events import Entries
from shoal.coordinator.ports import Store
from shoal.policies import Workload
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.workload import WorkloadKey

REVISIONS: Final = "revisions/"
KEPT: Final = 20


@dataclass(frozen=True, slots=True)
class Revision:
    """One line of a workload's history. lines: what it changed of the one before it, as far as that is kept. repeats:
    the earlier revision that it is the same as; 0: none. gone: sources of models whose bytes are here no more. current:
    it holds."""

    document: StoredDocument
    lines: tuple[str, ...]
    repeats: int
    gone: tuple[str, ...]
    current: bool


def outgoing(replaced: Sequence[StoredDocument]) -> Entries:
    """What these leave behind, for the transaction that replaces them."""
    puts = {_at(each.key, each.revision): records.dump(each) for each in replaced}
    old = (_at(each.key, each.revision - KEPT) for each in replaced if each.revision > KEPT)
    return Entries(puts, tuple(old))


def all_of(document: StoredDocument) -> tuple[str, ...]:
    """Where the store may have earlier revisions of a document."""
    first = max(1, document.revision - KEPT)
    return tuple(_at(document.key, number) for number in range(first, document.revision))


async def earlier(store: Store, key: DocumentKey) -> tuple[StoredDocument, ...]:
    """The oldest first."""
    found = [records.load(StoredDocument, record.value) for record in await store.scan(_folder(key))]
    return tuple(sorted(found, key=lambda each: each.revision))


async def history(store: Store, catalog: Catalog, workload: WorkloadKey) -> tuple[Revision, ...]:
    """Of the workload, and of each policy that a kept revision of it names; the oldest first.

    Raises ShoalError(WORKLOAD_UNKNOWN | STORE_UNAVAILABLE)."""
    own = await _line(store, catalog, _key(workload))
    if not own:
        raise refuse(Code.WORKLOAD_UNKNOWN, str(workload), "an applied workload", "see `shoal get workloads`")
    named = {each.document.value.spec.policy for each in own if isinstance(each.document.value, Workload)}
    policies = [await _line(store, catalog, DocumentKey("Policy", name)) for name in sorted(filter(None, named))]
    return tuple(sorted((each for line in (own, *policies) for each in line), key=_applied))


async def proposed(
    store: Store, catalog: Catalog, workload: WorkloadKey, to: int
) -> tuple[tuple[tuple[str, str], ...], Mapping[str, str]]:
    """The texts and pinned digests that bring an earlier revision of a workload back. to: its number; 0: the one before
    the one that holds.

    Raises ShoalError(WORKLOAD_UNKNOWN | NOT_FOUND | MODEL_UNKNOWN | STORE_UNAVAILABLE)."""
    line = [each for each in await history(store, catalog, workload) if each.document.kind == "Workload"]
    numbers = [each.document.revision for each in line if not each.current]
    wanted = to or max(numbers, default=0)
    found = next((each for each in line if each.document.revision == wanted), None)
    if found is None or not wanted:
        kept = ", ".join(map(str, numbers)) or "none yet"
        raise refuse(
            Code.NOT_FOUND, f"revision {wanted or 'before the first'} of {workload}", f"one that is kept: {kept}",
            f"see `shoal history {workload.name}`",
        )  # fmt: skip
    document = found.document
    if found.gone:
        source = found.gone[0]
        raise ShoalError(
            Refusal(
                Code.MODEL_UNKNOWN,
                f"revision {wanted} of {workload} had {source!s:.80} as {document.pinned[source]}, which was removed",
                "bytes that are here",
                "push those very bytes again, or choose another revision",
            )
        )
    return ((f"revision {wanted} of {workload}", document.text),), document.pinned


async def _line(store: Store, catalog: Catalog, key: DocumentKey) -> list[Revision]:
    holds = catalog.documents.get(key)
    if holds is None:
        return []
    return list(_told((*await earlier(store, key), holds), catalog))


def _told(line: Sequence[StoredDocument], catalog: Catalog) -> Iterator[Revision]:
    for index, each in enumerate(line):
        same = next((old.revision for old in line[:index] if old.digest == each.digest), 0)
        here = {*catalog.models, *catalog.packs}
        gone = tuple(source for source, digest in each.pinned.items() if digest not in here)
        lines = tuple(differences(line[index - 1], each)) if index else ()
        yield Revision(each, lines, same, gone, index == len(line) - 1)


def _applied(revision: Revision) -> tuple[float, str, int]:
    return revision.document.applied_at, revision.document.kind, revision.document.revision


def _key(workload: WorkloadKey) -> DocumentKey:
    return DocumentKey("Workload", str(workload))


def _folder(key: DocumentKey) -> str:
    return f"{REVISIONS}{key.kind.lower()}/{key.name}/"


def _at(key: DocumentKey, revision: int) -> str:
    return f"{_folder(key)}{revision:08}"
