"""All randomness of a run: named streams of one seed, so that a new draw in one place changes none elsewhere."""

from collections.abc import Sequence
from random import Random  # noqa: TID251 - the simulator's own chance; every stream is seeded
from typing import TypeVar

T = TypeVar("T")


class Rng:
    """One stream of draws, determined by (seed, name)."""

    def __init__(self, seed: int, name: str = "") -> None:
        self.seed = seed
        self._name = name
        self._draws = Random(f"{seed}/{name}")

    def stream(self, name: str) -> "Rng":
        """An independent stream below this one; draws here do not affect it."""
        return Rng(self.seed, f"{self._name}/{name}")

    def happens(self, probability: float) -> bool:
        return probability > 0 and self._draws.random() < probability

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self._draws.random()

    def randint(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        return self._draws.randint(low, high)

    def exponential(self, typical: float) -> float:
        """An exponentially distributed waiting time with mean `typical`."""
        return self._draws.expovariate(1.0 / typical) if typical > 0 else 0.0

    def choice(self, items: Sequence[T]) -> T:
        return items[self._draws.randrange(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        return self._draws.sample(items, min(count, len(items)))

    def hex_token(self, letters: int) -> str:
        return f"{self._draws.getrandbits(4 * letters):0{letters}x}"
