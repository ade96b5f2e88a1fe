"""What is known of other devices: one latency for each model and device, in logarithms."""

import re
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.intp]

_WORDS = re.compile(r"[a-z]+|\d+")


@dataclass(frozen=True, slots=True)
class KnownLatencies:
    """A table of measured latencies. Models are rows, device kinds are columns."""

    # The name of each device kind: what resembles a new device by name counts for more.
    devices: tuple[str, ...]
    # Kinds of one family (the same chip at another batch) are left out together when transfer is tried on one of them.
    families: tuple[str, ...]
    # (models, devices): natural logarithm of seconds. NaN: not measured.
    log_seconds: Floats
    # (models, features): what is known of each model without a measurement; no columns where nothing is.
    features: Floats

    def __post_init__(self) -> None:
        models, devices = self.log_seconds.shape
        if (len(self.devices), len(self.families), len(self.features)) != (devices, devices, models):
            raise ValueError("names, families, latencies and features do not belong together")

    def without(self, family: str) -> "KnownLatencies":
        """The table as if this family had never been measured."""
        kept = [column for column, each in enumerate(self.families) if each != family]
        return KnownLatencies(
            tuple(self.devices[column] for column in kept),
            tuple(self.families[column] for column in kept),
            self.log_seconds[:, kept],
            self.features,
        )

    def rows(self, models: Indices) -> "KnownLatencies":
        """The table of these models alone."""
        return replace(self, log_seconds=self.log_seconds[models], features=self.features[models])


def name_similarity(one: str, other: str) -> float:
    """Shared words and numbers of two device names, as a share of all of theirs (Jaccard index): 0 to 1."""
    words, others = (set(_WORDS.findall(name.lower())) for name in (one, other))
    return len(words & others) / max(1, len(words | others))
