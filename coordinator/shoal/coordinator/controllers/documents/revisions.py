"""Earlier revisions of applied documents: kept when replaced, listed, and rolled back to.

The current document is in the catalog; this module keeps the newest `KEPT` revisions before it. They are written in the
transaction that replaces them, and deleted with their document.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.coordinator import codec
from shoal.coordinator.controllers.log.events import StoreWrites
from shoal.coordinator.core.catalog.differences import differences
from shoal.coordinator.core.catalog.model import Catalog, DocumentKey, StoredDocument
from shoal.coordinator.ports import Store
from shoal.policies import Workload
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.workload import WorkloadKey

REVISIONS: Final = "revisions/"
KEPT: Final = 20


@dataclass(frozen=True, slots=True)
class Revision:
    """One line of a workload's history."""

    # The document as it was applied.
    document: StoredDocument
    # What it changed of the revision before it (`differences`); empty where that one is no longer kept.
    lines: tuple[str, ...]
    # The earlier revision with identical content; 0: none.
    repeats: int
    # Model sources and samples whose pinned bytes are no longer here.
    missing_sources: tuple[str, ...]
    # True if it is the applied revision.
    is_current: bool


def revision_writes(replaced: Sequence[StoredDocument]) -> StoreWrites:
    """Store writes that keep these documents as earlier revisions, for the transaction that replaces them."""
    puts = {_revision_key(each.key, each.revision): codec.dump(each) for each in replaced}
    old = (_revision_key(each.key, each.revision - KEPT) for each in replaced if each.revision > KEPT)
    return StoreWrites(puts, tuple(old))


def revision_keys(document: StoredDocument) -> tuple[str, ...]:
    """Store keys that may hold earlier revisions of a document."""
    first = max(1, document.revision - KEPT)
    return tuple(_revision_key(document.key, number) for number in range(first, document.revision))


async def load_earlier(store: Store, key: DocumentKey) -> tuple[StoredDocument, ...]:
    """Earlier revisions, oldest first."""
    found = [codec.load(StoredDocument, record.value) for record in await store.scan(_folder(key))]
    return tuple(sorted(found, key=lambda each: each.revision))


async def history(store: Store, catalog: Catalog, workload: WorkloadKey) -> tuple[Revision, ...]:
    """Revisions of the workload, and of each policy that a kept revision of it names; oldest first.

    Raises ShoalError(WORKLOAD_UNKNOWN | STORE_UNAVAILABLE).
    """
    own = await _line(store, catalog, _key(workload))
    if not own:
        raise refuse(
            Code.WORKLOAD_UNKNOWN, f"no workload {workload}", "an applied workload", "see `shoal get workloads`"
        )
    named = {each.document.value.spec.policy for each in own if isinstance(each.document.value, Workload)}
    policies = [await _line(store, catalog, DocumentKey("Policy", name)) for name in sorted(filter(None, named))]
    return tuple(sorted((each for line in (own, *policies) for each in line), key=_order))


async def rollback_documents(
    store: Store, catalog: Catalog, workload: WorkloadKey, to: int
) -> tuple[tuple[tuple[str, str], ...], Mapping[str, str]]:
    """The texts and pinned digests that restore an earlier revision of a workload. to: its number; 0: the newest one
    before the current.

    Raises ShoalError(WORKLOAD_UNKNOWN | NOT_FOUND | MODEL_UNKNOWN | STORE_UNAVAILABLE).
    """
    line = [each for each in await history(store, catalog, workload) if each.document.kind == "Workload"]
    numbers = [each.document.revision for each in line if not each.is_current]
    wanted = to or max(numbers, default=0)
    found = next((each for each in line if each.document.revision == wanted), None)
    if found is None or not wanted:
        kept = ", ".join(map(str, numbers)) or "none yet"
        raise refuse(
            Code.NOT_FOUND, f"revision {wanted or 'before the first'} of {workload}", f"one that is kept: {kept}",
            f"see `shoal history {workload.name}`",
        )  # fmt: skip
    document = found.document
    if found.missing_sources:
        source = found.missing_sources[0]
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
    return list(_revisions((*await load_earlier(store, key), holds), catalog))


def _revisions(line: Sequence[StoredDocument], catalog: Catalog) -> Iterator[Revision]:
    for index, each in enumerate(line):
        same = next((old.revision for old in line[:index] if old.digest == each.digest), 0)
        here = {*catalog.models, *catalog.packs}
        gone = tuple(source for source, digest in each.pinned.items() if digest not in here)
        lines = tuple(differences(line[index - 1], each)) if index else ()
        yield Revision(each, lines, same, gone, index == len(line) - 1)


def _order(revision: Revision) -> tuple[float, str, int]:
    return revision.document.applied_at, revision.document.kind, revision.document.revision


def _key(workload: WorkloadKey) -> DocumentKey:
    return DocumentKey("Workload", str(workload))


def _folder(key: DocumentKey) -> str:
    return f"{REVISIONS}{key.kind.lower()}/{key.name}/"


def _revision_key(key: DocumentKey, revision: int) -> str:
    return f"{_folder(key)}{revision:08}"
