"""A page of a large region loads the candidates that say most, and is told how many there are beside them."""

import math
from typing import Any

import pytest

from shoal.coordinator.api.dashboard.candidates import best_candidates, keep_most, shorten
from shoal.coordinator.api.dashboard.parameters import is_set
from shoal.types.codes import ShoalError
from shoal.v1 import nouns_pb2, operator_pb2


def candidate(node: str, score: float = 1.0, code: str = "", **given: Any) -> operator_pb2.Candidate:
    refusal = nouns_pb2.Refusal(code=code) if code else None
    return operator_pb2.Candidate(node=node, score=score, refusal=refusal, **given)


def kept_nodes(listed: list[operator_pb2.Candidate], most: int) -> list[str]:
    return [each.node for each in best_candidates(listed, most)]


def test_where_it_runs_comes_first_whatever_it_scores() -> None:
    listed = [
        candidate("a"),
        candidate("b", 0.5),
        candidate("here", 9.0, current=True),
        candidate("next", 3.0, chosen=True),
    ]
    assert kept_nodes(listed, 2) == ["here", "next"]
    assert kept_nodes(listed, 3) == ["b", "here", "next"], "in their order"


def test_what_fits_comes_before_what_does_not_and_each_reason_has_its_turn() -> None:
    listed = [
        *(candidate(f"full-{number}", code="MEMORY_SHORT") for number in range(5)),
        candidate("hot", code="DEVICE_HOT"),
        candidate("fits", 4.0),
        candidate("silent", math.nan, code="NODE_LOST"),
    ]
    assert kept_nodes(listed, 4) == ["full-0", "hot", "fits", "silent"]
    assert kept_nodes(listed, 5) == ["full-0", "full-1", "hot", "fits", "silent"]


def test_reasons_have_their_turn_where_what_does_not_fit_has_no_score() -> None:
    listed = [
        *(candidate(f"full-{number}", math.nan, code="MEMORY_SHORT") for number in range(90)),
        *(candidate(f"hot-{number}", math.nan, code="DEVICE_HOT") for number in range(9)),
        candidate("silent", math.nan, code="NODE_LOST"),
        candidate("runs", math.nan, code="NODE_LOST", current=True),
    ]
    assert kept_nodes(listed, 6) == ["full-0", "full-1", "hot-0", "hot-1", "silent", "runs"]


def test_of_equal_places_one_comes_before_the_second_of_another() -> None:
    listed = [*(candidate(f"small-{number}", 1.0) for number in range(9)), candidate("large", 2.0)]
    assert kept_nodes(listed, 2) == ["small-0", "large"]


def test_no_better_place_in_every_term_comes_before_a_better_score() -> None:
    listed = [candidate("fast", 1.0), candidate("frugal", 5.0, pareto=True), candidate("good", 1.1)]
    assert kept_nodes(listed, 2) == ["fast", "frugal"]


def reply_of(count: int) -> operator_pb2.ExplainReply:
    plan = operator_pb2.WorkloadPlan(candidates=[candidate(f"n{number}", float(number)) for number in range(count)])
    return operator_pb2.ExplainReply(plan=plan)


def test_a_reply_says_how_many_it_leaves_out() -> None:
    reply = reply_of(7)
    assert keep_most(reply, {"most": "3"}) == {"left_out": 4}
    assert [each.node for each in reply.plan.candidates] == ["n0", "n1", "n2"]


@pytest.mark.parametrize("given", [{}, {"most": ""}, {"most": "7"}, {"most": "99999"}])
def test_a_reply_that_has_no_more_is_whole(given: dict[str, str]) -> None:
    reply = reply_of(7)
    assert keep_most(reply, given) == {}
    assert reply == reply_of(7)


@pytest.mark.parametrize("most", ["-1", "x", "1.5", "100000", "٣", " 3"])
def test_what_is_no_number_is_refused(most: str) -> None:
    with pytest.raises(ShoalError, match="most"):
        keep_most(reply_of(7), {"most": most})


def test_a_brief_reply_has_of_each_candidate_what_the_page_shows() -> None:
    estimate = operator_pb2.Estimate(low=0.00123456789, mid=0.00223456789, high=0.00323456789)
    prediction = operator_pb2.Prediction(
        latency_p50_s=estimate, latency_p95_s=estimate, memory_bytes=estimate, basis="measured here"
    )
    fits = candidate("fits", 1.23456789, prediction=prediction, terms=[operator_pb2.ScoreTerm(name="cost")])
    full = candidate("full", math.nan)
    full.refusal.CopyFrom(nouns_pb2.Refusal(code="MEMORY_SHORT", found="1 GiB", asked="2 GiB", remedy="free some"))
    reply = operator_pb2.ExplainReply(plan=operator_pb2.WorkloadPlan(candidates=[fits, full]))
    reply.workload.state = "ready"
    assert shorten(reply, {"most": "9", "brief": "1"}) == {}
    assert not reply.HasField("workload")
    shown, refused = reply.plan.candidates
    assert [field.name for field, _ in shown.prediction.ListFields()] == ["latency_p95_s"]
    assert (shown.prediction.latency_p95_s.mid, shown.score) == (0.002235, 1.235)
    assert not shown.terms
    assert not shown.HasField("refusal")
    assert math.isnan(refused.score)
    assert not refused.HasField("prediction")
    assert refused.refusal == nouns_pb2.Refusal(code="MEMORY_SHORT", found="1 GiB")


@pytest.mark.parametrize("given", [{}, {"brief": ""}, {"brief": "0"}])
def test_a_reply_that_is_not_brief_has_everything(given: dict[str, str]) -> None:
    reply = reply_of(3)
    reply.plan.candidates[0].terms.add(name="cost")
    reply.workload.state = "ready"
    whole = operator_pb2.ExplainReply()
    whole.CopyFrom(reply)
    assert shorten(reply, given) == {}
    assert reply == whole


def test_a_flag_is_0_or_1() -> None:
    assert [is_set({"coarse": value}, "coarse") for value in ("", "0", "1")] == [False, False, True]
    with pytest.raises(ShoalError, match="brief"):
        shorten(reply_of(1), {"brief": "yes"})
