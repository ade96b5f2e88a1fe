"""What follows from a model's profile alone, computed once for each: a profile stays the same object while its model is
known, and some have hundreds of kernels."""

from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar
from weakref import ref

from shoal.types.profile import ModelProfile

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_ANSWERS: Final = 32
"""Kept of one profile. Each is to another batch, or other shapes that workloads serve."""


class OfProfiles(Generic[K, V]):
    """Remembers answers by the identity of profiles: to compare two takes longer than most of the answers.

    They are forgotten with their profile, which is not kept alive here: another region's stays no longer than its
    solicitation. So an answer must not hold the profile that it is of.
    """

    def __init__(self, compute: Callable[[ModelProfile, K], V]) -> None:
        self._compute = compute
        self._known = dict[int, tuple[ref[ModelProfile], dict[K, V]]]()

    def __call__(self, profile: ModelProfile, asked: K) -> V:
        known = self._known.get(id(profile))
        # One that ends is forgotten before its identity is another's.
        answers = self._remember(profile) if known is None or known[0]() is not profile else known[1]
        if asked in answers:
            return answers[asked]
        value = self._compute(profile, asked)
        if len(answers) >= MOST_ANSWERS:
            answers.clear()
        answers[asked] = value
        return value

    def _remember(self, profile: ModelProfile) -> dict[K, V]:
        identity, answers = id(profile), dict[K, V]()
        self._known[identity] = ref(profile, lambda _: self._known.pop(identity, None)), answers
        return answers
