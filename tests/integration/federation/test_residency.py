"""A25 on three regions: data goes only where its policy lets it, judged by its home and by who would work for it."""

import ssl
import urllib.request
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from harness.builders.negotiation import solicitation
from harness.cluster.delegation import (
    FAR,
    HOME,
    NEAR,
    agreements,
    delete_delegated,
    gateway_load,
    in_regions,
    wait_delegated,
)
from harness.cluster.stack import WAIT_TIMEOUT_S, DevStack, InferenceLoad, files_of
from harness.measure.history import CallOutcome
from harness.report import record
from harness.wait import wait_until
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.identity.authority import FileAuthority
from shoal.devstack.control import context_of
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.offer import Decline, Offer
from shoal.types.units import Seconds
from shoal.v1 import federation_pb2, federation_pb2_grpc
from shoal.wire import signed_envelope
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK_BYTES, channel_options
from shoal.wire.member_files import Enrolled

CALL_S = 10.0
LEFT_WITHIN_S = 2.0
"""From the answer to an apply until nothing goes to a region that it forbids."""


def coordinator_of(stack: DevStack, region: str) -> Enrolled:
    """A certificate such as the region's own coordinator has."""
    folder = stack.control.folder / stack.info.stack.for_region(region).coordinator.name / "ca"
    wall = CoordinatorClock().wall()
    authority = FileAuthority.open(folder, region, wall=wall, may_create=False)
    return authority.enrol_self(Role.COORDINATOR, "coordinator", lifetime_s=Seconds(600.0), wall=wall)


def peer(stack: DevStack, caller: Enrolled, to: str) -> Any:
    server = coordinator_of(stack, to)
    credentials = grpc.ssl_channel_credentials(server.ca_pem, caller.key_pem, caller.certificate_pem)
    options = channel_options(LINK_BYTES, server_name=dns_of(to, Role.COORDINATOR, "coordinator"))
    address = stack.info.stack.for_region(to).coordinator.addresses["peers"]
    return federation_pb2_grpc.PeerStub(grpc.secure_channel(address, credentials, options))


def service(stack: DevStack, caller: Enrolled) -> Any:
    (member,) = stack.info.stack.federation
    folder = stack.control.folder / member.name / "ca"
    ca = FileAuthority.open(folder, member.region, wall=CoordinatorClock().wall(), may_create=False).ca_pem
    credentials = grpc.ssl_channel_credentials(ca, caller.key_pem, caller.certificate_pem)
    options = channel_options(LINK_BYTES, server_name=dns_of(member.region, Role.FEDERATION, "federation"))
    return federation_pb2_grpc.FederationStub(grpc.secure_channel(member.addresses["link"], credentials, options))


def verify_answer(stack: DevStack, answer: federation_pb2.Said) -> object:
    roots = (coordinator_of(stack, answer.by).ca_pem.decode(),)
    wall = CoordinatorClock().wall()
    return signed_envelope.verify_either(answer, Offer, Decline, to=HOME, roots_of=lambda region: roots, wall=wall)


def codes(answers: Sequence[object]) -> list[str]:
    return [str(each.refusal.code) if isinstance(each, Decline) else "offered" for each in answers]


def test_a25_a_region_declines_what_may_not_come_to_it(neighbourhood: DevStack) -> None:
    """Solicited by the very home, past its own judgement: directly, and by the federation."""
    stack, own = neighbourhood, coordinator_of(neighbourhood, HOME)
    signer = signed_envelope.RegionSigner(HOME, own.certificate_pem, own.key_pem)
    asked = 0
    cases: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
        ((HOME,), {NEAR: Code.RESIDENCY, FAR: Code.RESIDENCY}),
        (("moon", HOME), {NEAR: Code.RESIDENCY, FAR: Code.RESIDENCY}),
        ((NEAR,), {NEAR: "offered", FAR: Code.RESIDENCY}),
    )
    for number, (residency, expected) in enumerate(cases):
        wanted = solicitation(f"s-{number}", origin=HOME, residency=residency, indicative=True)
        message = signer.sign(wanted, signed_envelope.ANYONE)
        for region, code in expected.items():
            answer = verify_answer(stack, peer(stack, own, region).Bid(message, timeout=CALL_S))
            assert codes([answer]) == [code], (region, residency)
            asked += 1
        answers = [verify_answer(stack, each) for each in service(stack, own).Solicit(message, timeout=CALL_S).answers]
        offered = [each.region for each in answers if isinstance(each, Offer)]
        assert offered == [region for region, code in expected.items() if code == "offered"]
        asked += 1
    record("A25", "P", asked, what="solicited for what may not come there")


