"""Ports that a coordinator is told to listen at."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness.ports import free_ports
from shoal.coordinator.main.serving import reserve_port
from shoal.types.address import HostPort
from shoal.types.codes import Code, ShoalError


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
        reserve_port(other_server)
    assert caught.value.code is Code.FIELD_INVALID
    assert str(other_server) in caught.value.refusal.found


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
    assert reserve_port(address) == (address, None)


@pytest.mark.parametrize("flag", ["--link", "--metrics"])
def test_a_coordinator_says_so_in_a_line(other_server: HostPort, tmp_path: Path, flag: str) -> None:
    """Before, a busy --metrics ended in tracebacks of gRPC's servers, whose loop was closed."""
    link, enrol, metrics = (f"127.0.0.1:{port}" for port in free_ports(3))
    words = ["--link", link, "--enrol", enrol, "--metrics", metrics, flag, str(other_server), "--dashboard", "off"]
    program = [sys.executable, "-c", "from shoal.coordinator.main import main; main()"]
    done = subprocess.run(
        [*program, "run", "--region", "eu", "--data-dir", str(tmp_path / "data"), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"cannot listen at {other_server}" in done.stderr
    assert "Traceback" not in done.stderr
