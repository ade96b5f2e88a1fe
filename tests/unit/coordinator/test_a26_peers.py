"""A26: an address that another region gave points inside. A server there that is not that region's receives no
request and no certificate of ours."""

import asyncio
import ssl
from pathlib import Path

import grpc
import pytest

from harness.crypto.pki import Authority
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.peers.channels import Channels
from shoal.coordinator.peers.grpc import stub_of
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.offer import Member
from shoal.v1 import federation_pb2
from shoal.wire.certificates import identity_of_pem
from shoal.wire.member_files import Enrolled

HANDSHAKE = b"\x16\x03"


@pytest.fixture
def authorities(tmp_path: Path) -> tuple[Authority, Authority]:
    wall = CoordinatorClock().wall()
    return Authority(tmp_path / "own", "own", wall), Authority(tmp_path / "other", "other", wall)


def caller(own: Authority) -> Channels:
    certificate, key, ca = own.issue(Role.COORDINATOR, "coordinator").read()
    enrolled = Enrolled("own", Role.COORDINATOR, "coordinator", certificate, ca, "", "", key)
    assert identity_of_pem(certificate).region == "own"
    return Channels(lambda: enrolled)


async def measure_error(channels: Channels, member: Member) -> grpc.StatusCode:
    call = stub_of(channels, member).Measure(federation_pb2.MeasureRequest(), timeout=2.0)
    with pytest.raises(grpc.RpcError) as failed:
        await call
    code: grpc.StatusCode = failed.value.code()
    return code


async def test_a26_a_server_inside_hears_nothing_but_the_beginning_of_a_handshake(
    authorities: tuple[Authority, Authority],
) -> None:
    heard = bytearray()

    async def inside(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read(65536))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecret")
        writer.close()

    server = await asyncio.start_server(inside, "127.0.0.1", 0)
    own, other = authorities
    channels = caller(own)
    port = server.sockets[0].getsockname()[1]
    member = Member("other", f"127.0.0.1:{port}", (other.certificate.read_text(),), "")
    assert await measure_error(channels, member) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    await channels.close()
    server.close()
    assert heard.startswith(HANDSHAKE)
    for told in (b"GET", b"POST", b"PRI", b"shoal://", b"Measure"):
        assert told not in heard


async def test_a26_our_certificate_is_shown_to_that_region_alone(authorities: tuple[Authority, Authority]) -> None:
    """A server that anybody would believe, of another CA, asks for it in vain."""
    own, other = authorities
    impostor = own.issue(Role.COORDINATOR, "coordinator", region="other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(impostor.certificate, impostor.key)
    context.load_verify_locations(own.certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    met = list[object]()

    async def inside(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(writer.get_extra_info("peercert"))
        writer.close()

    server = await asyncio.start_server(inside, "127.0.0.1", 0, ssl=context)
    channels = caller(own)
    port = server.sockets[0].getsockname()[1]
    member = Member("other", f"127.0.0.1:{port}", (other.certificate.read_text(),), "")
    assert await measure_error(channels, member) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    await channels.close()
    server.close()
    assert met == []


@pytest.mark.parametrize("address", ["169.254.169.254:80", "unix:/run/docker.sock", "0:7447"])
async def test_a26_what_no_region_can_be_at_is_not_dialled(
    address: str, authorities: tuple[Authority, Authority]
) -> None:
    own, other = authorities
    with pytest.raises(ShoalError) as denied:
        stub_of(caller(own), Member("other", address, (other.certificate.read_text(),), ""))
    assert denied.value.code is Code.SOURCE_DENIED
