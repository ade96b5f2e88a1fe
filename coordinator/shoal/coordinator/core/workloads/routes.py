"""Where every front may send requests. A table changes only when something in it does."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.placement.model import Move, Plan
from shoal.coordinator.core.workloads.model import Delegated, Table
from shoal.types.agreement import GatewayRef
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.workload import WorkloadKey

NOTHING_CROSSES: Final[Mapping[WorkloadKey, float]] = {}


def tables(
    plan: Plan,
    desired: Mapping[str, tuple[Assignment, ...]],
    fleet: Fleet,
    before: Mapping[str, Table],
    delegated: Mapping[WorkloadKey, Delegated],
    shares: Mapping[str, float],
    abroad: Mapping[WorkloadKey, float] = NOTHING_CROSSES,
) -> Mapping[str, Table]:
    """One table for each workload of the plan, by `str(key)`: replicas observed READY, not draining, on ready nodes.

    A node that has not reported in full since this coordinator (or its session) began is believed as it was last
    routed: a coordinator's restart changes no route. So is one whose carrier the coordinator has lost, however long:
    those who send requests to it can see whether it answers. The gateways of the region to which a workload is
    `delegated` count as replicas; this region's own gateways, which alone lead there, are judged as its nodes are.
    One that stands by is listed as such. shares: by assignment, of those that move: what each takes of one replica's
    requests; where that is none it is not listed. What takes no requests now but may have sessions is in `keeping`.
    abroad: of a workload on its way from or to another region, what that one takes of all requests; listed where that
    is none too, so that answers can be compared; all, where none is ready here.
    """
    endpoints = dict[WorkloadKey, list[Endpoint]]()
    keeping = dict[WorkloadKey, list[Endpoint]]()
    own = _gateways(fleet) if delegated else []
    stateful = {one.workload for held in desired.values() for one in held if one.session}
    for node in sorted(desired):
        state = fleet.nodes.get(node)
        for assignment in sorted(desired[node], key=lambda each: each.id):
            known = before.get(str(assignment.workload))
            share = shares.get(assignment.id, 1.0)
            if share > 0 and state is not None and _serves(state, assignment, known):
                endpoint = Endpoint(
                    assignment.id, node, EndpointKind.AGENT, state.node.grpc_address, share, _state_of(assignment)
                )
                endpoints.setdefault(assignment.workload, []).append(endpoint)
            elif assignment.session and state is not None and _keeps(state, assignment, known):
                endpoint = Endpoint(
                    assignment.id, node, EndpointKind.AGENT, state.node.grpc_address, 0.0, EndpointState.READY
                )
                keeping.setdefault(assignment.workload, []).append(endpoint)
    after = dict[str, Table]()
    for each in plan.workloads:
        name = str(each.workload)
        old = before.get(name)
        home = tuple(sorted(endpoints.get(each.workload, ()), key=lambda endpoint: endpoint.assignment))
        away = delegated.get(each.workload)
        found, through = home, tuple[Endpoint, ...]()
        if away is not None:
            found, through = _shared(home, _abroad(away), _through(away.agreement, own, old), abroad.get(each.workload))
        code, reason = (
            ("", "") if found else _pending(each.workload, each.refusal.code if each.refusal else None, desired)
        )
        kept = tuple(sorted(keeping.get(each.workload, ()), key=lambda endpoint: endpoint.assignment))
        table = Table(
            old.generation if old is not None else 1, found, code, reason, through, each.workload in stateful, kept
        )
        after[name] = table if old in (None, table) else replace(table, generation=table.generation + 1)
    return after


def served_here(
    keys: Collection[WorkloadKey],
    desired: Mapping[str, tuple[Assignment, ...]],
    fleet: Fleet,
    before: Mapping[str, Table],
    shares: Mapping[str, float],
) -> frozenset[WorkloadKey]:
    """Of these workloads, those that have a replica of this region for requests in their tables."""
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


def _shared(
    home: tuple[Endpoint, ...], away: tuple[Endpoint, ...], through: tuple[Endpoint, ...], share: float | None
) -> tuple[tuple[Endpoint, ...], tuple[Endpoint, ...]]:
    """A table's endpoints, and those of the nodes that go through this region's gateways. share: that the other region
    takes; None: it counts as one replica for each of its gateways."""
    ready = sum(endpoint.weight for endpoint in home if endpoint.state is EndpointState.READY)
    if share is None or share >= 1.0 or not ready:
        kept = tuple(each for each in home if share is None or each.state is EndpointState.STANDBY)
        return (*kept, *away), through
    kept = tuple(replace(endpoint, weight=endpoint.weight * (1.0 - share)) for endpoint in home)
    led = tuple(replace(endpoint, weight=share * ready / len(through)) for endpoint in through if share > 0)
    return (*kept, *(replace(endpoint, weight=share * ready / len(away)) for endpoint in away)), led


def routes(
    node: str, plan: Plan, tables: Mapping[str, Table], held: Sequence[Assignment], state: NodeState | None,
    shares: Mapping[str, float],
) -> tuple[Route, ...]:  # fmt: skip
    """All routes of the region as `node` takes them: its own replicas are local, by their worker's assignment.

    held: what `node` is assigned. While it is not seen, no other is sent to it; but its own replicas stay its own:
    whether they take requests its front knows, and this is what it meets first when its link is back.
    """
    takes = [each for each in held if not (each.draining or each.staged)]
    own = [each for each in takes if not is_seen(state) and shares.get(each.id, 1.0) > 0]
    return tuple(
        _as_taken(
            node,
            is_gateway(state),
            tables[str(each.workload)],
            each.workload,
            [one for one in own if one.workload == each.workload],
        )
        for each in sorted(plan.workloads, key=lambda each: each.workload)
    )


def shares_of(moves: Sequence[Move]) -> Mapping[str, float]:
    """By assignment: of the requests that one replica gets, what the two of a move take."""
    shares = dict[str, float]()
    for move in moves:
        if move.target:
            shares[move.source], shares[move.target] = 1.0 - move.share, move.share
    return shares


def gateways(fleet: Fleet) -> tuple[GatewayRef, ...]:
    """Of this region, by name, but for those that are lost or revoked: whom another region may meet."""
    return tuple(
        GatewayRef(state.name, state.node.grpc_address)
        for state in _gateways(fleet)
        if not state.revoked and (state.liveness is not Liveness.LOST or state.hidden)
    )


def is_gateway(state: NodeState | None) -> bool:
    return state is not None and state.node.role is Role.GATEWAY


def is_abroad(endpoint: Endpoint) -> bool:
    """Whether it is another region's."""
    return bool(endpoint.region)


