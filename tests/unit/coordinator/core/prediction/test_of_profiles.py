"""What follows from a profile is computed once for it, and again for another one, even if that is equal."""

from dataclasses import replace

import pytest

from harness.builders.coordinator_core import profile
from shoal.coordinator.core.prediction import of_profiles
from shoal.coordinator.core.prediction.of_profiles import OfProfiles
from shoal.types.profile import ModelProfile


def test_an_answer_is_computed_once_for_each_profile_and_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[ModelProfile, int]]()

    def compute(of: ModelProfile, number: int) -> int:
        asked.append((of, number))
        return number

    monkeypatch.setattr(of_profiles, "MOST_PROFILES", 3)
    known, first = OfProfiles(compute), profile()
    assert [known(first, number) for number in (1, 2, 1, 2)] == [1, 2, 1, 2]
    assert asked == [(first, 1), (first, 2)]
    other = replace(first)
    assert known(other, 1) == 1
    assert asked[-1][0] is other
    assert known(first, 3) == 3, "there is no room, so the others are forgotten"
    assert len(asked) == 4
    assert known(first, 1) == 1
    assert len(asked) == 5
