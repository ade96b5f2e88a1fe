"""What follows from a profile is computed once while it is known, and again for another one, even if that is equal."""

import gc
from dataclasses import replace
from weakref import ref

import pytest

from harness.builders.coordinator_core import profile
from shoal.coordinator.core.prediction import of_profiles
from shoal.coordinator.core.prediction.demand import at_shapes, prepared_profile, served_profile
from shoal.coordinator.core.prediction.of_profiles import OfProfiles
from shoal.types.profile import ModelProfile


def test_an_answer_is_computed_once_for_each_profile_and_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[ModelProfile, int]]()

    def compute(of: ModelProfile, number: int) -> int:
        asked.append((of, number))
        return number

    monkeypatch.setattr(of_profiles, "MOST_ANSWERS", 2)
    known, first = OfProfiles(compute), profile()
    assert [known(first, number) for number in (1, 2, 1, 2)] == [1, 2, 1, 2]
    assert asked == [(first, 1), (first, 2)]
    other = replace(first)
    assert known(other, 1) == 1
    assert asked[-1][0] is other
    assert known(first, 3) == 3, "there is no room, so its others are forgotten"
    assert len(asked) == 4
    assert (known(first, 1), known(other, 1)) == (1, 1)
    assert asked[4:] == [(first, 1)], "those of another profile stay"


def test_a_profile_is_not_kept_for_what_follows_from_it() -> None:
    """Another region's comes with each of its solicitations, and may be of megabytes."""
    known: OfProfiles[int, list[int]] = OfProfiles(lambda of, _: [len(of.digest)])
    passing, kept = profile(), profile()
    answer, seen = known(kept, 0), ref(passing)
    known(passing, 0)
    del passing
    gc.collect()
    assert seen() is None
    assert known(kept, 0) is answer
    assert all(known(replace(kept), number) == [len(kept.digest)] for number in range(100)), "identities come again"


def test_a_profile_at_the_shapes_of_a_workload_stays_one_object() -> None:
    """Each plan asks for it. Were it another object each time, what follows from it would be computed each time."""
    pushed, shapes = profile(), {"x": (8, 3, 224, 224)}
    found = served_profile(pushed, shapes)
    assert found == at_shapes(pushed, shapes)
    assert served_profile(pushed, dict(shapes)) is found
    made = served_profile(pushed, shapes, "int8")
    assert made == prepared_profile(found, "int8")
    assert served_profile(pushed, shapes, "int8") is made
    assert served_profile(pushed, {}) is pushed
