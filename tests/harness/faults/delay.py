"""A link with latency: every packet that a router forwards waits in this process. `python -m harness.faults.delay S`

Runs inside the router's network namespace. Packets from a leg are routed to the device `DEVICE`; this process writes
them back after S seconds, and the router forwards them. It prints `ready` once the device exists, and ends with its
input.
"""

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from shoal.types.codes import Code, refuse

DEVICE: Final = "delay"
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_AT_ONCE: Final = 64
"""Packets read before those that are due are written."""


def open_tun() -> int:
    """The process's end of the device. Raises OSError without the privileges."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return handle


def delay_packets(handle: int, delay_s: float) -> None:
    """Delay packets until standard input ends."""
    held: deque[tuple[float, bytes]] = deque()
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None  # noqa: TID251
        readable, _, _ = select.select([handle, 0], [], [], wait_s)
        if 0 in readable and not os.read(0, 1):
            return
        for _ in range(_AT_ONCE if handle in readable else 0):
            try:
                packet = os.read(handle, 2**16)
            except BlockingIOError:
                break
            held.append((time.monotonic() + delay_s, packet))  # noqa: TID251
        now = time.monotonic()  # noqa: TID251
        while held and held[0][0] <= now:
            os.write(handle, held.popleft()[1])


@contextlib.contextmanager
def delay_device(inside: Sequence[str], delay_s: float) -> Iterator[None]:
    """`DEVICE` is there and up, until the context ends; the ways through it go with it. inside: what a command line
    begins with, to run in that network namespace. Raises ShoalError(NOT_FOUND) without the right to make one."""
    command = [*inside, sys.executable, "-m", "harness.faults.delay", str(delay_s)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise refuse(Code.NOT_FOUND, "no packets can be carried", "root and /dev/net/tun")
        subprocess.run([*inside, "ip", "link", "set", DEVICE, "up"], check=True)
        yield


if __name__ == "__main__":
    device = open_tun()
    print("ready", flush=True)
    delay_packets(device, float(sys.argv[1]))
