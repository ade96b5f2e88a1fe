"""Repeatable choices: they depend on the names alone, and are spread evenly."""

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.types import stable_hash


@given(st.lists(st.text(max_size=10), max_size=4))
def test_a_fraction_is_between_zero_and_one_and_repeatable(names: list[str]) -> None:
    assert 0 < stable_hash.fraction(*names) < 1
    assert stable_hash.fraction(*names) == stable_hash.fraction(*names)


def test_the_ends_of_the_range_are_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    for digest in (bytes(8), b"\xff" * 8):
        monkeypatch.setattr(stable_hash, "digest", partial(_answer, digest))
        assert math.log(stable_hash.fraction("name")) < 0


def _answer(digest: bytes, *names: str) -> bytes:
    return digest


def test_names_in_another_order_or_divided_otherwise_have_another_digest() -> None:
    digests = {stable_hash.digest(*names) for names in (("a", "b"), ("b", "a"), ("ab",), ("", "ab"))}
    assert len(digests) == 4


def test_the_fractions_of_numbered_names_are_spread_evenly() -> None:
    counts = [0] * 10
    for number in range(10_000):
        counts[int(10 * stable_hash.fraction("edge", str(number)))] += 1
    assert min(counts) > 900
    assert max(counts) < 1100
