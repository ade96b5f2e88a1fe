"""A workload that another region runs: who leads there, and when home may go and has to be back."""

from dataclasses import replace

import pytest

from harness.builders.coordinator_core import (
    CoreRegion,
    device,
    fleet_of,
    intent,
    merge_status,
    node,
    observation,
    status,
)
from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.workloads.model import DelegatedWorkload
from shoal.coordinator.core.workloads.routes import gateways
from shoal.coordinator.core.workloads.service_reports import service_report
from shoal.types.agreement import GUEST_TENANT, GatewayRef
from shoal.types.assignment import AgreementCounts, PeerTrust, Phase, Served
from shoal.types.device import EnergySource, Role
from shoal.types.route import Endpoint, EndpointKind
from shoal.types.units import Elapsed, Joules, Seconds, Wall
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("shop", "ocr")
AWAY = DelegatedWorkload(
    "ag-1", "us-east", (GatewayRef("gw", "far:7001"), GatewayRef("gx", "far:7002")), is_ready=True, is_wanted=True
)
PEER = PeerTrust("us-east", ("pem",), ("gw", "gx"), ("ag-9",))


@pytest.fixture
def region() -> CoreRegion:
    """A gateway that is called as one of the other region's, and a node with a replica."""
    region = CoreRegion(node("gw", role=Role.GATEWAY), node("a"))
    region.intents = (intent(),)
    region.run(10)
    return region


def endpoints(region: CoreRegion, at: str) -> tuple[Endpoint, ...]:
    return region.desired[at].routes[0].endpoints


def test_the_gateway_leads_to_the_other_region_and_the_rest_to_the_gateway(region: CoreRegion) -> None:
    region.delegated = {KEY: AWAY}
    region.run(12)
    out = [each for each in endpoints(region, "gw") if each.kind is EndpointKind.GATEWAY]
    assert [(e.assignment, e.node, e.address, e.region, e.agreement) for e in out] == [
        ("ag-1/gw", "gw", "far:7001", "us-east", "ag-1"),
        ("ag-1/gx", "gx", "far:7002", "us-east", "ag-1"),
    ]
    through = [each for each in endpoints(region, "a") if each.kind is EndpointKind.GATEWAY]
    assert [(e.node, e.address, e.region, e.agreement) for e in through] == [("gw", "gw:8001", "", "")]


def test_home_goes_only_when_the_other_region_has_been_in_the_routes_for_a_moment(region: CoreRegion) -> None:
    region.delegated = {KEY: replace(AWAY, is_ready=False)}
    region.run(5)
    assert region.routed_nodes("a") == ["a"]
    region.delegated = {KEY: AWAY}
    region.step()
    assert region.routed_nodes("gw") == ["a", "gw", "gx"]
    assert [draining for _, draining in region.replicas().values()] == [False]
    region.run(12)
    assert region.routed_nodes("gw") == ["gw", "gx"]
    assert region.routed_nodes("a") == ["gw"]
    assert region.replicas() == {}
    assert [each.stage for each in region.migrations.values()] == ["done"]


def test_after_notice_the_other_region_leaves_when_home_has_been_in_the_routes_for_a_moment(region: CoreRegion) -> None:
    region.delegated = {KEY: AWAY}
    region.run(10)
    region.delegated = {KEY: replace(AWAY, is_wanted=False)}
    seen = list[list[str]]()
    for _ in range(20):
        region.step()
        seen.append(region.routed_nodes("a"))
    assert all(seen)
    assert ["a", "gw"] in seen, "for a moment both"
    assert seen[-1] == ["a"]
    assert region.routed_nodes("gw") == ["a"]


def test_an_agreement_that_is_gone_is_out_of_the_routes_at_once(region: CoreRegion) -> None:
    region.delegated = {KEY: AWAY}
    region.run(10)
    region.delegated = {}
    region.step()
    assert region.routed_nodes("gw") == []
    assert region.desired["gw"].routes[0].pending_code
    region.run(5)
    assert region.routed_nodes("gw") == ["a"]


def test_a_silent_gateway_of_ours_leads_nowhere_and_a_restart_changes_no_route(region: CoreRegion) -> None:
    region.delegated = {KEY: AWAY}
    region.run(10)
    before = endpoints(region, "a")
    region.restart()
    region.step()
    assert endpoints(region, "a") == before
    for name in ("gw", "a"):
        region.reconnect(name)
    region.run(20)
    region.agents["gw"].up = False
    region.run(5)
    route = region.desired["a"].routes[0]
    assert route.endpoints == ()
    assert "gateway" in route.pending_reason


