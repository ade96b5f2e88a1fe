"""Signed messages of other regions become events only where a region can mean them."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.builders.negotiation import notice, offer, solicitation
from harness.crypto.pki import Authority
from shoal.coordinator.peers.messages import ANSWER_BYTES, check_reply, verify_answer, verify_message
from shoal.types.agreement import Grant, Notice
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.v1 import federation_pb2
from shoal.wire.signed_envelope import RegionSigner

NOW = Wall(1_800_000_000.0)
HOME, AWAY = "us-east", "eu-west"


class TwoRegions:
    """Messages of one region to another, signed and verified."""

    def __init__(self, folder: Path) -> None:
        authorities = {name: Authority(folder / name, name, NOW) for name in (HOME, AWAY)}
        self._roots = {name: (each.certificate.read_text(),) for name, each in authorities.items()}
        self._signers = dict[str, RegionSigner]()
        for name, authority in authorities.items():
            certificate, key, _ = authority.issue(Role.COORDINATOR, "coordinator", valid_s=3600.0).read()
            self._signers[name] = RegionSigner(name, certificate, key)

    def roots_of(self, region: str) -> tuple[str, ...]:
        return self._roots[region]

    def verify(self, noun: object, kind: type, *, by: str = AWAY, to: str = HOME) -> object:
        said = self.sign(noun, by=by, to=to)
        return verify_message(said, kind, to=to, roots_of=self.roots_of, wall=NOW).content

    def sign(self, noun: object, *, by: str = AWAY, to: str = HOME) -> federation_pb2.Said:
        return self._signers[by].sign(noun, to)

    def verify_bid(self, hold_s: float) -> object:
        asked = solicitation()
        bid = replace(offer(), region=AWAY, solicitation=asked.id, round=asked.round, hold_s=Seconds(hold_s))
        said = self._signers[AWAY].sign(bid, asked.origin)
        return verify_answer(said, AWAY, asked, self.roots_of, NOW).content


@pytest.fixture
def regions(tmp_path: Path) -> TwoRegions:
    return TwoRegions(tmp_path)


def refusal_code(verify: Callable[[], object]) -> Code:
    with pytest.raises(ShoalError) as refused:
        verify()
    return refused.value.code


def test_an_answer_that_nobody_means_is_refused_before_it_is_read(regions: TwoRegions) -> None:
    said = regions.sign(grant(30.0))
    said.MergeFromString(b"\xfa\x3f" + b"\x80\x80\x04" + b"x" * ANSWER_BYTES)  # a field that there is not
    assert refusal_code(lambda: check_reply(said, AWAY)) is Code.TOO_LARGE
    check_reply(regions.sign(grant(30.0)), AWAY)


def grant(lease_s: float) -> Grant:
    return Grant("g-1", "bid-1", AWAY, Seconds(lease_s), ())


@pytest.mark.parametrize("wrong", [math.nan, -1.0])
def test_a_time_that_is_none_is_refused_in_requests_and_answers(regions: TwoRegions, wrong: float) -> None:
    assert regions.verify(grant(30.0), Grant) == grant(30.0)
    assert refusal_code(lambda: regions.verify(grant(wrong), Grant)) is Code.MESSAGE_INVALID
    assert refusal_code(lambda: regions.verify(notice(wrong), Notice, by=HOME, to=AWAY)) is Code.MESSAGE_INVALID
    assert regions.verify_bid(10.0)
    assert refusal_code(lambda: regions.verify_bid(wrong)) is Code.MESSAGE_INVALID
