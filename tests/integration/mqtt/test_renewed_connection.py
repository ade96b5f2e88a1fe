"""The coordinator's certificate is renewed: it is at the broker with the new one before it leaves with the old one."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from harness.cluster.links import CLOCK, NODE, OTHER, REGION, LinkHarness, MqttCarrier, ending, status
from harness.crypto.pki import Authority
from harness.crypto.pki import CertificateFiles as Issued
from harness.wait import until
from shoal.types.device import Role


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[LinkHarness]:
    found = await LinkHarness.open(tmp_path, "mqtt")
    yield found
    await found.close()


def renew(link: LinkHarness, issued: Issued) -> None:
    """The coordinator's files are of this certificate from now on."""
    for name, path in (("cert.pem", issued.certificate), ("key.pem", issued.key)):
        shutil.copyfile(path, link.folder / "coordinator" / name)
    assert isinstance(link.carrier, MqttCarrier)
    link.carrier.links.refresh()


async def event_codes(link: LinkHarness) -> list[str]:
    return [event.code for event in await link.region.events.events_after(0, 1000)]


async def test_it_serves_by_the_old_certificate_until_the_broker_takes_the_new_one(link: LinkHarness) -> None:
    sessions = [await link.connect(name) for name in (NODE, OTHER)]
    stranger = Authority(link.folder / "stranger", REGION, CLOCK.wall())
    with capture_logs() as logs:
        renew(link, stranger.issue(Role.COORDINATOR, "coordinator"))
        await until(lambda: "broker_connection_failed" in {line["event"] for line in logs}, 10.0, "it is not let in")
        await sessions[0].send(status(sessions[0], 1))
        await until(lambda: link.events.of(NODE), 5.0, "its session goes on")
        before = len(await event_codes(link))
        renew(link, link.authority.issue(Role.COORDINATOR, "coordinator"))
        for session in sessions:
            await ending(session)
        again = await link.connect()
    assert again.welcome.epoch == 2
    assert "broker_lost" not in {line["event"] for line in logs}
    closed = [line for line in logs if line["event"] == "sessions_closed"]
    assert [line["count"] for line in closed] == [2]
    state = link.region.fleet.fleet.nodes[OTHER]
    assert (state.connected, state.link_lost) == (False, False)
    assert state.grace_until > CLOCK.now(), "it has time to come back"
    told = (await event_codes(link))[before:]
    assert sorted(told) == ["BROKER_BACK", "BROKER_LEFT", "NODE_CONNECTED"], "one for all"
