"""A23: a ledger that was edited, reordered, thinned, cut or forked. Verification names the first bad entry."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.types.chain import LedgerEntry, digest, first_break
from shoal.types.units import Wall

LENGTH = 9
Entries = list[LedgerEntry]


def chain(length: int = LENGTH, *, since: Entries | None = None, word: str = "renewed") -> Entries:
    """`length` sound entries, going on from `since`."""
    entries = list(since or [])
    for number in range(len(entries) + 1, length + 1):
        previous = digest(entries[-1]) if entries else ""
        entries.append(
            LedgerEntry(number, Wall(1e9 + number), word, f"g-{number % 3}", "away", "shop/text", "", "", "", previous)
        )
    return entries


SOUND = chain()
HEAD = digest(SOUND[-1])
CHANGES: Mapping[str, Any] = {
    "sequence": 77, "at": Wall(5.0), "what": "ended", "agreement": "g-9", "counterpart": "far", "workload": "shop/x",
    "code": "BREACHED", "terms": "for nothing", "evidence": "AAAA", "previous": "0" * 64,
}  # fmt: skip


def test_a_sound_ledger_verifies_whole_or_from_late_on_under_every_head_that_was_ever_shown() -> None:
    for entry in SOUND:
        assert first_break(SOUND, digest(entry)) is None
    assert first_break(SOUND[4:], HEAD) is None
    assert first_break([], "") is None


@pytest.mark.parametrize("name", [each.name for each in fields(LedgerEntry)])
@pytest.mark.parametrize("index", range(LENGTH))
def test_a23_an_edited_entry_is_found_at_once(index: int, name: str) -> None:
    """By itself where it tells what the one before it denies, else by the next, else by the head that was shown."""
    spoilt = [*SOUND]
    spoilt[index] = replace(spoilt[index], **{name: CHANGES[name]})
    follows = name in ("sequence", "previous") and (index > 0 or name == "previous")
    first = spoilt[index].sequence if follows else index + 2
    assert first_break(spoilt, HEAD) == first


@given(st.permutations(range(LENGTH)))
def test_a23_reordered_entries_are_found_at_the_first_that_moved(order: Sequence[int]) -> None:
    shuffled = [SOUND[index] for index in order]
    moved = next((each for before, each in pairwise(order) if each != before + 1), None)
    assert first_break(shuffled, HEAD) == (None if moved is None else moved + 1)


@pytest.mark.parametrize("index", range(1, LENGTH - 1))
def test_a23_a_dropped_entry_is_found_at_the_next(index: int) -> None:
    assert first_break([*SOUND[:index], *SOUND[index + 1 :]], HEAD) == index + 2


@pytest.mark.parametrize("kept", range(LENGTH))
def test_a23_a_cut_tail_shows_because_the_other_side_keeps_the_last_head(kept: int) -> None:
    assert first_break(SOUND[:kept]) is None, "by itself it looks sound"
    assert first_break(SOUND[:kept], HEAD) == kept + 1


@pytest.mark.parametrize("kept", range(LENGTH))
def test_a23_a_fork_shows_the_same_way(kept: int) -> None:
    """Written anew from entry `kept` on, every link sound."""
    forked = chain(LENGTH + 3, since=SOUND[:kept], word="ended")
    assert first_break(forked) is None
    assert first_break(forked, HEAD) == LENGTH + 4


@pytest.mark.parametrize(
    "forge",
    [
        lambda entries: [replace(entries[0], previous=HEAD), *entries[1:]],
        lambda entries: [*entries, replace(entries[-1], sequence=LENGTH + 1)],
        lambda entries: [*entries, entries[-1]],
    ],
    ids=["begins-nowhere", "goes-on-from-the-last-but-one", "told-twice"],
)
def test_a23_nothing_is_put_in(forge: Callable[[Entries], Entries]) -> None:
    assert first_break(forge(SOUND), HEAD) is not None
