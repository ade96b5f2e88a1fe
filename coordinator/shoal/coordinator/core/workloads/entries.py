"""Where requests may enter the region, and which front may forward what to which node.

A node lists the fronts that may forward to it, each for certain workloads: a gateway for all tenants, or for those in
its label `entry`; an agent for the tenants in that label and for the workloads that it serves itself. Only fronts where
requests may enter get credentials and routes. A gateway has routes of all workloads that may enter there, and of those
of all tenants that are shared with other regions; an agent those that it serves or subscribed to. An agent of a version
that does not subscribe gets those of all workloads that may enter there.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from shoal.coordinator.core.fleet.labels import EVERY_TENANT, entry_tenants
from shoal.coordinator.core.fleet.state import Fleet, NodeState
from shoal.coordinator.core.workloads.model import DesiredContent
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Assignment, Credential, Forwarding, Front
from shoal.types.device import Role
from shoal.types.workload import WorkloadKey

ALL: Final = frozenset({EVERY_TENANT})
NO_SUBSCRIPTIONS: Final[Mapping[str, Collection[WorkloadKey]]] = {}


class EntryPoints:
    """Which node has which workload, and which tenants' clients each node accepts. It follows what nodes have and which
    workloads there are; for nodes that come, go or accept others, make another.
    """

    def __init__(
        self,
        fleet: Fleet,
        desired: Mapping[str, Sequence[Assignment]],
        workloads: Collection[WorkloadKey],
        delegated: Collection[WorkloadKey],
        subscribed: Mapping[str, Collection[WorkloadKey]] = NO_SUBSCRIPTIONS,
    ) -> None:
        """desired: assignments by node. workloads: all that have routes. delegated: those that gateways route to
        another region. subscribed: what each node subscribes to."""
        members = {name: state for name, state in fleet.nodes.items() if not state.revoked}
        self._workloads = set(workloads)
        self._keys = {name: state.node.forward_key for name, state in members.items()}
        self._gateways = frozenset(name for name, state in members.items() if state.node.role is Role.GATEWAY)
        self._enters = {name: _tenants(state) for name, state in members.items()}
        self._assigned = {name: frozenset(each.workload for each in desired.get(name, ())) for name in members}
        self._holders = defaultdict[WorkloadKey, set[str]](set)
        self._holders_of = defaultdict[str, Counter[str]](Counter)
        """By tenant: nodes that have workloads of it, and how many."""
        self._entries_of: dict[str, Sequence[str]] = {}
        """What `of_tenant` returned last, as long as it is so."""
        self._serving = Counter[str]()
        """By node: how many workloads with routes it has, if any."""
        self._fronts: dict[str, Front] = {}
        """Of the nodes that serve, as fronts that forward nothing."""
        self._serving_names: list[str] = []
        """These nodes, in order."""
        self._serving_fronts: tuple[Front, ...] | None = None
        """The same as fronts; None: nobody asked for them yet."""
        self._of_gateways: dict[str, Forwarding] = {}
        """What each gateway of all tenants was told last."""
        for name, held in self._assigned.items():
            for key in held:
                self._hold(key, name)
        self._delegated = frozenset(delegated)
        self._delegated_tenants = frozenset(key.tenant for key in self._delegated)
        self._all = sorted(self._workloads)
        self._own = [key for key in self._all if key.tenant != GUEST_TENANT]
        self._guests = self._workloads - set(self._own)
        self._of_tenant = defaultdict[str, list[WorkloadKey]](list)
        for key in self._own:
            self._of_tenant[key.tenant].append(key)
        self._open = frozenset(name for name, tenants in self._enters.items() if EVERY_TENANT in tenants)
        self._by_tenant = defaultdict[str, set[str]](set)
        for name, tenants in self._enters.items():
            for tenant in tenants - ALL:
                self._by_tenant[tenant].add(name)
        self._subscribed: dict[str, frozenset[WorkloadKey]] = {
            name: frozenset() for name, state in members.items() if state.node.subscribes and name not in self._gateways
        }
        self._subscribers = defaultdict[WorkloadKey, set[str]](set)
        for name in self._subscribed:
            self.subscribe(name, subscribed.get(name, ()))

    def add(self, key: WorkloadKey) -> None:
        """A workload that has routes from now on."""
        self._workloads.add(key)
        for node in self._holders.get(key, ()):
            self._count_serving(node, 1)
        insort(self._all, key)
        if key.tenant == GUEST_TENANT:
            self._guests.add(key)
        else:
            insort(self._own, key)
            insort(self._of_tenant[key.tenant], key)

    def remove(self, key: WorkloadKey) -> None:
        """A workload that has no routes from now on."""
        self._workloads.discard(key)
        for node in self._holders.get(key, ()):
            self._count_serving(node, -1)
        self._guests.discard(key)
        for keys in (self._all, *((self._own, self._of_tenant[key.tenant]) if key.tenant != GUEST_TENANT else ())):
            del keys[bisect_left(keys, key)]

    def put(self, node: str, assignments: Iterable[Assignment]) -> frozenset[WorkloadKey]:
        """What a node has from now on. Returns the workloads that it has in addition, or has no longer."""
        if node not in self._assigned:
            return frozenset()
        before, after = self._assigned[node], frozenset(each.workload for each in assignments)
        self._assigned[node] = after
        for key in before - after:
            self._release(key, node)
        for key in after - before:
            self._hold(key, node)
        return before ^ after

    def _hold(self, key: WorkloadKey, node: str) -> None:
        self._holders[key].add(node)
        counts = self._holders_of[key.tenant]
        counts[node] += 1
        if counts[node] == 1:
            self._entries_of.pop(key.tenant, None)
        if key in self._workloads:
            self._count_serving(node, 1)

    def _release(self, key: WorkloadKey, node: str) -> None:
        self._holders[key].discard(node)
        counts = self._holders_of[key.tenant]
        counts[node] -= 1
        if not counts[node]:
            del counts[node]
            self._entries_of.pop(key.tenant, None)
        if key in self._workloads:
            self._count_serving(node, -1)

    def _count_serving(self, node: str, more: int) -> None:
        before, after = self._serving[node], self._serving[node] + more
        if after:
            self._serving[node] = after
        else:
            del self._serving[node]
        if before and after:
            return
        at, fronts = bisect_left(self._serving_names, node), self._serving_fronts
        self._serving_names[at : at + bool(before)] = [node] if after else []
        if fronts is not None:
            self._serving_fronts = (*fronts[:at], *([self._front(node)] if after else []), *fronts[at + bool(before) :])

    def subscribe(self, node: str, keys: Iterable[WorkloadKey]) -> None:
        """All that a node that has routes on demand subscribes to from now on."""
        before, after = self._subscribed[node], frozenset(keys)
        self._subscribed[node] = after
        for key in before - after:
            self._subscribers[key].discard(node)
            if not self._subscribers[key]:
                del self._subscribers[key]
        for key in after - before:
            self._subscribers[key].add(node)

    def is_on_demand(self, node: str) -> bool:
        """Whether the node has routes of what it serves or subscribed to alone."""
        return node in self._subscribed

    def may_enter(self, node: str, key: WorkloadKey) -> bool:
        """Whether there is such a workload, and requests for it may enter the region at this node."""
        if key not in self._workloads:
            return False
        if node in self._gateways or key in self._assigned.get(node, ()):
            return True
        return key.tenant != GUEST_TENANT and not self._enters.get(node, frozenset()).isdisjoint(
            (EVERY_TENANT, key.tenant)
        )

    def dependents(self, key: WorkloadKey) -> Collection[str]:
        """Nodes whose routes and forwarding depend on the workload: those that have its routes, and who has it."""
        whole = self._entrances(key) - self._subscribed.keys()
        return whole | self._holders.get(key, set()) | self._subscribers.get(key, set())

    def route_keys(self, node: str) -> Sequence[WorkloadKey]:
        """Workloads that the node has routes of, in order: also those it subscribed to in vain."""
        asked = self._subscribed.get(node)
        if asked is None:
            return self.entering(node)
        return sorted(asked | (self._assigned.get(node, frozenset()) & self._workloads))

    def entering(self, node: str) -> Sequence[WorkloadKey]:
        """Workloads for which requests may enter the region at this node, in order; at a gateway also of other regions,
        or forwarded on their way there."""
        tenants, is_gateway = self._enters.get(node, frozenset()), node in self._gateways
        if is_gateway and EVERY_TENANT in tenants:
            return self._all
        held = self._assigned.get(node, frozenset()) & self._workloads
        if EVERY_TENANT in tenants:
            guests = sorted(key for key in held if key.tenant == GUEST_TENANT)
            return sorted((*self._own, *guests)) if guests else self._own
        found = held.union(*(self._of_tenant.get(tenant, ()) for tenant in tenants))
        if is_gateway:
            found |= self._guests | (self._delegated & self._workloads)
        return sorted(found)

    def of_tenant(self, tenant: str) -> Sequence[str]:
        """Nodes where the tenant's clients may call for any workload, or for some, in order: the same object as long as
        they are the same."""
        known = self._entries_of.get(tenant)
        if known is None:
            passing = self._gateways if tenant in self._delegated_tenants else ()
            found = self._open.union(self._by_tenant.get(tenant, ()), passing, self._holders_of.get(tenant, ()))
            known = self._entries_of[tenant] = tuple(sorted(found))
        return known

    def forwarding(self, node: str) -> Forwarding:
        """Which fronts may forward to the node, and to which nodes it forwards."""
        if node not in self._gateways & self._open or self._receives(node):
            return self._forwarding(node)
        # It forwards to every node that serves, so these are not looked for anew with each workload.
        known, fronts = self._of_gateways.get(node), self._all_serving()
        if known is None or known.fronts is not fronts:
            known = self._of_gateways[node] = Forwarding(fronts, tuple(sorted(self._enters[node])))
        return known

    def _all_serving(self) -> tuple[Front, ...]:
        """All nodes that serve, whose keys are needed although they forward nothing here: the same values as before
        where they are known."""
        if self._serving_fronts is None:
            self._serving_fronts = tuple(map(self._front, self._serving_names))
        return self._serving_fronts

    def _front(self, name: str) -> Front:
        if name not in self._fronts:
            self._fronts[name] = Front(name, self._keys.get(name, ""))
        return self._fronts[name]

    def _forwarding(self, node: str) -> Forwarding:
        receives, sends = self._receives(node), self._sends(node)
        listed = defaultdict[str, list[WorkloadKey]](list)
        for key in sorted(receives):
            for front in self._entrances(key):
                listed[front].append(key)
        for key in sends:
            for receiver in self._receivers(key):
                listed.setdefault(receiver, [])  # its key is needed although it forwards nothing here
        listed.pop(node, None)
        return Forwarding(
            tuple(Front(name, self._keys.get(name, ""), tuple(keys)) for name, keys in sorted(listed.items())),
            tuple(sorted(self._enters.get(node, ()))),
        )

    def _receives(self, node: str) -> frozenset[WorkloadKey]:
        held = self._assigned.get(node, frozenset())
        return held | self._delegated if node in self._gateways else held

    def _sends(self, node: str) -> frozenset[WorkloadKey]:
        held = self._assigned.get(node, frozenset())
        if not (node in self._gateways or self._enters.get(node)):
            return held
        asked = self._subscribed.get(node)
        return held.union(self.entering(node) if asked is None else (key for key in asked if self.may_enter(node, key)))

    def _entrances(self, key: WorkloadKey) -> AbstractSet[str]:
        holders = self._holders.get(key, set())
        if key.tenant == GUEST_TENANT:
            return self._gateways | holders
        known = self._open | holders | self._by_tenant.get(key.tenant, set())
        return known | self._gateways if key in self._delegated else known

    def _receivers(self, key: WorkloadKey) -> Collection[str]:
        holders = self._holders.get(key, set())
        return holders | self._gateways if key in self._delegated else holders


def credentials_of(content: DesiredContent, credentials: tuple[Credential, ...]) -> tuple[Credential, ...]:
    """Credentials of the tenants whose clients may call a node with this desired set."""
    enters = content.forwarding.enters if content.forwarding is not None else (EVERY_TENANT,)
    if EVERY_TENANT in enters:
        return credentials
    tenants = {*enters, *(each.workload.tenant for each in content.assignments)}
    return tuple(each for each in credentials if each.tenant in tenants)


def _tenants(state: NodeState) -> frozenset[str]:
    tenants = entry_tenants(state.node.labels)
    return ALL if state.node.role is Role.GATEWAY and not tenants else tenants