def test_what_runs_here_for_others_goes_to_no_third(region: CoreRegion) -> None:
    guest = WorkloadKey(GUEST_TENANT, "ag-7")
    region.intents = (intent("ag-7", tenant=GUEST_TENANT),)
    region.delegated = {guest: AWAY}
    region.run(10)
    assert region.routed_nodes("gw", "ag-7") == ["a"]


def test_gateways_alone_learn_of_the_other_region(region: CoreRegion) -> None:
    region.peers = (PEER,)
    region.step()
    assert region.desired["gw"].peers == (PEER,)
    assert region.desired["a"].peers == ()


def test_gateways_that_others_may_meet() -> None:
    fleet = fleet_of(node("gw", role=Role.GATEWAY), node("gx", role=Role.GATEWAY), node("a"))
    fleet = fleet.with_node(replace(fleet.nodes["gx"], liveness=Liveness.LOST))
    assert gateways(fleet) == (GatewayRef("gw", "gw:8001"),)
    assert gateways(fleet.with_node(replace(fleet.nodes["gw"], revoked=True))) == ()


def with_status(fleet: Fleet, name: str, sequence: int, *agreement_counts: AgreementCounts) -> Fleet:
    beat = status(fleet.nodes[name].node, sequence, at=0.0, agreement_counts=agreement_counts)
    fleet, refusals = merge_status(fleet, name, 1, beat, Elapsed(0.0), Wall(0.0))
    assert len(refusals) == sum(counts.requests < 0 for counts in agreement_counts)
    return fleet


def test_what_was_delivered_is_summed_over_gateways_and_their_restarts() -> None:
    fleet = fleet_of(node("gw", role=Role.GATEWAY), node("gx", role=Role.GATEWAY))
    fleet = with_status(fleet, "gw", 2, AgreementCounts("ag-1", "us-east", 10, 1, Seconds(0.02)))
    fleet = with_status(fleet, "gx", 2, AgreementCounts("ag-1", "us-east", 5, 0, Seconds(0.03)))
    fleet = with_status(fleet, "gw", 3, AgreementCounts("ag-1", "us-east", 4, 0, Seconds(0.01)))
    fleet = with_status(fleet, "gw", 4)
    fleet = with_status(fleet, "gw", 5, AgreementCounts("ag-1", "us-east", -4, 0, Seconds(0.01)))
    report = service_report(fleet, "ag-1")
    assert (report.requests, report.errors, report.latency_p95_s) == (19, 1, 0.03)
    assert service_report(fleet, "ag-2").requests == 0


def test_what_clients_got_wrong_is_neither_delivered_nor_failed() -> None:
    """Else one client's mistakes pass for answers of a region that gives none."""
    fleet = fleet_of(node("gw", role=Role.GATEWAY))
    fleet = with_status(fleet, "gw", 2, AgreementCounts("ag-1", "us-east", 20, 1, Seconds(0.02), refused=15, late=2))
    fleet = with_status(fleet, "gw", 3, AgreementCounts("ag-1", "us-east", 4, 0, Seconds(0.02), refused=4))
    report = service_report(fleet, "ag-1")
    assert (report.requests, report.errors) == (5, 3)


def test_the_delegate_counts_joules_where_its_replicas_are() -> None:
    fleet = fleet_of(node("gw", role=Role.GATEWAY), node("a", device()))
    fleet = with_status(fleet, "gw", 2, AgreementCounts("ag-1", "eu-west", 10, 0, Seconds(0.02)))
    region = CoreRegion(node("a"))
    region.intents = (intent("ag-1", tenant=GUEST_TENANT),)
    region.run(1)
    (assignment,) = region.desired["a"].assignments
    served = Served("eu-west", 4, 0, Seconds(0.01), Seconds(0.01), Joules(8.0), EnergySource.MEASURED)
    replica = observation(assignment, Phase.READY, served=(served,))
    fleet = fleet.with_node(replace(fleet.nodes["a"], observed={replica.assignment: replica}))
    report = service_report(fleet, "ag-1", ["a"])
    assert (report.joules, report.energy_source) == (20.0, EnergySource.MEASURED)
