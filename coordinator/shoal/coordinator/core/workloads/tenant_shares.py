"""How the region's entries share each tenant's quota of rate and concurrency.

An entry is a front where the tenant's clients may call. Each holds a share, by the demand that it reports, and refuses
what is beyond. The shares never add up to more than the quota: a share that falls is sent first, and its room is given
to others once every entry has confirmed its limits. An entry that is lost keeps its share while nobody can tell it
otherwise, and the others get that share too: by so much an island may exceed the quota.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple

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


NO_DEMAND: Final = DemandMeter()
"""Before anything was counted."""


class NodeLimits(NamedTuple):
    """What each node's front is told, by node."""

    of: Mapping[str, tuple[TenantLimit, ...]]
    # Nodes whose desired set says otherwise.
    changed: AbstractSet[str]


class TenantShares:
    """The shares of all tenants, step after step. A tenant whose shares came out as they were, whatever its entries
    confirm, is at rest: they are decided again once its quota, its entries, what these ask for or what they hold
    changed."""

    def __init__(self, entries: EntryPoints, fleet: Fleet) -> None:
        """fleet: as of the first decision."""
        self._entries = entries
        self._known: dict[str, _KnownTenant] = {}
        """By tenant: of what its shares were decided last."""
        self._told: dict[str, dict[str, TenantLimit]] = {}
        """By node and tenant: what was decided last."""
        self._limits: dict[str, tuple[TenantLimit, ...]] = {}
        """The same, by node, in order of tenants."""
        self._demands: TenantDemands = {}
        self._asked: Mapping[str, Mapping[str, EntryDemand]] = {}
        """The same demands by tenant and node."""
        self._lost = {name for name, state in fleet.nodes.items() if state.liveness is Liveness.LOST}
        """Nodes that are lost."""

    def decide(
        self,
        quotas: Mapping[str, Quota],
        fleet: Fleet,
        desired: Mapping[str, DesiredContent],
        demands: TenantDemands,
        confirmed: Container[str],
        changed: Iterable[str] = (),
    ) -> NodeLimits:
        """The limits as of now, until the next call. confirmed: nodes that hold the limits that were decided last.
        changed: nodes whose state is another than at the last call."""
        entries = self._entries
        limited = {tenant: quota for tenant, quota in quotas.items() if _is_limited(quota)}
        due = self._take_demands(demands) | self._take_liveness(fleet, changed)
        different = {
            node
            for node, limits in self._limits.items()
            if (content := desired.get(node)) is None
            or (content.tenants is not limits and content.tenants != limits)  # the same object at rest
        }
        for node in different:
            held = {each.tenant: each for each in _tenants_of(desired, node)}
            due.update(tenant for tenant, limit in self._told[node].items() if held.get(tenant) != limit)
        due = {
            tenant
            for tenant, quota in limited.items()
            if tenant in due
            or (known := self._known.get(tenant)) is None
            or not (known.is_at_rest and known.nodes is entries.of_tenant(tenant) and known.quota == quota)
        }
        touched = set[str]()
        for tenant in self._known.keys() - limited.keys():
            touched |= self._drop(tenant)
        held_by = self._held_by(due, desired)
        for tenant in due:
            touched |= self._decide_one(tenant, limited[tenant], entries.of_tenant(tenant), held_by, confirmed)
        for node in touched:
            if told := self._told[node]:
                limits = tuple(told[tenant] for tenant in sorted(told))
                if limits != self._limits.get(node):  # else the object stays that its desired set has
                    self._limits[node] = limits
            else:
                del self._told[node]
                self._limits.pop(node, None)
        different = {node for node in different | touched if _tenants_of(desired, node) != self._limits.get(node, ())}
        return NodeLimits(self._limits, different)

    def _take_demands(self, demands: TenantDemands) -> set[str]:
        """Tenants of which something else is asked for."""
        if demands is self._demands:
            return set()
        before, asked = self._asked, defaultdict[str, dict[str, EntryDemand]](dict)
        for (tenant, node), demand in demands.items():
            asked[tenant][node] = demand
        self._demands, self._asked = demands, asked
        return {tenant for tenant in {*before, *asked} if before.get(tenant) != asked.get(tenant)}

    def _take_liveness(self, fleet: Fleet, changed: Iterable[str]) -> set[str]:
        """Tenants of nodes that are lost now, or no longer."""
        found = set[str]()
        for node in changed:
            state = fleet.nodes.get(node)
            is_lost = state is not None and state.liveness is Liveness.LOST
            if is_lost != (node in self._lost):
                (self._lost.add if is_lost else self._lost.discard)(node)
                found.update(self._told.get(node, ()))
        return found

    def _held_by(
        self, tenants: AbstractSet[str], desired: Mapping[str, DesiredContent]
    ) -> Mapping[tuple[str, str], TenantLimit]:
        """What the entries of these tenants were told, by (tenant, node)."""
        nodes = {node for tenant in tenants for node in self._entries.of_tenant(tenant)}
        return {
            (each.tenant, node): each for node in nodes for each in _tenants_of(desired, node) if each.tenant in tenants
        }

    def _decide_one(
        self,
        tenant: str,
        quota: Quota,
        nodes: Sequence[str],
        held_by: Mapping[tuple[str, str], TenantLimit],
        confirmed: Container[str],
    ) -> set[str]:
        """Nodes whose limits may be others."""
        reachable = [name for name in nodes if name not in self._lost]
        asked = self._asked.get(tenant, {})
        demands = {name: asked.get(name, EntryDemand()) for name in reachable}
        held = {name: held_by.get((tenant, name)) for name in nodes}
        before = {name: limit or TenantLimit(tenant) for name, limit in held.items()}
        is_settled = all(name in confirmed for name in reachable)
        limits = _limits_of(tenant, quota, before, demands, is_settled=is_settled)
        is_at_rest = limits == held and limits == _limits_of(tenant, quota, before, demands, is_settled=not is_settled)
        touched = self._drop(tenant)
        self._known[tenant] = _KnownTenant(quota, nodes, is_at_rest)
        for name, limit in limits.items():
            self._told.setdefault(name, {})[tenant] = limit
        return touched.union(limits)

    def _drop(self, tenant: str) -> set[str]:
        """Nodes that had limits of the tenant."""
        known = self._known.pop(tenant, None)
        found = set(known.nodes) if known is not None else set[str]()
        for node in found:
            del self._told[node][tenant]
        return found


