"""Where each front may send requests. A table's generation grows only when its content changes."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from shoal.coordinator.core.fleet.state import ORIGIN, Fleet, Liveness, NodeState
from shoal.coordinator.core.placement.model import Move, PlacementPlan
from shoal.coordinator.core.workloads.entries import EntryPoints
from shoal.coordinator.core.workloads.model import DelegatedWorkload, RouteTable
from shoal.types.agreement import GatewayRef
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.workload import WorkloadKey

NO_REMOTE_SHARES: Final[Mapping[WorkloadKey, float]] = {}


def tables(
    plan: PlacementPlan,
    desired: Mapping[str, tuple[Assignment, ...]],
    fleet: Fleet,
    before: Mapping[str, RouteTable],
    delegated: Mapping[WorkloadKey, DelegatedWorkload],
    shares: Mapping[str, float],
    remote_shares: Mapping[WorkloadKey, float] = NO_REMOTE_SHARES,
) -> Mapping[str, RouteTable]:
    """One table for each workload of the plan, by `str(key)`: replicas observed READY, not draining, on ready nodes.

    A node without a full report since this coordinator (or its session) started keeps its last routes, so that a
    restart of the coordinator changes no route. So does a node whose link to the coordinator is lost, for any length
    of time, because the senders notice whether it answers. Where nobody else serves a workload, silent nodes may keep
    its routes for a while (`nodes_kept_in_silence`); none gets them back by that. The gateways of the region to which
    a workload is `delegated` count as replicas; only this region's own gateways lead there, and they are judged like
    its nodes. A standby is listed as such. shares: by assignment, for replicas that move: the share of one replica's
    requests that each takes; with a share of 0 it is not listed. A replica that takes no requests now but may have
    sessions is in `keeping`. remote_shares: for a workload on its way from or to another region, that region's share
    of all requests. It is listed with a share of 0 too, so that answers can be compared; it takes all requests if no
    local replica is ready.
    """
    endpoints = dict[WorkloadKey, list[Endpoint]]()
    keeping = dict[WorkloadKey, list[Endpoint]]()
    silent = dict[WorkloadKey, list[Endpoint]]()
    silent_nodes = dict[WorkloadKey, set[str]]()
    own = _gateways(fleet) if delegated else []
    stateful = {one.workload for held in desired.values() for one in held if one.session}
    for node in sorted(desired):
        state = fleet.nodes.get(node)
        for assignment in sorted(desired[node], key=lambda each: each.id):
            known = before.get(str(assignment.workload))
            share = shares.get(assignment.id, 1.0)
            is_silent = has_served_before_silence(state, assignment)
            if is_silent:
                silent_nodes.setdefault(assignment.workload, set()).add(node)
            is_listed = share > 0 and state is not None and _serves(state, assignment, known)
            may_stay = share > 0 and is_silent and _is_listed(assignment, known)
            if state is not None and (is_listed or may_stay):
                endpoint = Endpoint(
                    assignment.id, node, EndpointKind.AGENT, state.node.data_address, share, _state_of(assignment)
                )
                (endpoints if is_listed else silent).setdefault(assignment.workload, []).append(endpoint)
            elif assignment.session and state is not None and _may_keep_sessions(state, assignment, known):
                endpoint = Endpoint(
                    assignment.id, node, EndpointKind.AGENT, state.node.data_address, 0.0, EndpointState.READY
                )
                keeping.setdefault(assignment.workload, []).append(endpoint)
    after = dict[str, RouteTable]()
    held_keys = {one.workload for held in desired.values() for one in held}
    for each in plan.workloads:
        name = str(each.workload)
        old = before.get(name)
        away, serving = delegated.get(each.workload), endpoints.get(each.workload, [])
        if not serving and away is None and each.workload in silent:
            staying = nodes_kept_in_silence(fleet, silent_nodes[each.workload])
            serving = [endpoint for endpoint in silent[each.workload] if endpoint.node in staying]
        home = tuple(sorted(serving, key=lambda endpoint: endpoint.assignment))
        found, through = home, tuple[Endpoint, ...]()
        if away is not None:
            found, through = _split_traffic(
                home,
                _remote_endpoints(away),
                _gateway_endpoints(away.agreement, own, old),
                remote_shares.get(each.workload),
            )
        refused = each.refusal.code if each.refusal else None
        is_held, is_silent = each.workload in held_keys, each.workload in silent_nodes
        code, reason = ("", "") if found else _pending_reason(refused, is_held=is_held, is_silent=is_silent)
        kept = tuple(sorted(keeping.get(each.workload, ()), key=lambda endpoint: endpoint.assignment))
        table = RouteTable(
            old.generation if old is not None else 1, found, code, reason, through, each.workload in stateful, kept
        )
        after[name] = table if old is None else old if old == table else replace(table, generation=old.generation + 1)
    return after


def locally_served(
    keys: Collection[WorkloadKey],
    desired: Mapping[str, tuple[Assignment, ...]],
    fleet: Fleet,
    before: Mapping[str, RouteTable],
    shares: Mapping[str, float],
) -> frozenset[WorkloadKey]:
    """Those of the workloads that have a local replica for requests in their tables."""
    return frozenset(
        one.workload
        for node, held in desired.items()
        for one in held
        if one.workload in keys
        and not one.standby
        and shares.get(one.id, 1.0) > 0
        and (state := fleet.nodes.get(node)) is not None
        and _serves(state, one, before.get(str(one.workload)))
    )


def _split_traffic(
    home: tuple[Endpoint, ...], away: tuple[Endpoint, ...], through: tuple[Endpoint, ...], share: float | None
) -> tuple[tuple[Endpoint, ...], tuple[Endpoint, ...]]:
    """A table's endpoints, and those for nodes that go through this region's gateways. share: the other region's;
    None: each of its gateways counts as one replica."""
    ready = sum(endpoint.weight for endpoint in home if endpoint.state is EndpointState.READY)
    if share is None or share >= 1.0 or not ready:
        kept = tuple(each for each in home if share is None or each.state is EndpointState.STANDBY)
        return (*kept, *away), through
    kept = tuple(replace(endpoint, weight=endpoint.weight * (1.0 - share)) for endpoint in home)
    led = tuple(replace(endpoint, weight=share * ready / len(through)) for endpoint in through if share > 0)
    return (*kept, *(replace(endpoint, weight=share * ready / len(away)) for endpoint in away)), led


class RoutesBefore(NamedTuple):
    """What a node had after the step before."""

    # Its routes, in order.
    routes: tuple[Route, ...]
    # Workloads whose routes may be others now, that came, or that went.
    changed: Collection[WorkloadKey]
    # Whether it has and had no replica and subscribes to nothing: its routes follow from the tables alone.
    has_nothing: bool

    def after(self, routed: Sequence[WorkloadKey], make: Callable[[WorkloadKey], Route]) -> tuple[Route, ...]:
        """Its routes now, where it has nothing. routed: workloads that it has routes of, in order."""
        found = list(self.routes)
        for key in self.changed:
            at, place = bisect_left(found, key, key=lambda route: route.workload), bisect_left(routed, key)
            is_there = at < len(found) and found[at].workload == key
            if place < len(routed) and routed[place] == key:
                found[at : at + is_there] = [make(key)]
            elif is_there:
                del found[at]
        return tuple(found)

    def same_as_before(self, tables: Mapping[str, RouteTable]) -> Mapping[WorkloadKey, Route]:
        """Routes that are the same now unless the node's own replicas count otherwise, by workload."""
        return {
            route.workload: route
            for route in self.routes
            if route.workload not in self.changed
            and (table := tables.get(str(route.workload))) is not None
            and _has_listed_alone(route, table)
        }


