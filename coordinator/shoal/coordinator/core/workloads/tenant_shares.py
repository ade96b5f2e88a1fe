"""How the region's entries share each tenant's quota of rate and concurrency.

An entry is a front where the tenant's clients may call. Each holds a share, by the demand that it reports, and refuses
what is beyond. The shares never add up to more than the quota: a share that falls is sent first, and its room is given
to others once every entry has confirmed its limits. An entry that is lost keeps its share while nobody can tell it
otherwise, and the others get that share too: by so much an island may exceed the quota.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.workloads.entries import EntryPoints
from shoal.coordinator.core.workloads.model import DesiredContent, EntryDemand, TenantDemands
from shoal.types.tenant import DEFAULT_WEIGHT, TenantLimit, TenantUse
from shoal.types.units import Elapsed, PerSecond
from shoal.types.workload import Quota

WINDOW_S: Final = 5.0
"""Seconds over which demand is counted: five heartbeats by default, so that one that is late moves nothing."""
IDLE_SHARE: Final = 0.05
"""Part of a rate that entries share evenly, whatever they report: what one that was idle starts with."""
NEAR_LIMIT: Final = 0.8
"""Shares are changed only where an entry asks for more than this part of its own: each change is a desired set."""
MIN_SHIFT: Final = 0.05
"""Shares are changed only by more than this part of the quota, for the same reason."""


@dataclass(frozen=True, slots=True)
class DemandMeter:
    """What entries asked for, from their counters."""

    # When `counts` were taken; None: not yet.
    at: Elapsed | None = None
    # Counters as reported then, by (tenant, node).
    counts: Mapping[tuple[str, str], TenantUse] = field(default_factory=dict)
    # Demand of the last whole window.
    demands: TenantDemands = field(default_factory=dict)

    def observe(self, fleet: Fleet, now: Elapsed) -> "DemandMeter":
        """The meter after a look at the fleet; itself within a window."""
        if self.at is not None and now - self.at < WINDOW_S:
            return self
        counts = {(use.tenant, name): use for name, state in fleet.nodes.items() for use in state.tenants}
        if self.at is None:
            return DemandMeter(now, counts)
        window_s = now - self.at
        demands = {
            key: _demand(self.counts.get(key, TenantUse(use.tenant)), use, window_s) for key, use in counts.items()
        }
        return DemandMeter(now, counts, demands)


def tenant_limits(
    quotas: Mapping[str, Quota],
    entries: EntryPoints,
    fleet: Fleet,
    desired: Mapping[str, DesiredContent],
    demands: TenantDemands,
    confirmed: Container[str],
) -> Mapping[str, tuple[TenantLimit, ...]]:
    """What each node's front is told, by node. confirmed: nodes that hold the limits that were decided last."""
    limited = [(tenant, quota) for tenant, quota in sorted(quotas.items()) if _is_limited(quota)]
    if not limited:
        return {}
    held = {(each.tenant, node): each for node, content in desired.items() for each in content.tenants}
    found: dict[str, list[TenantLimit]] = {}
    for tenant, quota in limited:
        nodes = sorted(entries.of_tenant(tenant))
        reachable = [name for name in nodes if fleet.nodes[name].liveness is not Liveness.LOST]
        is_settled = all(name in confirmed for name in reachable)
        before = {name: held.get((tenant, name), TenantLimit(tenant)) for name in nodes}
        here = {name: demands.get((tenant, name), EntryDemand()) for name in reachable}
        asked = {name: each.per_s for name, each in here.items()}
        rates = _shares_of(quota.rate, {name: before[name].rate for name in nodes}, asked, is_settled)
        counts = _shares_of(
            quota.concurrency, {name: before[name].concurrency for name in nodes}, asked, is_settled, here
        )
        for name in nodes:
            rate, count = rates.get(name), counts.get(name)
            limit = TenantLimit(
                tenant,
                None if rate is None else PerSecond(rate),
                None if count is None else int(count),
                quota.weight,
            )
            found.setdefault(name, []).append(limit)
    return {name: tuple(limits) for name, limits in found.items()}


