"""Runs in a worker's interpreter, and on SIGUSR2 tries what code that took over the worker would try.

It writes the outcome of each attempt to the one place where a worker may write. On SIGUSR1 it allocates memory until
something stops it, on SIGWINCH it lies about itself.
"""

import contextlib
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def _attempts(told: dict[str, str]) -> dict[str, Callable[[], object]]:
    """told: paths, pids and addresses that a compromised worker could guess."""
    victim = int(told["victim"])

    def dial(family: int, address: object) -> None:
        with socket.socket(family) as peer:
            peer.connect(address)  # type: ignore[arg-type]

    def processes() -> None:
        for _ in range(3000):
            if os.fork() == 0:
                signal.pause()

    return {
        "key": Path(told["key"]).read_bytes,
        "other worker's nonce": Path(told["nonce"]).read_bytes,
        "forge a record": lambda: Path(told["nonce"]).write_text("{}"),
        "list models": lambda: list(Path(told["models"]).iterdir()),
        "home": lambda: list(Path.home().iterdir()),
        "passwords": Path("/etc/passwd").read_bytes,
        "write elsewhere": lambda: Path(told["models"], "new").write_text("x"),
        "program": lambda: subprocess.run(["/bin/true"], check=True),
        "other's environment": Path(f"/proc/{victim}/environ").read_bytes,
        "other's memory": lambda: Path(f"/proc/{victim}/mem").open("rb").close(),
        "kill": lambda: os.kill(victim, signal.SIGTERM),
        "other's limit of files": lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, (3, 3)),
        "other's limit of processor time": lambda: resource.prlimit(victim, resource.RLIMIT_CPU, (1, 1)),
        "service on loopback": lambda: dial(socket.AF_INET, ("127.0.0.1", int(told["port"]))),
        "machine elsewhere": lambda: dial(socket.AF_INET, ("192.0.2.1", 80)),
        "name service": lambda: dial(socket.AF_INET6, ("::1", 53)),
        "socket by its path": lambda: dial(socket.AF_UNIX, told["socket"]),
        "datagram": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).close(),
        "own group": lambda: Path(told["group"], "cgroup.procs").read_bytes() and Path(
            told["group"], "memory.limit_in_bytes"
        ).write_text("-1"),
        "processes without end": processes,
    }  # fmt: skip


def _tell(number: int, frame: object) -> None:
    folder = _folder()
    found = {}
    for name, attempt in _attempts(json.loads((folder / "told.json").read_text())).items():
        try:
            attempt()
            found[name] = "done"
        except (OSError, PermissionError) as error:
            found[name] = type(error).__name__
    (folder / "found.new").write_text(json.dumps(found))
    (folder / "found.new").replace(folder / "found.json")


def _swell(number: int, frame: object) -> None:
    """Lift the limit that the worker has set itself, then map shared memory, which that limit does not count."""
    with contextlib.suppress(ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    held = mmap.mmap(-1, 8 * 2**30)
    for at in range(0, len(held), 4096):
        held[at] = 1


def _lie(number: int, frame: object) -> None:
    """Tell of more latencies than there are buckets: the region refuses a status that has them."""
    from shoal.agent.worker.metering import Metering

    Metering.latencies = lambda self: (1,) * 70_000  # type: ignore[method-assign]


def _folder() -> Path:
    return Path(sys.argv[sys.argv.index("--socket") + 1]).parent / "slots"


signal.signal(signal.SIGUSR2, _tell)
signal.signal(signal.SIGUSR1, _swell)
signal.signal(signal.SIGWINCH, _lie)
