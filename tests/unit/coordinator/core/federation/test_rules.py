"""What the federation believes of an advertisement (A24), of a member, of a solicitation."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders.federation_members import advertisement, capacity, member
from harness.builders.negotiation import solicitation
from shoal.coordinator.core.federation.rules import (
    PATTERNS_MOST,
    ROOT_BYTES_MOST,
    check_advertisement,
    check_member,
    check_solicitation,
)
from shoal.types.codes import Code

ABSURD: dict[str, Any] = {
    "1e12 GPUs": {"devices": 10**12},
    "none": {"devices": 0},
    "a negative price": {"cost_usd_per_h": -0.01},
    "an infinite price": {"cost_usd_per_h": math.inf},
    "negative joules": {"joules_per_tflop": -1.0},
    "negative carbon": {"carbon_g_per_kwh": -1.0},
    "more memory than devices have": {"devices": 1, "free_bytes": 2**45},
    "negative memory": {"free_bytes": -1},
    "confidence of 2": {"confidence": 2.0},
    "unknown confidence": {"confidence": math.nan},
    "a name of lines": {"device_class": "gpu\nadmin"},
    "a long name": {"runtime": "x" * 200},
    "many precisions": {"precisions": tuple(f"fp{n}" for n in range(17))},
}


@pytest.mark.parametrize("name", ABSURD)
def test_a24_a_class_that_cannot_be(name: str) -> None:
    told = advertisement(classes=(capacity(**ABSURD[name]),))
    refusal = check_advertisement(told, None)
    assert refusal is not None
    assert refusal.code is Code.ADVERT_INVALID


@pytest.mark.parametrize(
    "changes",
    [
        {"classes": tuple(capacity(device_class=f"gpu {n}") for n in range(65))},
        {"classes": (capacity(), capacity())},
        {"lease_s": 1e9},
        {"lease_s": math.nan},
        {"lease_s": 0.0},
        {"rtt_s": {"us": math.nan}},
        {"rtt_s": {"us": -1.0}},
        {"rtt_s": {f"r{n}": 0.1 for n in range(1001)}},
        {"rtt_s": {"../etc": 0.1}},
        {"rtt_s": {"": 0.1}},
        {"heads": {"us": "not a digest"}},
        {"ledger_head": "0" * 63},
        {"residency": "Somewhere Else"},
    ],
    ids=str,
)
def test_a24_an_advertisement_that_cannot_be(changes: dict[str, Any]) -> None:
    refusal = check_advertisement(advertisement(**changes), None)
    assert refusal is not None
    assert refusal.code is Code.ADVERT_INVALID


def test_what_a_region_can_have_counts_with_what_it_does_not_know() -> None:
    told = advertisement(rtt_s={"us": 0.08}, heads={"us": "a" * 64}, ledger_head="b" * 64, residency="eu")
    assert check_advertisement(told, None) is None
    assert check_advertisement(advertisement(classes=()), None) is None, "a region with nothing free is a region"


def test_an_older_one_is_replayed_and_the_same_again_is_not() -> None:
    newest = advertisement(sequence=5, classes=(capacity(joules_per_tflop=math.nan),))
    assert check_advertisement(advertisement(sequence=6), newest) is None
    again = advertisement(sequence=5, classes=(capacity(joules_per_tflop=float("nan")),))
    assert check_advertisement(again, newest) is None, "what it does not know is the same too"
    for other in (advertisement(sequence=4), advertisement(sequence=5, classes=())):
        refusal = check_advertisement(other, newest)
        assert refusal is not None
        assert refusal.code is Code.REPLAYED


@given(st.integers(), st.integers(), st.floats(), st.floats(), st.floats(), st.floats(), st.text(max_size=90))
def test_a24_whatever_counts_is_finite_and_within_reach(
    devices: int, free: int, cost: float, joules: float, carbon: float, confidence: float, name: str
) -> None:
    told = capacity(
        device_class=name,
        devices=devices,
        free_bytes=free,
        cost_usd_per_h=cost,
        joules_per_tflop=joules,
        carbon_g_per_kwh=carbon,
        confidence=confidence,
    )
    if check_advertisement(advertisement(classes=(told,)), None) is None:
        assert 0 < devices <= 10**6
        assert 0 <= free <= devices * 2**44
        assert math.isnan(cost) or 0 <= cost <= 10_000
        assert 0 <= confidence <= 1
        assert name.isprintable()


@pytest.mark.parametrize("address", ["", "eu", "eu:0", "eu:65536", "eu:x", "e u:1", "http://eu:1", "eu:1/x"])
def test_an_address_that_nobody_can_dial(address: str) -> None:
    refusal = check_member(member(address=address))
    assert refusal is not None
    assert refusal.code is Code.FIELD_INVALID


def test_members_that_can_be_dialled_and_known() -> None:
    for address in ("eu.example.org:7447", "10.0.0.1:7447", "[::1]:7447"):
        assert check_member(member(address=address)) is None
    assert check_member(member(roots=())) is not None
    assert check_member(member(roots=("C" * ROOT_BYTES_MOST,))) is None
    assert check_member(member(roots=("C", "C" * (ROOT_BYTES_MOST + 1)))) is not None
    assert check_member(member(residency="Two Words")) is not None


def test_solicitations_ask_for_something_in_time() -> None:
    assert check_solicitation(solicitation()) is None
    assert check_solicitation(replace(solicitation(), models=())) is not None
    for seconds in (0.0, 60.0, math.nan):
        assert check_solicitation(solicitation(answer_s=seconds)) is not None


def test_solicitations_name_few_regions_by_short_patterns() -> None:
    longest = tuple(f"{number:02}" + "*-" * 30 + "*" for number in range(PATTERNS_MOST))
    for patterns in ((), ("*",), ("eu-*", "us"), longest):
        assert check_solicitation(solicitation(to=patterns)) is None
    for patterns in ((*longest, "eu"), ("e" * 64,), ("eu?",), ("[e]u",), ("",)):
        refusal = check_solicitation(solicitation(to=patterns))
        assert refusal is not None
        assert refusal.code is Code.MESSAGE_INVALID
