"""A node has routes of what it serves and of what it subscribed to, a gateway those of all workloads."""

from dataclasses import replace

from harness.builders.coordinator_core import CoreRegion, intent, merge_status, node, status
from shoal.types.assignment import Subscriptions
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Route
from shoal.types.units import Elapsed, Wall
from shoal.types.workload import WorkloadKey

OCR, ASR, NONE, OTHER = (WorkloadKey("shop", name) for name in ("ocr", "asr", "none", "other"))
BANKS = WorkloadKey("bank", "ocr")


def region_of(*keys: WorkloadKey) -> CoreRegion:
    """One node that serves, two that do not, one of them of a version that does not subscribe; and a gateway."""
    shop = {"entry": "shop"}
    members = (
        node("serves", labels=shop, subscribes=True),
        node("asks", labels=shop, subscribes=True),
        node("old", labels=shop),
        node("gw", role=Role.GATEWAY, subscribes=True),
    )
    region = CoreRegion(*members, flops={"serves": 1e12})
    region.intents = tuple(intent(key.name, tenant=key.tenant, where='node.name == "serves"') for key in keys)
    for name in ("serves", "asks", "gw"):
        region.agents[name].subscriptions = Subscriptions(())
    return region


def routes(region: CoreRegion, name: str) -> dict[WorkloadKey, Route]:
    return {route.workload: route for route in region.desired[name].routes}


def subscribe(region: CoreRegion, *keys: WorkloadKey) -> None:
    region.agents["asks"].subscriptions = Subscriptions(tuple(sorted(keys)))


def test_a_node_has_routes_of_what_it_serves_and_of_what_it_subscribed_to() -> None:
    region = region_of(OCR, ASR)
    region.run(10)
    assert {name: set(routes(region, name)) for name in region.desired} == {
        "serves": {OCR, ASR},
        "asks": set(),
        "old": {OCR, ASR},
        "gw": {OCR, ASR},
    }
    assert {name: each.routes_on_demand for name, each in region.desired.items()} == {
        "serves": True,
        "asks": True,
        "old": False,
        "gw": False,
    }
    subscribe(region, OCR)
    region.step()
    assert routes(region, "asks") == {OCR: routes(region, "old")[OCR]}
    subscribe(region)
    region.step()
    assert routes(region, "asks") == {}


def test_a_subscription_to_what_may_not_enter_is_answered_until_it_may() -> None:
    region = region_of(OCR, BANKS)
    subscribe(region, NONE, OTHER, BANKS)
    region.run(10)
    unknown = routes(region, "asks")
    assert set(unknown) == {NONE, OTHER, BANKS}
    assert all(route.is_unknown and not route.endpoints for route in unknown.values())
    region.intents = (*region.intents, intent("none", tenant="shop", where='node.name == "serves"'))
    region.run(10)
    found = routes(region, "asks")
    assert [each.node for each in found[NONE].endpoints] == ["serves"]
    assert found[OTHER].is_unknown
    assert found[BANKS].is_unknown
    region.intents = region.intents[:-1]
    region.run(10)
    assert routes(region, "asks")[NONE].is_unknown


def test_only_those_who_have_a_route_get_another_set_when_it_changes() -> None:
    region = region_of(OCR, ASR)
    subscribe(region, OCR)
    region.run(10)
    before = dict(region.desired)
    region.intents = (intent("ocr", tenant="shop", where='node.name == "serves"'),)
    region.run(10)
    assert {name for name, each in region.desired.items() if each.routes != before[name].routes} == {
        *("serves", "old", "gw")
    }


def test_a_restart_of_the_coordinator_takes_no_route_from_a_node_that_has_not_reported() -> None:
    region = region_of(OCR, ASR)
    subscribe(region, OCR)
    region.run(10)
    before = region.desired["asks"].routes
    region.restart()
    region.agents["asks"].heard = False
    region.run(3)
    assert region.desired["asks"].routes == before


def test_a_node_that_has_not_reported_keeps_the_route_of_what_it_serves_no_longer() -> None:
    region = region_of(OCR)
    region.agents["serves"].subscriptions = None
    region.run(10)
    region.intents = ()
    region.run(10)
    assert routes(region, "serves")[OCR].is_unknown
    region.agents["serves"].subscriptions = Subscriptions(())
    region.run(3)
    assert routes(region, "serves") == {}


def test_a_status_says_all_that_a_node_subscribes_to_or_nothing() -> None:
    region = region_of()
    asks = region.agents["asks"].node

    def after(sequence: int, subscriptions: Subscriptions | None) -> tuple[Subscriptions | None, list[str]]:
        said = status(asks, sequence, at=1.0, subscriptions=subscriptions)
        region.fleet, refusals = merge_status(region.fleet, "asks", 1, said, Elapsed(1.0), Wall(1.0))
        return region.fleet.nodes["asks"].subscriptions, [each.code for each in refusals]

    region.fleet = region.fleet.with_node(replace(region.fleet.nodes["asks"], sequence=1))
    assert after(2, Subscriptions((OCR,))) == (Subscriptions((OCR,)), [])
    assert after(3, None) == (Subscriptions((OCR,)), [])
    odd = Subscriptions((OCR, WorkloadKey("shop", "no name"), WorkloadKey("", "ocr")))
    assert after(4, odd) == (Subscriptions((OCR,)), [Code.TELEMETRY_ABSURD])
    assert after(5, Subscriptions(())) == (Subscriptions(()), [])
