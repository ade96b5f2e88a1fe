"""Whose turn it is to be compared with every other place, where one scan cannot compare all.

Turns are counted, so that everybody has one whatever the time between scans is. Tenants take turns: nobody waits for
all of a tenant that has many replicas.
"""

from collections import deque
from collections.abc import Collection, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class Turn(NamedTuple):
    """The last turn of a tenant."""

    # Turns are counted through all tenants.
    number: int
    # The assignment that had it.
    assignment: str


class Waiting(NamedTuple):
    """A replica that waits for its turn."""

    tenant: str
    assignment: str


TurnsTaken = Mapping[str, Turn]
"""By tenant."""


def take_turns(before: TurnsTaken, waiting: Collection[Waiting], most: int) -> tuple[frozenset[str], TurnsTaken]:
    """The assignments whose turn it is, `most` where more wait, and the turns taken with these.

    The tenant whose last turn was longest ago goes first, and of its assignments the next one by id. So one waits for
    as many turns as there are tenants, for each assignment of its own tenant.
    """
    if len(waiting) <= most:
        return frozenset(each.assignment for each in waiting), before
    left = dict[str, deque[str]]()
    for tenant, assignment in sorted(waiting):
        left.setdefault(tenant, deque()).append(assignment)
    after, found = dict(before), set[str]()
    for tenant, queue in left.items():
        last = after[tenant].assignment if tenant in after else ""
        queue.rotate(-sum(each <= last for each in queue))
    order = [(after[tenant].number if tenant in after else 0, tenant) for tenant in left]
    heapify(order)
    number = max((each.number for each in before.values()), default=0)
    while len(found) < most:
        tenant = heappop(order)[1]
        number += 1
        after[tenant] = Turn(number, left[tenant].popleft())
        found.add(after[tenant].assignment)
        if left[tenant]:
            heappush(order, (number, tenant))
    return frozenset(found), after