class GatewayRoutes:
    """Of one step: the routes of gateways that have no replica. Those that have routes of the same workloads, and had
    the same before, have the same, as one object: of these, each costs as much as there are workloads."""

    def __init__(self) -> None:
        self._known: list[tuple[Sequence[WorkloadKey], tuple[Route, ...] | None, tuple[Route, ...]]] = []
        """Of what workloads, what was there before, and what is now."""

    def of(
        self, routed: Sequence[WorkloadKey], before: RoutesBefore | None, make: Callable[[], tuple[Route, ...]]
    ) -> tuple[Route, ...]:
        """The routes of these workloads. make: computes them where no other gateway has them."""
        earlier = None if before is None else before.routes
        for same, start, found in self._known:
            if same is routed and start is earlier:
                return found
        made = make()
        self._known.append((routed, earlier, made))
        return made


def routes(
    node: str,
    tables: Mapping[str, RouteTable],
    held: Sequence[Assignment],
    state: NodeState | None,
    shares: Mapping[str, float],
    entries: EntryPoints,
    of_gateways: GatewayRoutes,
    before: RoutesBefore | None = None,
) -> tuple[Route, ...]:
    """Routes of the workloads that may enter at `node`; its own replicas are local, by their worker's assignment.

    A node that subscribes has those of what it serves and of what it subscribed to. What may not enter there, or does
    not exist, is answered by a route that says so.
    held: the node's assignments. While the node is not reporting, no other node sends to its replicas, but they stay
    in its own routes: its front knows whether they take requests, and uses these routes first when the link is
    restored. of_gateways: of the step. before: its routes are followed from there; None: all are made anew.
    """
    takes = [each for each in held if not (each.draining or each.staged)]
    own = [each for each in takes if not is_status_current(state) and shares.get(each.id, 1.0) > 0]
    routed, leads_out = entries.route_keys(node), is_gateway(state)

    def route_of(key: WorkloadKey, held: Sequence[Assignment]) -> Route:
        if not entries.may_enter(node, key):
            return Route(key, 0, (), Code.MODEL_NOT_FOUND, "no such workload may enter here")
        return _route_for_node(node, leads_out, tables[str(key)], key, held, shares)

    def make() -> tuple[Route, ...]:
        if before is not None and before.has_nothing:
            return before.after(routed, lambda key: route_of(key, ()))
        known: Mapping[WorkloadKey, Route] = {} if before is None or own else before.same_as_before(tables)
        return tuple(known.get(key) or route_of(key, [one for one in own if one.workload == key]) for key in routed)

    return of_gateways.of(routed, before, make) if leads_out and not held else make()


