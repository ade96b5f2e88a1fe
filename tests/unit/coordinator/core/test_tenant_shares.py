"""How entries share a tenant's quota of rate and concurrency."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders import agent_values
from harness.builders.coordinator_core import node
from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState
from shoal.coordinator.core.workloads import tenant_shares
from shoal.coordinator.core.workloads.entries import EntryPoints
from shoal.coordinator.core.workloads.model import DesiredContent, EntryDemand
from shoal.coordinator.core.workloads.tenant_shares import (
    IDLE_SHARE,
    WINDOW_S,
    DemandMeter,
    TenantShares,
    is_any_limited,
    next_shares,
    tenant_limits,
)
from shoal.types.device import Role
from shoal.types.tenant import TenantLimit, TenantUse
from shoal.types.units import Elapsed, PerSecond
from shoal.types.workload import Quota, WorkloadKey

SHOP = "shop"
QUOTA = Quota(SHOP, rate=PerSecond(100.0), concurrency=10, weight=2.0)
NAMES = ("gw1", "gw2", "gw3")


@dataclass
class Entries:
    """Gateways that hear of their desired sets late, and report what they are asked for."""

    names: Sequence[str] = NAMES
    quota: Quota = QUOTA
    demands: Mapping[str, EntryDemand] = field(default_factory=dict)
    decided: dict[str, DesiredContent] = field(default_factory=dict)
    held: dict[str, DesiredContent] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def decide(self) -> None:
        fleet = Fleet(
            {
                name: NodeState(
                    replace(node(name, role=Role.GATEWAY), labels={}),
                    liveness=Liveness.LOST if name in self.lost else Liveness.READY,
                )
                for name in self.names
            }
        )
        told = tenant_limits(
            {SHOP: self.quota},
            EntryPoints(fleet, {}, (), ()),
            fleet,
            self.decided,
            {(SHOP, name): each for name, each in self.demands.items()},
            [name for name in self.names if self.held.get(name) is self.decided.get(name)],
        )
        for name in self.names:
            if name not in self.decided or self.decided[name].tenants != told[name]:
                self.decided[name] = DesiredContent(tenants=told[name])

    def receive(self, *names: str) -> None:
        for name in names or self.names:
            if name not in self.lost:
                self.held[name] = self.decided[name]

    def settle(self) -> None:
        for _ in range(4):
            self.decide()
            self.receive()

    def limit(self, name: str) -> TenantLimit:
        (found,) = self.decided[name].tenants
        return found

    def rates(self) -> list[float]:
        return [self.limit(name).rate or 0.0 for name in self.names]

    def counts(self) -> list[int]:
        return [self.limit(name).concurrency or 0 for name in self.names]


def asks(per_s: float) -> EntryDemand:
    return EntryDemand(per_s, int(per_s), was_full=True)


def test_a_quota_that_is_new_is_shared_evenly_at_once() -> None:
    entries = Entries()
    entries.decide()
    assert entries.rates() == pytest.approx([100 / 3] * 3)
    assert sorted(entries.counts()) == [3, 3, 4]
    assert entries.limit("gw1").weight == 2.0


def test_shares_follow_demand_and_an_idle_entry_keeps_a_little() -> None:
    entries = Entries()
    entries.settle()
    entries.demands = {"gw1": asks(300.0), "gw2": asks(100.0)}
    entries.settle()
    idle = 100 * IDLE_SHARE / 3
    assert entries.rates() == pytest.approx([idle + 0.75 * 95, idle + 0.25 * 95, idle])
    assert entries.counts() == [6, 3, 1]


def test_nothing_is_changed_while_every_entry_has_enough() -> None:
    entries = Entries()
    entries.settle()
    before = dict(entries.decided)
    entries.demands = {"gw1": EntryDemand(20.0, 1), "gw2": EntryDemand(1.0, 0)}
    entries.settle()
    assert entries.decided == before


def test_what_one_gives_up_is_given_out_only_when_all_have_heard() -> None:
    entries = Entries()
    entries.settle()
    entries.demands = {"gw1": asks(100.0)}
    entries.decide()
    assert entries.rates()[0] == pytest.approx(100 / 3), "the others still let as many in"
    entries.receive("gw1", "gw2")
    entries.decide()
    assert entries.rates()[0] == pytest.approx(100 / 3)
    entries.receive("gw3")
    entries.decide()
    assert entries.rates()[0] > 95


def test_a_new_entry_starts_with_nothing_and_gets_its_part() -> None:
    entries = Entries(names=NAMES[:2])
    entries.settle()
    entries.names = NAMES
    entries.decide()
    assert entries.rates()[2] == 0.0
    entries.settle()
    assert entries.rates() == pytest.approx([100 / 3] * 3)


def test_what_a_lost_entry_had_goes_to_the_others_and_it_keeps_what_it_was_told() -> None:
    entries = Entries()
    entries.settle()
    entries.lost.add("gw3")
    entries.settle()
    assert entries.rates() == pytest.approx([50.0, 50.0, 100 / 3])
    entries.lost.clear()
    entries.settle()
    assert sum(entries.rates()) == pytest.approx(100.0)


def test_a_quota_that_is_lowered_or_raised_or_gone_reaches_every_entry() -> None:
    entries = Entries()
    entries.settle()
    entries.quota = replace(QUOTA, rate=PerSecond(40.0), concurrency=4)
    entries.decide()
    assert sum(entries.rates()) == pytest.approx(40.0), "at once"
    entries.receive()
    entries.quota = replace(QUOTA, rate=PerSecond(200.0), concurrency=None)
    entries.settle()
    assert sum(entries.rates()) == pytest.approx(200.0)
    assert entries.limit("gw1").concurrency is None
    entries.quota = Quota(SHOP, replicas=3)
    fleet = Fleet({name: NodeState(node(name, role=Role.GATEWAY)) for name in NAMES})
    assert not tenant_limits({SHOP: entries.quota}, EntryPoints(fleet, {}, (), ()), fleet, entries.decided, {}, ())


def test_a_quota_of_replicas_tells_fronts_nothing() -> None:
    assert not is_any_limited({})
    assert not is_any_limited({SHOP: Quota(SHOP, replicas=3)})
    assert is_any_limited({SHOP: Quota(SHOP, replicas=3), "zoo": replace(QUOTA, tenant="zoo")})


def test_demand_counts_what_was_refused_and_survives_a_restart_of_the_front() -> None:
    def fleet(*uses: TenantUse) -> Fleet:
        return Fleet({"gw1": NodeState(node("gw1", role=Role.GATEWAY), tenants=uses)})

    meter = DemandMeter().observe(fleet(TenantUse(SHOP, 1000)), Elapsed(0.0))
    assert not meter.demands
    assert meter.observe(fleet(TenantUse(SHOP, 2000)), Elapsed(WINDOW_S / 2)) is meter
    meter = meter.observe(fleet(TenantUse(SHOP, 1010, 20, 20, 3)), Elapsed(WINDOW_S))
    assert meter.demands == {(SHOP, "gw1"): EntryDemand(50 / WINDOW_S, 3, was_full=True)}
    meter = meter.observe(fleet(TenantUse(SHOP, 5)), Elapsed(2 * WINDOW_S))
    assert meter.demands == {(SHOP, "gw1"): EntryDemand(5 / WINDOW_S)}


moves = st.lists(
    st.tuples(
        st.sampled_from(["receive", "receive", "ask", "decide", "decide", "quota"]),
        st.sampled_from(NAMES),
        st.floats(0.0, 500.0),
    ),
    max_size=60,
)


@given(moves)
def test_what_fronts_hold_never_exceeds_the_quota_however_late_they_hear(
    history: Sequence[tuple[str, str, float]],
) -> None:
    entries = Entries()
    entries.settle()
    # A quota that is lowered holds once everybody has heard of it: until then the highest before does.
    allowed_rate, allowed_count = 100.0, 10
    for what, name, number in history:
        match what:
            case "receive":
                entries.receive(name)
            case "ask":
                entries.demands = {**entries.demands, name: asks(number)}
            case "quota":
                entries.quota = replace(QUOTA, rate=PerSecond(1.0 + number), concurrency=1 + int(number))
                allowed_rate, allowed_count = max(allowed_rate, 1.0 + number), max(allowed_count, 1 + int(number))
            case _:
                entries.decide()
        told = [limit for content in entries.held.values() for limit in content.tenants]
        assert sum(each.rate or 0.0 for each in told) <= allowed_rate * (1 + 1e-5)
        assert sum(each.concurrency or 0 for each in told) <= allowed_count
    for _ in range(6):
        entries.settle()
    assert sum(entries.rates()) == pytest.approx(entries.quota.rate, rel=1e-5)
    assert sum(entries.counts()) == entries.quota.concurrency
    decided = dict(entries.decided)
    entries.settle()
    assert entries.decided == decided, "it comes to rest"


@given(
    st.floats(0.5, 1e5),
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.0, 1e6), min_size=1),
    st.booleans(),
)
def test_a_first_split_adds_up(total: float, asked: Mapping[str, float], whole: bool) -> None:
    total = float(int(total) + 1) if whole else total
    shares = next_shares(total, dict.fromkeys(asked), asked, is_settled=False, is_short=False, whole=whole)
    assert sum(shares.values()) == pytest.approx(total, rel=1e-9)
    assert min(shares.values()) >= 0
    assert not whole or all(each == int(each) for each in shares.values())


TENANTS = ("shop", "clinic", "farm")
AGENTS = ("a1", "a2", "a3", "a4")
MEMBERS = ("gw1", "gw2", *AGENTS)


class Region:
    """A region whose shares are decided step by step."""

    def __init__(self) -> None:
        self.quotas = {tenant: Quota(tenant, rate=PerSecond(100.0), concurrency=10) for tenant in TENANTS}
        self.fleet = Fleet(
            {
                name: NodeState(
                    replace(node(name, role=Role.GATEWAY if name.startswith("gw") else Role.AGENT), labels={}),
                    liveness=Liveness.READY,
                )
                for name in MEMBERS
            }
        )
        self.entries = EntryPoints(self.fleet, {}, (), ())
        self.shares = TenantShares(self.entries, self.fleet)
        self.desired: dict[str, DesiredContent] = {}
        self.demands: dict[tuple[str, str], EntryDemand] = {}
        self.confirmed: set[str] = set()
        self.changed: set[str] = set()

    def decide(self, *, is_stored: bool = True) -> None:
        """A step comes to the same as one from scratch. is_stored: its decision takes effect."""
        told = self.shares.decide(
            self.quotas, self.fleet, self.desired, self.demands, self.confirmed, frozenset(self.changed)
        )
        self.changed.clear()
        whole = tenant_limits(self.quotas, self.entries, self.fleet, self.desired, self.demands, self.confirmed)
        assert told.of == whole
        different = {
            name for name, limits in whole.items() if name not in self.desired or self.desired[name].tenants != limits
        }
        assert different <= told.changed
        if is_stored:
            for name in told.changed:
                if self.desired.get(name, DesiredContent()).tenants != told.of.get(name, ()):
                    self.desired[name] = DesiredContent(tenants=told.of.get(name, ()))
                    self.confirmed.discard(name)

    def have(self, name: str, tenant: str) -> None:
        """The node has this tenant's workload from now on, and no other."""
        self.entries.put(name, (agent_values.assignment("a-1", workload=WorkloadKey(tenant, "w")),))

    def turn(self, name: str) -> None:
        """The node is lost, or is back."""
        state = self.fleet.nodes[name]
        other = Liveness.READY if state.liveness is Liveness.LOST else Liveness.LOST
        self.fleet = self.fleet.with_node(replace(state, liveness=other))
        self.changed.add(name)

    def ask(self, tenant: str, name: str, demand: EntryDemand) -> None:
        self.demands = {**self.demands, (tenant, name): demand}

    def settle(self) -> None:
        for _ in range(4):
            self.decide()
            self.confirmed = set(MEMBERS)
        self.decide()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["decide", "decide", "fail", "confirm", "ask", "have", "turn", "quota", "settle", "other"]),
            st.sampled_from(MEMBERS),
            st.sampled_from(TENANTS),
            st.integers(0, 300),
        ),
        max_size=40,
    )
)
def test_shares_that_are_kept_are_those_from_scratch(history: Sequence[tuple[str, str, str, int]]) -> None:
    region = Region()
    region.settle()
    for what, name, tenant, number in history:
        match what:
            case "decide" | "fail":
                region.decide(is_stored=what == "decide")
            case "confirm":
                region.confirmed ^= {name}
            case "ask":
                region.ask(tenant, name, EntryDemand(float(number), number // 10, was_full=number > 200))
            case "have":
                region.have(AGENTS[number % 4], tenant)
            case "turn":
                region.turn(name)
            case "quota":
                region.quotas = {
                    **region.quotas,
                    tenant: Quota(tenant, rate=PerSecond(1.0 + number) if number % 3 else None),
                }
            case "other":  # its set was replaced
                region.desired[name] = DesiredContent(tenants=(TenantLimit(tenant, PerSecond(float(number))),))
            case _:
                region.settle()
        region.decide()


def test_only_tenants_to_whom_something_happened_are_shared_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region()
    for name, tenant in zip(AGENTS, ("shop", "shop", "clinic", "farm"), strict=True):
        region.have(name, tenant)
    region.settle()
    decided = set[str]()
    plain = tenant_shares._limits_of

    def count(tenant: str, *given: Any, **more: Any) -> Mapping[str, TenantLimit]:
        decided.add(tenant)
        return plain(tenant, *given, **more)

    def anew() -> set[str]:
        """Whose shares the next step decides."""
        decided.clear()
        region.shares.decide(
            region.quotas, region.fleet, region.desired, region.demands, region.confirmed, frozenset(region.changed)
        )
        found = set(decided)
        region.settle()
        return found

    monkeypatch.setattr(tenant_shares, "_limits_of", count)
    assert anew() == set()
    region.confirmed.clear()
    assert anew() == set(), "what is shared as before needs no word from anybody"
    region.ask("shop", "a1", EntryDemand(90.0, 9, was_full=True))
    assert anew() == {"shop"}
    region.have("a4", "clinic")
    assert anew() == {"clinic", "farm"}
    region.turn("a3")
    assert anew() == {"clinic"}
    region.quotas = {**region.quotas, "farm": Quota("farm", rate=PerSecond(7.0))}
    assert anew() == {"farm"}
