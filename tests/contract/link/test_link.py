"""What an agent's link promises, over gRPC and over MQTT alike."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from harness.cluster.links import CARRIERS, NODE, OTHER, LinkHarness, desired_set, ending, receive, status
from harness.wait import until
from shoal.agent.identity.signer import KeySigner
from shoal.agent.ports import LinkRefused
from shoal.coordinator import metrics
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import EnergySource, PowerState, Role
from shoal.types.link import NodeEvent, NodeEvents, ProbeNow, Receipts, Refused
from shoal.types.receipt import Rates, Receipt, SignedReceipt
from shoal.types.units import Bytes, Elapsed, Seconds, Wall, Watts
from shoal.v1 import link_pb2
from shoal.wire import nouns

ENDED = Refusal(Code.CERT_REVOKED, "serial 7", "a certificate that stands", "enrol again")


@pytest.fixture(params=sorted(CARRIERS))
async def link(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LinkHarness]:
    found = await LinkHarness.open(tmp_path, request.param)
    yield found
    await found.close()


def receipt(node: str) -> Receipt:
    rates = Rates(
        {"fp32": 1e10}, {"fp32": 1e10}, 1e10, 1e10, Seconds(1e-5), Seconds(1e-6), 1e9, Watts(5.0), Watts(20.0),
        EnergySource.ESTIMATED,
    )  # fmt: skip
    return Receipt(
        node, "cpu0", "CPUExecutionProvider", "1", "ort 1", ("fp32",), (), rates, Bytes(2**33), 0.1, Wall(1.0),
        Seconds(1.0), False, "probe",
    )  # fmt: skip


async def test_hello_and_welcome(link: LinkHarness) -> None:
    session = await link.connect()
    assert session.welcome.nonce == "nonce-1"
    assert session.welcome.epoch == 1
    assert session.welcome.history == link.region.fence.history
    assert link.is_connected()
    await session.close()
    await until(lambda: not link.is_connected(), 3.0, "the coordinator sees it leave")
    assert (await link.connect()).welcome.epoch == 2


async def test_statuses_arrive_in_order_and_once(link: LinkHarness) -> None:
    session = await link.connect()
    sent = [status(session, 1), *(status(session, number, full=False) for number in range(2, 40))]
    for each in sent:
        await session.send(each)
    await until(lambda: len(link.events.of(NODE)) >= len(sent), 5.0, "all statuses")
    assert link.events.of(NODE) == sent
    state = link.region.fleet.fleet.nodes[NODE]
    assert (state.sequence, state.has_full_status) == (39, True)


async def test_i7_an_old_status_changes_nothing(link: LinkHarness) -> None:
    session = await link.connect()
    for each in (status(session, 2), status(session, 1, free_bytes=1), status(session, 2, free_bytes=2)):
        await session.send(each)
    await until(lambda: len(link.events.of(NODE)) == 3, 5.0, "all three")
    assert link.region.fleet.fleet.nodes[NODE].readings["cpu0"].free_bytes == 2**33


async def test_events_and_receipts_go_up(link: LinkHarness) -> None:
    files = link.files()
    session = await link.connect(files=files)
    (signed,) = await KeySigner(files.key, region="eu", node=NODE).sign_receipts((receipt(NODE),))
    await session.send(Receipts((signed,)))
    await session.send(NodeEvents((NodeEvent("X", "subject", "message", Wall(1.0)),)))
    await until(lambda: len(link.events.of(NODE)) == 2, 5.0, "both")
    assert link.region.fleet.fleet.nodes[NODE].receipts["cpu0"] == signed.receipt


async def test_a04_a_receipt_that_another_key_signed(link: LinkHarness) -> None:
    session = await link.connect()
    forged = nouns.make_signed_receipt(
        receipt(NODE), ec.generate_private_key(ec.SECP256R1()).sign(b"", ec.ECDSA(SHA256()))
    )
    await session.send(Receipts((SignedReceipt(forged.receipt, forged.content, forged.signature),)))
    told = await receive(session)
    assert isinstance(told, Refused)
    assert told.refusal.code is Code.SIGNATURE_INVALID
    assert link.region.fleet.fleet.nodes[NODE].receipts == {}


async def test_the_newest_desired_set_wins(link: LinkHarness) -> None:
    session = await link.connect()
    for generation in range(1, 30):
        await link.carrier.links.send(NODE, desired_set(session, generation))
    seen, message = 0, None
    while seen < 29:
        message = await receive(session)
        assert isinstance(message, DesiredSet)
        assert message.version.generation > seen
        seen = message.version.generation
    assert message == desired_set(session, 29)


async def test_a_desired_set_for_a_node_that_is_away_is_dropped(link: LinkHarness) -> None:
    session = await link.connect()
    await link.carrier.links.send(OTHER, desired_set(session, 1, name=OTHER))
    await link.carrier.links.send(NODE, desired_set(session, 1))
    assert await receive(session) == desired_set(session, 1)


async def test_the_wish_to_sleep_goes_down_and_how_a_device_sleeps_comes_up(link: LinkHarness) -> None:
    session = await link.connect()
    desired = replace(desired_set(session, 1), asleep=("cpu0",))
    await link.carrier.links.send(NODE, desired)
    assert await receive(session) == desired
    asleep = status(session, 1)
    reading = replace(asleep.readings[0], power=PowerState.ASLEEP, slept_s=Seconds(60.0), saved_j=-5.0)
    await session.send(replace(asleep, readings=(reading,)))
    await until(lambda: link.region.fleet.fleet.nodes[NODE].readings.get("cpu0") == reading, 5.0, "its reading")


async def test_requests_and_refusals_go_down(link: LinkHarness) -> None:
    session = await link.connect()
    told = (ProbeNow(("cpu0",)), Refused(Refusal(Code.TELEMETRY_ABSURD, "free memory -1", "at least 0"), fatal=False))
    for each in told:
        await link.carrier.links.send(NODE, each)
    assert (await receive(session), await receive(session)) == told


async def test_f47_a_twin_is_refused_and_the_running_one_stays(link: LinkHarness) -> None:
    files = link.files()
    session = await link.connect(files=files)
    await session.send(status(session, 1))
    await until(lambda: link.events.of(NODE), 5.0, "its status")
    with pytest.raises(LinkRefused) as caught:
        await link.connect(files=files)
    assert caught.value.code is Code.DUPLICATE_IDENTITY
    await session.send(status(session, 2))
    await until(lambda: len(link.events.of(NODE)) == 2, 5.0, "the running one goes on")
    assert link.is_connected()


async def test_a04_a_hello_in_another_s_name(link: LinkHarness) -> None:
    with pytest.raises(ShoalError) as caught:
        await link.carrier.link(link.files(NODE), link.heard).connect(link.hello(OTHER))
    assert caught.value.code is Code.NODE_MISMATCH
    assert link.events.hellos == []


async def test_a03_an_operator_has_no_link(link: LinkHarness) -> None:
    with pytest.raises(ShoalError):
        await link.carrier.link(link.files("admin", Role.OPERATOR), link.heard).connect(link.hello("admin"))
    assert link.events.hellos == []


async def test_a04_a_status_of_another_node(link: LinkHarness) -> None:
    other, session = await link.connect(OTHER), await link.connect()
    await session.send(status(other, 9, name=OTHER, free_bytes=3))
    told = await receive(session)
    assert isinstance(told, Refused)
    assert told.refusal.code is Code.NODE_MISMATCH
    assert link.region.fleet.fleet.nodes[OTHER].readings == {}


async def test_malformed_messages_are_counted_answered_and_end_the_session_when_they_persist(link: LinkHarness) -> None:
    other, session = await link.connect(OTHER), await link.connect()
    absurd = nouns.from_agent_to_wire(status(session, 1))
    absurd.status.readings[0].temperature_c = math.inf
    for message in (link_pb2.FromAgent(), absurd):
        await link.carrier.send_wire(session, message)
        told = await receive(session)
        assert isinstance(told, Refused)
        assert told.refusal.code is Code.MESSAGE_INVALID
    assert link.meter.with_code(metrics.MESSAGES_REFUSED, Code.MESSAGE_INVALID) == 2
    assert link.events.of(NODE) == []
    await session.send(status(session, 2))
    await until(lambda: link.events.of(NODE), 5.0, "a sound one is heard")
    for _ in range(20):
        with contextlib.suppress(ShoalError):
            await link.carrier.send_wire(session, link_pb2.FromAgent())
    await ending(session)
    await until(lambda: not link.is_connected(), 5.0, "the session is over")
    await other.send(status(other, 1, name=OTHER))
    await until(lambda: link.events.of(OTHER), 5.0, "nobody else is touched")


async def test_a14_an_oversized_message_is_not_even_sent(link: LinkHarness) -> None:
    other, session = await link.connect(OTHER), await link.connect()
    event = NodeEvent("X", "s", "m" * 4000, Wall(1.0))
    with pytest.raises(ShoalError) as caught:
        await session.send(NodeEvents((event,) * 1100))
    assert caught.value.code is Code.TOO_LARGE
    assert link.events.of(NODE) == []
    await other.send(status(other, 1, name=OTHER))
    await until(lambda: link.events.of(OTHER), 5.0, "nobody else is touched")


async def test_a_session_that_the_coordinator_ends_says_why(link: LinkHarness) -> None:
    session = await link.connect()
    await link.carrier.links.end(NODE, ENDED, fatal=True)
    assert await receive(session) == Refused(ENDED, fatal=True)
    await ending(session)
    with pytest.raises(ShoalError):
        await session.send(status(session, 1))
    await until(lambda: not link.is_connected(), 5.0, "it is over at the other end too")


async def test_a_newer_session_takes_the_place_of_a_silent_one(link: LinkHarness) -> None:
    files = link.files()
    session = await link.connect(files=files)
    fleet = link.region.fleet.fleet
    silent = replace(fleet.nodes[NODE], heard_at=Elapsed(fleet.nodes[NODE].heard_at - 60.0))
    link.region.fleet.fleet = fleet.with_node(silent)
    again = await link.connect(files=files)
    assert again.welcome.epoch == session.welcome.epoch + 1
    assert (await receive(session)) == Refused(
        Refusal(Code.EPOCH_STALE, "epoch 1", "epoch 2", "connect again"), fatal=False
    )
    await ending(session)
    await again.send(status(again, 1))
    await until(lambda: link.events.of(NODE), 5.0, "the newer one is heard")


async def test_f17_f18_both_ends_see_the_carrier_die_and_meet_again(link: LinkHarness) -> None:
    session = await link.connect()
    await link.carrier.kill()
    async with asyncio.timeout(3.0):
        assert (await ending(session)).code in (Code.COORDINATOR_UNREACHABLE, Code.CANCELLED)
    with pytest.raises(ShoalError):
        await session.send(status(session, 1))
    await session.close()
    await until(lambda: not link.is_connected(), 3.0, "the coordinator saw it too")
    await link.carrier.revive()
    again = await link.connect()
    assert again.welcome.epoch == 2
    await again.send(status(again, 1))
    await link.carrier.links.send(NODE, desired_set(again, 1))
    assert await receive(again) == desired_set(again, 1)
    await until(lambda: link.events.of(NODE), 5.0, "it is heard again")


async def test_the_coordinator_leaves(link: LinkHarness) -> None:
    session = await link.connect()
    await link.carrier.stop()
    async with asyncio.timeout(3.0):
        assert (await ending(session)).code in (Code.COORDINATOR_UNREACHABLE, Code.CANCELLED)
