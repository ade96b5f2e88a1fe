"""Whoever can read, keep, repeat, move and forge messages as a broker can: it may deny service, and change nothing."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.clients.mqtt import MqttPeer
from harness.cluster.links import (
    BEAT_S,
    NODE,
    OTHER,
    REGION,
    LinkHarness,
    MqttCarrier,
    desired_set,
    ending,
    receive,
    status,
)
from harness.crypto.pki import CertificateFiles as Issued
from harness.servers.mosquitto import tls
from harness.wait import until
from shoal.agent.link.mqtt import MqttSession
from shoal.agent.ports import LinkSession
from shoal.coordinator import metrics
from shoal.types import topics
from shoal.types.codes import Code, Refusal
from shoal.types.device import Role
from shoal.types.link import NodeEvents, Receipts, Refused
from shoal.types.mqtt_frames import Sealer
from shoal.types.topics import DOWN, UP, Channel
from shoal.v1 import mqtt_pb2
from shoal.wire.limits import LINK_BYTES
from shoal.wire.mqtt import CALL_S
from shoal.wire.seal import SessionKey, SigningIdentity, sign

Messages = list[tuple[str, bytes]]
SAID = 5
"""Messages of a session that said everything: that it is there, its hello, a status, receipts, events."""


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[LinkHarness]:
    found = await LinkHarness.open(tmp_path, "mqtt")
    yield found
    await found.close()


def carrier(ends: LinkHarness) -> MqttCarrier:
    assert isinstance(ends.carrier, MqttCarrier)
    return ends.carrier


@contextmanager
def peer(ends: LinkHarness, files: Issued, name: str) -> Iterator[MqttPeer]:
    found = MqttPeer(carrier(ends).broker.port, tls(files), name)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def as_coordinator(ends: LinkHarness) -> Iterator[MqttPeer]:
    """Reads whatever nodes say, and may publish whatever a coordinator may."""
    with peer(ends, carrier(ends).files, "shadow") as found:
        for channel in UP:
            found.subscribe(topics.all_nodes(REGION, channel))
        yield found


@contextmanager
def as_node(ends: LinkHarness, name: str = NODE) -> Iterator[MqttPeer]:
    """Reads whatever the coordinator says to this node, and may publish whatever it may."""
    with peer(ends, ends.authority.issue(Role.AGENT, name), f"{name}-shadow") as found:
        for topic in (topics.region_online(REGION), *(topics.of_node(REGION, name, channel) for channel in DOWN)):
            found.subscribe(topic)
        yield found


def select_channels(messages: Messages, node: str, *channels: Channel) -> Messages:
    wanted = {topics.of_node(REGION, node, channel) for channel in channels}
    return [(topic, payload) for topic, payload in messages if topic in wanted]


def state(ends: LinkHarness) -> tuple[object, ...]:
    """All that a message could have changed."""
    return (
        len(ends.events.hellos),
        tuple(ends.events.messages),
        tuple(ends.events.closed_sessions),
        ends.region.fleet.fleet,
    )


async def wait_refused(ends: LinkHarness, codes: tuple[Code, ...], least: int) -> None:
    await until(
        lambda: sum(ends.meter.with_code(metrics.MESSAGES_REFUSED, code) for code in codes) >= least,
        5.0,
        "everything was refused",
    )


async def full_session(ends: LinkHarness, broker: MqttPeer | None = None) -> LinkSession:
    """broker: reads beside the coordinator, and has all of it too."""
    session = await ends.connect()
    await session.send(status(session, 1))
    await session.send(Receipts(()))
    await session.send(NodeEvents(()))
    await until(lambda: len(ends.events.of(NODE)) == 3, 5.0, "all of it")
    if broker is not None:
        await until(lambda: len(select_channels(broker.received, NODE, *UP)) == SAID, 5.0, "the copy of it")
    return session


async def test_a11_what_an_earlier_session_said_is_dropped_in_the_next_and_after_it(link: LinkHarness) -> None:
    with as_coordinator(link) as broker:
        session = await full_session(link, broker)
        await session.close()
        await until(lambda: not link.is_connected(), 3.0, "it has left")
        await until(lambda: len(select_channels(broker.received, NODE, *UP)) > SAID, 5.0, "the copy of its leaving")
        kept = select_channels(broker.received, NODE, *UP)
        assert {topic.rpartition("/")[2] for topic, _ in kept} == set(UP)
        again = await link.connect()
        before = state(link)
        with as_node(link) as node:
            for topic, payload in kept * 2:
                node.publish(topic, payload)
        await wait_refused(link, (Code.EPOCH_STALE, Code.MESSAGE_REPLAYED), 8)
        assert state(link) == before
        await again.send(status(again, 1))
        await until(lambda: len(link.events.of(NODE)) == 4, 5.0, "the session stands")
        await again.close()
        await until(lambda: not link.is_connected(), 3.0, "it has left")
        before = state(link)
        with as_node(link) as node:
            for topic, payload in select_channels(broker.received, NODE, *UP):
                node.publish(topic, payload)
        await wait_refused(link, (Code.MESSAGE_REPLAYED,), 3)
        assert state(link) == before, "a dead node does not come to life by what it once said"


async def test_a11_what_this_session_said_counts_once(link: LinkHarness) -> None:
    with as_coordinator(link) as broker:
        await full_session(link, broker)
        before = state(link)
        with as_node(link) as node:
            for topic, payload in select_channels(
                broker.received, NODE, Channel.HELLO, Channel.STATUS, Channel.CAPABILITY
            ):
                node.publish(topic, payload)
        await wait_refused(link, (Code.MESSAGE_REPLAYED,), 4)
        assert state(link) == before


async def test_a11_a04_what_one_node_said_is_not_another_s(link: LinkHarness) -> None:
    with as_coordinator(link) as broker:
        await full_session(link, broker)
        await link.connect(OTHER)
        before = state(link)
        with as_node(link, OTHER) as node:
            for topic, payload in select_channels(broker.received, NODE, *UP):
                node.publish(topic.replace(NODE, OTHER), payload)
        await wait_refused(link, (Code.SIGNATURE_INVALID, Code.NODE_MISMATCH), 5)
        assert state(link) == before


async def test_a11_what_is_said_to_one_session_or_node_counts_nowhere_else(link: LinkHarness) -> None:
    with as_node(link) as listener:
        session = await link.connect()
        for generation in (1, 2):
            await link.carrier.links.send(NODE, desired_set(session, generation))
            await receive(session)
        told = Refused(Refusal(Code.TELEMETRY_ABSURD, "x"), fatal=False)
        await link.carrier.links.send(NODE, told)
        assert await receive(session) == told
        await session.close()
        held = desired_set(session, 2).version
        other, again = await link.connect(OTHER), await link.connect(holds=held)
        kept = select_channels(listener.received, NODE, *DOWN)
        assert len(kept) >= 4
        with as_coordinator(link) as broker:
            for topic, payload in kept:
                broker.publish(topic, payload)
                broker.publish(topic.replace(NODE, OTHER), payload)
        await until(lambda: link.heard.events.count("message_dropped") >= len(kept), 5.0, "it was dropped")
    newest = desired_set(again, 3)
    await link.carrier.links.send(NODE, newest)
    await link.carrier.links.send(OTHER, desired_set(other, 1, name=OTHER))
    while (message := await receive(again)) != newest:
        assert message in (desired_set(session, 1), desired_set(session, 2)), (
            "signed for this node: fenced by its generation"
        )
    assert await receive(other) == desired_set(other, 1, name=OTHER)


async def test_a19_retained_junk_and_an_old_desired_set_are_ignored_and_overwritten(link: LinkHarness) -> None:
    with as_node(link) as listener:
        session = await link.connect()
        await link.carrier.links.send(NODE, desired_set(session, 1))
        await receive(session)
        await until(lambda: select_channels(listener.received, NODE, Channel.DESIRED), 5.0, "the broker's copy")
        (topic, old) = select_channels(listener.received, NODE, Channel.DESIRED)[0]
        await session.close()
    held = desired_set(session, 7).version
    with as_coordinator(link) as broker:
        for payload in (b"", b"junk", old):
            broker.publish(topic, payload, retain=True)
            again = await link.connect(holds=held)
            newest = desired_set(again, 8)
            await link.carrier.links.send(NODE, newest)
            assert await receive(again) == newest, "nothing else came before it"
            await again.close()
    with as_node(link) as late:
        await until(lambda: select_channels(late.received, NODE, Channel.DESIRED), 5.0, "what the broker keeps now")
        assert select_channels(late.received, NODE, Channel.DESIRED)[0][1] != old


async def test_a19_presence_counts_only_for_its_signer(link: LinkHarness) -> None:
    session = await full_session(link)
    topic = topics.of_node(REGION, NODE, Channel.ONLINE)
    gone = mqtt_pb2.Presence(nonce="nonce-1", online=False).SerializeToString()
    certificate, key, _ = link.authority.issue(Role.AGENT, NODE).read()
    impostor = SigningIdentity.from_pem(key, certificate)  # the same name, another key
    with as_node(link) as node:
        for payload in (b"", b"junk", gone, sign(impostor, REGION, NODE, Channel.ONLINE, gone)):
            node.publish(topic, payload, retain=True)
    await wait_refused(link, (Code.SIGNATURE_INVALID, Code.MESSAGE_INVALID), 4)
    await session.send(status(session, 2))
    await until(lambda: len(link.events.of(NODE)) == 4, 5.0, "the session stands")
    assert link.events.closed_sessions == []


async def test_a19_a_storm_of_its_own_wills_ends_no_session_and_costs_nobody_else(link: LinkHarness) -> None:
    files = link.files()
    session, other = await link.connect(files=files), await link.connect(OTHER)
    own = SigningIdentity.from_pem(files.key.read_bytes(), files.certificate.read_bytes())
    topic = topics.of_node(REGION, NODE, Channel.ONLINE)
    wills = [mqtt_pb2.Presence(nonce=f"nonce-of-{number}", online=False) for number in range(1000)]
    with as_node(link) as node:
        for will in wills:
            node.send(topic, sign(own, REGION, NODE, Channel.ONLINE, will.SerializeToString()))
        await other.send(status(other, 1, name=OTHER))
        await until(lambda: link.events.of(OTHER), 2.0, "the other is heard in the midst of it")
        assert node.publish(topic, b"last") in (0, 16)
    await session.send(status(session, 1))
    await until(lambda: link.events.of(NODE), 5.0, "its session stands")
    assert link.events.closed_sessions == []


async def test_a20_forged_messages_change_nothing_at_either_end(link: LinkHarness) -> None:
    session = await full_session(link)
    certificate, key, _ = link.authority.issue(Role.AGENT, OTHER).read()
    stranger = SigningIdentity.from_pem(key, certificate)
    sealer = Sealer(SessionKey(b"k" * 32, REGION, NODE, session.welcome.epoch))
    before = state(link)
    with as_node(link) as node, as_coordinator(link) as broker:
        for channels, end in ((UP, node), (DOWN, broker)):
            for channel in channels:
                forged = (b"\xff" * 40, sealer.seal(channel, b"x"), sign(stranger, REGION, NODE, channel, b"x"))
                for payload in forged:
                    end.publish(topics.of_node(REGION, NODE, channel), payload)
        for payload in (b"junk", sign(stranger, REGION, "", Channel.ONLINE, b"x")):
            broker.publish(topics.region_online(REGION), payload)
    await wait_refused(link, (Code.SIGNATURE_INVALID, Code.MESSAGE_INVALID, Code.NODE_MISMATCH), 10)
    assert state(link) == before
    await link.carrier.links.send(NODE, desired_set(session, 1))
    assert await receive(session) == desired_set(session, 1)


async def test_a20_a_broker_cannot_keep_up_the_appearance_of_a_coordinator(link: LinkHarness) -> None:
    with as_node(link) as listener:
        session = await link.connect()

        def beats() -> Messages:
            return [got for got in listener.received if got[0] == topics.region_online(REGION)]

        await until(lambda: len(beats()) >= 4, 5.0, "some beats")
        kept = beats()
        connection = carrier(link).links._sessions._connection
        assert connection is not None
        connection.codec.sign_presence = lambda presence: b"not a word more"  # type: ignore[method-assign]
        with as_coordinator(link) as broker:
            loop = asyncio.get_running_loop()
            began = loop.time()
            over = asyncio.ensure_future(ending(session))
            while not over.done() and loop.time() - began < 5.0:
                for topic, payload in kept:
                    broker.publish(topic, payload, retain=True)
                await asyncio.wait([over], timeout=BEAT_S / 3)
            assert (await over).code is Code.COORDINATOR_UNREACHABLE
            assert loop.time() - began < 5 * BEAT_S


async def test_f18_a_broker_that_answers_no_more_is_found_by_silence(link: LinkHarness) -> None:
    session = await link.connect()
    links, broker = carrier(link).links, carrier(link).broker
    broker.pause()
    try:
        async with asyncio.timeout(3.0):
            assert (await ending(session)).code is Code.COORDINATOR_UNREACHABLE
        await session.close()
        await until(lambda: not links.is_online, CALL_S + 2 * BEAT_S, "the coordinator knows it too")
    finally:
        broker.resume()
    await until(lambda: links.is_online and not link.is_connected(), 10.0, "the coordinator came back")
    assert (await link.connect()).welcome.epoch == 2


async def test_a14_a_message_larger_than_the_link_takes_reaches_nobody(link: LinkHarness) -> None:
    other, session = await link.connect(OTHER), await link.connect()
    assert isinstance(session, MqttSession)
    with as_node(link) as node:
        node.send(topics.of_node(REGION, NODE, Channel.STATUS), bytes(LINK_BYTES * 2))
        await until(lambda: node.ended.is_set(), 5.0, "the broker throws it out")
    await other.send(status(other, 1, name=OTHER))
    await until(lambda: link.events.of(OTHER), 5.0, "nobody else is touched")
    assert link.events.of(NODE) == []


async def test_a01_a_certificate_that_ends_ends_its_session(link: LinkHarness) -> None:
    session = await link.connect(files=link.files(valid_s=2.0))
    async with asyncio.timeout(4.0):
        assert (await ending(session)).code is Code.CERT_EXPIRED
    await until(lambda: not link.is_connected(), 2.0, "it is over at the other end")


async def test_a09_a_revoked_certificate_ends_its_session_and_opens_no_other_when_its_node_is_back(
    link: LinkHarness,
) -> None:
    files = link.files()
    session = await link.connect(files=files)
    refusal = Refusal(Code.CERT_REVOKED, "serial 7", "a certificate that stands", "enrol again")
    carrier(link).revoked[files.identity().serial] = refusal
    async with asyncio.timeout(1.0 + BEAT_S):
        assert (await ending(session)).code is Code.CERT_REVOKED
    await until(lambda: not link.is_connected(), 2.0, "it is over at the other end")
    again = await link.connect(files=link.files())
    with pytest.raises(Exception, match=r"COORDINATOR_UNREACHABLE|CERT_REVOKED"):
        await link.connect(files=files)
    assert len(link.events.hellos) == 2
    await again.send(status(again, 1))
    await until(lambda: link.events.of(NODE), 5.0, "whoever joined again is not disturbed")
