"""Where the CPU of a request goes: samples of the stacks of the real front, gateway and worker, by layer.

py-spy reads the stacks of a running process from outside, some hundred times a second, and stops it for each. What
that distorts: the process is slower while it is watched, so only shares are taken from the samples; the microseconds
that they share are those of the rounds before, without py-spy. Time in C is its Python caller's: what OpenSSL takes is
TLS, what the runtime takes is the run. A thread that waits for its core counts as running. One that waits for work (in
`select`, for a lock) is left out, though some of that time is the kernel's work for it. With n samples the error of a
share p is the square root of p (1 - p) / n.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from _serving.processes import on_core

RATE: Final = 400
"""Samples a second. A sample takes py-spy some 0.2 ms of its own core."""
LAYERS: Final[Sequence[tuple[str, tuple[str, ...]]]] = (
    ("TLS", ("shoal/host/tls", "ssl.py", "shoal/agent/dataplane/tls_context")),
    (
        "gRPC",
        (
            "shoal/host/grpc_", "shoal/http2/grpc_messages", "shoal/agent/dataplane/grpc",
            "shoal/agent/dataplane/data_port",
            "shoal/agent/dataplane/exchange", "shoal/agent/dataplane/compression", "shoal/agent/dataplane/transport",
        ),
    ),
    ("HTTP/2", ("shoal/http2/", "shoal/host/http2_session", "shoal/host/flush_queue", "hpack/")),
    (
        "REST",
        (
            "shoal/agent/dataplane/rest", "shoal/agent/dataplane/http", "shoal/agent/dataplane/json_tensors",
            "shoal/agent/dataplane/tensors", "shoal/agent/dataplane/conversion", "shoal/agent/dataplane/usual_bodies",
            "shoal/agent/dataplane/byte_stream", "shoal/host/tls_streams", "h11/",
        ),
    ),
    (
        "auth and admission",
        (
            "shoal/agent/dataplane/auth", "shoal/agent/dataplane/caller_auth", "shoal/agent/dataplane/forward_auth",
            "shoal/agent/dataplane/ingress_admission", "shoal/agent/dataplane/memory", "shoal/agent/dataplane/trust",
            "shoal/host/connections",
        ),
    ),
    ("frames", ("shoal/agent/frames/", "shoal/agent/dataplane/upstream")),
    ("worker: read", ("shoal/agent/worker/request_reader", "shoal/agent/worker/parsing", "shoal/agent/worker/tensors")),
    ("worker: run", ("shoal/agent/worker/engine", "onnxruntime/")),
    ("worker: write", ("shoal/agent/worker/answer_writer",)),
    ("worker: queue and metering", ("shoal/agent/worker/",)),
    (
        "metering and traces",
        (
            "shoal/agent/metrics", "shoal/agent/core/histogram", "shoal/agent/dataplane/metering",
            "shoal/agent/dataplane/outcomes", "shoal/agent/dataplane/tracing", "shoal/host/otlp",
        ),
    ),
    ("clocks", ("shoal/agent/clock", "shoal/agent/main/timekeeper", "shoal/agent/timeouts")),
    ("route and retries", ("shoal/agent/",)),
    ("event loop and sockets", ("asyncio/", "selectors.py", "uvloop/")),
)  # fmt: skip
"""Layers by the beginning of a module's path; the first that fits. Of a stack the innermost frame that is in a layer
counts. The event loop's frames count only where there is no other within the loop: a socket written by TLS is TLS's,
and whoever started the loop has no part in what it runs."""
LOOP: Final = "event loop and sockets"
OTHER: Final = "other"
WAITING: Final = ("selectors.py", "threading.py", "queue.py", "concurrent/futures/thread.py")
"""Modules whose innermost frame is a thread's that waits for work."""


def layer_of(frames: Sequence[str]) -> tuple[str, str] | None:
    """The layer, and the function that it is for; None: the thread waits. frames: of one stack, outermost first, as
    py-spy writes them: `function (path:line)`."""
    if _path_of(frames[-1]) in WAITING:
        return None
    for frame in reversed(frames):
        found = _layer_of_path(_path_of(frame))
        if found == LOOP and frame.startswith(("BaseEventLoop._run_once", "_run_once")):
            return LOOP, _function_of(frames[-1])
        if found not in (None, LOOP):
            return found, _function_of(frame)
    return OTHER, _function_of(frames[-1])


def _function_of(frame: str) -> str:
    """Its name and its module."""
    name = frame.rpartition(" (")[0]
    return f"{_path_of(frame).rpartition('/')[2].removesuffix('.py')}.{name}"


def _path_of(frame: str) -> str:
    """The module's path below what it was installed into."""
    path = frame.rpartition("(")[2].partition(":")[0].rstrip(")")
    if (at := path.rfind("/shoal/")) >= 0:
        return path[at + 1 :]
    return re.split(r"/site-packages/|/python3\.\d+/", path)[-1]


def _layer_of_path(path: str) -> str | None:
    return next((layer for layer, starts in LAYERS if path.startswith(starts)), None)


@dataclass(frozen=True, slots=True)
class LayerSamples:
    """Samples of one layer: how many, and the function with most of them."""

    count: int
    function: str


def count_layers(folded: Iterable[str]) -> dict[str, LayerSamples]:
    """folded: lines `frame;frame;.. count`. Threads that wait are left out."""
    counts = dict[str, Counter[str]]()
    for line in folded:
        stack, _, count = line.rpartition(" ")
        if stack and (found := layer_of(stack.split(";"))) is not None:
            layer, function = found
            counts.setdefault(layer, Counter())[function] += int(count)
    return {layer: LayerSamples(each.total(), each.most_common(1)[0][0]) for layer, each in counts.items()}


def watch(
    program: str, pids: Iterable[int], seconds: int, folder: Path, cores: tuple[int, ...] | None
) -> dict[int, list[str]]:
    """Folded stacks by process. program: path of py-spy. Raises OSError where it may not read one of them."""
    running = []
    for pid in pids:
        out = folder / f"{pid}.folded"
        command = [program, "record", "-p", str(pid), "-d", str(seconds), "-r", str(RATE), "-f", "raw"]
        command += ["--full-filenames", "-o", str(out)]
        process = subprocess.Popen(
            on_core(cores, command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        running.append((pid, out, process))
    found = dict[int, list[str]]()
    for pid, out, process in running:
        said = process.communicate(timeout=seconds + 60)[1]
        if not out.exists():
            raise OSError(f"py-spy has no sample of {pid}: {said.strip()[-300:]}")
        found[pid] = out.read_text().splitlines()
    return found


def table(role: str, of: Mapping[str, LayerSamples], us: float) -> list[str]:
    """us: CPU of a request in this role's processes."""
    total = sum(layer.count for layer in of.values())
    lines = [f"{role}: {us:.0f} us of CPU a request, {total} samples"]
    for name, layer in sorted(of.items(), key=lambda item: -item[1].count):
        share = layer.count / total
        error = (share * (1 - share) / total) ** 0.5
        lines.append(f"  {name:27} {share * us:>6.1f} us {share:>6.1%} (+-{error:.1%})  most: {layer.function}")
    return lines
