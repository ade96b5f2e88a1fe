"""One replica for each matching node, or for each value of a label: new ones get their own, lost ones lose it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from harness.builders.coordinator_core import DIGEST, CoreRegion, device, fleet_of, inputs, intent, node, traffic
from shoal.coordinator.core.fleet import updates
from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.placement.model import PlacementPlan, RegionFacts, WorkloadPlan, terms_of
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.workloads.replica_counts import WantedReplicas
from shoal.policies.documents import load
from shoal.policies.kinds import Policy, Workload
from shoal.policies.resolve import resolve
from shoal.types.codes import Code
from shoal.types.device import Node
from shoal.types.migration import MigrationRule
from shoal.types.units import Elapsed, Wall
from shoal.types.workload import Intent, ModelRef, Spread

EXAMPLES: Final = Path(__file__).parents[4] / "policies/examples"
TICK_S: Final = 2.0
ORDER: Final = ("npu", "gpu", "cpu")


def per_node(**changes: Any) -> Intent:
    return intent(spread=Spread.NODE, per="node", **changes)


def per_site(**changes: Any) -> Intent:
    return intent(spread="site", per="site", **changes)


def member(name: str, site: str = "", kind: str = "cpu") -> Node:
    return node(name, device(kind, kind=kind), labels={"site": site} if site else {})


def only(plan: PlacementPlan) -> WorkloadPlan:
    (found,) = plan.workloads
    return found


def count(counts: WantedReplicas, fleet: Fleet, *intents: Intent) -> list[int]:
    found = counts.count(intents, fleet, RegionFacts("eu-west", "eu"), {}, Elapsed(0.0), Wall(0.0))
    return [each.require.replicas for each in found]


def holders(region: CoreRegion, name: str = "ocr") -> list[str]:
    return sorted(at for at, draining in region.replicas(name).values() if not draining)


def test_the_number_follows_nodes_labels_and_liveness() -> None:
    counts, fleet = WantedReplicas(), fleet_of(member("a", "lyon"), member("b", "lyon"), member("c"))
    asked = (per_node(), intent("sites", spread="site", per="site"), intent("fixed", replicas=2))
    assert count(counts, fleet, *asked) == [3, 1, 2]
    fleet = updates.with_labels(fleet, "c", {"site": "metz"})
    assert count(counts, fleet, *asked) == [3, 2, 2]
    fleet = fleet.with_node(replace(fleet.nodes["c"], liveness=Liveness.SUSPECT))
    assert count(counts, fleet, *asked) == [3, 2, 2]
    fleet = fleet.with_node(replace(fleet.nodes["c"], liveness=Liveness.LOST))
    assert count(counts, fleet, *asked) == [2, 1, 2]
    assert count(counts, fleet, per_node(where='node.name == "nobody"')) == [1]


def test_intents_are_the_same_objects_until_their_number_changes() -> None:
    counts, fleet, facts = WantedReplicas(), fleet_of(member("a", "lyon"), member("b", "metz")), RegionFacts("x")
    asked = (per_site(), intent("fixed"))

    def ask(changed: set[str] | None = None) -> tuple[Intent, ...]:
        return counts.count(asked, fleet, facts, {}, Elapsed(0.0), Wall(0.0), changed)

    first = ask()
    assert ask() is first
    assert ask(set()) is first
    fleet = fleet.with_node(replace(fleet.nodes["a"], cordoned=True))
    assert ask({"a"}) is first
    fleet = updates.with_labels(fleet, "a", {"site": "metz"})
    assert ask({"a"})[0].require.replicas == 1
    assert ask({"a"})[1] is asked[1]
    assert terms_of(ask(set())[0]) == terms_of(first[0])


def test_a_new_node_gets_one_a_lost_one_is_not_replaced_and_serves_again_when_it_is_back() -> None:
    region = CoreRegion(*(member(name) for name in "abc"))
    region.intents = (per_node(),)
    region.run(10)
    assert holders(region) == ["a", "b", "c"]
    region.join(member("d"))
    region.run(10)
    assert holders(region) == ["a", "b", "c", "d"]
    before = region.replicas()
    region.agents["b"].heard = False
    region.run(20)
    assert region.fleet.nodes["b"].liveness is Liveness.LOST
    assert region.replicas() == before
    assert region.decision is not None
    (plan,) = region.decision.plan.workloads
    assert (plan.wanted, plan.placed, plan.refusal) == (3, 3, None)
    started = len(region.agents["b"].started)
    region.reconnect("b")
    region.run(10)
    assert region.replicas() == before
    assert len(region.agents["b"].started) == started


def test_a_site_has_another_node_take_over() -> None:
    region = CoreRegion(member("a", "lyon"), member("b", "lyon"), member("c", "metz"))
    region.intents = (per_site(),)
    region.run(10)
    (first,) = set(holders(region)) - {"c"}
    region.agents[first].heard = False
    region.run(30)
    assert holders(region) == sorted({"a", "b", "c"} - {first})


def test_what_a_site_lacks_is_named_and_no_other_number_is_proposed() -> None:
    small = node("c", device("cpu", memory=2**20), labels={"site": "metz"})
    fleet = fleet_of(member("a", "lyon"), small, member("d"))
    asked = replace(per_site(), require=replace(per_site().require, replicas=2))
    plan = only(place(inputs(fleet, asked)))
    assert plan.placed == 1
    assert plan.refusal is not None
    assert plan.refusal.code is Code.REPLICAS_SHORT
    assert plan.refusal.asked == "2 replicas, one for each site"
    assert "1 of 2 placed; MEMORY_SHORT: " in plan.refusal.found
    assert "replicas:" not in plan.nearest
    nobody = only(place(inputs(fleet_of(member("d")), per_site())))
    assert nobody.refusal is not None
    assert nobody.refusal.code is Code.LABEL_MISSING


def intents_of(file: str, revision: int = 1) -> tuple[Intent, ...]:
    documents = load([(file, (EXAMPLES / file).read_text())])
    assert documents.problems == ()
    values = [each.value for each in documents.documents]
    policies = {each.metadata.name: each for each in values if isinstance(each, Policy)}
    return tuple(
        resolve(
            each,
            policies[each.spec.policy or ""],
            revision=revision,
            digests={each.spec.model.source: ModelRef(each.spec.model.source, DIGEST, "")},
        )
        for each in values
        if isinstance(each, Workload)
    )


def kinds_in(site: int) -> tuple[str, str, str]:
    """Most sites have an NPU, some a GPU instead, some only processors."""
    return ("npu" if site % 4 else "cpu", "gpu" if site % 3 else "cpu", "cpu")


@pytest.mark.parametrize(("sites", "losses"), [(4, 2), pytest.param(40, 10, marks=pytest.mark.long)])
def test_sites_keep_what_two_files_say_through_losses_and_returns(sites: int, losses: int) -> None:
    """The last two losses are of nodes with a replica of both. `CoreRegion.step` compares what is decided about what
    changed with what is decided about everything."""
    nodes = {
        f"s{site:02}-{at}": node(
            f"s{site:02}-{at}", device(kind, kind=kind), labels={"site": f"s{site:02}", "entry": "*"}
        )
        for site in range(sites)
        for at, kind in enumerate(kinds_in(site))
    }
    kind_of = {name: str(each.devices[0].kind) for name, each in nodes.items()}
    region = CoreRegion(*nodes.values(), flops={name: 1e10 for name, kind in kind_of.items() if kind == "npu"})
    region.facts = replace(region.facts, carbon_g_per_kwh=300.0)
    documents = (*intents_of("one-per-site.yaml"), *intents_of("npu-else-gpu-else-cpu.yaml"))
    # As much for each site as among forty. Without moves by themselves, which look at every place in every scan and are
    # tested elsewhere.
    region.intents = tuple(
        replace(
            each,
            migration=MigrationRule(),
            traffic=tuple(traffic(one.rate * sites / 40, one.origin)[0] for one in each.traffic),
        )
        for each in documents
    )
    region.run(6 * TICK_S, tick=TICK_S)
    lost = ""

    def check() -> None:
        shops = [name for name in holders(region, "label-reader") if name != lost]
        assert [name[:3] for name in shops] == [f"s{site:02}" for site in range(sites)]
        speech = [name for name in holders(region, "speech") if name != lost]
        assert len({name[:3] for name in speech}) == len(speech) == 2
        assert {kind_of[name] for name in speech} == {"npu"}
        assert region.decision is not None
        assert [each.refusal for each in region.decision.plan.workloads] == [None] * len(region.decision.plan.workloads)

    check()
    best = {name[:3]: min(ORDER.index(kind_of[each]) for each in nodes if each[:3] == name[:3]) for name in nodes}
    assert {name[:3]: ORDER.index(kind_of[name]) for name in holders(region, "label-reader")} == best
    speech = holders(region, "speech")
    others = [name for name in holders(region, "label-reader") if name not in speech]
    for lost in (*others[: losses - len(speech)], *speech):
        region.agents[lost].heard = False
        region.run(6 * TICK_S, tick=TICK_S)
        check()
        alive = [ORDER.index(kind_of[each]) for each in nodes if each[:3] == lost[:3] and each != lost]
        (now_at,) = [name for name in holders(region, "label-reader") if name[:3] == lost[:3] and name != lost]
        assert ORDER.index(kind_of[now_at]) == min(alive)
        region.reconnect(lost)
    lost = ""
    region.run(2 * TICK_S, tick=TICK_S)
    check()


@pytest.mark.parametrize("site", ["s1", "s0"])
def test_a_site_that_is_lost_as_a_whole_waits_for_its_nodes(site: str) -> None:
    region = CoreRegion(*(member(f"s{at}-{name}", f"s{at}") for at in range(4) for name in "ab"))
    region.intents = (per_site(),)
    region.run(10)
    before = region.replicas()
    for name in ("a", "b"):
        region.agents[f"{site}-{name}"].heard = False
    region.run(20)
    assert region.replicas() == before
    region.reconnect(f"{site}-a")
    region.reconnect(f"{site}-b")
    region.run(10)
    assert region.replicas() == before
