"""The link over real TLS: which side is refused, and that the refused side says why."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.cluster.agent_host import NODE, REGION, FakeCoordinator
from harness.crypto.pki import Authority
from harness.crypto.pki import CertificateFiles as Issued
from harness.fakes.log import RecordingLog
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.link.credentials import CredentialFiles, check_coordinator
from shoal.agent.link.grpc import GrpcLink, GrpcModels
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Node, Role
from shoal.types.link import PROTOCOL, Hello, NodeEvent, NodeEvents
from shoal.types.units import Bytes

MODEL = bytes(range(256)) * 4096
DIGEST = "sha256:" + "ab" * 32


@dataclass
class LinkFixture:
    folder: Path
    authority: Authority
    coordinator: FakeCoordinator

    def files(self, issued: Issued, authority: Authority | None = None) -> CredentialFiles:
        """A node's identity folder of these files; `authority`: the one it trusts."""
        folder = self.folder / issued.certificate.stem
        folder.mkdir()
        ca = (authority or self.authority).certificate
        for name, path in (("cert.pem", issued.certificate), ("key.pem", issued.key), ("ca.pem", ca)):
            (folder / name).write_bytes(path.read_bytes())
        return CredentialFiles(folder)

    def link(self, files: CredentialFiles, address: str = "") -> GrpcLink:
        return GrpcLink(files, address or self.coordinator.address, SystemClock(), RecordingLog())


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[LinkFixture]:
    authority = Authority(tmp_path / "ca", REGION, SystemClock().wall())
    coordinator = FakeCoordinator(authority.issue(Role.COORDINATOR, "coordinator"), {DIGEST: MODEL})
    await coordinator.start()
    yield LinkFixture(tmp_path, authority, coordinator)
    await coordinator.stop()


def hello() -> Hello:
    node = Node(NODE, REGION, Role.AGENT, {}, "0", "linux", "x86_64", Bytes(1), Bytes(1), (), "", "", "boot")
    return Hello(node, "nonce-1", None, PROTOCOL, SystemClock().wall())


async def refusal(link: GrpcLink) -> ShoalError:
    with pytest.raises(ShoalError) as caught:
        await link.connect(hello())
    assert caught.value.refusal.remedy
    return caught.value


async def test_hello_welcome_and_messages_both_ways(link: LinkFixture) -> None:
    session = await link.link(link.files(link.authority.issue(Role.AGENT, NODE))).connect(hello())
    assert session.welcome.nonce == "nonce-1"
    event = NodeEvent("X", "subject", "message", SystemClock().wall())
    await session.send(NodeEvents((event,)))
    link.coordinator.want(generation=1)
    assert await session.receive() == link.coordinator.desired
    await until(lambda: link.coordinator.events, 10, "the event to be there")
    assert link.coordinator.events == [event]
    await session.close()


async def test_a_session_that_ends_says_so_on_both_methods(link: LinkFixture) -> None:
    session = await link.link(link.files(link.authority.issue(Role.AGENT, NODE))).connect(hello())
    await link.coordinator.stop()
    with pytest.raises(ShoalError) as caught:
        await session.receive()
    assert caught.value.code in (Code.COORDINATOR_UNREACHABLE, Code.CANCELLED)
    with pytest.raises(ShoalError):
        await session.send(NodeEvents(()))
    await session.close()


async def test_who_waits_for_a_session_that_another_task_closes_hears_it(link: LinkFixture) -> None:
    session = await link.link(link.files(link.authority.issue(Role.AGENT, NODE))).connect(hello())
    waiting = asyncio.create_task(session.receive())
    await asyncio.wait([waiting], timeout=0.05)
    await session.close()
    await asyncio.wait([waiting], timeout=10)
    assert waiting.done()
    assert not waiting.cancelled(), "nobody cancelled it: a loop that waits here would end without a word"
    assert isinstance(waiting.exception(), ShoalError)
    with pytest.raises(ShoalError):
        await session.send(NodeEvents(()))


async def test_nobody_there(link: LinkFixture) -> None:
    files = link.files(link.authority.issue(Role.AGENT, NODE))
    await link.coordinator.stop()
    assert (await refusal(link.link(files))).code is Code.COORDINATOR_UNREACHABLE


async def test_a01_this_node_s_certificate_has_expired(link: LinkFixture) -> None:
    files = link.files(link.authority.issue(Role.AGENT, NODE, valid_s=-60.0))
    assert (await refusal(link.link(files))).code is Code.CERT_EXPIRED


@pytest.mark.parametrize(
    ("begins_s", "valid_s", "code"),
    [(-3600.0, -60.0, Code.CERT_EXPIRED), (86_400.0, 172_800.0, Code.CERT_NOT_YET_VALID)],
    ids=["ended", "begins"],
)
async def test_a01_the_coordinator_s_certificate_is_of_another_time(
    link: LinkFixture, begins_s: float, valid_s: float, code: Code
) -> None:
    await link.coordinator.stop()
    other = FakeCoordinator(
        link.authority.issue(Role.COORDINATOR, "coordinator", begins_s=begins_s, valid_s=valid_s), {}
    )
    await other.start()
    found = await refusal(link.link(link.files(link.authority.issue(Role.AGENT, NODE)), other.address))
    await other.stop()
    assert found.code is code
    assert other.address in found.refusal.found


async def test_a02_this_node_s_certificate_is_of_another_authority(link: LinkFixture) -> None:
    other = Authority(link.folder / "other", REGION, SystemClock().wall())
    files = link.files(other.issue(Role.AGENT, NODE))
    found = await refusal(link.link(files))
    assert found.code is Code.CERT_UNTRUSTED
    assert "not of the authority" in found.refusal.found
    assert link.coordinator.hellos == []


async def test_a02_the_coordinator_is_of_another_authority(link: LinkFixture) -> None:
    other = Authority(link.folder / "other", REGION, SystemClock().wall())
    files = link.files(link.authority.issue(Role.AGENT, NODE), authority=other)
    assert (await refusal(link.link(files))).code is Code.CERT_UNTRUSTED


async def test_another_member_of_the_region_is_not_its_coordinator(link: LinkFixture) -> None:
    impostor = FakeCoordinator(link.authority.issue(Role.AGENT, "edge-9"), {})
    await impostor.start()
    files = link.files(link.authority.issue(Role.AGENT, NODE))
    found = await refusal(link.link(files, impostor.address))
    await impostor.stop()
    assert found.code is Code.CERT_UNTRUSTED
    assert impostor.hellos == []


async def test_a_machine_that_has_not_joined(link: LinkFixture) -> None:
    assert (await refusal(link.link(CredentialFiles(link.folder / "none")))).code is Code.UNAUTHENTICATED


async def test_all_well_is_no_refusal(link: LinkFixture) -> None:
    files = link.files(link.authority.issue(Role.AGENT, NODE))
    assert await check_coordinator(files, link.coordinator.address, SystemClock().wall()) is None


async def test_model_bytes_come_from_an_offset_on(link: LinkFixture) -> None:
    models = GrpcModels(link.files(link.authority.issue(Role.AGENT, NODE)), lambda: link.coordinator.address)
    assert b"".join([chunk async for chunk in models.fetch(DIGEST, 1000)]) == MODEL[1000:]
    await link.coordinator.stop()
    with pytest.raises(ShoalError) as caught:
        _ = [chunk async for chunk in models.fetch(DIGEST, 0)]
    assert caught.value.code is Code.FETCH_FAILED
