"""Which route a request takes, by how it came in."""

from dataclasses import dataclass

import pytest

from shoal.agent.core.route_tables import RequestEntry, RouteTables
from shoal.types.agreement import GUEST_TENANT, local_traffic_key
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("acme", "reader")
GUEST = WorkloadKey(GUEST_TENANT, "ag-9")
LOCAL, PEER, AWAY = (
    Endpoint("here", "n1", EndpointKind.LOCAL, "", 0.5, EndpointState.READY),
    Endpoint("there", "n2", EndpointKind.AGENT, "n2:1", 0.5, EndpointState.READY),
    Endpoint("ag-1/g", "g", EndpointKind.GATEWAY, "g:1", 0.25, EndpointState.READY, "east", "ag-1"),
)


@dataclass(frozen=True)
class Worker:
    assignment: str
    workload: WorkloadKey = KEY


def names(route: Route | None) -> list[str]:
    assert route is not None
    return [each.assignment for each in route.endpoints]


def test_a_client_is_sent_along_the_route_as_it_is() -> None:
    route = Route(KEY, 3, (LOCAL, PEER, AWAY))
    tables = RouteTables.from_routes((route,), (Worker("here"),))
    assert tables.find(KEY, RequestEntry.CLIENT) is route
    assert tables.assignments == {"here", "there", "ag-1/g"}


def test_what_another_front_forwarded_goes_to_no_third_one() -> None:
    tables = RouteTables.from_routes((Route(KEY, 3, (LOCAL, PEER, AWAY), stateful=True),), (Worker("here"),))
    route = tables.find(KEY, RequestEntry.FORWARD)
    assert names(route) == ["here", "ag-1/g"]
    assert route is not None
    assert route.endpoints[1].weight == 1.0, "the front that it entered at has applied the share"
    assert route.stateful


def test_a_worker_is_used_for_forwards_before_any_route_lists_it() -> None:
    tables = RouteTables.from_routes((), (Worker("here"),))
    assert names(tables.find(KEY, RequestEntry.FORWARD)) == ["here"]
    assert tables.find(KEY, RequestEntry.CLIENT) is None


def test_without_a_worker_or_a_gateway_nothing_is_forwarded_here() -> None:
    assert RouteTables.from_routes((Route(KEY, 1, (LOCAL, PEER)),), ()).find(KEY, RequestEntry.FORWARD) is None


def test_a_request_of_another_region_goes_to_no_third_region() -> None:
    guest = Route(GUEST, 1, (LOCAL, PEER, AWAY))
    tables = RouteTables.from_routes((guest, Route(KEY, 1, (PEER,))), (Worker("here", GUEST),))
    assert names(tables.find(GUEST, RequestEntry.GUEST)) == ["here", "there"]
    assert names(tables.find(GUEST, RequestEntry.FORWARD)) == ["here"]
    assert tables.find(KEY, RequestEntry.GUEST) is None


@pytest.mark.parametrize(
    ("endpoints", "attempt", "counted_as"),
    [
        ((LOCAL, AWAY), AWAY, ("ag-1", "east")),
        ((LOCAL, AWAY), LOCAL, (local_traffic_key("ag-1"), "west")),
        ((LOCAL, PEER), LOCAL, None),
    ],
    ids=["of the other region", "beside it", "nobody else serves"],
)
def test_attempts_count_where_another_region_serves(
    endpoints: tuple[Endpoint, ...], attempt: Endpoint, counted_as: tuple[str, str] | None
) -> None:
    tables = RouteTables.from_routes((Route(KEY, 1, endpoints),), ())
    assert tables.traffic_of(KEY, attempt, "west") == counted_as
    assert counted_as is None or counted_as[0] in tables.traffic_keys
