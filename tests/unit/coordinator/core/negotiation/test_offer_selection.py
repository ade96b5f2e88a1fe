"""Which bid is taken: one objective for home and for bids, margin, the smallest relaxation, distrust."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.offers import counter, decline, offer, requirements, term_values, terms
from shoal.coordinator.core.negotiation import reputation
from shoal.coordinator.core.negotiation.offer_selection import choose, gain_of_local
from shoal.types.agreement import Delivered
from shoal.types.codes import Code
from shoal.types.offer import Answer, Offer
from shoal.types.units import GramsPerHour, Joules, Seconds, UsdPerHour
from shoal.types.workload import DelegationMode, Limits


def winner(*answers: Answer, **asked: object) -> str:
    choice = choose(answers, terms(**asked))  # type: ignore[arg-type]
    return choice.winner.region if choice.winner is not None else ""


def test_the_best_under_the_objective_wins() -> None:
    quick, cheap = offer("a", 0.01, 4.0), offer("b", 0.04, 1.0)
    assert winner(quick, cheap, weights={"latency": 1.0}) == "a"
    assert winner(quick, cheap, weights={"cost": 1.0}) == "b"


def test_the_way_counts_against_a_bid() -> None:
    near = terms(0.025, rtt_s=0.001)
    assert choose([offer("a", 0.02)], near).winner is not None
    choice = choose([offer("a", 0.02)], terms(0.025, rtt_s=0.01))
    assert choice.refusal is not None
    assert choice.refusal.code is Code.NO_BID
    assert choice.ranked[0].refusal is not None
    assert choice.ranked[0].refusal.code is Code.SLO_UNREACHABLE


def test_a_way_that_was_not_measured_keeps_no_bound() -> None:
    assert winner(offer("z", 0.001), p95_s=1.0) == ""
    assert winner(offer("z", 0.001)) == "z"


@pytest.mark.parametrize(
    ("bid", "code"),
    [
        (offer("a", residency="us"), Code.RESIDENCY),
        (offer("a", precision="int8"), Code.PRECISION_DENIED),
        (offer("a", replicas=1), Code.REPLICAS_SHORT),
        (offer("a", replicas=2, cost=UsdPerHour(3.0)), Code.COST_OVER),
        (offer("a", replicas=2, cost=UsdPerHour(math.nan)), Code.COST_OVER),
        (offer("a", replicas=2, hold_s=Seconds(0.0)), Code.HOLD_EXPIRED),
        (counter("a", 0.01), Code.REPLICAS_SHORT),
    ],
)
def test_what_is_asked_is_asked_again_at_home(bid: Offer, code: Code) -> None:
    asked = terms(
        limits=Limits(cost=UsdPerHour(2.0)), require=requirements(replicas=2, residency=("eu",), precisions=("fp32",))
    )
    choice = choose([bid], asked)
    assert choice.winner is None
    assert choice.ranked[0].refusal is not None
    assert choice.ranked[0].refusal.code is code


@pytest.mark.parametrize(
    "absurd",
    [
        {"latency_p95_s": Seconds(-0.001)},
        {"cost": UsdPerHour(-1.0)},
        {"joules": Joules(-math.inf)},
        {"carbon": GramsPerHour(-1.0)},
        {"load_s": Seconds(-1.0)},
    ],
)
def test_what_would_be_better_than_anything_real_is_not_taken(absurd: dict[str, float]) -> None:
    choice = choose([replace(offer("a"), **absurd), offer("b", cost=9.0)], terms())  # type: ignore[arg-type]
    assert choice.winner is not None
    assert choice.winner.region == "b"
    assert [each.refusal.code for each in choice.ranked if each.refusal is not None] == [Code.MESSAGE_INVALID]


def test_a_region_that_the_policy_does_not_name_is_not_taken() -> None:
    choice = choose([offer("a")], terms(mode=DelegationMode.NEVER))
    assert choice.winner is None
    assert choice.ranked[0].refusal is not None
    assert choice.ranked[0].refusal.code is Code.TRADE_DENIED


def test_a_hold_that_is_over_is_none() -> None:
    assert choose([offer("a")], terms(), since_s=9.9).winner is not None
    assert choose([offer("a")], terms(), since_s=10.0).winner is None
    assert choose([offer("a")], terms(), since_s=10.0, indicative=True).winner is not None


def test_a_place_at_home_beats_all_where_only_want_delegates() -> None:
    assert winner(offer("a", 0.001, 0.01), own=term_values(latency=1.0, cost=10.0, energy=1.0)) == ""


@pytest.mark.parametrize(("margin", "taken"), [(0.05, "a"), (0.2, "a"), (0.3, "")])
def test_the_margin_is_kept(margin: float, taken: str) -> None:
    """Half as dear at the same latency, at weights of one half: a quarter better."""
    own = term_values(latency=0.03, cost=2.0)
    assert winner(offer("a", 0.02, 1.0), mode=DelegationMode.WHEN_BETTER, margin=margin, own=own) == taken


def test_what_is_no_better_is_not_taken_at_no_margin() -> None:
    assert winner(offer("a", 0.02, 1.0), mode=DelegationMode.WHEN_BETTER, own=term_values(latency=0.03, cost=1.0)) == ""


@settings(deadline=None)
@given(st.floats(0.001, 1.0), st.floats(0.01, 10.0), st.floats(0.0, 0.5))
def test_nothing_moves_below_its_margin(p95_s: float, cost: float, margin: float) -> None:
    asked = terms(mode=DelegationMode.WHEN_BETTER, margin=margin, own=term_values(latency=0.1, cost=1.0))
    choice = choose([offer("a", p95_s, cost)], asked)
    gain = choice.ranked[0].gain
    assert (choice.winner is not None) == (gain > 0 and gain >= margin)


@settings(deadline=None)
@given(st.floats(0.001, 1.0), st.floats(0.01, 10.0))
def test_what_moved_for_the_better_does_not_come_back_for_the_better(p95_s: float, cost: float) -> None:
    asked = terms(mode=DelegationMode.WHEN_BETTER, margin=0.1, own=term_values(latency=0.1, cost=1.0))
    bid = offer("a", p95_s, cost)
    if choose([bid], asked).winner is not None:
        assert gain_of_local(bid, asked) < 0.1


@settings(deadline=None)
@given(st.permutations([offer("a", 0.02, 2.0), offer("b", 0.03, 1.0), counter("c", 0.001), decline("d")]))
def test_the_order_of_answers_changes_nothing(answers: list[Answer]) -> None:
    first = choose([offer("a", 0.02, 2.0), offer("b", 0.03, 1.0), counter("c", 0.001), decline("d")], terms())
    again = choose(answers, terms())
    assert [each.answer.region for each in again.ranked] == [each.answer.region for each in first.ranked]
    assert again.winner is not None
    assert first.winner is not None
    assert again.winner.id == first.winner.id


def test_the_smallest_step_that_a_counter_meets_is_asked_for_next() -> None:
    asked = terms(0.03, relax=(0.04, 0.06, 0.1))
    choice = choose([counter("a", 0.045), counter("b", 0.08), decline("c")], asked)
    assert choice.winner is None
    assert choice.relaxation == asked.relax[1]


def test_no_step_that_nobody_meets_is_asked_for() -> None:
    assert choose([counter("a", 0.2)], terms(0.03, relax=(0.04,))).relaxation is None


def test_one_answer_of_a_region_counts() -> None:
    choice = choose([offer("a", 0.5), offer("a", 0.001, id="other")], terms())
    assert [each.answer for each in choice.ranked] == [offer("a", 0.5)]


def delivery(region: str, promised: float, measured: float, *, breached: bool = False) -> Delivered:
    return Delivered(region, "g-1", Seconds(promised), Seconds(measured), 100, breached)


def test_kept_promises_leave_trust_whole() -> None:
    assert reputation.trust_of([delivery("a", 0.02, 0.021)] * 5) == {"a": 1.0}


def test_a_liar_is_believed_at_less_than_it_delivers_and_may_win_trust_back() -> None:
    trust = reputation.trust_of([delivery("a", 0.01, 0.02)] * 20)
    assert reputation.believed_latency_s(Seconds(0.01), trust["a"]) > 0.02
    better = reputation.trust_of([delivery("a", 0.01, 0.02)] * 20 + [delivery("a", 0.01, 0.01)] * 20)
    assert better["a"] > 0.95


def test_a_breach_counts_though_nothing_was_measured() -> None:
    assert reputation.trust_of([Delivered("a", "g", Seconds(0.01), Seconds(0.0), 0, True)])["a"] < 1.0
    assert reputation.trust_of([Delivered("a", "g", Seconds(0.01), Seconds(0.0), 0, False)]) == {}


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.booleans())))
def test_trust_stays_in_its_bounds(deliveries: list[tuple[float, float, bool]]) -> None:
    trust = reputation.trust_of([delivery("a", *pair[:2], breached=pair[2]) for pair in deliveries])
    assert all(0 < each <= 1 for each in trust.values())


def test_a_liar_loses_to_an_honest_dearer_region_within_20_agreements() -> None:
    """One tells half its latency and is a fifth cheaper; the objective is the same for both."""
    trust: dict[str, float] = {}
    won = list[str]()
    for _ in range(20):
        choice = choose([offer("a", 0.02, 0.8), offer("b", 0.04, 1.0)], terms(trust=trust))
        assert choice.winner is not None
        won.append(choice.winner.region)
        real = 0.04
        promised = choice.winner.latency_p95_s
        trust = dict(reputation.with_delivery(trust, delivery(choice.winner.region, promised, real)))
    assert won.count("b") > won.count("a")


def test_a_price_that_is_not_told_is_no_better_than_the_worst_that_is() -> None:
    cost, own = {"cost": 1.0}, term_values(latency=0.01, cost=2.0, energy=1.0)
    better = DelegationMode.WHEN_BETTER
    unpriced, dear = offer("a", 0.01, math.nan), offer("b", 0.01, 4.0)
    assert winner(unpriced, dear, offer("c", 0.01, 3.0), weights=cost) == "c"
    choice = choose([unpriced, offer("c", 0.01, 1.0)], terms(weights=cost, own=own, mode=better, margin=0.2))
    assert choice.winner is not None
    assert choice.winner.region == "c"
    gains = {each.answer.region: each.gain for each in choice.ranked}
    assert gains["a"] < 0
    assert gains["c"] == pytest.approx(0.5)
    assert choose([unpriced], terms(weights=cost, own=own, mode=better)).winner is None
    assert winner(unpriced, weights=cost) == "a", "where nothing fits at home, and nobody tells a price"
