"""The link over real TLS: which side is refused, and that the refused side says why."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from contract.agent.test_journal import Heard
from integration.agent.region import NODE, REGION, Coordinator

from harness.pki import Authority
from harness.pki import Files as Issued
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.link.credentials import Files, check_coordinator
from shoal.agent.link.grpc import GrpcLink, GrpcModels
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Node, Role
from shoal.types.link import PROTOCOL, Hello, NodeEvent, NodeEvents
from shoal.types.units import Bytes

MODEL = bytes(range(256)) * 4096
DIGEST = "sha256:" + "ab" * 32


@dataclass
class Ends:
    folder: Path
    authority: Authority
    coordinator: Coordinator

    def files(self, issued: Issued, authority: Authority | None = None) -> Files:
        """A node's identity folder of these files; `authority`: the one it trusts."""
        folder = self.folder / issued.certificate.stem
        folder.mkdir()
        ca = (authority or self.authority).certificate
        for name, path in (("cert.pem", issued.certificate), ("key.pem", issued.key), ("ca.pem", ca)):
            (folder / name).write_bytes(path.read_bytes())
        return Files(folder)

    def link(self, files: Files, address: str = "") -> GrpcLink:
        return GrpcLink(files, address or self.coordinator.address, SystemClock(), Heard())


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    authority = Authority(tmp_path / "ca", REGION, SystemClock().wall())
    coordinator = Coordinator(authority.issue(Role.COORDINATOR, "coordinator"), {DIGEST: MODEL})
    await coordinator.start()
    yield Ends(tmp_path, authority, coordinator)
    await coordinator.stop()


def hello() -> Hello:
    node = Node(NODE, REGION, Role.AGENT, {}, "0", "linux", "x86_64", Bytes(1), Bytes(1), (), "", "", "", "", "boot")
    return Hello(node, "nonce-1", None, PROTOCOL, SystemClock().wall())


async def refusal(link: GrpcLink) -> ShoalError:
    with pytest.raises(ShoalError) as caught:
        await link.connect(hello())
    assert caught.value.refusal.remedy
    return caught.value


async def test_hello_welcome_and_messages_both_ways(ends: Ends) -> None:
    session = await ends.link(ends.files(ends.authority.issue(Role.AGENT, NODE))).connect(hello())
    assert session.welcome.nonce == "nonce-1"
    event = NodeEvent("X", "subject", "message", SystemClock().wall())
    await session.send(NodeEvents((event,)))
    ends.coordinator.want(generation=1)
    assert await session.receive() == ends.coordinator.desired
    await until(lambda: ends.coordinator.events, 10, "the event to be there")
    assert ends.coordinator.events == [event]
    await session.close()


async def test_a_session_that_ends_says_so_on_both_methods(ends: Ends) -> None:
    session = await ends.link(ends.files(ends.authority.issue(Role.AGENT, NODE))).connect(hello())
    await ends.coordinator.stop()
    with pytest.raises(ShoalError) as caught:
        await session.receive()
    assert caught.value.code in (Code.COORDINATOR_UNREACHABLE, Code.CANCELLED)
    with pytest.raises(ShoalError):
        await session.send(NodeEvents(()))
    await session.close()


async def test_who_waits_for_a_session_that_another_task_closes_hears_it(ends: Ends) -> None:
    session = await ends.link(ends.files(ends.authority.issue(Role.AGENT, NODE))).connect(hello())
    waiting = asyncio.create_task(session.receive())
    await asyncio.wait([waiting], timeout=0.05)
    await session.close()
    await asyncio.wait([waiting], timeout=10)
    assert waiting.done()
    assert not waiting.cancelled(), "nobody cancelled it: a loop that waits here would end without a word"
    assert isinstance(waiting.exception(), ShoalError)
    with pytest.raises(ShoalError):
        await session.send(NodeEvents(()))


async def test_nobody_there(ends: Ends) -> None:
    files = ends.files(ends.authority.issue(Role.AGENT, NODE))
    await ends.coordinator.stop()
    assert (await refusal(ends.link(files))).code is Code.COORDINATOR_UNREACHABLE


async def test_a01_this_node_s_certificate_has_expired(ends: Ends) -> None:
    files = ends.files(ends.authority.issue(Role.AGENT, NODE, valid_s=-60.0))
    assert (await refusal(ends.link(files))).code is Code.CERT_EXPIRED


@pytest.mark.parametrize(
    ("begins_s", "valid_s", "code"),
    [(-3600.0, -60.0, Code.CERT_EXPIRED), (86_400.0, 172_800.0, Code.CERT_NOT_YET_VALID)],
    ids=["ended", "begins"],
)
async def test_a01_the_coordinator_s_certificate_is_of_another_time(
    ends: Ends, begins_s: float, valid_s: float, code: Code
) -> None:
    await ends.coordinator.stop()
    other = Coordinator(ends.authority.issue(Role.COORDINATOR, "coordinator", begins_s=begins_s, valid_s=valid_s), {})
    await other.start()
    found = await refusal(ends.link(ends.files(ends.authority.issue(Role.AGENT, NODE)), other.address))
    await other.stop()
    assert found.code is code
    assert other.address in found.refusal.found


async def test_a02_this_node_s_certificate_is_of_another_authority(ends: Ends) -> None:
    other = Authority(ends.folder / "other", REGION, SystemClock().wall())
    files = ends.files(other.issue(Role.AGENT, NODE))
    found = await refusal(ends.link(files))
    assert found.code is Code.CERT_UNTRUSTED
    assert "not of the authority" in found.refusal.found
    assert ends.coordinator.hellos == []


async def test_a02_the_coordinator_is_of_another_authority(ends: Ends) -> None:
    other = Authority(ends.folder / "other", REGION, SystemClock().wall())
    files = ends.files(ends.authority.issue(Role.AGENT, NODE), authority=other)
    assert (await refusal(ends.link(files))).code is Code.CERT_UNTRUSTED


async def test_another_member_of_the_region_is_not_its_coordinator(ends: Ends) -> None:
    impostor = Coordinator(ends.authority.issue(Role.AGENT, "edge-9"), {})
    await impostor.start()
    files = ends.files(ends.authority.issue(Role.AGENT, NODE))
    found = await refusal(ends.link(files, impostor.address))
    await impostor.stop()
    assert found.code is Code.CERT_UNTRUSTED
    assert impostor.hellos == []


async def test_a_machine_that_has_not_joined(ends: Ends) -> None:
    assert (await refusal(ends.link(Files(ends.folder / "none")))).code is Code.UNAUTHENTICATED


async def test_all_well_is_no_refusal(ends: Ends) -> None:
    files = ends.files(ends.authority.issue(Role.AGENT, NODE))
    assert await check_coordinator(files, ends.coordinator.address, SystemClock().wall()) is None


async def test_model_bytes_come_from_an_offset_on(ends: Ends) -> None:
    models = GrpcModels(ends.files(ends.authority.issue(Role.AGENT, NODE)), lambda: ends.coordinator.address)
    assert b"".join([chunk async for chunk in models.fetch(DIGEST, 1000)]) == MODEL[1000:]
    await ends.coordinator.stop()
    with pytest.raises(ShoalError) as caught:
        _ = [chunk async for chunk in models.fetch(DIGEST, 0)]
    assert caught.value.code is Code.FETCH_FAILED