def at_home(endpoints: Iterable[Endpoint]) -> int:
    """How many replicas of this region take requests by these."""
    return sum(not is_abroad(each) and each.state is EndpointState.READY for each in endpoints)


def is_seen(state: NodeState | None) -> bool:
    """Whether what the coordinator knows of the node's replicas is what they are now."""
    return state is not None and state.liveness is Liveness.READY and state.reported


def _as_taken(node: str, leads_out: bool, table: Table, key: WorkloadKey, own: Sequence[Assignment]) -> Route:
    listed = {endpoint.assignment for endpoint in table.endpoints}
    home = tuple(endpoint for endpoint in table.endpoints if not is_abroad(endpoint))
    endpoints = (
        *(_local(endpoint) if endpoint.node == node else endpoint for endpoint in home),
        *(table.endpoints[len(home) :] if leads_out else table.through),
        *(
            Endpoint(each.id, node, EndpointKind.LOCAL, "", 1.0, _state_of(each))
            for each in own
            if each.id not in listed
        ),
    )
    if not endpoints and table.endpoints:
        return Route(key, table.generation, (), Code.MODEL_NOT_READY, "another region has it, and no gateway is ready")
    known = {endpoint.assignment for endpoint in endpoints}
    kept = (_local(each) if each.node == node else each for each in table.keeping if each.assignment not in known)
    return Route(key, table.generation, (*endpoints, *kept), table.pending_code, table.pending_reason, table.stateful)


def _abroad(away: Delegated) -> tuple[Endpoint, ...]:
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


def _through(agreement: str, own: Sequence[NodeState], known: Table | None) -> tuple[Endpoint, ...]:
    """own: this region's gateways, one replica each for every workload that they lead to."""
    listed = {endpoint.node for endpoint in known.through} if known is not None else set()
    return tuple(
        Endpoint(
            f"{agreement}/{state.name}",
            state.name,
            EndpointKind.GATEWAY,
            state.node.grpc_address,
            1.0,
            EndpointState.READY,
        )
        for state in own
        if _answers(state, listed=state.name in listed)
    )


def _serves(state: NodeState, assignment: Assignment, known: Table | None) -> bool:
    listed = known is not None and any(endpoint.assignment == assignment.id for endpoint in known.endpoints)
    if assignment.draining or assignment.staged or not _answers(state, listed=listed):
        return False
    observed = state.observed.get(assignment.id)
    return not is_seen(state) or (observed is not None and observed.phase is Phase.READY)


def _keeps(state: NodeState, assignment: Assignment, known: Table | None) -> bool:
    """Whether its node may have sessions of it, though it takes no new ones: its worker is being started, say."""
    before = () if known is None else (*known.endpoints, *known.keeping)
    listed = any(endpoint.assignment == assignment.id for endpoint in before)
    return not assignment.draining and _answers(state, listed=listed)


def _answers(state: NodeState, *, listed: bool) -> bool:
    """listed: it was routed to before, which counts for a node that cannot be judged now."""
    silent = state.liveness in (Liveness.SUSPECT, Liveness.LOST)
    if state.revoked or (silent and not state.hidden):
        return False
    return state.front_ready if is_seen(state) else listed


def _pending(key: WorkloadKey, refused: Code | None, desired: Mapping[str, tuple[Assignment, ...]]) -> tuple[str, str]:
    if any(each.workload == key for assignments in desired.values() for each in assignments):
        return Code.MODEL_NOT_READY, "its replicas are not ready yet"
    return refused or Code.NO_CANDIDATE, "it has no replica; `shoal explain` says why"


def _state_of(assignment: Assignment) -> EndpointState:
    return EndpointState.STANDBY if assignment.standby else EndpointState.READY


def _local(endpoint: Endpoint) -> Endpoint:
    return replace(endpoint, kind=EndpointKind.LOCAL, address="")
