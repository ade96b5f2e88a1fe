"""The registry of score terms: one more term is scored, explained, traded and followed by its module alone."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from harness.builders.coordinator_core import CoreRegion, fleet_of, inputs, intent, node
from harness.builders.offers import offer, term_values, terms
from shoal.cli.render.plan import show_workload
from shoal.coordinator.api.views import workload_plan_view
from shoal.coordinator.core.migration.model import Cause, DoneState
from shoal.coordinator.core.negotiation.offer_selection import choose, own_values
from shoal.coordinator.core.placement import score
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.placement.rank import gain
from shoal.coordinator.core.placement.score.term import ObjectiveTerm
from shoal.policies.kinds import Optimize
from shoal.types.migration import Against, MigrationRule
from shoal.types.units import Joules, Seconds

NOISE: Final = ObjectiveTerm(
    name="noise",
    unit="dB",
    label="noise",
    show=lambda value: f"{value:g} dB",
    predict=lambda _scope, option, _intent, _replicas: float(option.state.node.labels.get("noise", "nan")),
    read=lambda served: served.joules,
    combine=max,
    least=1.0,
)
"""One term more. Its predictions are a label of the node; what is served or offered is read from the joules."""


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "TERMS", (*score.TERMS, NOISE))


def test_every_term_has_a_weight_in_the_policy_language() -> None:
    assert {term.name for term in score.TERMS} == set(Optimize.model_fields)


def test_the_guide_lists_every_term_with_its_unit() -> None:
    guide = (Path(__file__).parents[4] / "docs/guides/placement.md").read_text()
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in guide.splitlines() if line.startswith("| `")]
    listed = [(row[1], row[2]) for row in rows if row[1] in Optimize.model_fields]
    assert listed == [(term.name, term.unit) for term in score.TERMS]


@pytest.mark.usefixtures("noise")
def test_a_further_term_is_scored_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """The fast node is loud."""
    fleet = fleet_of(
        node("fast", labels={"noise": "60"}), node("quiet", labels={"noise": "20"}), flops={"fast": 1e12, "quiet": 1e11}
    )
    asked = intent(weights={"noise": 0.75, "latency": 0.25})
    (plan,) = place(inputs(fleet, asked)).workloads
    best, other = plan.candidates
    assert (best.node, other.node) == ("quiet", "fast")
    assert [term.name for term in best.terms] == [term.name for term in score.TERMS]
    quiet, loud = best.terms[-1], other.terms[-1]
    assert (quiet.weight, quiet.value, quiet.unit, quiet.normalised) == (0.75, 20.0, "dB", 1.0)
    assert (loud.weight, loud.value, loud.unit) == (0.75, 60.0, "dB")
    assert loud.normalised == pytest.approx(3.0)
    faster = other.terms[0].normalised
    assert faster < 1.0
    assert best.score == 1.0
    assert other.score == pytest.approx(3.0**0.75 * faster**0.25)
    assert best.pareto
    assert other.pareto
    own = own_values(plan)
    assert own is not None
    assert own[-1] == 20.0
    show_workload(workload_plan_view(plan, fleet), wide=True)
    assert "noise 0.75x1.00" in " ".join(capsys.readouterr().out.split())


def test_without_its_module_a_weight_counts_for_nothing() -> None:
    fleet = fleet_of(node("fast"), node("quiet"), flops={"fast": 1e12, "quiet": 1e11})
    (plan,) = place(inputs(fleet, intent(weights={"noise": 0.75, "latency": 0.25}))).workloads
    assert [each.node for each in plan.candidates] == ["fast", "quiet"]
    assert "noise" not in {term.name for term in plan.candidates[0].terms}


@pytest.mark.usefixtures("noise")
def test_a_further_term_decides_between_offers_and_counts_in_the_gain() -> None:
    loud = offer("a", 0.01, joules=Joules(60.0))
    quiet = offer("b", 0.02, joules=Joules(20.0))
    assert choose([loud, quiet], terms(weights={"latency": 1.0})).winner == loud
    assert choose([loud, quiet], terms(weights={"noise": 1.0})).winner == quiet
    assert gain(
        term_values(cost=1.0, noise=30.0), term_values(cost=1.0, noise=60.0), {"noise": 0.5, "cost": 0.5}
    ) == pytest.approx(1 - 0.5**0.5)
    assert gain(term_values(noise=30.0), term_values(cost=1.0), {"noise": 1.0}) == 0.0


@pytest.mark.usefixtures("noise")
def test_a_move_for_a_further_term_has_the_objective_as_its_cause() -> None:
    loud, quiet = node("edge-1", labels={"noise": "20"}), node("edge-2", labels={"noise": "40"})
    region = CoreRegion(loud, quiet, flops={"edge-1": 1e11, "edge-2": 4e11})
    rule = MigrationRule(
        against=Against.NONE, automatic=True, cooldown_s=Seconds(60.0), hold_s=Seconds(1.0), drain_s=Seconds(1.0)
    )
    region.intents = (intent(weights={"noise": 1.0}, migration=rule),)
    region.run(10)
    assert [at for at, _ in region.replicas().values()] == ["edge-1"]
    state = region.fleet.nodes["edge-1"]
    louder = replace(state, node=replace(state.node, labels={**state.node.labels, "noise": "80"}))
    region.fleet = region.fleet.with_node(louder)
    region.run(40)
    (migration,) = region.migrations.values()
    assert isinstance(migration.state, DoneState)
    assert [at for at, draining in region.replicas().values() if not draining] == ["edge-2"]
    assert migration.cause is Cause.OBJECTIVE
    assert migration.reason.startswith("noise ")
    assert migration.reason.endswith(" dB, the objective is 50% better")
