"""Whose the streams of a connection are."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.http2.stream_shares import LEFT_FACTOR, StreamShares

MOST = 256


def fill(shares: StreamShares[int], payer: str, count: int, most: int = MOST) -> int:
    """The payer asks `count` times; how many streams it gets. The rest waits."""
    got = 0
    for number in range(count):
        if shares.may_take(payer, most):
            shares.take(payer)
            got += 1
        else:
            shares.wait(payer, number)
    return got


def grant_all(shares: StreamShares[int], most: int = MOST) -> list[tuple[str, int]]:
    """All that go on now."""
    found = list[tuple[str, int]]()
    while (each := shares.grant(most)) is not None:
        found.append(each)
    return found


def test_whoever_comes_finds_streams_beside_one_that_takes_all_it_may() -> None:
    shares = StreamShares[int](is_shared=True)
    assert [fill(shares, payer, 420) for payer in "abcdef"] == [192, 48, 12, 3, 1, 0]
    assert shares.total == MOST
    assert grant_all(shares) == []


def test_the_last_to_come_is_the_first_to_go_on() -> None:
    shares = StreamShares[int](is_shared=True)
    for payer in "abcdef":
        fill(shares, payer, 420)
    shares.leave("a")
    assert grant_all(shares) == [("f", 0)]


def test_streams_that_are_free_go_to_who_holds_fewest_and_in_turn() -> None:
    shares = StreamShares[int](is_shared=True)
    fill(shares, "a", 12, 12)
    for payer in "bcd":
        for number in range(3):
            shares.wait(payer, number)
    assert grant_all(shares, 12) == [("b", 0), ("c", 0), ("d", 0)]
    for payer in "bcd":
        shares.leave(payer)
    assert grant_all(shares, 12) == [("b", 1), ("c", 1), ("d", 1)]


def test_calls_of_a_payer_keep_their_order() -> None:
    shares = StreamShares[int](is_shared=True)
    assert fill(shares, "a", 5, 4) == 3
    assert not shares.may_take("a", 1000), "others of its own wait"
    assert grant_all(shares, 1000) == [("a", 3), ("a", 4)]


def test_a_connection_of_one_payer_gives_it_every_stream() -> None:
    shares = StreamShares[int](is_shared=False)
    assert fill(shares, "", MOST + 2) == MOST
    shares.leave("")
    assert grant_all(shares) == [("", MOST)]


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_so_few_streams_that_none_can_be_left_are_all_used(most: int) -> None:
    assert fill(StreamShares[int](is_shared=True), "a", 9, most) == most


def test_what_waits_goes_on_when_more_streams_are_allowed_and_not_while_fewer_are() -> None:
    shares = StreamShares[int](is_shared=True)
    assert fill(shares, "a", 420) == 192
    assert fill(shares, "b", 420, 100) == 0
    for _ in range(91):
        shares.leave("a")
    assert grant_all(shares, 100) == [], "more are held than are allowed"
    shares.leave("a")
    assert [payer for payer, _ in grant_all(shares, 101)] == ["b"]
    assert len(grant_all(shares, 1000)) > 300


def test_who_withdraws_takes_no_stream() -> None:
    shares = StreamShares[int](is_shared=True)
    fill(shares, "a", 5, 4)
    assert shares.withdraw("a", 3)
    assert not shares.withdraw("a", 3)
    assert not shares.withdraw("b", 3)
    assert grant_all(shares) == [("a", 4)]
    assert not shares.withdraw("a", 4)
    assert not shares.lines


def test_once_nothing_can_begin_all_that_wait_are_told() -> None:
    shares = StreamShares[int](is_shared=True)
    fill(shares, "a", 5, 4)
    fill(shares, "b", 2, 4)
    assert shares.end_waits() == [3, 4, 1]
    assert (shares.lines, grant_all(shares, 1000), shares.total) == ({}, [], 4)


PAYERS = st.sampled_from("abcd")
MOSTS = st.integers(0, 40)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), PAYERS),
        st.tuples(st.just("end"), st.integers(0, 50)),
        st.tuples(st.just("withdraw"), st.integers(0, 50)),
        st.tuples(st.just("allow"), MOSTS),
    ),
    max_size=120,
)


@given(STEPS, MOSTS)
def test_whatever_happens_no_payer_has_all_and_nothing_waits_that_need_not(
    steps: list[tuple[str, str | int]], most: int
) -> None:
    shares = StreamShares[int](is_shared=True)
    held, waiting = list[str](), list[tuple[str, int]]()
    number = 0

    def on_taken(payer: str) -> None:
        counted = Counter(held)
        left = most - len(held)
        assert counted[payer] < LEFT_FACTOR * left
        held.append(payer)
        if most > LEFT_FACTOR:
            assert counted[payer] + 1 < most, "it has all of them"

    for step, value in steps:
        match step, value:
            case "ask", str(payer):
                number += 1
                if shares.may_take(payer, most):
                    assert payer not in {each for each, _ in waiting}, "it overtook its own"
                    shares.take(payer)
                    on_taken(payer)
                else:
                    shares.wait(payer, number)
                    waiting.append((payer, number))
            case "end", int(at) if held:
                shares.leave(held.pop(at % len(held)))
            case "withdraw", int(at) if waiting:
                assert shares.withdraw(*waiting.pop(at % len(waiting)))
            case "allow", int(allowed):
                most = allowed
            case _:
                pass
        while (found := shares.grant(most)) is not None:
            payer, _ = found
            assert found == next(each for each in waiting if each[0] == payer), "it overtook its own"
            waiting.remove(found)
            on_taken(payer)
        assert shares.total == len(held)
        assert bool(shares.lines) is bool(waiting)
        counted, left = Counter(held), most - len(held)
        assert not [each for each, _ in waiting if counted[each] < LEFT_FACTOR * left], "it waits for nothing"
    most = max(most, 1)
    while held or waiting:  # whatever ends lets others go on, until all had their turn
        if held:
            shares.leave(held.pop(0))
        while (found := shares.grant(most)) is not None:
            waiting.remove(found)
            held.append(found[0])
        assert held or not waiting
    assert (shares.total, shares._held, shares.lines) == (0, {}, {})
