"""Entry point of a worker process: `python -m shoal.agent.worker.main --socket PATH`, with its nonce on standard input.

The runtime is imported with the first order. The process outlives its supervisor and its front. It ends by itself when
neither has been connected for `orphan_after` seconds.
"""

import asyncio
import faulthandler
import mmap
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shoal.agent.frames import FrameServer
from shoal.agent.worker import isolation
from shoal.agent.worker.busy_file import map_busy_file
from shoal.agent.worker.idle_service import IdleService
from shoal.host import gc_freeze, logs
from shoal.host.event_wait import wait_or_timeout

ORPHAN_AFTER_S = 60.0
_DEVICE = "--device-file="


def run(
    socket: Path, models: Path, nonce: str, orphan_after_s: float = ORPHAN_AFTER_S, devices: Sequence[Path] = ()
) -> None:
    """Serve until stopped or orphaned; does not return.

    A fatal signal leaves its stack in `SOCKET.crash`, and `SOCKET.busy` lists the assignments that had requests in
    flight. `models` is the folder of all models that it may be told to load; `devices` are files of devices that it may
    use.
    """
    logs.configure(process="worker")
    with socket.with_suffix(".crash").open("w") as crash, socket.with_suffix(".busy").open("w+b") as file:
        busy = map_busy_file(file)
        isolation.isolate(socket.parent, models, devices)
        faulthandler.enable(crash)
        asyncio.run(_serve(socket, nonce, orphan_after_s, busy))
        sys.stderr.flush()
        # a run that cannot be interrupted must not keep a stopped worker alive
        os._exit(0)


async def _serve(path: Path, nonce: str, orphan_after_s: float, busy: mmap.mmap) -> None:
    service = IdleService(busy)
    server = FrameServer(path, nonce, service.handlers(), on_infer=service.on_infer)
    service.serve_on(server)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, service.stop_requested.set)
    for number in (signal.SIGINT, signal.SIGHUP):  # sent by the terminal, or by its end: the supervisor decides
        loop.add_signal_handler(number, lambda: None)
    await server.start()
    gc_freeze.freeze()
    _signal_ready()
    while not service.stop_requested.is_set():
        alone = server.empty_since
        if alone is not None and loop.time() - alone >= orphan_after_s:
            break
        await wait_or_timeout(service.stop_requested, min(1.0, orphan_after_s / 4))
    await server.close()


def _signal_ready() -> None:
    """Write one line to standard output, for which the supervisor waits, and close it."""
    with suppress(BrokenPipeError):  # that supervisor is gone; the next one adopts this process
        os.write(1, b"ready\n")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


def main() -> None:
    """`--socket PATH --models PATH [--orphan-after SECONDS] [--device-file=PATH]..`, as `WorkerProcess` starts it: what
    reads a command line for people takes memory that a worker does not need."""
    devices = [Path(word.removeprefix(_DEVICE)) for word in sys.argv[1:] if word.startswith(_DEVICE)]
    words = [word for word in sys.argv[1:] if not word.startswith(_DEVICE)]
    given = dict(zip(words[::2], words[1::2], strict=True))
    nonce = sys.stdin.readline().strip()
    sys.stdin.close()
    orphan_after_s = float(given.get("--orphan-after", ORPHAN_AFTER_S))
    run(Path(given["--socket"]), Path(given["--models"]), nonce, orphan_after_s, devices)


if __name__ == "__main__":
    main()
