"""What follows from a model's profile alone, computed once for each: a profile stays the same object while its model is
known, and some have thousands of kernels."""

from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from shoal.types.profile import ModelProfile

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_PROFILES: Final = 512
"""Answers kept, each with its profile."""


class OfProfiles(Generic[K, V]):
    """Remembers answers by the identity of profiles: to compare two takes longer than most of the answers."""

    def __init__(self, compute: Callable[[ModelProfile, K], V]) -> None:
        self._compute = compute
        self._known = dict[tuple[int, K], tuple[ModelProfile, V]]()

    def __call__(self, profile: ModelProfile, asked: K) -> V:
        key = id(profile), asked
        known = self._known.get(key)
        if known is not None and known[0] is profile:  # held here, so that nothing else has its identity
            return known[1]
        value = self._compute(profile, asked)
        if len(self._known) >= MOST_PROFILES:
            self._known.clear()
        self._known[key] = profile, value
        return value
