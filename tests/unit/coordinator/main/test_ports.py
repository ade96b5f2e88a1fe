"""Ports that a coordinator is told to listen at."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from harness.fakes.region import RegionFixture
from harness.ports import free_ports
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.blobs.directory import DirectoryBlobs
from shoal.coordinator.controllers.runner import inline
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.server import ServerIdentity
from shoal.coordinator.main.federation_peering import FederationPeering
from shoal.coordinator.main.serving import reserve_port
from shoal.types.address import HostPort
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Bytes


@pytest.fixture
def other_server() -> Iterator[HostPort]:
    """Another server listens there as gRPC does, so that a second one could as well."""
    with closing(socket.socket()) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield HostPort("127.0.0.1", other.getsockname()[1])


def test_a_port_where_another_process_listens_is_refused(other_server: HostPort) -> None:
    """Before, two coordinators shared it, and each got a part of the other's callers."""
    with pytest.raises(ShoalError) as caught:
        reserve_port(other_server, "--link")
    assert caught.value.code is Code.FIELD_INVALID
    assert str(other_server) in caught.value.refusal.found
    assert caught.value.refusal.remedy.endswith(" --link")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::", "localhost"])
def test_a_port_is_held_from_the_start_for_the_server_that_listens_later(host: str) -> None:
    """Before, it was only probed: of two coordinators started together both served there."""
    (port,) = free_ports(1)
    address = HostPort(host, port)
    found, place = reserve_port(address, "--link")
    assert found == address
    assert place is not None
    with closing(place):
        with pytest.raises(ShoalError) as caught:
            reserve_port(address, "--enrol")
        assert caught.value.code is Code.FIELD_INVALID
        for _ in range(2):  # a leader's server follows that of a follower
            server = grpc.server(futures.ThreadPoolExecutor(1))
            assert server.add_insecure_port(str(address)) == port
            server.start()
            with grpc.insecure_channel(f"localhost:{port}" if address.is_any else str(address)) as channel:
                grpc.channel_ready_future(channel).result(timeout=20)
            server.stop(None).wait()
    _, again = reserve_port(address, "--link")
    assert again is not None
    again.close()


def test_a_port_of_no_address_of_this_machine_is_left_to_the_server_to_refuse() -> None:
    address = HostPort("192.0.2.1", 7443)
    assert reserve_port(address, "--link") == (address, None)


def test_a_port_that_ended_connections_used_is_free() -> None:
    (port,) = free_ports(1)
    with closing(socket.socket()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        with closing(socket.create_connection(("127.0.0.1", port))):
            accepted, _ = server.accept()
            accepted.close()  # first, so that this side waits for what is late
    address = HostPort("127.0.0.1", port)
    found, place = reserve_port(address, "--link")
    assert found == address
    if place is not None:
        place.close()


async def test_the_port_for_peers_is_not_shared_either(tmp_path: Path) -> None:
    """Before, two regions of a machine that joined a federation with the default --peers both listened there."""
    (port,) = free_ports(1)
    world = await RegionFixture.open(tmp_path / "store")
    region, blobs = world.region, DirectoryBlobs(tmp_path / "models", Bytes(1 << 20))
    authority = FileAuthority.open(tmp_path / "ca", region.config.name, wall=world.clock.wall(), may_create=True)
    identity = ServerIdentity(authority, tmp_path / "server", ("127.0.0.1",), world.clock)
    audit = AuditTrail(region.events, region.context.meter)
    address = HostPort("127.0.0.1", port)

    async def code_of_a_join(peering: FederationPeering) -> Code:
        with pytest.raises(ShoalError) as caught:
            await peering.join("127.0.0.1:1", "none", "ops")
        return caught.value.code

    first, second = (
        FederationPeering(
            *(region, blobs, address, "127.0.0.1"),
            authority=authority,
            identity=identity,
            audit=audit,
            compute=inline,
        )
        for _ in range(2)
    )
    try:
        await first.start()
        _, place = reserve_port(address, "--peers")
        assert place is not None, "no federation yet: the port is left to others"
        place.close()
        assert await code_of_a_join(first) is Code.TOKEN_INVALID, "it listens, and the token is none"
        assert await code_of_a_join(second) is Code.FIELD_INVALID
        await first.stop(None)
        assert await code_of_a_join(second) is Code.TOKEN_INVALID, "the port is free again"
    finally:
        await first.stop(None)
        await second.stop(None)
        await world.store.close()


def run_coordinator(folder: Path, *words: str) -> str:
    """What one says that ends by itself, as it cannot start."""
    program = [sys.executable, "-c", "from shoal.coordinator.main import main; main()"]
    done = subprocess.run(
        [*program, "run", "--region", "eu", "--data-dir", str(folder), "--dashboard", "off", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "ready" not in done.stdout
    return done.stderr


@pytest.mark.parametrize("flag", ["--link", "--metrics"])
def test_a_coordinator_says_so_in_a_line(other_server: HostPort, tmp_path: Path, flag: str) -> None:
    """Before, a busy --metrics ended in tracebacks of gRPC's servers, whose loop was closed."""
    link, enrol, metrics = (f"127.0.0.1:{port}" for port in free_ports(3))
    words = ["--link", link, "--enrol", enrol, "--metrics", metrics, flag, str(other_server)]
    said = run_coordinator(tmp_path / "data", *words)
    assert f"cannot listen at {other_server}" in said
    assert f"choose another {flag}" in said


def test_one_port_of_a_coordinator_is_not_another_one(tmp_path: Path) -> None:
    """Before, it said `ready`, and agents that joined were answered by either server."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    said = run_coordinator(tmp_path / "data", "--link", address, "--enrol", address, "--metrics", "127.0.0.1:0")
    assert f"cannot listen at {address}" in said
    assert "choose another --enrol" in said
