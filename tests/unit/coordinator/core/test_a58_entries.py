"""A58: an agent's certificate forwards a request for a tenant that sent none. Which node may forward what to whom,
and which receives routes and credentials."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders import agent_values
from harness.builders.coordinator_core import node
from shoal.coordinator.core.fleet.state import Fleet, NodeState
from shoal.coordinator.core.workloads.entries import EntryPoints, credentials_of
from shoal.coordinator.core.workloads.model import DesiredContent
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Assignment, Credential, Front
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

OCR, ASR, GUEST, AWAY = (
    WorkloadKey("shop", "ocr"),
    WorkloadKey("clinic", "asr"),
    WorkloadKey(GUEST_TENANT, "g-1"),
    WorkloadKey("shop", "away"),
)


def member(name: str, entry: str = "", role: Role = Role.AGENT, *, revoked: bool = False) -> NodeState:
    told = replace(node(name, role=role), labels={"entry": entry} if entry else {}, forward_key=f"key-{name}")
    return NodeState(told, revoked=revoked)


def holds(*keys: WorkloadKey) -> tuple[Assignment, ...]:
    return tuple(agent_values.assignment(f"a-{key.name}", workload=key) for key in keys)


FLEET = Fleet(
    {
        each.name: each
        for each in (
            member("gw", role=Role.GATEWAY),
            member("shops", "shop", role=Role.GATEWAY),
            member("clinics", "clinic,x", role=Role.GATEWAY),
            member("till", "shop"),
            member("desk", "clinic, x"),
            member("any", "*"),
            member("one"),
            member("two"),
            member("idle"),
            member("gone", "*", revoked=True),
        )
    }
)
DESIRED = {"one": holds(OCR, GUEST), "two": holds(OCR, ASR)}
ENTRIES = EntryPoints(FLEET, DESIRED, (OCR, ASR, GUEST, AWAY), (AWAY,))


def fronts(name: str) -> dict[str, set[WorkloadKey]]:
    return {each.node: set(each.workloads) for each in ENTRIES.forwarding(name).fronts}


def test_a58_a_node_is_told_of_what_may_enter_there_and_no_more() -> None:
    entering = {name: set(ENTRIES.entering(name)) for name in FLEET.nodes}
    assert entering == {
        "gw": {OCR, ASR, GUEST, AWAY},
        "shops": {OCR, GUEST, AWAY},
        "clinics": {ASR, GUEST, AWAY},
        "till": {OCR, AWAY},
        "desk": {ASR},
        "any": {OCR, ASR, AWAY},
        "one": {OCR, GUEST},
        "two": {OCR, ASR},
        "idle": set(),
        "gone": set(),
    }


def test_a58_a_replica_takes_forwards_of_entries_gateways_and_its_fellows_only() -> None:
    both = {"gw": {OCR, GUEST}, "shops": {OCR, GUEST}}
    assert fronts("one") == {**both, "clinics": {GUEST}, "till": {OCR}, "any": {OCR}, "two": {OCR}}
    agents = {"till": {OCR}, "desk": {ASR}, "any": {OCR, ASR}, "one": {OCR}}
    assert fronts("two") == {"gw": {OCR, ASR}, "shops": {OCR}, "clinics": {ASR}, **agents}
    others = {"shops": {AWAY}, "clinics": {AWAY}, "till": {AWAY}, "any": {AWAY}}
    assert fronts("gw") == {**others, "one": set(), "two": set()}
    del others["clinics"]
    assert fronts("clinics") == {**others, "gw": {AWAY}, "one": set(), "two": set()}
    assert fronts("till") == {"one": set(), "two": set(), "gw": set(), "shops": set(), "clinics": set()}
    assert fronts("idle") == {}
    assert Front("till", "key-till", (OCR,)) in ENTRIES.forwarding("one").fronts


def test_a58_credentials_go_where_their_tenants_may_enter() -> None:
    tokens = tuple(Credential(tenant, f"sha-{tenant}", Wall(1.0)) for tenant in ("shop", "clinic", "x"))

    def tenants_at(name: str) -> set[str]:
        content = DesiredContent(DESIRED.get(name, ()), forwarding=ENTRIES.forwarding(name))
        return {each.tenant for each in credentials_of(content, tokens)}

    found = {name: tenants_at(name) for name in ("gw", "shops", "till", "desk", "any", "one", "two", "idle")}
    every = {"shop", "clinic", "x"}
    assert found == {
        "gw": every,
        "shops": {"shop"},
        "till": {"shop"},
        "desk": {"clinic", "x"},
        "any": every,
        "one": {"shop"},
        "two": {"shop", "clinic"},
        "idle": set(),
    }


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["one", "two", "idle", "gw2"]), st.sets(st.sampled_from([OCR, ASR, GUEST])))))
def test_a58_entries_followed_are_entries_made_after_every_change(changes: list[tuple[str, set[WorkloadKey]]]) -> None:
    subscribing = {
        name: replace(FLEET.nodes[name], node=replace(FLEET.nodes[name].node, subscribes=True))
        for name in ("idle", "any")
    }
    fleet = Fleet({**FLEET.nodes, **subscribing, "gw2": member("gw2", role=Role.GATEWAY)})
    held, known = {"one": holds(OCR)}, {OCR, GUEST}
    entries = EntryPoints(fleet, held, known, ())
    asked: dict[str, set[WorkloadKey]] = {}
    for node_name, keys in changes:
        for key in keys - known:
            entries.add(key)
        for key in known - keys - {OCR}:
            entries.remove(key)
        known = keys | {OCR}
        held = {**held, node_name: holds(*sorted(keys))}
        entries.put(node_name, held[node_name])
        asked = {**asked, "any": keys}
        entries.subscribe("any", keys)
        fresh = EntryPoints(fleet, held, known, (), asked)
        for name in fleet.nodes:
            assert entries.forwarding(name) == fresh.forwarding(name)
            assert entries.route_keys(name) == fresh.route_keys(name)
        for tenant in ("shop", "clinic", GUEST_TENANT, "nobody"):
            callable_at = {name for name in fleet.nodes for key in held.get(name, ()) if key.workload.tenant == tenant}
            assert entries.of_tenant(tenant) == fresh.of_tenant(tenant)
            assert entries.of_tenant(tenant) is entries.of_tenant(tenant)
            assert callable_at - {"gone"} <= set(entries.of_tenant(tenant))
        for key in (OCR, ASR, GUEST):
            routed = {name for name in fleet.nodes if key in entries.route_keys(name)}
            assert entries.dependents(key) == fresh.dependents(key)
            assert routed <= set(entries.dependents(key))
