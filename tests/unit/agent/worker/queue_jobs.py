"""Jobs of queues, without requests."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class QueueJob:
    """A job that a queue takes; `number` tells it from others."""

    number: int
    deadline: float = math.inf
    arrived_at: float = 0.0
    group: Hashable | None = None
    rows: int = 1
    place: list[Any] | None = None
    start_by: float = 0.0

    @property
    def due(self) -> float:
        return self.deadline
