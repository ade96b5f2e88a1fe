import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from harness.wait import until
from shoal.host import gc_freeze, memory


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as all tests begin


def test_what_was_there_is_no_longer_searched() -> None:
    kept = Node()
    gc_freeze.freeze()
    assert not any(each is kept for each in gc.get_objects())
    assert gc.get_freeze_count() > 10_000, "modules and classes at least"


def test_what_was_garbage_then_is_freed_and_so_is_what_becomes_garbage_later() -> None:
    gc.disable()
    try:
        before = weakref.ref(Node())
        gc_freeze.freeze()
        assert before() is None
        later = weakref.ref(Node())
        assert later() is not None
        gc.collect()
        assert later() is None
    finally:
        gc.enable()


def test_later_collections_count_only_what_came_later() -> None:
    """Of 56,000 frozen objects, a quarter would have to come before the oldest generation is searched again."""
    before = gc.get_threshold()
    gc_freeze.freeze()
    gc.set_threshold(10, 1, 1)
    try:
        full = gc.get_stats()[-1]["collections"]
        kept = [Node() for _ in range(1000)]
        assert gc.get_stats()[-1]["collections"] > full
    finally:
        gc.set_threshold(*before)
    assert kept


def test_what_is_under_way_is_searched_less_often() -> None:
    before = gc.get_threshold()
    try:
        gc_freeze.search_after(10_000)
        assert gc.get_threshold()[1:] == before[1:]
        gc.collect()
        searched = gc.get_stats()[0]["collections"]
        kept = [Node() for _ in range(5000)]
        assert gc.get_stats()[0]["collections"] == searched
        kept += [Node() for _ in range(6000)]
        assert gc.get_stats()[0]["collections"] > searched
    finally:
        gc.set_threshold(*before)
    assert kept


async def test_garbage_does_not_wait_for_a_high_threshold() -> None:
    gc.disable()
    collecting = asyncio.create_task(gc_freeze.collect_regularly(0.001))
    try:
        garbage = weakref.ref(Node())
        await until(lambda: garbage() is None, 5.0, "it to be freed")
    finally:
        collecting.cancel()
        gc.enable()


async def test_what_is_old_is_no_longer_searched() -> None:
    kept = Node()
    collecting = asyncio.create_task(gc_freeze.collect_regularly(0.001))
    try:
        await until(lambda: not any(each is kept for each in gc.get_objects()), 5.0, "it to be excluded")
    finally:
        collecting.cancel()


@pytest.mark.parametrize("reason", ["an hour", "memory", ""])
async def test_garbage_among_what_is_excluded_is_freed_once_it_holds_much_and_after_an_hour(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few objects, so that their number says nothing."""
    resident, counted = 100, 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return resident

    monkeypatch.setattr(memory, "resident_bytes", count)
    whole_every = 5 if reason == "an hour" else 10**9
    kept = [Node()]
    garbage = weakref.ref(kept[0])
    gc_freeze.freeze()
    collecting = asyncio.create_task(gc_freeze.collect_regularly(0.001, count_every=1, whole_every=whole_every))
    try:
        await until(lambda: counted > 0, 5.0, "the first count")
        kept.clear()
        if reason == "memory":
            resident = 126
        if reason:
            await until(lambda: garbage() is None, 30.0, "it to be freed")
        else:
            resident = 125
            await until(lambda: counted > 10, 60.0, "many searches of what is young")
            assert garbage() is not None
    finally:
        collecting.cancel()


async def test_garbage_among_what_is_excluded_is_freed_once_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident_bytes", lambda: 0)
    gc_freeze.freeze()
    collecting = asyncio.create_task(gc_freeze.collect_regularly(0.001, count_every=1))
    try:
        kept = [Node() for _ in range(gc.get_freeze_count())]
        garbage = weakref.ref(kept[0])
        await until(lambda: not any(each is kept[0] for each in gc.get_objects()), 5.0, "it to be excluded")
        excluded = gc.get_freeze_count()
        kept.clear()
        assert garbage() is not None, "nothing frees a cycle without a search"
        kept += [Node() for _ in range(excluded)]
        await until(lambda: garbage() is None, 30.0, "it to be freed")
    finally:
        collecting.cancel()


def test_nothing_is_searched_while_it_is_paused() -> None:
    before = gc.isenabled()
    with gc_freeze.pause():
        assert not gc.isenabled()
        with gc_freeze.pause():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is before


class CountedPauses(gc_freeze._Pauses):
    looks = 0

    @property
    def is_under_way(self) -> bool:
        self.looks += 1
        return super().is_under_way


async def test_regular_searches_wait_for_a_pause_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came in between visited all that a large apply was making, and held the loop for it."""
    pauses = CountedPauses()
    monkeypatch.setattr(gc_freeze, "_PAUSES", pauses)
    begun, go = threading.Event(), threading.Event()

    def make() -> None:
        with gc_freeze.pause():
            begun.set()
            assert go.wait(30)

    making = asyncio.create_task(asyncio.to_thread(make))
    await until(begun.is_set, 30.0, "the pause to begin")
    with gc_freeze.pause():
        pass  # another one that ends sooner
    garbage = weakref.ref(Node())
    searches = gc.get_stats()[1]["collections"]
    collecting = asyncio.create_task(gc_freeze.collect_regularly(0.001))
    try:
        await until(lambda: pauses.looks > 2, 30.0, "looks whether the pause is over")
        assert gc.get_stats()[1]["collections"] == searches
        assert garbage() is not None
        go.set()
        await making
        await until(lambda: garbage() is None, 30.0, "it to be freed")
    finally:
        go.set()
        collecting.cancel()


@pytest.mark.parametrize("most", [10, 10**9])
def test_what_is_left_of_it_is_searched_if_it_is_little(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(gc_freeze, "MOST_SEARCHED", most)
    gc.collect()
    before = gc.get_freeze_count()
    with gc_freeze.pause():
        left = [[at] for at in range(1000)]
    assert (gc.get_freeze_count() > before) is (most < len(left))
    gc.unfreeze()


def test_what_others_left_does_not_count_as_left_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches would stop for good in a process that pauses more often than it is searched."""
    monkeypatch.setattr(gc_freeze, "MOST_SEARCHED", 1000)
    threshold = gc.get_threshold()
    gc_freeze.search_after(50_000)
    try:
        gc.collect()
        before = gc.get_freeze_count()
        others = [[at] for at in range(2000)]
        with gc_freeze.pause():
            pass
        assert gc.get_freeze_count() == before
        assert others
    finally:
        gc.set_threshold(*threshold)