class _KnownTenant(NamedTuple):
    """Of what a tenant's shares were decided last."""

    quota: Quota
    nodes: Sequence[str]
    # True: they were the same before, and no confirmation changes them.
    is_at_rest: bool


def tenant_limits(
    quotas: Mapping[str, Quota],
    entries: EntryPoints,
    fleet: Fleet,
    desired: Mapping[str, DesiredContent],
    demands: TenantDemands,
    confirmed: Container[str],
) -> Mapping[str, tuple[TenantLimit, ...]]:
    """What each node's front is told, by node, from scratch; as `TenantShares.decide`."""
    return TenantShares(entries, fleet).decide(quotas, fleet, desired, demands, confirmed).of


def _limits_of(
    tenant: str,
    quota: Quota,
    before: Mapping[str, TenantLimit],
    demands: Mapping[str, EntryDemand],
    *,
    is_settled: bool,
) -> Mapping[str, TenantLimit]:
    """What each entry of a tenant is told. before: what it was told. demands: of those that can be reached."""
    asked = {name: each.per_s for name, each in demands.items()}
    held_rates = {name: each.rate for name, each in before.items()}
    held_counts = {name: each.concurrency for name, each in before.items()}
    rates = _shares_of(quota.rate, held_rates, asked, is_settled)
    counts = _shares_of(quota.concurrency, held_counts, asked, is_settled, demands)
    return {
        name: TenantLimit(
            tenant,
            PerSecond(rates[name]) if name in rates else None,
            int(counts[name]) if name in counts else None,
            quota.weight,
        )
        for name in before
    }


def _tenants_of(desired: Mapping[str, DesiredContent], node: str) -> tuple[TenantLimit, ...]:
    content = desired.get(node)
    return () if content is None else content.tenants


def _is_limited(quota: Quota) -> bool:
    return quota.rate is not None or quota.concurrency is not None or quota.weight != DEFAULT_WEIGHT


def is_any_limited(quotas: Mapping[str, Quota]) -> bool:
    """Whether fronts are told limits of some tenant. They count what a tenant does only then."""
    return any(map(_is_limited, quotas.values()))


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