def shares_of(moves: Sequence[Move]) -> Mapping[str, float]:
    """By assignment: the share of one replica's requests that each of a move's two replicas takes."""
    shares = dict[str, float]()
    for move in moves:
        if move.target:
            shares[move.source], shares[move.target] = 1.0 - move.share, move.share
    return shares


def gateways(fleet: Fleet) -> tuple[GatewayRef, ...]:
    """This region's gateways by name, without lost or revoked ones: those that another region may connect to."""
    return tuple(
        GatewayRef(state.name, state.node.data_address)
        for state in _gateways(fleet)
        if not state.revoked and (state.liveness is not Liveness.LOST or state.link_lost)
    )


def has_reachable_gateway(fleet: Fleet, *, has_served: bool) -> bool:
    """Whether other regions' requests can enter at one of this region's gateways. has_served: they did before, which
    decides for a gateway whose status is not current."""
    return any(_is_reachable(state, listed=has_served) for state in _gateways(fleet))


def is_gateway(state: NodeState | None) -> bool:
    return state is not None and state.node.role is Role.GATEWAY


def is_remote(endpoint: Endpoint) -> bool:
    """True if it is another region's."""
    return bool(endpoint.region)


def local_replica_count(endpoints: Iterable[Endpoint], fleet: Fleet) -> int:
    """Number of local replicas that take requests, on nodes that answer."""
    return sum(not is_remote(each) and each.state is EndpointState.READY for each in answering(endpoints, fleet))


def answering(endpoints: Iterable[Endpoint], fleet: Fleet) -> tuple[Endpoint, ...]:
    """Without those that are listed although their node is silent."""
    return tuple(each for each in endpoints if is_remote(each) or not _is_silent(fleet.nodes.get(each.node)))


def nodes_kept_in_silence(fleet: Fleet, silent: Iterable[str]) -> frozenset[str]:
    """Those of a workload's silent nodes that may stay in its routes while nobody else serves it.

    silent: all nodes that took its requests when they were last heard, also those that routes avoid already.

    They are probably cut off for one reason, such as the coordinator's own link: they are part of a mass silence, or
    at least two were last heard within one suspicion time. What is cut off at once was last heard less than one
    heartbeat apart, and a few of the last heartbeats may be missing. Within `lost_after_s` nodes also fail one by one.
    The front that hears the coordinator first again would otherwise refuse what they answer, and each front notices
    by itself where nothing answers. That ends for a node that is lost once a mass silence and its grace are over.
    """
    states = [state for name in silent if (state := fleet.nodes.get(name)) is not None]
    last = max((state.heard_at for state in states), default=ORIGIN)
    together = {state.name for state in states if last - state.heard_at <= fleet.timing.suspect_after_s}
    mass = () if fleet.mass_silence is None else fleet.mass_silence.nodes
    return frozenset(
        state.name
        for state in states
        if state.name in mass or (len(together) > 1 and state.name in together and not _is_given_up(fleet, state))
    )


def has_served_before_silence(state: NodeState | None, assignment: Assignment) -> bool:
    """Whether a silent node took requests for it when it was last heard, as far as is known."""
    if state is None or not _is_silent(state) or state.revoked or assignment.draining or assignment.staged:
        return False
    observed = state.observed.get(assignment.id)
    is_ready = state.front_ready and observed is not None and observed.phase is Phase.READY
    return is_ready or not state.has_full_status


def is_status_current(state: NodeState | None) -> bool:
    """True if the coordinator's view of the node's replicas is current."""
    return state is not None and state.liveness is Liveness.READY and state.has_full_status


