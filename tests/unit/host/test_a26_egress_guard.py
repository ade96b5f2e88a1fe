"""A26: an address that another region gave points inside. Only one that a machine of another region can have is
dialled, judged by name or number alone."""

import pytest

from shoal.host.egress_guard import target_of_peer
from shoal.types.codes import Code, ShoalError


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:7447",
        "10.0.0.7:7447",
        "8.8.8.8:1",
        "[fd00::1]:7447",
        "paris.example:7447",
        "localhost:65535",
        "3com:80",
    ],
)
def test_a_peer_may_be_wherever_a_machine_can_be(address: str) -> None:
    assert target_of_peer(address) == f"dns:///{address}"


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254:80", "[fe80::1]:80", "[::ffff:169.254.169.254]:80", "0.0.0.0:80", "[::]:80", "224.0.0.1:80",
        "[ff02::1]:80", "255.255.255.255:80", "2852039166:80", "0xa9fea9fe:80", "0xA9.254.169.254:80", "0:80",
        "169.254.43518:80",
        "unix:/run/docker.sock", "unix:///run/docker.sock", "unix-abstract:/7", "dns:///x:80", "vsock:2:80", "xds:///x",
        "http://x:80", "x:80/path", "user@x:80", "x:0", "x:65536", "x", ":80", "", "x:80,y:80", "x:80\n", "[::1%lo]:80",
    ],
)  # fmt: skip
def test_nothing_else_is_dialled(address: str) -> None:
    with pytest.raises(ShoalError) as denied:
        target_of_peer(address)
    assert denied.value.code is Code.SOURCE_DENIED


@pytest.mark.parametrize("address", ["unix:7", "unix-abstract:7", "ipv4:7"])
def test_what_looks_like_a_port_of_a_socket_is_a_name(address: str) -> None:
    """gRPC would take it for a socket of this machine."""
    assert target_of_peer(address) == f"dns:///{address}"
