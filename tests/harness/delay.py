"""A road that takes its time: every packet that a router forwards waits in this process, `python -m harness.delay S`.

Runs inside the router's network namespace. What comes from a leg goes to the device `DEVICE`, and is written back there
after S seconds, from where it goes on its way. It says `ready` once the device is there, and ends with its input.
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


def opened() -> int:
    """The device's other end. Raises OSError without the right to make one."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return handle


def carry(handle: int, delay_s: float) -> None:
    """Until standard input ends."""
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
def carrier(inside: Sequence[str], delay_s: float) -> Iterator[None]:
    """`DEVICE` is there and up, until the context ends; the ways through it go with it. inside: what a command line
    begins with, to run in that network namespace. Raises ShoalError(NOT_FOUND) without the right to make one."""
    command = [*inside, sys.executable, "-m", "harness.delay", str(delay_s)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise refuse(Code.NOT_FOUND, "no packets can be carried", "root and /dev/net/tun")
        subprocess.run([*inside, "ip", "link", "set", DEVICE, "up"], check=True)
        yield


if __name__ == "__main__":
    device = opened()
    print("ready", flush=True)
    carry(device, float(sys.argv[1]))
