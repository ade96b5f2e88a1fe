"""Jobs that wait, the earliest deadline first."""

import heapq
from collections.abc import Iterator
from typing import Any, Final, Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What a heap needs of a job."""

    # Its place in the heap that it waits in; None where it waits in none. Only the heap writes it.
    place: list[Any] | None

    @property
    def due(self) -> float:
        """The earliest runs first. When it ends, answered or not, unless it must not wait for those that end
        earlier."""
        ...


J = TypeVar("J", bound=Waiting)

DEADLINE, NUMBER, _JOB = 0, 1, 2
"""Of a place."""
_FEW: Final = 16
"""A heap is not rebuilt for fewer places that were left."""


class DeadlineHeap(Generic[J]):
    """Jobs by deadline. Those of one deadline keep the order of their numbers.

    A job that leaves empties its place, and the heap is rebuilt when more than half of its places are empty: however
    many leave at once, each costs the same.
    """

    def __init__(self) -> None:
        # Each the deadline, the number and the job, None once it left. Numbers differ, so that jobs are never compared.
        self._places: list[list[Any]] = []
        self._empty = 0

    def __len__(self) -> int:
        return len(self._places) - self._empty

    def __iter__(self) -> Iterator[J]:
        """In no order."""
        return (place[_JOB] for place in self._places if place[_JOB] is not None)

    def push(self, job: J, number: int) -> None:
        """`number`: greater than those before."""
        job.place = place = [job.due, number, job]
        heapq.heappush(self._places, place)

    def first(self) -> tuple[float, int] | None:
        """(deadline, number) of the job that is next; None: there is none."""
        places = self._places
        while places and places[0][_JOB] is None:
            heapq.heappop(places)
            self._empty -= 1
        return (places[0][DEADLINE], places[0][NUMBER]) if places else None

    def peek(self) -> J:
        """The job that is next. Raises IndexError if none waits."""
        self.first()
        found: J = self._places[0][_JOB]
        return found

    def pop(self) -> J:
        """Take the job that is next. Raises IndexError if none waits."""
        while True:
            job: J | None = heapq.heappop(self._places)[_JOB]
            if job is not None:
                job.place = None
                return job
            self._empty -= 1

    def discard(self, job: J) -> None:
        """`job` waits here, and leaves."""
        place = job.place
        assert place is not None
        place[_JOB], job.place = None, None
        self._empty += 1
        if self._empty > _FEW and self._empty > len(self._places) // 2:
            self._places = [place for place in self._places if place[_JOB] is not None]
            heapq.heapify(self._places)
            self._empty = 0
