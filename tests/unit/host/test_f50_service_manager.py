"""F50: a process hangs but does not end. A coordinator's event loop notifies the service manager that it runs; one
that hangs does not."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.host import service_manager

LIMIT_S = 0.3


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.setblocking(False)
        yield made


def signs(manager: socket.socket) -> int:
    found = 0
    try:
        while manager.recv(64) == b"WATCHDOG=1":
            found += 1
    except BlockingIOError:
        pass
    return found


async def test_f50_the_loop_itself_shows_that_it_makes_progress(manager: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": str(int(LIMIT_S * 1e6))}
    alive = asyncio.create_task(service_manager.keep_alive(environment))
    await asyncio.wait((alive,), timeout=2 * LIMIT_S)
    assert signs(manager) >= 3, "several within the limit"
    time.sleep(2 * LIMIT_S)  # noqa: ASYNC251, TID251 - the loop hangs
    assert signs(manager) == 0
    await asyncio.wait((alive,), timeout=LIMIT_S)
    assert signs(manager) >= 1
    alive.cancel()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": "/x"},
        {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "0"},
        {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "5000000", "WATCHDOG_PID": str(os.getpid() + 1)},
    ],
    ids=["no manager", "no watchdog", "off", "of another process"],
)
async def test_f50_where_nobody_watches_nothing_is_sent(environment: dict[str, str]) -> None:
    assert service_manager.watchdog_s(environment) is None
    await service_manager.keep_alive(environment)
