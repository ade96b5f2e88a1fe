"""Reports progress to the service manager (systemd), whose watchdog ends a process that hangs.

The event loop itself sends each notification, so a loop that hangs sends none. Protocol: sd_notify(3).
"""

import asyncio
import os
import socket
from collections.abc import Mapping

NOTIFICATIONS_PER_TIMEOUT: int = 3
"""Notifications sent within the manager's timeout."""


def watchdog_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds of silence after which the manager ends this process; None where it does not watch."""
    if "NOTIFY_SOCKET" not in environment or environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        limit_s = int(environment.get("WATCHDOG_USEC", "0")) / 1e6
    except ValueError:
        return None
    return limit_s or None


async def keep_alive(environment: Mapping[str, str] = os.environ) -> None:
    """Sends notifications until cancelled. Returns at once where no manager watches."""
    limit_s = watchdog_s(environment)
    if limit_s is None:
        return
    address = environment["NOTIFY_SOCKET"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
        manager.setblocking(False)
        manager.connect("\0" + address[1:] if address.startswith("@") else address)
        while True:
            try:
                manager.send(b"WATCHDOG=1")
            except OSError:
                pass  # the manager is busy or restarting: the next one counts
            await asyncio.sleep(limit_s / NOTIFICATIONS_PER_TIMEOUT)