def cross_region_requests(stack: DevStack, region: str) -> dict[str, str]:
    """What left, or came from, other regions at its gateway."""
    (gateway,) = stack.info.stack.for_region(region).gateways
    files = files_of(stack.contexts.get(context_of(stack.info.stack, region)))
    context = ssl.create_default_context(cafile=str(files.authority))
    context.load_cert_chain(files.certificate, files.key)
    url = f"https://{gateway.addresses['front-metrics']}/metrics"
    with urllib.request.urlopen(url, context=context, timeout=CALL_S) as answer:
        lines = answer.read().decode().splitlines()
    told = (line.rpartition(" ") for line in lines if line.startswith("shoal_front_agreement_requests_total"))
    return {name: count for name, _, count in told}


def refusals(load: InferenceLoad, since: float) -> int:
    done = [each for history in load.histories for each in list(history.completed)]
    return sum(each.outcome is not CallOutcome.OK and each.start >= since for each in done)


@pytest.mark.long
def test_a25_a_request_that_fails_there_goes_to_no_other_region(neighbourhood: DevStack) -> None:
    """The only node that serves it dies: neither its region nor the gateway at home takes it to one that may not."""
    stack = neighbourhood
    stack.apply(in_regions("kept", NEAR))
    agreed = wait_delegated(stack, "kept")
    before = cross_region_requests(stack, FAR)
    node = stack.info.stack.for_region(NEAR).agents[0].name
    try:
        with gateway_load(stack, "kept") as load:
            killed = load.now()
            stack.kill(node)
            wait_until(lambda: refusals(load, killed) >= 20, WAIT_TIMEOUT_S, "requests to be refused")
            stack.control.break_member(node, "resume")
            load.wait_for(20)
        verdict = load.verdict()
        assert verdict.violations == (), str(verdict)
        assert verdict.refused > 0
    finally:
        stack.control.break_member(node, "resume")
    assert cross_region_requests(stack, FAR) == before
    assert agreements(stack, "kept", FAR) == []
    assert [view.agreement for view in agreements(stack, "kept")] == [agreed.agreement]
    for region in (NEAR, FAR):
        with stack.api(region) as api:
            assert "SOLICITED" not in [event.code for event in api.events()], "guests are not delegated on"
    record("A25", "P", 1, what="retries", sent=verdict.sent, answered=verdict.answered, elsewhere=0)
    delete_delegated(stack, "kept")


def fetch_result(stack: DevStack, by: str, agreement: str, digest: str) -> str:
    """What a fetch of the model's bytes from its home comes to."""
    asked = federation_pb2.PeerFetch(agreement=agreement, digest=digest)
    try:
        size = sum(len(each.data) for each in peer(stack, coordinator_of(stack, by), HOME).Fetch(asked, timeout=CALL_S))
    except grpc.RpcError as error:
        return str(refusal_of(error).code)
    return "bytes" if size else "nothing"


def test_a25_a_policy_that_forbids_the_delegate_takes_its_work_and_the_bytes_back(neighbourhood: DevStack) -> None:
    """With nobody to take its place: better no answer than one from there."""
    stack = neighbourhood
    stack.apply(in_regions("moved", NEAR))
    agreed = wait_delegated(stack, "moved")
    digest = agreed.offer.model
    asked = (agreed.agreement, digest)
    assert fetch_result(stack, NEAR, *asked) == "bytes"
    assert fetch_result(stack, FAR, *asked) == Code.AGREEMENT_UNKNOWN
    assert fetch_result(stack, NEAR, agreed.agreement, "sha256:" + "0" * 64) == Code.TENANT_DENIED
    record("A27", "P", 3, what="fetch of the bid's model, of another one, by another region")
    with gateway_load(stack, "moved") as load:
        stack.apply(in_regions("moved", "moon"))
        applied = load.now()
        assert fetch_result(stack, NEAR, *asked) in (Code.RESIDENCY, Code.AGREEMENT_UNKNOWN)
        wait_until(lambda: refusals(load, applied + LEFT_WITHIN_S) >= 20, WAIT_TIMEOUT_S, "requests to be refused")
    late = [each for history in load.histories for each in history.completed if each.start >= applied + LEFT_WITHIN_S]
    assert not any(each.outcome is CallOutcome.OK for each in late)
    done = [each for history in load.histories for each in history.completed]
    last_s = max(each.start for each in done if each.outcome is CallOutcome.OK) - applied
    record("A25", "P", len(late), what="forbidden while it runs", last_answer_s=round(last_s, 3))
    delete_delegated(stack, "moved")
