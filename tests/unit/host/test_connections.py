"""Who may connect, and whose connection ends for it: a table by address."""

import pytest

from shoal.host.connections import Connection, Connections, share_of


class Port:
    def __init__(self, most: int, most_per_address: int, *, replaces_own: bool = False) -> None:
        self.connections = Connections(most, most_per_address, replaces_own=replaces_own)
        self.closed: list[str] = []

    def add(self, address: str, name: str = "") -> Connection | None:
        return self.connections.add(address, lambda: self.closed.append(name or address))


def test_an_address_has_its_share_and_no_more() -> None:
    port = Port(8, 2)
    assert [port.add("a") is not None for _ in range(3)] == [True, True, False]
    assert port.add("b") is not None
    assert not port.closed


def test_a24_the_oldest_idle_connection_of_the_address_with_most_ends_for_a_newcomer() -> None:
    port = Port(4, 3)
    first = port.add("a", "first")
    assert first is not None
    port.connections.set_busy(first)
    for name in ("second", "third"):
        port.add("a", name)
    port.add("b", "b")
    assert port.add("c") is not None
    assert port.closed == ["second"]
    port.connections.set_idle(first)
    assert port.add("d") is not None
    assert port.closed == ["second", "third"]
    assert len(port.connections) == 4


def test_who_is_asked_something_is_not_ended() -> None:
    port = Port(2, 2)
    one, other = port.add("a"), port.add("a")
    assert one is not None
    assert other is not None
    port.connections.set_busy(one)
    port.connections.set_busy(other)
    assert port.add("b") is None
    port.connections.remove(one)
    port.connections.remove(one)
    assert port.add("b") is not None
    assert (len(port.connections), port.closed) == (2, [])


@pytest.mark.parametrize("own", [False, True])
def test_where_nobody_has_more_the_newcomer_gives_one_of_its_own_or_waits(own: bool) -> None:
    port = Port(2, 2, replaces_own=own)
    for address in ("a", "b"):
        assert port.add(address) is not None
    assert (port.add("a") is not None) is own
    assert port.closed == (["a"] if own else [])


def test_a_host_has_one_share_of_its_network() -> None:
    assert share_of("2001:db8:1:2:3:4:5:6") == share_of("2001:db8:1:2::1%eth0") != share_of("2001:db8:1:3::1")
    assert share_of("192.0.2.1") != share_of("192.0.2.2")
