"""What becomes of a call when the channel that it is on is followed by another one."""

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from harness.crypto.pki import Authority
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.peers.channels import CLOSE_S, Channels, await_answer, has_unknown_issuer
from shoal.coordinator.peers.grpc import stub_of
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.offer import Member
from shoal.v1 import federation_pb2
from shoal.wire.member_files import Enrolled


async def test_who_waits_on_a_channel_that_a_renewed_identity_replaced_is_told(tmp_path: Path) -> None:
    wall = CoordinatorClock().wall()
    own, other = Authority(tmp_path / "own", "own", wall), Authority(tmp_path / "other", "other", wall)

    def issue_identity() -> Enrolled:
        certificate, key, ca = own.issue(Role.COORDINATOR, "coordinator").read()
        return Enrolled("own", Role.COORDINATOR, "coordinator", certificate, ca, "", "", key)

    identity = issue_identity()
    met = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    member = Member("other", f"127.0.0.1:{port}", (other.certificate.read_text(),), "")
    channels = Channels(lambda: identity)
    call = stub_of(channels, member).Measure(federation_pb2.MeasureRequest(), timeout=60.0)
    waiting = asyncio.create_task(await_answer(call, Code.PEER_UNREACHABLE, "other"))
    await asyncio.wait_for(met.wait(), 10.0)
    identity = issue_identity()
    stub_of(channels, member)
    await asyncio.wait([waiting], timeout=CLOSE_S + 10.0)
    assert not waiting.cancelled(), "the loop that waits would end without a word"
    with pytest.raises(ShoalError) as told:
        waiting.result()
    assert told.value.code is Code.PEER_UNREACHABLE
    await channels.close()
    server.close()


@pytest.mark.parametrize("case", ["unknown CA", "expired", "another name", "nobody"])
async def test_a_server_that_no_trusted_ca_vouches_for_is_told_from_one_that_cannot_be_reached(
    tmp_path: Path, case: str
) -> None:
    wall = CoordinatorClock().wall()
    own, other = Authority(tmp_path / "own", "own", wall), Authority(tmp_path / "other", "other", wall)
    shown = other.issue(Role.COORDINATOR, "coordinator", valid_s=-60.0 if case == "expired" else 3600.0).read()
    caller = own.issue(Role.COORDINATOR, "coordinator").read()
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(shown[1], shown[0])]))
    if case != "nobody":
        await server.start()
    trusted = own if case == "unknown CA" else other
    region = "elsewhere" if case == "another name" else "other"
    member = Member(region, f"127.0.0.1:{port}", (trusted.certificate.read_text(),), "")
    channels = Channels(
        lambda: Enrolled("own", Role.COORDINATOR, "coordinator", caller[0], caller[2], "", "", caller[1])
    )
    call = stub_of(channels, member).Measure(federation_pb2.MeasureRequest(), timeout=10.0)
    with pytest.raises(ShoalError) as told:
        await await_answer(call, Code.PEER_UNREACHABLE, region)
    assert told.value.code is Code.PEER_UNREACHABLE
    assert has_unknown_issuer(told.value.refusal) == (case == "unknown CA"), str(told.value)
    await channels.close()
    await server.stop(None)