def _is_limited(quota: Quota) -> bool:
    return quota.rate is not None or quota.concurrency is not None or quota.weight != DEFAULT_WEIGHT


def next_shares(
    total: float,
    held: Mapping[str, float | None],
    asked: Mapping[str, float],
    *,
    is_settled: bool,
    is_short: bool,
    whole: bool = False,
) -> Mapping[str, float]:
    """The shares of `total` to tell the entries now.

    - held: what each was told before; None: nothing.
    - asked: requests a second that each reports.
    - is_settled: every entry has confirmed what it was told.
    - is_short: some entry needs more than it has.
    - whole: shares are whole numbers.
    """
    wanted = _split(total, asked, whole=whole)
    if all(share is None for share in held.values()):
        return wanted
    now = {name: share or 0.0 for name, share in held.items()}
    given = sum(now.values())
    is_complete = total * (1 - 1e-6) <= given <= total * (1 + 1e-6)
    is_starved = min(now.values()) < _least_share(total, len(now), whole=whole) * (1 - 1e-6)
    shift = max(abs(wanted[name] - share) for name, share in now.items())
    if is_complete and not is_starved and not (is_short and shift > MIN_SHIFT * total):
        return now
    if not is_settled:
        return {name: min(share, wanted[name]) for name, share in now.items()}
    left = max(0.0, total - given)
    found = dict[str, float]()
    for name, share in sorted(now.items(), key=lambda one: (one[1] - wanted[one[0]], one[0])):
        more = min(left, max(0.0, wanted[name] - share))
        left -= more
        found[name] = min(share, wanted[name]) + more
    return found


def _shares_of(
    total: float | None,
    held: Mapping[str, float | None],
    asked: Mapping[str, float],
    is_settled: bool,
    inside: Mapping[str, EntryDemand] | None = None,
) -> Mapping[str, float]:
    """Shares by entry; empty without a quota. inside: given for concurrency, which is shared in whole numbers."""
    if total is None:
        return {}
    reachable = {name: held[name] for name in asked}
    short = (
        any(asked[name] > NEAR_LIMIT * (share or 0.0) for name, share in reachable.items())
        if inside is None
        else any(each.was_full or each.inside > NEAR_LIMIT * (held[name] or 0.0) for name, each in inside.items())
    )
    lost = {name: share or 0.0 for name, share in held.items() if name not in asked}
    if not reachable:
        return lost
    shares = next_shares(total, reachable, asked, is_settled=is_settled, is_short=short, whole=inside is not None)
    return {**lost, **shares}


def _split(total: float, asked: Mapping[str, float], *, whole: bool) -> Mapping[str, float]:
    """`total` by demand, and evenly without any; each gets at least the least share."""
    everything, least = sum(asked.values()), _least_share(total, len(asked), whole=whole)
    left = total - least * len(asked)
    parts = {
        name: least + left * (one / everything if everything > 0 else 1 / len(asked)) for name, one in asked.items()
    }
    if not whole:
        return parts
    # Largest remainders (Hamilton's method), so that the whole numbers add up.
    floors = {name: float(int(part)) for name, part in parts.items()}
    missing = round(total - sum(floors.values()))
    by_remainder = sorted(parts, key=lambda name: (floors[name] - parts[name], name))
    return {name: floor + (name in by_remainder[:missing]) for name, floor in floors.items()}


def _least_share(total: float, entries: int, *, whole: bool) -> float:
    """What an entry gets that nobody asks. Of whole numbers one, where there are enough."""
    return float(total >= entries) if whole else total * IDLE_SHARE / entries


def _demand(before: TenantUse, now: TenantUse, window_s: float) -> EntryDemand:
    if now.total < before.total:  # the front has restarted, and counts from 0
        before = TenantUse(now.tenant)
    return EntryDemand(
        (now.total - before.total) / window_s, now.inside, now.over_concurrency > before.over_concurrency
    )