def _route_for_node(
    node: str,
    leads_out: bool,
    table: RouteTable,
    key: WorkloadKey,
    own: Sequence[Assignment],
    shares: Mapping[str, float],
) -> Route:
    listed = {endpoint.assignment for endpoint in table.endpoints}
    home = tuple(endpoint for endpoint in table.endpoints if not is_remote(endpoint))
    endpoints = (
        *(_local(endpoint) if endpoint.node == node else endpoint for endpoint in home),
        *(table.endpoints[len(home) :] if leads_out else table.through),
        *(
            Endpoint(each.id, node, EndpointKind.LOCAL, "", shares.get(each.id, 1.0), _state_of(each))
            for each in own
            if each.id not in listed
        ),
    )
    if not endpoints and table.endpoints:
        return Route(key, table.generation, (), Code.MODEL_NOT_READY, "another region has it, and no gateway is ready")
    known = {endpoint.assignment for endpoint in endpoints}
    kept = (_local(each) if each.node == node else each for each in table.keeping if each.assignment not in known)
    return Route(key, table.generation, (*endpoints, *kept), table.pending_code, table.pending_reason, table.stateful)


def _has_listed_alone(route: Route, table: RouteTable) -> bool:
    """Whether a route of this table has what the table lists for all nodes of the region, and no more."""
    has_others = table.through or table.keeping or any(map(is_remote, table.endpoints))
    return not has_others and len(route.endpoints) == len(table.endpoints)


def _remote_endpoints(away: DelegatedWorkload) -> tuple[Endpoint, ...]:
    return tuple(
        Endpoint(
            assignment=f"{away.agreement}/{gateway.name}",
            node=gateway.name,
            kind=EndpointKind.GATEWAY,
            address=gateway.address,
            weight=1.0,
            state=EndpointState.READY,
            region=away.region,
            agreement=away.agreement,
        )
        for gateway in sorted(away.gateways, key=lambda gateway: gateway.name)
    )


def _gateways(fleet: Fleet) -> list[NodeState]:
    return sorted((state for state in fleet.nodes.values() if is_gateway(state)), key=lambda state: state.name)


def _gateway_endpoints(agreement: str, own: Sequence[NodeState], known: RouteTable | None) -> tuple[Endpoint, ...]:
    """own: this region's gateways; each counts as one replica for every workload that it routes to another region."""
    listed = {endpoint.node for endpoint in known.through} if known is not None else set()
    return tuple(
        Endpoint(
            f"{agreement}/{state.name}",
            state.name,
            EndpointKind.GATEWAY,
            state.node.data_address,
            1.0,
            EndpointState.READY,
        )
        for state in own
        if _is_reachable(state, listed=state.name in listed)
    )


def _serves(state: NodeState, assignment: Assignment, known: RouteTable | None) -> bool:
    if assignment.draining or assignment.staged or not _is_reachable(state, listed=_is_listed(assignment, known)):
        return False
    observed = state.observed.get(assignment.id)
    return not is_status_current(state) or (observed is not None and observed.phase is Phase.READY)


def _may_keep_sessions(state: NodeState, assignment: Assignment, known: RouteTable | None) -> bool:
    """True if its node may have sessions of it although it takes no new ones, for instance while its worker starts."""
    before = () if known is None else (*known.endpoints, *known.keeping)
    listed = any(endpoint.assignment == assignment.id for endpoint in before)
    return not assignment.draining and _is_reachable(state, listed=listed)


def _is_reachable(state: NodeState, *, listed: bool) -> bool:
    """listed: it was routed to before, which decides for a node whose status is not current."""
    if state.revoked or _is_silent(state):
        return False
    return state.front_ready if is_status_current(state) else listed


def _is_silent(state: NodeState | None) -> bool:
    """Whether its silence says that it does not answer."""
    if state is None:
        return True
    return state.liveness in (Liveness.SUSPECT, Liveness.LOST) and not state.link_lost


def _is_given_up(fleet: Fleet, state: NodeState) -> bool:
    """Whether it is lost, and nothing excuses its silence."""
    excused_until = max(fleet.grace_until, state.grace_until)
    is_excused = fleet.ticked_at is not None and fleet.ticked_at < excused_until
    return state.liveness is Liveness.LOST and not is_excused


def _is_listed(assignment: Assignment, known: RouteTable | None) -> bool:
    return known is not None and any(endpoint.assignment == assignment.id for endpoint in known.endpoints)


def _pending_reason(refused: Code | None, *, is_held: bool, is_silent: bool) -> tuple[str, str]:
    """is_held: some node has an assignment of the workload. is_silent: such a node served it and is silent."""
    if is_silent:
        return Code.MODEL_NOT_READY, "the nodes of its replicas are silent"
    if is_held:
        return Code.MODEL_NOT_READY, "its replicas are not ready yet"
    return refused or Code.NO_CANDIDATE, "it has no replica; `shoal explain` says why"


def _state_of(assignment: Assignment) -> EndpointState:
    return EndpointState.STANDBY if assignment.standby else EndpointState.READY


def _local(endpoint: Endpoint) -> Endpoint:
    return replace(endpoint, kind=EndpointKind.LOCAL, address="")
