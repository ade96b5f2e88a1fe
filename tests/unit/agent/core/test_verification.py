"""From what each input showed to a verdict."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders.agent_values import verification
from shoal.agent.core.verification import InputComparison, drift_refusal, is_within, show_drifts, verdict_of
from shoal.types.codes import Code
from shoal.types.migration import Drift, InputsFrom, Metric
from shoal.wire import nouns

ASKED = verification(samples=2)
GOOD = InputComparison(
    (Drift("y", Metric.MAX_REL, 1e-3, 1e-5, True), Drift("y", Metric.COSINE, 0.99, 1.0, True)), "", 10
)
OFF = InputComparison(
    (Drift("y", Metric.MAX_REL, 1e-3, 0.5, False), Drift("y", Metric.COSINE, 0.99, 0.995, True)), "", 10
)
TORN = InputComparison((), "y: shape [1], expected [2]", 0)


def test_passed_with_the_worst_of_all_inputs() -> None:
    other = replace(GOOD, drifts=(replace(GOOD.drifts[0], worst=1e-4), replace(GOOD.drifts[1], worst=0.999)))
    verdict = verdict_of(ASKED, InputsFrom.SAMPLES, (GOOD, other), "ab")
    assert (verdict.passed, verdict.code, verdict.reason, verdict.samples) == (True, None, "", 2)
    assert [drift.worst for drift in verdict.drifts] == [1e-4, 0.999]
    assert (verdict.migration, verdict.inputs, verdict.inputs_sha256) == ("m-1", InputsFrom.SAMPLES, "ab")


@pytest.mark.parametrize(
    ("compared", "code", "reason"),
    [
        ((GOOD, OFF), Code.VERIFY_FAILED, "y: max_rel 0.5, at most 0.001"),
        ((GOOD, TORN), Code.VERIFY_FAILED, "input 2: y: shape [1], expected [2]"),
        ((OFF, TORN), Code.VERIFY_FAILED, "input 2: y: shape [1], expected [2]; y: max_rel 0.5, at most 0.001"),
        ((OFF,), Code.VERIFY_FAILED, "y: max_rel 0.5, at most 0.001"),
        ((GOOD,), Code.VERIFY_IMPOSSIBLE, "1 inputs of 2 were answered"),
        ((), Code.VERIFY_IMPOSSIBLE, "no answer had a value to compare"),
        ((replace(GOOD, elements=0),) * 2, Code.VERIFY_IMPOSSIBLE, "no answer had a value to compare"),
    ],
)
def test_why_it_did_not_pass(compared: tuple[InputComparison, ...], code: Code, reason: str) -> None:
    verdict = verdict_of(ASKED, InputsFrom.GENERATED, compared, "")
    assert (verdict.passed, verdict.code, verdict.reason) == (False, code, reason)


@given(st.lists(st.tuples(st.sampled_from(list(Metric)), st.floats(-1, 2)), min_size=1, max_size=12))
def test_one_input_out_of_tolerance_fails_them_all_in_any_order(found: list[tuple[Metric, float]]) -> None:
    compared = [
        InputComparison((Drift("y", metric, 0.5, worst, is_within(metric, worst, 0.5)),), "", 1)
        for metric, worst in found
    ]
    asked = verification(samples=1)
    verdict = verdict_of(asked, InputsFrom.GENERATED, compared, "")
    assert verdict.passed == all(each.drifts[0].passed for each in compared)
    assert verdict_of(asked, InputsFrom.GENERATED, compared[::-1], "").passed == verdict.passed
    for drift in verdict.drifts:
        assert drift.passed == is_within(drift.metric, drift.worst, drift.bound)
    assert nouns.decode(type(verdict), nouns.encode(verdict)) == verdict


def test_nan_is_within_nothing() -> None:
    assert not any(is_within(metric, float("nan"), 1.0) for metric in Metric)


@pytest.mark.parametrize(
    ("compared", "found"),
    [
        ((GOOD, OFF), "y: max_rel 0.5, at most 0.001, over 2 samples"),
        ((GOOD, TORN), "input 2: y: shape [1], expected [2], over 2 samples"),
    ],
)
def test_first_answers_that_differ_are_refused(compared: tuple[InputComparison, ...], found: str) -> None:
    refusal = drift_refusal(compared, "2 samples")
    assert refusal is not None
    assert (refusal.code, refusal.found) == (Code.DRIFT_OVER, found)
    assert "tolerance" in refusal.remedy


def test_first_answers_that_are_near_are_told() -> None:
    assert drift_refusal((GOOD,), "1 sample") is None
    assert show_drifts((GOOD,), "1 sample") == "y max_rel 0.00001, y cosine 1 from the processor's, over 1 sample"
    assert show_drifts((replace(GOOD, drifts=()),), "1 sample") == "", "text that is equal"
    far = replace(GOOD, drifts=(replace(GOOD.drifts[0], worst=1023.4),))
    assert show_drifts((far,), "1 sample") == "y max_rel 1023 from the processor's, over 1 sample", "not 1.02e+03"
