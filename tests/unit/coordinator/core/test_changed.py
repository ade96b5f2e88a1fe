"""What changed from one tuple to the next is found whatever changed, and nothing is looked at that did not."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.core.workloads.changed import LARGE, STRIDE, difference


class Value:
    """Equal to itself alone."""


@given(st.lists(st.tuples(st.integers(0, 3 * STRIDE), st.sampled_from("+-~")), max_size=5))
def test_what_came_and_went_is_found(changes: list[tuple[int, str]]) -> None:
    before = tuple(Value() for _ in range(3 * STRIDE))
    after = [*before]
    for at, kind in changes:
        after[at : at + (kind != "+")] = [] if kind == "-" else [Value()]
    new, gone = difference(before, tuple(after))
    known, now = set(map(id, before)), set(map(id, after))
    assert [*map(id, new)] == [id(each) for each in after if id(each) not in known]
    assert [*map(id, gone)] == [id(each) for each in before if id(each) not in now]


def test_equal_values_are_the_same() -> None:
    before = tuple((number,) for number in range(2 * STRIDE))
    after = (*((*each,) for each in before[:-1]), (-1,))
    new, gone = difference(before, after)
    assert before[0] is not after[0]
    assert before[0] not in gone
    assert new[-1] == (-1,)
    assert gone[-1] == before[-1]


def test_of_large_tuples_the_last_answer_is_that_of_the_same_two() -> None:
    before = tuple(Value() for _ in range(LARGE))
    one, other = (*before, Value()), (*before[1:], Value())
    assert difference(before, one) == ([one[-1]], [])
    assert difference(before, one) is difference(before, one)
    assert difference(before, other) == ([other[-1]], [before[0]])
    assert difference(before, one) == ([one[-1]], [])
    assert difference(one, before) == ([], [one[-1]])
