"""Where every front may send requests. A table changes only when something in it does."""

from collections.abc import Mapping, Sequence

from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.placement.model import Plan
from shoal.coordinator.core.workloads.model import Table
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.workload import WorkloadKey


def tables(
    plan: Plan, desired: Mapping[str, tuple[Assignment, ...]], fleet: Fleet, before: Mapping[str, Table]
) -> Mapping[str, Table]:
    """One table for each workload of the plan, by `str(key)`: replicas observed READY, not draining, on ready nodes.

    A node that has not reported in full since this coordinator (or its session) began is believed as it was last
    routed: a coordinator's restart changes no route. So is one whose carrier the coordinator has lost, however long:
    those who send requests to it can see whether it answers.
    """
    endpoints = dict[WorkloadKey, list[Endpoint]]()
    for node in sorted(desired):
        state = fleet.nodes.get(node)
        for assignment in sorted(desired[node], key=lambda each: each.id):
            known = before.get(str(assignment.workload))
            if state is not None and _serves(state, assignment, known):
                endpoint = Endpoint(
                    assignment.id, node, EndpointKind.AGENT, state.node.grpc_address, 1.0, EndpointState.READY
                )
                endpoints.setdefault(assignment.workload, []).append(endpoint)
    after = dict[str, Table]()
    for each in plan.workloads:
        name = str(each.workload)
        found = tuple(sorted(endpoints.get(each.workload, ()), key=lambda endpoint: endpoint.assignment))
        code, reason = (
            ("", "") if found else _pending(each.workload, each.refusal.code if each.refusal else None, desired)
        )
        old = before.get(name)
        if old is not None and (old.endpoints, old.pending_code, old.pending_reason) == (found, code, reason):
            after[name] = old
        else:
            after[name] = Table(old.generation + 1 if old is not None else 1, found, code, reason)
    return after


def routes(
    node: str, plan: Plan, tables: Mapping[str, Table], held: Sequence[Assignment], state: NodeState | None
) -> tuple[Route, ...]:
    """All routes of the region as `node` takes them: its own replicas are local, by their worker's assignment.

    held: what `node` is assigned. While it is not seen, no other is sent to it; but its own replicas stay its own:
    whether they take requests its front knows, and this is what it meets first when its link is back.
    """
    own = [each for each in held if not is_seen(state) and not each.draining]
    return tuple(
        _as_taken(
            node, tables[str(each.workload)], each.workload, [one for one in own if one.workload == each.workload]
        )
        for each in sorted(plan.workloads, key=lambda each: each.workload)
    )


def is_seen(state: NodeState | None) -> bool:
    """Whether what the coordinator knows of the node's replicas is what they are now."""
    return state is not None and state.liveness is Liveness.READY and state.reported


def _as_taken(node: str, table: Table, key: WorkloadKey, own: Sequence[Assignment]) -> Route:
    listed = {endpoint.assignment for endpoint in table.endpoints}
    endpoints = (
        *(_local(endpoint) if endpoint.node == node else endpoint for endpoint in table.endpoints),
        *(
            Endpoint(each.id, node, EndpointKind.LOCAL, "", 1.0, EndpointState.READY)
            for each in own
            if each.id not in listed
        ),
    )
    return Route(key, table.generation, endpoints, table.pending_code, table.pending_reason)


def _serves(state: NodeState, assignment: Assignment, known: Table | None) -> bool:
    silent = state.liveness in (Liveness.SUSPECT, Liveness.LOST)
    if assignment.draining or state.revoked or (silent and not state.hidden):
        return False
    if silent or state.liveness is Liveness.NEVER_SEEN or not state.reported:
        return known is not None and any(endpoint.assignment == assignment.id for endpoint in known.endpoints)
    observed = state.observed.get(assignment.id)
    return state.front_ready and observed is not None and observed.phase is Phase.READY


def _pending(key: WorkloadKey, refused: Code | None, desired: Mapping[str, tuple[Assignment, ...]]) -> tuple[str, str]:
    if any(each.workload == key for assignments in desired.values() for each in assignments):
        return Code.MODEL_NOT_READY, "its replicas are not ready yet"
    return refused or Code.NO_CANDIDATE, "it has no replica; `shoal explain` says why"


def _local(endpoint: Endpoint) -> Endpoint:
    return Endpoint(endpoint.assignment, endpoint.node, EndpointKind.LOCAL, "", endpoint.weight, endpoint.state)
