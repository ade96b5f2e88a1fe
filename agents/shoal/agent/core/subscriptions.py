"""Which routes a node subscribes to: of what clients asked for at its front, until nobody asks any more.

While the node is cut off it gives nothing up, so that an island goes on answering what it was asked before; and it adds
nothing that the region has not answered. What it held is resumed from the routes of the set on disk.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal.agent.core.awaited_routes import NAMES
from shoal.agent.core.partition import Linked, LinkState
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import MAX_SUBSCRIPTIONS, DesiredSet, Ingress, Subscriptions
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import WorkloadKey

UNUSED_S: Final = Seconds(3600.0)
"""A subscription ends this long after the last request. A choice: a client that asks less often waits for a route, some
tenths of a second, and so does whoever asks first on an island."""
UNKNOWN_S: Final = Seconds(10.0)
"""A subscription to a workload that does not exist ends this long after the last request. A choice: whoever makes names
up gets their places back by then."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """One workload that clients asked for here."""

    # When one asked last.
    used_at: Elapsed
    # Since when the node knows that no such workload may enter here; None: it may, or the region has not said.
    unknown_since: Elapsed | None = None


Subscribed = Mapping[WorkloadKey, Subscription]


def resume(desired: DesiredSet | None, now: Elapsed) -> Subscribed:
    """What an earlier run of the agent subscribed to, from the set on disk. Where that lists all routes, it is as many
    of them as may be held."""
    if desired is None:
        return {}
    served = {each.workload for each in desired.assignments}
    found = [route.workload for route in desired.routes if route.workload not in served]
    return dict.fromkeys(found[:MAX_SUBSCRIPTIONS], Subscription(now))


def to_report(held: Subscribed) -> Subscriptions:
    return Subscriptions(tuple(sorted(held)))


def used_between(before: Iterable[Ingress], after: Iterable[Ingress]) -> frozenset[WorkloadKey]:
    """Workloads that clients asked for between two readings of a front's counters."""
    known = {(each.workload, each.origin): each.requests for each in before}
    return frozenset(each.workload for each in after if known.get((each.workload, each.origin), 0) != each.requests)


def follow(
    held: Subscribed, asked: Collection[WorkloadKey], desired: DesiredSet | None, link_state: LinkState, now: Elapsed
) -> Subscribed:
    """The subscriptions now; the same value where nothing changed. asked: by clients since the last call.

    A node whose set lists all routes gives none up and asks for none; it only follows what is used, so that it knows
    what to subscribe to when its region has routes on demand again.
    """
    if desired is None or not (asked or desired.routes_on_demand):
        return held
    unknown = {route.workload for route in desired.routes if route.is_unknown}
    known = {route.workload for route in desired.routes} - unknown
    if not desired.routes_on_demand:
        used = {key: Subscription(now) for key in asked if key in known and _may_enter(desired, key)}
        return _within_bounds({**held, **used}, known, unknown) if used else held
    found = dict(held)
    is_linked = isinstance(link_state, Linked)
    for key in asked:
        if _may_enter(desired, key) and (is_linked or key in known):
            found[key] = replace(found.get(key, Subscription(now)), used_at=now)
    for key in unknown & found.keys():
        if found[key].unknown_since is None:
            found[key] = replace(found[key], unknown_since=now)
    for key in [key for key, each in found.items() if each.unknown_since is not None and key not in unknown]:
        found[key] = replace(found[key], unknown_since=None)
    if is_linked:
        found = {key: each for key, each in found.items() if not _is_over(each, now)}
    found = _within_bounds(found, known, unknown)
    return held if found == held else found


def _within_bounds(
    found: dict[WorkloadKey, Subscription], known: set[WorkloadKey], unknown: set[WorkloadKey]
) -> dict[WorkloadKey, Subscription]:
    """At most MAX_SUBSCRIPTIONS: those used last. Places are kept for what the region has not answered yet, as many as
    a front may ask for; beyond these, whatever does not exist pushes out nothing that does."""
    if len(found) <= MAX_SUBSCRIPTIONS:
        return found
    newest = sorted(found, key=lambda key: (-found[key].used_at, key))
    kept = [key for key in newest if key in known][: MAX_SUBSCRIPTIONS - NAMES]
    rest = sorted(found.keys() - set(kept), key=lambda key: (key in unknown, key in known, -found[key].used_at, key))
    return {key: found[key] for key in (*kept, *rest[: MAX_SUBSCRIPTIONS - len(kept)])}


def _may_enter(desired: DesiredSet, key: WorkloadKey) -> bool:
    if key.tenant == GUEST_TENANT:
        return False
    told = desired.forwarding
    return told is None or told.may_enter(key.tenant)


def _is_over(each: Subscription, now: Elapsed) -> bool:
    if each.unknown_since is not None:
        return now - max(each.unknown_since, each.used_at) >= UNKNOWN_S
    return now - each.used_at >= UNUSED_S
