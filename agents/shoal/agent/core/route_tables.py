"""A front's routes, by how a request came in: from a client, from another front of the region, or from another region.

The tables are made of the node's routes and of its workers that take requests, whenever either changes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, Protocol

from shoal.agent.core import routing
from shoal.types.agreement import GUEST_TENANT, local_traffic_key
from shoal.types.route import Endpoint, EndpointKind, Route
from shoal.types.workload import WorkloadKey


class RunningWorker(Protocol):
    """A worker of this node that takes requests. Two that are unequal are two processes."""

    @property
    def assignment(self) -> str:
        """Id of its assignment."""
        ...

    @property
    def workload(self) -> WorkloadKey:
        """The workload that it serves."""
        ...


class RequestEntry(Enum):
    """How a request came to this front."""

    CLIENT = auto()
    """From a client."""
    FORWARD = auto()
    """From another front of the region."""
    GUEST = auto()
    """From another region, under an agreement."""


@dataclass(frozen=True, slots=True)
class RouteTables:
    """The routes of one front."""

    # Of requests from clients: the node's routes as they are.
    entering: Mapping[WorkloadKey, Route]
    # Of requests that another front of the region forwarded here.
    forwarded: Mapping[WorkloadKey, Route]
    # Of requests from other regions.
    guests: Mapping[WorkloadKey, Route]
    # Agreements of workloads that another region serves, beside this region or alone.
    agreements: Mapping[WorkloadKey, str]

    @classmethod
    def from_routes(cls, routes: Iterable[Route], workers: Iterable[RunningWorker]) -> "RouteTables":
        """`workers` are those of this node that take requests. What the region does not know has no route."""
        routes = tuple(route for route in routes if not route.is_unknown)
        return cls(
            entering={route.workload: route for route in routes},
            forwarded=_forwarded_routes(routes, tuple(workers)),
            guests=_guest_routes(routes),
            agreements={
                route.workload: endpoint.agreement
                for route in routes
                for endpoint in route.endpoints
                if endpoint.region
            },
        )

    def find(self, workload: WorkloadKey, entry: RequestEntry) -> Route | None:
        """The route for a request that came in so; None without one."""
        match entry:
            case RequestEntry.CLIENT:
                return self.entering.get(workload)
            case RequestEntry.FORWARD:
                return self.forwarded.get(workload)
            case RequestEntry.GUEST:
                return self.guests.get(workload)

    @property
    def assignments(self) -> frozenset[str]:
        """Assignments of all endpoints."""
        return frozenset(endpoint.assignment for route in self.entering.values() for endpoint in route.endpoints)

    @property
    def traffic_keys(self) -> frozenset[str]:
        """What `traffic_of` may name as the agreement."""
        return frozenset(
            name for agreement in self.agreements.values() for name in (agreement, local_traffic_key(agreement))
        )

    def traffic_of(self, workload: WorkloadKey, endpoint: Endpoint, region: str) -> tuple[str, str] | None:
        """(agreement, region) under which an attempt at the endpoint counts.

        Attempts in this `region` count too where another region serves the workload as well, so that both can be
        compared. None where no other region serves it.
        """
        if endpoint.region:
            return endpoint.agreement, endpoint.region
        beside = self.agreements.get(workload)
        return None if beside is None else (local_traffic_key(beside), region)


def _forwarded_routes(routes: tuple[Route, ...], workers: tuple[RunningWorker, ...]) -> dict[WorkloadKey, Route]:
    """Routes of requests forwarded inside the region: to this node's workers, and to other regions.

    The share of traffic that other regions take now is ignored, because the entering front has applied it. A guest
    workload of another region is not forwarded to a third.
    """
    listed = {route.workload: route.endpoints for route in routes}
    found: defaultdict[WorkloadKey, list[Endpoint]] = defaultdict(list)
    for key in {worker.workload: None for worker in workers}:
        own = [worker.assignment for worker in workers if worker.workload == key]
        found[key] += routing.local_endpoints(listed.get(key, ()), own)
    for route in routes:
        if route.workload.tenant != GUEST_TENANT:
            found[route.workload] += [replace(each, weight=1.0) for each in route.endpoints if each.region]
    stateful = {route.workload for route in routes if route.stateful}
    return {
        key: Route(key, 0, tuple(endpoints), stateful=key in stateful) for key, endpoints in found.items() if endpoints
    }


def _guest_routes(routes: tuple[Route, ...]) -> dict[WorkloadKey, Route]:
    """Routes of guest workloads, without gateways: only as far as they run in this region."""
    return {
        route.workload: replace(
            route, endpoints=tuple(each for each in route.endpoints if each.kind is not EndpointKind.GATEWAY)
        )
        for route in routes
        if route.workload.tenant == GUEST_TENANT
    }


NO_ROUTES: Final = RouteTables({}, {}, {}, {})
