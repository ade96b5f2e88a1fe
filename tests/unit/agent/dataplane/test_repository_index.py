"""The index of a tenant's models, among those of all."""

from collections.abc import Iterable
from typing import Any, cast

import pytest

from shoal.agent.clock import SystemClock
from shoal.agent.dataplane import front as module
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import InboundCall
from shoal.agent.dataplane.upstream import PeerClients, WorkerClients
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey


class Nobody:
    """No workers, and no other fronts."""

    def configure(self, _listed: object) -> None:
        pass

    def is_connecting(self, endpoint: Endpoint) -> bool:
        return False


def test_an_index_looks_closer_only_at_the_tenants_own(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, peers, clock = cast("WorkerClients", Nobody()), cast("PeerClients", Nobody()), SystemClock()
    sessions = FrontSessions("west", "n1", clock, workers, peers, lambda: Wall(1.0))
    callers = CallerAuth("west", "n1", lambda: Wall(1.0))
    plane = DataPlane(FrontSettings("west", "n1"), clock, workers, peers, callers, sessions)
    endpoint = Endpoint("a", "n2", EndpointKind.AGENT, "10.0.0.1:1", 1.0, EndpointState.READY)
    keys = [WorkloadKey(tenant, f"m{number}") for number in (2, 1, 0) for tenant in ("shop", "acme", "bank")]
    plane.configure(tuple(Route(key, 1, (endpoint,)) for key in keys), (), ())
    ordered: list[int] = []

    def order(found: Iterable[Any]) -> list[Any]:
        made = sorted(found)
        ordered.append(len(made))
        return made

    monkeypatch.setattr(module, "sorted", order, raising=False)
    for tenant, names in (("acme", ["m0", "m1", "m2"]), ("nobody", [])):
        call = InboundCall(Identity("west", Role.TENANT, tenant, Wall(0.0), Wall(2.0), "1"))
        assert [each.name for each in plane.index(call, ready_only=False).models] == names
    assert ordered == [3, 0]
