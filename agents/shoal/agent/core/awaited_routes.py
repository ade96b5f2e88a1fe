"""Workloads that clients ask for at a front that has no routes of them: which it asks the region for, and who may wait.

It holds a bounded number of names for each tenant: those that the region has not answered, and those that it does not
know. So a caller who makes names up uses its own share, and is refused beyond it.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from shoal.types.agreement import GUEST_TENANT
from shoal.types.codes import Code, Refusal
from shoal.types.identity import NAME_PATTERN
from shoal.types.route import Route
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import WorkloadKey

WAIT_S: Final = Seconds(5.0)
"""Longest time that the region may take to answer; later requests do not wait. A choice: a region that answers takes
one status, one step and one desired set, each well below a heartbeat; a caller whose region does not answer had better
try another front."""
ASKED_S: Final = Seconds(2 * WAIT_S)
"""A name is asked for until then, so that nobody who waits takes it for answered."""
NAMES_PER_TENANT: Final = 64
"""Unanswered and unknown names of one tenant. A choice: a client that asks a new front for all that it uses waits once;
beyond, it comes back after the first were answered."""
NAMES: Final = 1024
"""Of all tenants together."""


class _Question(NamedTuple):
    # When a request asked first.
    asked_at: Elapsed
    # Until when it is asked, if no further request comes.
    ends_at: Elapsed


class AwaitedRoutes:
    """Of one front. It belongs to one thread."""

    def __init__(self) -> None:
        self._is_on_demand = False
        self._asked: dict[WorkloadKey, _Question] = {}
        self._unknown: frozenset[WorkloadKey] = frozenset()
        self._repeated: dict[WorkloadKey, Elapsed] = {}
        """Until when unknown ones are asked for that clients asked for again."""
        self._names: Counter[str] = Counter()
        """By tenant: names asked for and unknown ones."""

    def configure(self, routes: Iterable[Route], *, is_on_demand: bool) -> None:
        """All routes that the front has from now on. is_on_demand: others may exist; otherwise all is answered."""
        routes = tuple(routes)
        self._is_on_demand = is_on_demand
        self._unknown = frozenset(route.workload for route in routes if route.is_unknown)
        if not is_on_demand:
            self._asked.clear()
        self._repeated = {key: until for key, until in self._repeated.items() if key in self._unknown}
        for route in routes:
            self._asked.pop(route.workload, None)
        self._recount()

    def is_answered(self, key: WorkloadKey) -> bool:
        """Whether there is nothing to wait for."""
        return key not in self._asked

    def may_exist(self, key: WorkloadKey) -> bool:
        """Whether the region may have routes of a workload that this front has none of."""
        return (
            self._is_on_demand
            and key not in self._unknown
            and key.tenant != GUEST_TENANT
            and all(map(NAME_PATTERN.fullmatch, key))
        )

    def ask(self, key: WorkloadKey, now: Elapsed) -> Refusal | None:
        """Ask the region for the routes of a workload that may exist; None, or why the caller may not."""
        known = self._asked.get(key)
        if known is None or now >= known.ends_at:
            self._drop_late(now)
            if self._names[key.tenant] >= NAMES_PER_TENANT or len(self._asked) + len(self._unknown) >= NAMES:
                return Refusal(
                    Code.OVERLOADED,
                    f"{self._names[key.tenant]} workloads of the tenant that this front has no routes of, "
                    f"and {len(self._asked) + len(self._unknown)} of all",
                    f"at most {NAMES_PER_TENANT} of one tenant, and {NAMES} of all",
                    "ask for workloads that exist, and retry later",
                )
            self._names[key.tenant] += 1
            known = _Question(now, now)
        self._asked[key] = known._replace(ends_at=Elapsed(now + ASKED_S))
        return None

    def repeat(self, key: WorkloadKey, now: Elapsed) -> None:
        """A client asked for a workload that may not exist. One that the region does not know is asked for on: so it
        hears if that comes, and a client that looks for it again and again changes nothing."""
        if key in self._unknown:
            self._repeated[key] = Elapsed(now + ASKED_S)

    def due_at(self, key: WorkloadKey) -> Elapsed:
        """When those stop waiting who ask for a name. Whoever comes later finds that the region does not answer."""
        return Elapsed(self._asked[key].asked_at + WAIT_S)

    def open_questions(self, now: Elapsed) -> tuple[WorkloadKey, ...]:
        """Workloads that somebody asked for, in order."""
        self._drop_late(now)
        return tuple(sorted((*self._asked, *(key for key, until in self._repeated.items() if now < until))))

    def _drop_late(self, now: Elapsed) -> None:
        late = [key for key, question in self._asked.items() if now >= question.ends_at]
        for key in late:
            del self._asked[key]
        if late:
            self._recount()

    def _recount(self) -> None:
        self._names = Counter(key.tenant for key in (*self._asked, *self._unknown))


def no_answer(key: WorkloadKey) -> Refusal:
    """Why a request that waited for the routes of a workload is refused."""
    return Refusal(
        Code.MODEL_NOT_READY,
        f"the region has not said where {key} is",
        "its answer",
        "retry; on an island, ask for what was asked before",
    )
